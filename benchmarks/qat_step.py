"""A training step of a simulated network over the same step of the float network, interleaved in one process.

`python benchmarks/qat_step.py [network ...] [--compile=kernels|model] [--threads=N]`: networks `resnet14` and `mobile`
of `ptq_networks.py`, batch 64, W8A8, SGD with momentum, BatchNorms folded on both sides. Processor time of one thread,
so that other programs hardly count, or wall time of several; one JSON line of ratios. `fixed` trains weights, `learned`
scales as well. `--compile=kernels` is `sim.training(compile_kernels=True)` beside the eager float network,
`--compile=model` compiles both models whole.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from ptq_networks import NETWORKS, calibration, trained
from torch import Tensor, nn

import qsdk

ROUNDS, BATCH = 15, 64

Step = Callable[[], object]


def stepper(model: Callable[[Tensor], Tensor], groups: object, x: Tensor, y: Tensor) -> Step:
    """One step of a training: forward, backward and optimizer."""
    optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)  # type: ignore[arg-type]

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def compared(model: nn.Module, compiled: str, clock: Callable[[], float]) -> dict[str, float]:
    """Kind of training -> time of its step in steps of the float network."""
    batches = calibration(BATCH)
    x, y = batches[0], torch.arange(BATCH) % 10
    sims = {name: qsdk.quantize(model, batches[0], qsdk.w8a8()) for name in ("fixed", "learned")}
    plain = sims["fixed"].unwrap().train()
    with_compiler = torch.compile if compiled == "model" else lambda module: module
    steps = {"float": stepper(with_compiler(plain), plain.parameters(), x, y)}
    for name, sim in sims.items():
        qsdk.calibrate(sim, batches, progress=False)
        block = sim.training(learn_scales=name == "learned", compile_kernels=compiled == "kernels")
        steps[name] = stepper(with_compiler(block.__enter__()), sim.parameter_groups(lr=1e-3), x, y)
        steps[name].block = block  # type: ignore[attr-defined]
    for step in steps.values():
        step(), step(), step()
    rounds = [{name: _seconds(step, clock) for name, step in steps.items()} for _ in range(ROUNDS)]
    return {n: round(statistics.median(row[n] / row["float"] for row in rounds), 3) for n in steps if n != "float"}


def _seconds(step: Step, clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start


def main() -> None:
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    names = [argument for argument in sys.argv[1:] if argument not in options] or list(NETWORKS)
    threads = next((int(option.partition("=")[2]) for option in options if option.startswith("--threads")), 1)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = time.process_time if threads == 1 else time.perf_counter
    compiled = next((option.partition("=")[2] for option in options if option.startswith("--compile")), "nothing")
    ratios = {name: compared(trained(name), compiled, clock) for name in names}
    print(json.dumps({"benchmark": "qat_step", "compiled": compiled, "threads": threads, **ratios}))


if __name__ == "__main__":
    main()
