"""Accumulators of few bits by gptq, on both sides: what is promised, held against the worst inputs of the files."""

import copy
import functools
import json

import numpy as np
import onnx
import pytest
import torch
from bias_models import data_of
from onnx import numpy_helper
from rounded_sims import network_error, sim_at

import qsdk
from qsdk import ConfigError, gptq, w4a8, w8a8

SITES = {f"{name}:weight" for name in ("conv", "depthwise", "transposed", "mixed", "bare", "last")}


def rows_of(op, weight):
    """A weight as [outputs, K], the input channels of each position of a kernel side by side."""
    if op.op_type == "MatMul":
        return weight.T
    given = {a.name: onnx.helper.get_attribute_value(a) for a in op.attribute}
    if op.op_type == "Gemm":
        return weight if given.get("transB") else weight.T
    if op.op_type == "ConvTranspose":
        group = given.get("group", 1)
        parts = weight.reshape(group, -1, *weight.shape[1:]).swapaxes(1, 2)
        weight = parts.reshape(-1, *parts.shape[2:])
    return np.moveaxis(weight, 1, -1).reshape(len(weight), -1)


def worst_sums(path, tile=None):
    """The largest magnitude of a sum of products of each layer of a Q/DQ file, over every input on its grid.

    Exact integers; each input takes the end of its grid that makes the sum largest, with zero points and without.
    """
    graph = onnx.load(path).graph
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    result = {}
    for op in graph.node:
        if op.op_type not in ("Conv", "ConvTranspose", "MatMul", "Gemm"):
            continue
        source, weight = (makers[name] for name in op.input[:2])
        while source.op_type in ("Reshape", "Transpose"):
            source = makers[source.input[0]]
        assert source.op_type == weight.op_type == "DequantizeLinear"
        zero = int(stored[source.input[2]]) if len(source.input) > 2 else 0
        codes = rows_of(op, stored[weight.input[0]].astype(np.int64))
        width = tile or codes.shape[1]
        worst = 0
        for low, high in ((0, 255), (-zero, 255 - zero)):
            for start in range(0, codes.shape[1], width):
                part = codes[:, start : start + width]
                largest = np.where(part > 0, part * high, part * low).sum(1).max()
                least = np.where(part > 0, part * low, part * high).sum(1).min()
                worst = max(worst, int(largest), -int(least))
        result[op.name or op.output[0]] = worst
    return result


@functools.cache
def calibrated(door):
    return sim_at(door, w8a8())


@pytest.mark.parametrize("door", ["onnx", pytest.param("torch", marks=pytest.mark.slow)])
def test_no_input_leaves_the_accumulators_of_the_file_and_the_certificate_proves_it(door, tmp_path):
    sim = copy.deepcopy(calibrated(door))
    free = qsdk.analysis.accumulators(sim)
    assert free.summary["bits"] > 15
    assert {row["site"] for row in free.rows} == SITES
    report = gptq(sim, data_of(door), accumulator_bits=15, progress=False)
    assert {row["site"]: row["accumulator_bits"] <= 15 for row in report.rows} == dict.fromkeys(SITES, True)
    assert report.summary["accumulator_bits"] == 15
    path = tmp_path / "model.onnx"
    qsdk.export(sim, path)
    assert qsdk.check_parity(sim, path, data_of(door)).summary["weights_max_lsb"] == 0
    worst = worst_sums(path)
    assert len(worst) == len(SITES)
    # the report's bounds are reached by the worst inputs, but for what zero points leave unused
    assert sorted(worst.values()) == sorted(row["accumulator_bound"] for row in report.rows)
    assert max(worst.values()) < 2**14
    qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx")
    rows = json.loads((tmp_path / "int.onnx.certificate.json").read_text())["requantizations"]
    layers = [row for row in rows if "weight_bits" in row]
    assert len(layers) >= 5
    assert all(0 < bound < 2**14 for row in layers for bound in row["accumulator_bounds"])


def test_tiles_have_accumulators_of_their_own(tmp_path):
    door, errors = "onnx", {}
    for tile in (None, 4):
        sim = copy.deepcopy(calibrated(door))
        gptq(sim, data_of(door), accumulator_bits=13, accumulator_tile=tile, progress=False)
        qsdk.export(sim, tmp_path / f"{tile}.onnx")
        errors[tile] = network_error(sim, door)
        assert max(worst_sums(tmp_path / f"{tile}.onnx", tile).values()) < 2**12
        assert qsdk.analysis.accumulators(sim, tile=tile).summary["bits"] == 13
    assert max(worst_sums(tmp_path / "4.onnx").values()) >= 2**12
    assert errors[4] < errors[None]


def test_the_error_with_sixteen_bits_is_small():
    sim, nearest = copy.deepcopy(calibrated("onnx")), sim_at("onnx", w4a8())
    gptq(sim, data_of("onnx"), accumulator_bits=16, progress=False)
    assert network_error(sim, "onnx") < 0.2 * network_error(nearest, "onnx")


def test_signed_and_dynamic_inputs_are_bound_too():
    model, x = torch.nn.Linear(64, 8), torch.randn(128, 64)
    for config in (w8a8().override("*", activation="int8"), qsdk.QuantConfig(weight="int8", dynamic_activations=True)):
        qsdk.calibrate(sim := qsdk.quantize(model, x, config), [x], progress=False)
        gptq(sim, [x], accumulator_bits=16, progress=False)
        codes = sim.encodings["self:weight"].quantize(sim.stored_floats(["self:weight"])["self:weight"]).astype(int)
        for low, high in ((-128, 127), (0, 255)):
            worst = max(np.where(sign * codes > 0, codes * high, codes * low).sum(1).max() for sign in (1, -1))
            assert worst < 2**15
        assert np.abs(codes).sum(1).max() > 200  # the room is used


def refusal(**options):
    sim = copy.deepcopy(calibrated("onnx"))
    before = sim.encodings
    with pytest.raises(ConfigError) as error:
        gptq(sim, data_of("onnx"), progress=False, **options)
    assert sim.encodings == before
    return str(error.value)


def test_what_cannot_be_met_is_named_with_the_remedy():
    message = refusal(accumulator_bits=8)
    assert "conv:weight: beside an input of 256 levels no weight but 0 fits accumulators of 8 bits" in message
    assert "give accumulator_bits=9 or more" in message
    assert "accumulator_bits=33 is no number of bits" in refusal(accumulator_bits=33)
    assert "accumulator_tile=4 is of no use without accumulator_bits" in refusal(accumulator_tile=4)
    assert "accumulator_tile=0 is no number of products" in refusal(accumulator_bits=16, accumulator_tile=0)


def test_layers_that_stay_as_they_are_must_fit():
    sim = copy.deepcopy(calibrated("onnx"))
    sim.freeze("conv:weight")
    with pytest.raises(
        ConfigError, match=r"conv:weight \(\d+ bits\): layers that do not fit.*sim.unfreeze\('conv:weight'\)"
    ):
        gptq(sim, data_of("onnx"), accumulator_bits=15, progress=False)


def test_a_layer_that_no_data_reaches_is_refused_and_the_sim_stays():
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)

        def forward(self, x):
            return self.one(x) + (self.two(x) if x.shape[0] == 2 else 0)

    x = torch.randn(2, 64)
    qsdk.calibrate(sim := qsdk.quantize(Branches(), x, w8a8()), [x], progress=False)
    before, weight = sim.encodings, sim.model.one.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"two:weight .*since no data has reached them"):
        gptq(sim, [torch.randn(16, 64)], accumulator_bits=14, progress=False)
    assert sim.encodings == before
    assert torch.equal(sim.model.one.weight, weight)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [({"symmetric_weights": False}, "symmetric_weights=True"), ({"block_size": 4}, "block_size=None")],
)
def test_weights_with_zero_points_or_blocks_are_refused(change, remedy):
    model, x = torch.nn.Linear(16, 4), torch.randn(32, 16)
    qsdk.calibrate(sim := qsdk.quantize(model, x, w8a8().override("*", **change)), [x], progress=False)
    with pytest.raises(ConfigError, match=f"self:weight: accumulators of few bits.*{remedy}"):
        gptq(sim, [x], accumulator_bits=16, progress=False)
