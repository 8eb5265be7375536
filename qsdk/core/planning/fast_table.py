"""What ONNX Runtime's default level computes on codes, and with which kernel: the table of what is fast.

Measured on onnxruntime 1.32 (CPU, x86); `tests/onnx_backend/runtimes/test_fast_table.py` derives it again from the
models that the installed runtime makes of one op between two pairs. What is wrong stands in `onnxruntime_table`.
"""

from collections.abc import Mapping
from types import MappingProxyType


def _rows(text: str) -> dict[str, str]:
    """Return label -> kernel of lines `kernel: labels`; ops on a line without a kernel move codes as they are."""
    rows = [line.rpartition(":") for line in text.strip().splitlines()]
    return {label: kernel.strip() or label.removesuffix(">") for kernel, _, labels in rows for label in labels.split()}


_KERNELS = _rows("""
QLinearConv: Conv/int8 Conv/uint8
QLinearMatMul: MatMul/int8 MatMul/uint8
MatMulIntegerToFloat: MatMul/int8> MatMul/uint8>
QLinearSigmoid: Sigmoid
QLinearLeakyRelu: LeakyRelu
QLinearSoftmax: Softmax
QLinearConcat: Concat
QLinearAveragePool: AveragePool
QLinearGlobalAveragePool: GlobalAveragePool
""")
_OF_UNSIGNED = _rows("""
QLinearMatMul: MatMul
MatMulIntegerToFloat: MatMul>
QLinearAdd: Add
QLinearMul: Mul
""")
#: moved on codes of 8 and 16 bits, of the others those of 8 alone; QGemm needs the zero point of its weight as well
_MOVED = _rows("Flatten Reshape Transpose Slice Squeeze Unsqueeze Gather Tile")
_MOVED_TO_FLOAT = _rows("Reshape> Transpose> Slice> Squeeze> Unsqueeze>")
_WITH_ZERO_POINTS = _MOVED | _rows(
    "MaxPool ReduceMax DepthToSpace Resize\nQGemm: Gemm/int8 Gemm/uint8 Gemm/int8> Gemm/uint8>"
)
_BOTH_FORMS = ("zero_point", "both")

#: (dtype of an activation, form of its pair) -> reader between two such pairs -> the kernel that computes it on codes.
#: A reader is an op; `op/weight` for a layer, by what its weight is stored in; and `>` behind it where its result is
#: read in floats. All others are computed in floats, and weights behind 8 bits then dequantized in every run.
FAST: Mapping[tuple[str, str], Mapping[str, str]] = MappingProxyType(
    {
        ("uint8", "output_dtype"): _KERNELS | _OF_UNSIGNED,
        **{
            ("uint8", form): _KERNELS
            | _OF_UNSIGNED
            | _WITH_ZERO_POINTS
            | _MOVED_TO_FLOAT
            | _rows("MaxPool>\nQLinearWhere: Where")
            for form in _BOTH_FORMS
        },
        ("int8", "zero_point"): _KERNELS | _WITH_ZERO_POINTS,
        **{(dtype, form): _MOVED | _MOVED_TO_FLOAT for dtype in ("uint16", "int16") for form in _BOTH_FORMS},
    }
)
#: readers of uint8 that are computed on codes with zero-point tensors, and without them in floats
NEED_ZERO_POINTS = frozenset(FAST["uint8", "zero_point"]) - frozenset(FAST["uint8", "output_dtype"])
#: the types of layers with an integer kernel
LAYERS_ON_CODES = frozenset(label.partition("/")[0] for label in _KERNELS | _WITH_ZERO_POINTS if "/" in label)


def kernel_of(label: str, dtype: str = "uint8") -> str | None:
    """Return the kernel that computes a reader on codes, written in the form that it needs; None if there is none."""
    return FAST.get((dtype, "zero_point"), {}).get(label)
