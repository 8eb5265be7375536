"""Functions of fixed point as integer programs, and how near they must be."""

from onnx_backend.integer.fixed_point.curves import CURVES
from onnx_backend.integer.lowering.nonlinear.tables import TABLES

ALL_FUNCTIONS = dict(TABLES)

CASES = [(name, {}) for name in sorted(CURVES)] + [
    ("Gelu", {"approximate": "tanh"}),
    ("Elu", {"alpha": 0.3}),
    ("Celu", {"alpha": 0.4}),
]
