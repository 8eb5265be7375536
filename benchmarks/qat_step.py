"""A training step of a simulated network over the same step of the float network, interleaved in one process.

`python benchmarks/qat_step.py [network ...] [--compile=kernels|model] [--threads=N]`: networks `resnet14` and `mobile`
of `ptq_networks.py`, batch 64, W8A8, SGD with momentum, BatchNorms folded on both sides. Processor time of one thread,
so that other programs hardly count, or wall time of several; one JSON line of ratios. `fixed` trains weights, `learned`
scales as well. `--compile=kernels` is `sim.training(compile_kernels=True)` beside the eager float network,
`--compile=model` compiles both models whole. `stock_fixed` and `stock_learned` are the floor that PyTorch's own kernels
set: the float network with `torch.fake_quantize_per_tensor_affine` (and its kin per channel and with learned scales) on
the same weights and the same outputs of modules, and nothing else.
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
from torch.nn.utils import parametrize

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


class StockQuantizer(nn.Module):
    """PyTorch's fake quantization of one tensor, with the scale and zero point that qsdk has found for it."""

    def __init__(self, encoding: qsdk.Encoding, *, learned: bool) -> None:
        super().__init__()
        scale, zero_point = (torch.from_numpy(v.reshape(-1).copy()) for v in (encoding.scale, encoding.zero_point))
        self.scale = nn.Parameter(scale.float(), requires_grad=learned)
        self.zero_point = nn.Parameter(zero_point.float(), requires_grad=False)
        self.ends, self.learned = (int(encoding.dtype.lo), int(encoding.dtype.hi)), learned
        self.axis = () if len(scale) == 1 else (encoding.axis,)
        self.number = (float(scale[0]), int(zero_point[0]))

    def forward(self, x: Tensor) -> Tensor:
        """Gives the values on their grid."""
        of = "channel" if self.axis else "tensor"
        if self.learned:
            kernel = getattr(torch, f"_fake_quantize_learnable_per_{of}_affine")
            return kernel(x, self.scale, self.zero_point, *self.axis, *self.ends, 1.0)
        if self.axis:
            points = self.zero_point.int()
            return torch.fake_quantize_per_channel_affine(x, self.scale, points, *self.axis, *self.ends)  # noqa: TID251
        return torch.fake_quantize_per_tensor_affine(x, *self.number, *self.ends)  # noqa: TID251 - its speed is asked


def stock(sim: qsdk.QuantSim, *, learned: bool) -> nn.Module:
    """Return the float network of a calibrated sim with stock kernels at its weights and at its modules' outputs."""
    model = sim.unwrap().train()
    for site, decision in sim.plan.decisions.items():
        owner, port = site.rpartition(":")[::2]
        if not decision.quantized or decision.kind == "bias" or owner == "input":
            continue
        quantizer, module = StockQuantizer(sim.encodings[site], learned=learned), model.get_submodule(owner)
        if port == "weight":
            parametrize.register_parametrization(module, "weight", quantizer)
        else:
            module.add_module("stock", quantizer)
            module.register_forward_hook(lambda module, _, output: module.stock(output))
    return model


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
    for name, sim in sims.items():
        floor = stock(sim, learned=name == "learned")
        trained_too = [parameter for parameter in floor.parameters() if parameter.requires_grad]
        steps[f"stock_{name}"] = stepper(floor, trained_too, x, y)
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
