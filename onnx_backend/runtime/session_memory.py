"""Memory that many short sessions share: the next session reuses what one has freed."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

_EXTEND_BY_REQUEST = 1


@contextmanager
def shared_memory() -> Iterator[None]:
    """Open a pool for sessions that ask for it (`session.use_env_allocators`); at the end it frees what is unused.

    Fresh memory costs more than the convolution that fills it (3 times, measured), and a session's own goes with it.
    Sessions and arrays may outlive the pool.
    """
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"arena_extend_strategy": _EXTEND_BY_REQUEST}))
    try:
        yield
    finally:
        _shrink()


def _shrink() -> None:
    """Free the unused memory of the pool; the runtime does that only after a run."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "nothing", [value], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options, run = ort.SessionOptions(), ort.RunOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.zeros(1, np.float32)}, run)
