"""An adopted Q/DQ file is computed as it is written, and keeps its encodings unless it is said which went."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from foreign_models import by_onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType
from qdq_models import make_model, mlp

import qsdk
from onnx_backend.runtime.session import computes_in_narrow_floats

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 16)).astype(np.float32)
node = helper.make_node


def with_float16_part():
    """Between two pairs of Q/DQ a layer and a GELU in float16, as a converter for mixed precision writes them."""
    narrow = {
        "w": RNG.normal(size=(16, 16)) / 4,
        "b": RNG.normal(size=16),
        "root": np.array(2**0.5),
        "one": np.array(1.0),
        "half": np.array(0.5),
    }
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "first"),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], "first_back"),
        node("Cast", ["d"], ["h"], "narrow", to=TensorProto.FLOAT16),
        node("MatMul", ["h", "w"], ["m"], "product"),
        node("Add", ["m", "b"], ["a"], "sum"),
        node("Div", ["a", "root"], ["e0"], "divided"),
        node("Erf", ["e0"], ["e1"], "erf"),
        node("Add", ["e1", "one"], ["e2"], "raised"),
        node("Mul", ["a", "e2"], ["e3"], "gated"),
        node("Mul", ["e3", "half"], ["e4"], "halved"),
        node("Cast", ["e4"], ["y"], "wide", to=TensorProto.FLOAT),
        node("QuantizeLinear", ["y", "s", "z"], ["q2"], "last"),
        node("DequantizeLinear", ["q2", "s", "z"], ["z2"], "last_back"),
    ]
    stored = {name: value.astype(np.float16) for name, value in narrow.items()}
    stored |= {"s": np.float32(0.05), "z": np.uint8(128)}
    return make_model(nodes, {"x": ["n", 16]}, {"y": ["n", 16], "z2": ["n", 16]}, stored)


def as_written(model):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": X})


def rounded_everywhere(model):
    """Both outputs, every result of the part rounded to float16, as the standard has it."""

    def on_grid(x):
        codes = np.clip(np.rint(x / np.float32(0.05)) + 128, 0, 255)
        return ((codes - 128) * np.float32(0.05)).astype(np.float32)

    def rounded(x):
        return x.astype(np.float16).astype(np.float32)

    half = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    wide = {name: value.astype(np.float32) for name, value in half.items()}
    a = rounded(rounded(rounded(on_grid(X)) @ wide["w"]) + wide["b"])
    erf = rounded(torch.erf(torch.from_numpy(rounded(a / wide["root"]))).numpy())
    y = rounded(rounded(a * rounded(erf + wide["one"])) * wide["half"])
    return y, on_grid(y)


def test_a_float16_part_is_computed_as_it_is_written():
    """An ordinary session rounds less often: a fifth of its results are other ones."""
    model = with_float16_part()
    sim = qsdk.quantize(model, None, None)
    found = list(zip(sim.run(X), rounded_everywhere(model), strict=True))
    for got, wanted in found:
        assert np.mean(got == wanted) > 0.98  # sums of another order are rounded to the other side now and then
    ordinary = ort.InferenceSession(model.SerializeToString()).run(None, {"x": X})
    assert np.mean(ordinary[0] == found[0][1]) < 0.9


def test_a_pair_of_casts_is_no_float16_part():
    sim = qsdk.quantize(mlp(), None, qsdk.w8a8().skip("relu", dtype="float16").skip("mm1", dtype="float16"))
    qsdk.calibrate(sim, [X[:, :6]], progress=False)
    assert not computes_in_narrow_floats(sim.qdq_model())
    assert computes_in_narrow_floats(with_float16_part())


def test_calibrating_an_adopted_file_says_which_encodings_went():
    sim = qsdk.quantize(mlp(), None, qsdk.w8a8())
    qsdk.calibrate(sim, [X[:, :6]], progress=False)
    adopted = qsdk.quantize(sim.qdq_model(), None, None)
    same = qsdk.calibrate(adopted, [X[:, :6]], progress=False)
    before = dict(adopted.encodings)
    report = qsdk.calibrate(adopted, [3 * X[:, :6]], progress=False)
    moved = {site for site, encoding in adopted.encodings.items() if encoding != before[site]}
    noted = {row["site"] for row in report.rows if "the file's own encoding was replaced" in str(row.get("note"))}
    assert "x:input" in noted
    assert noted == {site for site in moved if not site.endswith(":bias")}
    assert report.summary["adopted encodings replaced"] == len(noted)
    assert same.summary["adopted encodings replaced"] < len(noted)
    kept = qsdk.quantize(sim.qdq_model(), None, None)
    kept.freeze("*")
    assert qsdk.calibrate(kept, [3 * X[:, :6]], progress=False).summary["adopted encodings replaced"] == 0


@pytest.mark.parametrize("activation", ["QUInt16", "QInt16", "QUInt8"])
def test_the_int32_bias_of_a_norm_is_adopted_as_the_file_has_it(activation, tmp_path):
    nodes = [
        node("MatMul", ["x", "w"], ["m"], "mm"),
        node("LayerNormalization", ["m", "gamma", "beta"], ["y"], "norm", axis=-1),
    ]
    stored = {name: RNG.normal(size=shape) for name, shape in (("w", (16, 6)), ("gamma", 6), ("beta", 6))}
    stored = {name: value.astype(np.float32) for name, value in stored.items()}
    model = make_model(nodes, {"x": ["n", 16]}, {"y": ["n", 6]}, stored)
    kinds = {"activation_type": getattr(QuantType, activation), "weight_type": QuantType.QInt8}
    theirs = by_onnxruntime(model, (8, 16), tmp_path, **kinds)
    sim = qsdk.quantize(theirs, None, "w8a8")
    np.testing.assert_array_equal(sim.run(X)[0], as_written(theirs)[0])
    row = next(row for row in sim.coverage().rows if row["dtype"] == "int32")
    assert row["state"] == "quantized"
    assert row["reason"].startswith("as the file says")
    qsdk.export(sim, tmp_path / "ours.onnx")
    assert qsdk.check_parity(sim, tmp_path / "ours.onnx", [X], progress=False).summary["passed"]


@pytest.mark.parametrize("activation", ["QUInt16", "QInt16"])
def test_codes_of_a_bias_beyond_float32_are_adopted_as_the_floats_of_the_runtime(activation, tmp_path):
    rng = np.random.default_rng(3)  # codes of b that no float32 stands for
    stored = {"w": rng.normal(size=(16, 6)) * 0.01, "b": rng.normal(size=6)}
    stored = {name: value.astype(np.float32) for name, value in stored.items()}
    model = make_model([node("Gemm", ["x", "w", "b"], ["y"], "fc")], {"x": ["n", 16]}, {"y": ["n", 6]}, stored)
    kinds = {"activation_type": getattr(QuantType, activation), "weight_type": QuantType.QInt8}
    theirs = by_onnxruntime(model, (8, 16), tmp_path, per_channel=True, **kinds)
    codes = next(numpy_helper.to_array(t) for t in theirs.graph.initializer if t.name == "b_quantized")
    assert (codes.astype(np.float32).astype(np.int64) != codes).any()
    sim = qsdk.quantize(theirs, None, "w8a8")
    np.testing.assert_array_equal(sim.run(X)[0], as_written(theirs)[0])
    assert "taken as the floats that the runtime reads: b" in sim.coverage().summary["opened"]


def test_compare_names_tensors_of_our_files_as_the_float_file_does(tmp_path):
    sim = qsdk.quantize(mlp(), None, "w8a8")
    qsdk.calibrate(sim, [X[:, :6]], progress=False)
    qsdk.export(sim, tmp_path / "ours.onnx")
    rows = qsdk.compare(mlp(), tmp_path / "ours.onnx", [X[:, :6]], progress=False).rows
    assert rows
    assert [row["other"] for row in rows if "unmarked" in row["other"]] == []
