"""Peak memory of a process that trains a simulated network, in units of one that trains the float network.

`python benchmarks/qat_memory.py [network ...]`: networks `resnet14` and `mobile` of `ptq_networks.py`, batch 64, W8A8, five
steps, one process each. One JSON line: `process` compares whole processes, as peers are measured, `step` what the steps
add to a process that is ready to train.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from ptq_networks import NETWORKS, calibration, trained
from qat_step import BATCH, stepper

import qsdk

STEPS = 5


def resident(field: str) -> int:
    """KiB that this process has (`VmRSS`) or had at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measure(name: str, kind: str) -> dict[str, int]:
    """Train in this process."""
    batches = calibration(BATCH)
    x, y = batches[0], torch.arange(BATCH) % 10
    sim = qsdk.quantize(trained(name), batches[0], qsdk.w8a8())
    qsdk.calibrate(sim, batches, progress=False)
    with sim.training(learn_scales=kind == "learned") as model:
        network = sim.unwrap().train() if kind == "float" else model
        groups = network.parameters() if kind == "float" else sim.parameter_groups(lr=1e-3)
        step = stepper(network, groups, x, y)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before = resident("VmRSS")
        for _ in range(STEPS):
            step()
    return {"process": resident("VmHWM"), "step": resident("VmHWM") - before}


def child(name: str, kind: str) -> dict[str, int]:
    command = [sys.executable, __file__, f"--child={kind}", name]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")] or list(NETWORKS)
    kind = next((argument.partition("=")[2] for argument in sys.argv[1:] if argument.startswith("--child=")), "")
    if kind:
        print(json.dumps(measure(names[0], kind)))
        return
    ratios: dict[str, dict[str, float]] = {}
    for name in names:
        plain = child(name, "float")
        for kind in ("fixed", "learned"):
            found = child(name, kind)
            ratios[f"{name} {kind}"] = {what: round(found[what] / plain[what], 3) for what in plain}
    print(json.dumps({"benchmark": "qat_memory", **ratios}))


if __name__ == "__main__":
    main()
