"""The whole road of a small module: quantize, calibrate, export, run in ONNX Runtime and compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from exact_products import exact_sessions
from torch import Tensor, nn
from torch_models import calibrated

from qsdk import QuantConfig, QuantSim, check_parity, export
from torch_bridge.torch_values.batches import as_example
from torch_bridge.torch_values.pytree import argument_leaves, name_leaves, tensors_of


@dataclass(frozen=True)
class Road:
    """What came out: the sim, and the edges of the exported file by name."""

    sim: QuantSim
    inputs: Mapping[str, Sequence[Any]]
    outputs: Mapping[str, Sequence[Any]]


def road(
    model: nn.Module,
    example: Any,
    others: Sequence[Any],
    folder: Path,
    config: QuantConfig | None = None,
    **options: Any,
) -> Road:
    """Take a module through, with batches of other sizes than the example's; the file must give what the sim gives."""
    sim = calibrated(model, example, config, **options)
    path = folder / "model.onnx"
    export(sim, path)
    with exact_sessions():
        session = ort.InferenceSession(path.read_bytes())
    assert check_parity(sim, path, [example, *others], progress=False).summary["passed"]
    for batch in (example, *others):
        given = as_example(batch)
        leaves = argument_leaves(sim.model.forward, given.args, given.kwargs)
        feeds = name_leaves((path, leaf.numpy()) for path, leaf in leaves if isinstance(leaf, Tensor))
        expected = [tensor.numpy() for tensor in tensors_of(sim.run(batch))]
        found = session.run(None, feeds)
        assert [x.shape for x in found] == [x.shape for x in expected]
        assert [x.dtype for x in found] == [x.dtype for x in expected]
        for one, other in zip(found, expected, strict=True):
            step = 2.01 * np.abs(other).max(initial=0) / 255 if other.dtype == np.float32 else 0
            np.testing.assert_allclose(one, other, rtol=0, atol=step)
    shapes = [{value.name: value.shape for value in edge} for edge in (session.get_inputs(), session.get_outputs())]
    return Road(sim, *shapes)
