"""Sessions of ONNX Runtime for another process, which a file that ends the runtime's process leaves alive.

This file runs as a script and imports NumPy and the runtime alone; `user_session` starts it.
"""

import ctypes
import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import onnxruntime as ort

from qsdk.core.arrays import Array

#: the runtime's types that NumPy lacks, whose bits travel as unsigned integers -> the number that ONNX gives them
WITHOUT_NUMPY: Mapping[str, int] = {
    "tensor(bfloat16)": 16,
    "tensor(float8e4m3fn)": 17,
    "tensor(float8e4m3fnuz)": 18,
    "tensor(float8e5m2)": 19,
    "tensor(float8e5m2fnuz)": 20,
}


def send(file: BinaryIO, message: Mapping[str, Any], arrays: Sequence[Array] = ()) -> None:
    """Write a message, and arrays with it."""
    pickle.dump((dict(message), [np.asarray(array) for array in arrays]), file, protocol=5)
    file.flush()


def receive(file: BinaryIO) -> tuple[dict[str, Any], list[Array]]:
    """Read a message and its arrays; EOFError where the other side has ended."""
    try:
        message, arrays = pickle.load(file)  # what a process of our own has written
    except pickle.UnpicklingError as error:  # in the middle of it
        raise EOFError from error
    return message, arrays


class _Sessions:
    """The open sessions, by number."""

    def __init__(self) -> None:
        self.opened: dict[int, ort.InferenceSession] = {}

    def open(self, asked: Mapping[str, Any], arrays: Sequence[Array]) -> tuple[dict[str, Any], list[Array]]:
        """Open a session of a file, or of the bytes of a model."""
        options = ort.SessionOptions()
        options.log_severity_level = 4
        for name, value in asked["options"].items():
            setattr(options, name, value)
        if asked["level"] is not None:
            options.graph_optimization_level = ort.GraphOptimizationLevel(asked["level"])
        for name, value in asked["entries"].items():
            options.add_session_config_entry(name, value)
        model = asked["path"] or arrays[0].tobytes()
        session = ort.InferenceSession(
            model, options, ["CPUExecutionProvider"], enable_fallback=0, disabled_optimizers=asked["disabled"]
        )
        number = max(self.opened, default=0) + 1
        self.opened[number] = session
        return {"number": number} | {
            kind: [[value.name, value.type, value.shape] for value in values]
            for kind, values in (("inputs", session.get_inputs()), ("outputs", session.get_outputs()))
        }, []

    def run(self, asked: Mapping[str, Any], arrays: Sequence[Array]) -> tuple[dict[str, Any], list[Array]]:
        """Run a session on the named arrays."""
        session, feeds = self.opened[asked["number"]], dict(zip(asked["names"], arrays, strict=True))
        types = {value.name: value.type for value in (*session.get_inputs(), *session.get_outputs())}
        start = time.perf_counter()
        if WITHOUT_NUMPY.keys().isdisjoint(types.values()):
            values = session.run(None, feeds)
        else:
            given = {name: _as_value(array, types[name]) for name, array in feeds.items()}
            values = [_as_array(value) for value in session.run_with_ort_values(None, given)]
        seconds = time.perf_counter() - start
        if not all(isinstance(value, np.ndarray | np.generic) for value in values):
            raise TypeError("an output is no tensor, and only tensors are given back")
        return {"seconds": seconds}, values

    def end_profiling(self, asked: Mapping[str, Any], _: Sequence[Array]) -> tuple[dict[str, Any], list[Array]]:
        """End the profile of a session, and name its file."""
        return {"file": self.opened[asked["number"]].end_profiling()}, []

    def close(self, asked: Mapping[str, Any], _: Sequence[Array]) -> tuple[dict[str, Any], list[Array]]:
        """Close a session."""
        self.opened.pop(asked["number"], None)
        return {}, []


def _as_value(array: Array, kind: str) -> ort.OrtValue:
    if kind in WITHOUT_NUMPY:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, WITHOUT_NUMPY[kind])
    return ort.OrtValue.ortvalue_from_numpy(array)


def _as_array(value: ort.OrtValue) -> Array:
    if value.data_type() not in WITHOUT_NUMPY:
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    element = ctypes.c_uint16 if value.data_type() == "tensor(bfloat16)" else ctypes.c_uint8
    if 0 in shape:
        return np.empty(shape, element)
    pointer = ctypes.cast(value.data_ptr(), ctypes.POINTER(element))
    return np.ctypeslib.as_array(pointer, shape).copy()


def main() -> None:
    """Answer messages on the standard streams until the other side ends."""
    asks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the runtime prints is no answer
    sessions = _Sessions()
    send(answers, {"ready": ort.__version__})
    while True:
        try:
            asked, arrays = receive(asks)
        except EOFError:
            return
        try:
            answer, values = getattr(sessions, asked["do"])(asked, arrays)
        except Exception as error:  # the runtime's own exception types are private
            answer, values = {"error": str(error)}, []
        send(answers, answer, values)


if __name__ == "__main__":
    main()
