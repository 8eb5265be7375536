"""Dynamic axes that `to_integer(shapes=)` fixes, and constants that are then computed at conversion time."""

import numpy as np
import pytest
from dynamic_products import dynamic_product
from integer_models import Net, run, simulate
from onnx import TensorProto

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.proto.inputs import with_shapes
from qsdk import ConfigError, IntegerError


def test_a_sum_over_a_dynamic_axis_needs_its_size(tmp_path):
    with pytest.raises(IntegerError, match="not static"):
        qsdk.to_integer(dynamic_product(), tmp_path / "int.onnx")
    report = qsdk.to_integer(dynamic_product(), tmp_path / "int.onnx", shapes={"x": (2, 4, 7)})
    assert report.summary["operations_max_lsb"] <= 1


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"y": (1,)}, "names y; the model's inputs are x"),
        ({"x": (2, 4)}, "3 axes"),
        ({"x": (2, 4, 0)}, "sizes above 0"),
        ({"x": (2, 5, 7)}, "contradicts the model's size 4"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ConfigError, match=message):
        with_shapes(dynamic_product(), shapes)


def test_the_given_model_stays_as_it_is():
    model = dynamic_product()
    before = model.SerializeToString()
    with_shapes(model, {"x": (2, 4, 7)})
    assert model.SerializeToString() == before


def test_arithmetic_on_sizes_and_constants_is_done_at_conversion_time():
    """Anchors as YOLO writes them: a Range over a size, moved by half and expanded, added to what the network says."""
    net = Net()
    x = net.qdq(net.input([1, 1, 3, 5]), 0.031, 117)
    size = net.op("Gather", net.op("Shape", x), net.const(np.array(3)))
    count = net.op("Cast", size, to=TensorProto.FLOAT)
    cells = net.op("Range", net.const(np.float32(0)), count, net.const(np.float32(1)))
    centres = net.op("Expand", net.op("Add", cells, net.const(np.float32(0.5))), net.const(np.array([3, 5])))
    net.output(net.qdq(net.op("Add", x, centres), 0.06, 90), [1, 1, 3, 5])
    feeds = {"x": np.random.default_rng(0).uniform(-3, 3, (1, 1, 3, 5)).astype(np.float32)}
    result = convert(net.model())
    assert not {"Range", "Expand", "Gather", "Shape"} & {node.op_type for node in result.model.graph.node}
    np.testing.assert_allclose(run(result.model, feeds)["y"], simulate(net.model(), feeds)["y"], atol=1e-6)
