"""The certificate: what a reviewer needs to compute every requantization again, and bounds held against measurement."""

import importlib.metadata
import importlib.util
import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from firmware_models import MODELS, cnn, residual, sixteen_bits
from integer_comparison import compare
from integer_models import INT8, Net

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.measure import compare_runtimes, index_bounds, measure, measured_inputs
from qsdk import IntegerError
from qsdk.core.numerics.fixed_point import round_shift


def written(model, tmp_path, **options):
    onnx.save(model, tmp_path / "model.onnx")
    qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "out.onnx", **options)
    certificate = json.loads((tmp_path / "out.onnx.certificate.json").read_text())
    return onnx.load(tmp_path / "out.onnx"), certificate["requantizations"]


def along(values, shape):
    """Shape the flat list of a certificate, one number or one per channel (axis 1), to a tensor."""
    array = np.array(values)
    return array.reshape([-1 if i == 1 else 1 for i in range(len(shape))]) if array.size > 1 else array.reshape(())


@pytest.mark.parametrize("make", [cnn, residual, sixteen_bits])
@pytest.mark.parametrize("rounding", ["half_even", "gemmlowp"])
def test_every_code_can_be_computed_again_from_the_certificate(make, rounding, tmp_path):
    model, feeds = make()
    made, rows = written(model, tmp_path, rounding=rounding)
    tensors = run_reference(made, feeds, every_tensor=True)
    forms = set()
    for row in rows:
        forms.add(row["form"])
        codes = tensors[row["tensor"]]
        if row["form"] == "table":
            if len(row.get("table", [])) != 256:
                assert make is sixteen_bits
                continue
            np.testing.assert_array_equal(codes, np.array(row["table"])[tensors[row["input"]]])
            continue
        total = along(row["addends"], codes.shape)
        for name, mantissas in zip(row["accumulators"], row["mantissas"], strict=True):
            total = total + tensors[name].astype(np.int64) * along(mantissas, codes.shape)
        rounded = round_shift(total, along(row["shifts"], codes.shape), rounding=row["rounding"])
        lo, hi = row["codes"]
        np.testing.assert_array_equal(codes, (rounded + row["output_zero_point"]).clip(lo, hi))
        assert 0 < row["accumulator_measured"] <= row["accumulator_bound"]
    assert forms == {"fixed point", "table"}


def extreme(zero):
    """A layer of weights 127 whose accumulator reaches its bound where every code is at one end."""
    net = Net()
    x = net.qdq(net.input(["n", 8]), 0.03, zero)
    weight = net.op("DequantizeLinear", net.const(np.full((8, 2), 127, np.int8)), net.const(np.float32(0.01)))
    net.output(net.qdq(net.op("MatMul", x, weight), 0.9, 120), ["n", 2])
    return net.model()


@pytest.mark.parametrize(("zero", "value"), [(0, 1e6), (255, -1e6), (100, 1e6)])
def test_the_largest_accumulator_is_measured_and_may_reach_the_bound(zero, value, tmp_path):
    data = [{"x": np.full((3, 8), value, np.float32)}]
    _, (row,) = written(extreme(zero), tmp_path, data=data)
    assert row["accumulator_measured"] == row["accumulator_bound"] == 8 * 127 * max(zero, 255 - zero)


def test_the_bias_counts(tmp_path):
    net = Net()
    x = net.qdq(net.input([1, 4]), 0.5, 0)
    weight = net.op("DequantizeLinear", net.const(np.ones((4, 2), np.int8)), net.const(np.float32(0.5)))
    bias = net.op("DequantizeLinear", net.const(np.array([5, -70], np.int32)), net.const(np.float32(0.25)))
    net.output(net.qdq(net.op("Gemm", x, weight, bias), 0.9, 120), [1, 2])
    _, (row,) = written(net.model(), tmp_path, data=[{"x": np.zeros((1, 4), np.float32)}])
    assert row["accumulator_measured"] == 70


def test_a_bias_on_another_grid_than_the_accumulator_s_keeps_its_value():
    net = Net()
    x = net.qdq(net.input([3, 4]), 1e-4, 0)
    weight = net.op("DequantizeLinear", net.const(np.full((4, 2), 9, np.int8)), net.const(np.float32(1e-3)))
    bias = net.op("DequantizeLinear", net.const(np.array([50, -700], np.int32)), net.const(np.float32(3e-7)))
    net.output(net.qdq(net.op("Gemm", x, weight, bias), 2e-6, 120), [3, 2])
    compare(net.model(), {"x": np.random.default_rng(0).uniform(0, 0.0255, (3, 4)).astype(np.float32)})


def test_a_wrong_bound_of_any_tensor_is_refused():
    model, _ = cnn()
    result = convert(model)
    inputs = measured_inputs(model, result.model, None)
    narrowed = {name: (low, high // 64) for name, (low, high) in result.bounds.items()}
    with pytest.raises(IntegerError, match=r"the integers of '.*' reach -?\d+ to \d+ in the measurement, beyond their"):
        measure(model, result.model, inputs, edges="float", bounds=narrowed)


def test_indices_of_the_measurement_lie_in_the_tables_that_they_reach_behind_choices_and_offsets():
    net = Net()
    ids = net.input([4, 3], "ids", onnx.TensorProto.INT64)
    column = net.op("Gather", ids, net.const(np.int64(1)), axis=1)
    moved = net.op("Add", net.const(np.array([0, 2, 5])), ids)
    sizes = {column: 9, moved: 12, net.op("Add", net.const(np.array([0, 2, 5])), ids): 4}  # nothing is behind all of 4
    for indices, table in ((indices, np.ones((size, 2), np.float32)) for indices, size in sizes.items()):
        net.op("Gather", net.const(table), indices)
    net.output(net.op("GatherND", net.const(np.ones(10, np.float32)), net.op("Unsqueeze", ids, net.const([2]))), [4, 3])
    assert index_bounds(net.model()) == {"ids": 7}


def test_a_table_whose_length_is_open_bounds_no_index():
    net = Net()
    ids = net.input([4], "ids", onnx.TensorProto.INT64)
    net.output(net.op("Gather", net.input(["n", 2]), ids), [4, 2])
    assert index_bounds(net.model()) == {}


def test_a_bound_that_is_too_small_by_one_is_refused():
    model = extreme(0)
    result = convert(model)
    inputs = {"x": np.full((1, 8), 1e6, np.float32)}
    measure(model, result.model, inputs, edges="float", operations=result.operations)
    (op,) = [op for op in result.operations if isinstance(op, Requantization)]
    wrong = replace(op, row={**op.row, "accumulator_bound": op.row["accumulator_bound"] - 1})
    words = rf"an accumulator of '{op.label}' reaches \d+ in the measurement, beyond its bound of {8 * 127 * 255 - 1}"
    with pytest.raises(IntegerError, match=words):
        measure(model, result.model, inputs, edges="float", operations=[wrong])


@pytest.mark.spread(8)
@pytest.mark.parametrize("name", MODELS)
def test_no_model_exceeds_a_bound(name, tmp_path):
    model, feeds = MODELS[name]()
    _, rows = written(model, tmp_path, data=[feeds])
    for row in rows:
        if "accumulator_bound" in row:
            assert 0 <= row["accumulator_measured"] <= row["accumulator_bound"]


def test_kernels_have_no_measured_accumulator(tmp_path):
    model, _ = cnn()
    _, rows = written(model, tmp_path, target="onnxruntime")
    assert not any("accumulator_measured" in row for row in rows)


def runtimes(tmp_path):
    certificate = json.loads((tmp_path / "out.onnx.certificate.json").read_text())
    return {row["runtime"]: row for row in certificate["runtimes"]}


@pytest.mark.slow
@pytest.mark.parametrize("edges", ["float", "integer"])
def test_a_portable_certificate_names_every_runtime_that_gave_the_same_integers(edges, tmp_path):
    model, _ = MODELS["softmax"]()
    written(model, tmp_path, target="portable", edges=edges)
    found = runtimes(tmp_path)
    assert found["onnxruntime"] == {"runtime": "onnxruntime", "version": ort.__version__, "equal": True}
    assert found["onnx.reference"]["equal"]
    if importlib.util.find_spec("openvino") is not None:
        assert found["openvino"]["equal"]
        assert found["openvino"]["version"] == importlib.metadata.version("openvino")


@pytest.mark.slow
def test_other_targets_name_onnx_runtime_where_it_computed_integers_alone(tmp_path):
    model, _ = cnn()
    written(model, tmp_path)
    assert [*runtimes(tmp_path)] == ["onnxruntime"]
    written(model, tmp_path, target="onnxruntime")
    assert runtimes(tmp_path) == {}


def test_a_runtime_with_other_integers_is_named():
    pytest.importorskip("openvino", reason="the extra qsdk[openvino] is not installed")
    model, feeds = cnn()
    with pytest.raises(IntegerError, match=r"openvino 20.* and the integer reference disagree on the output 'y'"):
        compare_runtimes(convert(model, target="standard").model, convert(model).model, feeds)


def test_a_portable_form_with_other_integers_than_the_standard_one_is_not_written():
    model, feeds = cnn()
    other, _ = cnn(INT8)
    with pytest.raises(IntegerError, match="the portable and the standard form disagree on the output 'y'"):
        compare_runtimes(convert(model, target="portable").model, convert(other).model, feeds)
