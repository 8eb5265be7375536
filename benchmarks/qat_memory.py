"""Memory of a training step of a simulated network, in units of the float network's.

`python benchmarks/qat_memory.py [network ...]`: networks `resnet14` and `mobile` of `ptq_networks.py`, batch 64, W8A8,
five steps, one process each. One JSON line: `process` compares the peaks of whole processes, as peers are measured;
`kept` what the forward pass keeps for the backward pass (BatchNorms folded on both sides).
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from ptq_networks import NETWORKS, calibration, trained
from qat_step import BATCH, stepper
from torch import Tensor

import qsdk

STEPS = 5


def resident(field: str) -> int:
    """KiB that this process has (`VmRSS`) or had at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> None:
    """Let `VmHWM` start again from what the process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


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
        forget_peak()
        for _ in range(STEPS):
            step()
        peak = resident("VmHWM")
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = network(x).sum()
        del loss
    return {"process": peak, "kept": sum(kept.values())}


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
