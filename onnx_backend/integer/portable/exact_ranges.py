"""What every runtime computes exactly on int32, by operator: the table that the portable target obeys.

OpenVINO computes 64-bit integers in 32 bits, and many of its kernels take int32 through float32. Such an operator is
exact while its operands, results and sums stay within 2**24; `tests/integer/verify/test_portable_table.py` derives the
limits again on the installed version. A right shift is a division by a power of two, exact if its operand has at most
24 significant bits: low bits are cut off first.
"""

from collections.abc import Mapping
from types import MappingProxyType

#: Bound of what passes through float32.
FLOAT32 = 1 << 24
#: Bound of int32.
INT32 = 1 << 31

_ALL = (
    "Abs Add And ArgMax ArgMin BitwiseAnd BitwiseOr Cast Concat CumSum DepthToSpace Expand Flatten Gather "
    "GatherElements GatherND Identity Max Min Mul Not Or Reshape ScatterElements ScatterND Shape Slice SpaceToDepth "
    "Split Squeeze Sub Tile TopK Transpose Unsqueeze Where Xor"
)
_THROUGH_FLOAT32 = (
    "BitShift Clip ConvInteger Div Equal Greater GreaterOrEqual Less LessOrEqual MatMul MatMulInteger MaxPool Pad "
    "ReduceMax ReduceMin ReduceSum Resize"
)
#: Operators into whose float32 kernels a runtime may take the arithmetic on their results: into a layer's as float32,
#: into a reduction's with wrong results even of small numbers.
FUSING = frozenset(("ConvInteger", "MatMul", "MatMulInteger"))
REDUCTIONS = frozenset(("ReduceMax", "ReduceMin", "ReduceSum"))
#: Operator -> magnitudes below this are computed exactly, as operands, results and partial sums. Of Clip and Pad it is
#: their bounds and fill value that count.
LIMITS: Mapping[str, int] = MappingProxyType(
    {**dict.fromkeys(_ALL.split(), INT32), **dict.fromkeys(_THROUGH_FLOAT32.split(), FLOAT32)}
)
