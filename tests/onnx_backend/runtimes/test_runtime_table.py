"""The runtime table is derived again on the installed runtime; and what is kept apart by it is right."""

import itertools

import numpy as np
import onnxruntime as ort
import pytest
from integer_models import Net, run
from onnx import TensorProto
from runtime_probes import LABELS, Probe

from onnx_backend.integer.exact_products import products_saturate
from onnx_backend.runtimes.registry import runtime_named
from onnx_backend.workarounds.onnxruntime_barriers import insert_barriers
from onnx_backend.workarounds.onnxruntime_table import EVERYTHING, NARROW, WRONG, WRONG_FLOAT16, is_wrong
from qsdk import ConfigError
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.ranges.ranges import of_whole_steps

INSTALLED = tuple(int(part) for part in ort.__version__.split(".")[:2])
#: whether a float8 tensor is off by more than an ulp depends on the weight's values where the weight is requantized
BY_VALUE = {f"{op}/{weight}" for op in ("ConvTranspose", "Gemm") for weight in ("float32", "float16")}
#: the runtime makes int8 of float weights there too, and some processors cannot add up its products
SATURATING = {"Gemm/float32", "Gemm/float16"} if products_saturate() else set()
#: weights that the runtime (from 1.32 on) packs for MatMulNBits where the activation has 16 bits, unless kept apart
PACKED = {f"{op}/{weight}" for op in ("MatMul", "Gemm") for weight in ("int8", "uint8", "int4")}
#: what 1.31 gets wrong and 1.32 does not, which models that both shall run need kept apart
REPAIRED = {"Conv/float8e4m3fn", "MatMul/float8e4m3fn", "MatMul/int8 blocks", "MatMul/uint8 blocks"}
REPAIRED_FLOAT8 = WRONG["float8e5m2", "output_dtype"] - {"Conv/float32", "Conv/float16"} - BY_VALUE
KEYS = sorted(WRONG)
WRITTEN = [key for key in KEYS if key[1] == ("zero_point" if key[0] == "int8" else "output_dtype")]
WRITTEN += [key for key in KEYS if key[1] == "both" and key[0] != "int8"]


def slow_where_narrow(keys):
    """The types that are always kept apart, whatever the table says, with the slow tests."""
    return [pytest.param(*key, marks=pytest.mark.nightly) if key[0] in NARROW else key for key in keys]


def wrong_readers(dtype, form, *, separated=False, labels=LABELS, tensor_type="float32"):
    found = set()
    for label, same in itertools.product(labels, (True, False)):
        verdict = Probe(label, dtype, form, same, tensor_type).verdict(separated=separated)
        assert verdict != "none", label
        if verdict != "right":
            found.add(label.removesuffix(" at 0").removesuffix(" linear"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "form"), slow_where_narrow(KEYS))
def test_the_table_is_what_the_installed_runtime_does(dtype, form):
    found, said = wrong_readers(dtype, form), WRONG[dtype, form]
    if said == {EVERYTHING}:
        assert len(found) >= len(LABELS) - 4
        return
    if INSTALLED >= (1, 32):
        said = said - (REPAIRED_FLOAT8 if dtype.startswith("float8") else REPAIRED)
        said = said | PACKED if dtype.endswith("16") else said
    by_value = BY_VALUE if dtype.startswith("float8") else set()
    assert found - by_value - SATURATING == said - by_value - SATURATING


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "form"), slow_where_narrow(WRITTEN))
def test_what_is_kept_apart_is_right_at_the_default_level(dtype, form):
    assert wrong_readers(dtype, form, separated=True) - SATURATING == set()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "form"), [("uint8", "both"), ("int8", "zero_point"), ("uint16", "output_dtype")])
def test_pairs_with_float16_scales_are_wrong_where_the_table_says_so(dtype, form):
    labels = [label for label in LABELS if label != "Cast"]
    found = wrong_readers(dtype, form, labels=labels, tensor_type="float16")
    more = WRONG_FLOAT16.get((dtype, form), frozenset())
    assert more <= found <= WRONG[dtype, form] | more
    assert wrong_readers(dtype, form, separated=True, labels=labels, tensor_type="float16") == set()


def test_only_what_is_wrong_is_kept_apart():
    for label in ("Add", "Conv/int8", "Gemm/int8", "MaxPool"):
        for separated in (True, False):
            model = Probe(label, "uint8", "both").model(separated=separated)
            assert "Sum" not in {node.op_type for node in model.graph.node}
    model = Probe("Conv/float32", "uint8", "both").model(separated=True)
    assert [node.op_type for node in model.graph.node].count("Sum") == 1


@pytest.mark.parametrize(("dtype", "form"), WRITTEN)
def test_the_form_that_is_written_is_the_one_with_the_fewest_faults(dtype, form):
    symmetric = form != "both"
    assert runtime_named("onnxruntime").form(dtype_named(dtype), symmetric) == form or dtype == "int8"
    assert runtime_named("onnx").form(dtype_named(dtype), symmetric) == ("output_dtype" if symmetric else "both")


def softmax(scale, zero_point, code):
    net = Net()
    x = net.qdq(net.input([200, 8]), 0.05, 200)
    shares = net.op("Transpose", net.op("Softmax", x, axis=-1), perm=[1, 0])
    net.output(net.qdq(shares, scale, zero_point, code), [8, 200])
    return net.model()


@pytest.mark.parametrize(("zero_point", "code"), [(0, TensorProto.UINT8), (-128, TensorProto.INT8)])
@pytest.mark.parametrize("scale", [1 / 255, 0.003, 1 / 100.5])
def test_a_softmax_whose_scale_has_no_whole_number_of_steps_is_kept_apart(scale, zero_point, code):
    """The runtime takes the whole part of 1 / scale: that of float32(1/255) is 254."""
    x = (np.random.default_rng(2).normal(size=(200, 8)) * 4).astype(np.float32)
    left, separated = (softmax(scale, zero_point, code) for _ in range(2))
    whole = softmax(of_whole_steps(np.float32([scale]))[0], zero_point, code)
    wanted, off = (run(left, {"x": x}, level)["y"] for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"))
    assert (np.abs(off - wanted) > scale / 2).mean() > 0.005
    insert_barriers(separated)
    assert np.abs(run(separated, {"x": x})["y"] - wanted).max() < scale / 2
    before = len(whole.graph.node)
    insert_barriers(whole)
    assert len(whole.graph.node) == before
    levels = [run(whole, {"x": x}, level)["y"] for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")]
    assert np.abs(levels[0] - levels[1]).max() < scale / 2


def test_types_that_the_runtime_was_not_written_for_are_always_apart():
    assert all(is_wrong("AnyOp", dtype, "output_dtype") for dtype in NARROW)
    assert not is_wrong("AnyOp", "uint8", "output_dtype")
    with pytest.raises(ConfigError, match="unknown dialect 'tflite'"):
        runtime_named("tflite")
