"""AIMET encodings documents for the tests, as other tools write them."""

from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from qdq_models import make_model

FILES = sorted((Path(__file__).parent / "aimet_files").glob("*.json"))

named = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def tiny():
    """Conv -> Relu -> Flatten -> MatMul -> Gemm: [N, 2, 2, 1] to [N, 3]."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "conv.weight"], ["c"], "conv"),
        node("Relu", ["c"], ["r"], "relu"),
        node("Flatten", ["r"], ["f"], "flat"),
        node("MatMul", ["f", "m1"], ["h"], "mm1"),
        node("Gemm", ["h", "m2", "b2"], ["y"], "mm2"),
    ]
    conv = [[0, 0.3], [-0.27, -0.89], [-0.45, -0.99]]
    m1 = [[0.06, 1.34, -0.49, -0.62], [0.49, 0.36, 0.11, -0.93], [-0.03, 0.7, -1.34, -0.46]]
    m1 += [[-1.9, -1.29, -1.84, -0.24], [-1.27, 0.27, 0.16, -0.19], [-2.52, -0.54, -0.05, 0.11]]
    m2 = [[-1.53, -0.48, -0.98], [-0.81, 1.06, -0.81], [-0.03, 0.88, -0.58], [-0.11, 0.11, 0.06]]
    stored = {"conv.weight": np.reshape(conv, (3, 2, 1, 1)), "m1": m1, "m2": m2, "b2": [-1.23, 0.08, 1.36]}
    floats = {name: np.asarray(value, np.float32) for name, value in stored.items()}
    return make_model(nodes, {"x": ["n", 2, 2, 1]}, {"y": ["n", 3]}, floats)


def as_float32(value):
    """JSON data with its numbers as a reader that computes in float32 has them."""
    if isinstance(value, dict):
        return {name: as_float32(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_float32(item) for item in value]
    return float(np.float32(value)) if type(value) in (int, float) else value


def entries(data):
    """Section -> tensor -> entry, without min and max, which are products of doubles."""
    found = {}
    for section in ("activation_encodings", "param_encodings", "encodings"):
        part = data.get(section, {})
        listed = part.items() if isinstance(part, dict) else [(entry["name"], entry) for entry in part]
        found[section] = {
            name: [{k: v for k, v in p.items() if k not in ("min", "max")} for p in entry]
            if isinstance(entry, list)
            else entry
            for name, entry in listed
        }
    return as_float32(found)
