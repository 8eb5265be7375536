"""Models that OpenVINO compiled may be freed in any order: the stack for signals stays that of the process."""

import gc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_backend.runtimes.openvino import OpenVinoRunner
from onnx_backend.workarounds.openvino import signal_stack


def doubling() -> onnx.ModelProto:
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy"]
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    graph = helper.make_graph(nodes, "doubling", edges[:1], edges[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.slow
def test_freed_models_leave_the_stack_for_signals_as_it_was():
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    before, x = signal_stack(), np.ones((2, 4), np.float32)
    assert any(before)
    runners = [OpenVinoRunner(doubling()) for _ in range(2)]
    for runner in runners:
        np.testing.assert_array_equal(runner.run({"x": x})[0], x + x)
        assert signal_stack() == before
    while runners:
        del runner
        runner = runners.pop(0)  # the oldest first
        runner.compiled = runner.request = None
        gc.collect()
        assert signal_stack() == before
