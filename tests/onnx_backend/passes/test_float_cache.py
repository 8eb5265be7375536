"""A file that takes and gives codes, as one of floats again: it computes what it did before."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from qdq_models import make_model

from onnx_backend.passes.integer_cache import take_integer_cache, with_float_cache
from onnx_backend.proto.nodes import copied

node = helper.make_node


@pytest.mark.parametrize("zero_point", [None, 3])
@pytest.mark.parametrize("code", [TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16])
def test_codes_that_come_back_as_floats_are_those_of_their_dtype(code, zero_point):
    """Without a zero point, output_dtype alone says the dtype: as uint8, all below 0 would be lost."""
    operands, written = (["s", "z"], {}) if zero_point is not None else (["s"], {"output_dtype": code})
    nodes = [
        node("QuantizeLinear", ["past", *operands], ["q"], "q", **written),
        node("DequantizeLinear", ["q", *operands], ["d"], "dq"),
        node("Neg", ["d"], ["n"], "neg"),
        node("QuantizeLinear", ["n", *operands], ["q2"], "q2", **written),
        node("DequantizeLinear", ["q2", *operands], ["present"], "dq2"),
    ]
    model = make_model(nodes, {"past": [1, 4]}, {"present": [1, 4]}, {"s": np.float32(0.5)})
    if zero_point is not None:
        typed = np.asarray(zero_point, helper.tensor_dtype_to_np_dtype(code))
        model.graph.initializer.append(numpy_helper.from_array(typed, "z"))
    of_codes = copied(model)
    take_integer_cache(of_codes, ["past", "present"])
    assert {value.type.tensor_type.elem_type for value in (*of_codes.graph.input, *of_codes.graph.output)} == {code}
    floats = with_float_cache(of_codes)
    x = {"past": np.float32([[-20, -1.25, 0.75, 30]])}
    found, wanted = (ReferenceEvaluator(form).run(None, x)[0] for form in (floats, model))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)
