"""A walk through a module and one through the ONNX file made of it come by the same layers with the same inputs."""

from typing import Any

import numpy as np
import pytest
import torch
from float_files import CONFIG, float_onnx
from zoo_models import ZOO, distinct

from onnx_backend.walk import layer_walk as onnx_door
from qsdk import OnnxSim, QuantSim, calibrate, quantize
from qsdk.core.layers.layer_problem import Layer
from qsdk.core.planning.graph_matching import match_graphs
from torch_bridge.walk import layer_walk as torch_door

QUICK = ("cnn", "lstm")
Seen = dict[str, tuple[Layer, np.ndarray, list[tuple[np.ndarray, np.ndarray]]]]


def both_sims(name: str) -> tuple[QuantSim, OnnxSim, list[Any]]:
    build, inputs = ZOO[name]
    model, data = distinct(build()), [inputs(seed) for seed in range(2)]
    sim = quantize(model, data[0], CONFIG)
    other = quantize(float_onnx(model, data[0]), None, CONFIG)
    assert isinstance(sim, QuantSim)
    assert isinstance(other, OnnxSim)
    calibrate(sim, data, progress=False)
    calibrate(other, as_numpy(data), progress=False)
    return sim, other, data


def as_numpy(data: list[Any]) -> list[Any]:
    return [tuple(x.numpy() for x in batch) for batch in data]


def seen_in(walk: Any) -> Seen:
    """Site -> layer, weight as a matrix, inputs as rows or images, in the order of the walk."""
    found: Seen = {}
    for step in walk:
        pairs = [(plain(x), plain(q)) for x, q in step.inputs()]
        for layer in step.layers:
            weight = layer.layout.to_matrix(plain(walk.weight(layer.site)))
            found[layer.site] = layer, weight, [(rows(layer, x), rows(layer, q)) for x, q in pairs]
    return found


def plain(values: Any) -> np.ndarray:
    return torch.as_tensor(values).detach().clone().numpy()


def rows(layer: Layer, x: np.ndarray) -> np.ndarray:
    return x if layer.geometry is not None or not x.ndim else x.reshape(-1, x.shape[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in ZOO]
)
def test_both_doors_give_the_same_layer_problems(name: str) -> None:
    sim, other, data = both_sims(name)
    with torch_door.walk_layers(sim, data) as walk:
        left = dict(walk.left)
        ours = seen_in(walk)
        batches = walk.batches
    with onnx_door.walk_layers(other, as_numpy(data), progress=False) as walk:
        others = seen_in(walk)
        assert walk.batches == batches == 2
        others_left = dict(walk.left)
    mapping = match_graphs(sim.graph, other.graph)
    sites = {site: other.graph.tensors[mapping[t]].site for site, t in sim.graph.sites.items() if t in mapping}
    assert [sites[site] for site in ours] == list(others)
    # a file may have no site for what a module stores (the bias of a norm without one)
    common = {sites[site]: reason(why) for site, why in left.items() if sites.get(site) is not None}
    assert common == {site: reason(why) for site, why in others_left.items() if site in common}
    for site, (layer, weight, inputs) in ours.items():
        theirs, their_weight, their_inputs = others[sites[site] or ""]
        compare_layers(layer, theirs, sites)
        # a spelling may hold a matrix transposed, and a recurrent op orders its gates as ONNX does
        assert np.allclose(weight, their_weight, rtol=1e-4, atol=1e-5), site
        assert len(inputs) == len(their_inputs)
        for (x, x_quantized), (y, y_quantized) in zip(inputs, their_inputs, strict=True):
            assert x.shape == y.shape, site
            close = 1e-4 * max(1.0, float(np.abs(x).max()))
            assert np.abs(x - y).max() < close, site
            # a rounding that falls the other way moves what is behind it by a step: 2.3 % with one processor
            assert (np.abs(x_quantized - y_quantized) > close).mean() < 0.05, site


def reason(why: str) -> str:
    """Without the names of ops, which are the trace's own."""
    return why.partition(": node_")[0]


def compare_layers(layer: Layer, other: Layer, sites: dict[str, str | None]) -> None:
    """Same kind, sizes, geometry, bias and activation; the axes are those of either door's stored tensor."""
    assert layer.layout.kind == other.layout.kind
    assert layer.layout.matrix_shape == other.layout.matrix_shape
    assert layer.geometry == other.geometry
    assert (sites[layer.bias] if layer.bias else "") == other.bias
    assert layer.activation == other.activation
    assert layer.spec.dtype == other.spec.dtype
    assert type(layer.spec.granularity) is type(other.spec.granularity)
