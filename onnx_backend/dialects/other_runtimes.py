"""What OpenVINO and Qualcomm's HTP compute otherwise than the simulation, measured op by op.

Every op was run between two Q/DQ pairs of one dtype, written as `export` writes them for that runtime, on codes that
reach the ends of the grid, with and without zero points; `tests/onnx_backend/dialects/test_other_runtimes.py` derives
the tables again on the installed versions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: the zero points that a fault needs: none, one of the input, of the output, of any of the two, or of both
Where = Literal["anywhere", "input", "output", "either", "both"]
REFUSED = math.inf


@dataclass(frozen=True)
class Fault:
    """What is wrong with an op in a runtime.

    Attributes:
        steps: the largest difference from the simulation, in steps of the output; REFUSED where it does not run.
        where: the zero points without which it is right.
        between_grids: it is right where both pairs have one scale and one zero point.
        second_operand: it is right where the zero point of the second operand is the middle of its grid.
    """

    steps: float
    where: Where = "anywhere"
    between_grids: bool = False
    second_operand: bool = False

    def applies(self, *, input_shifted: bool, output_shifted: bool, same_grid: bool = False) -> bool:
        """Return True if an op between pairs with these zero points has the fault."""
        if same_grid and self.between_grids:
            return False
        return {
            "anywhere": True,
            "input": input_shifted,
            "output": output_shifted,
            "either": input_shifted or output_shifted,
            "both": input_shifted and output_shifted,
        }[self.where]


@dataclass(frozen=True)
class RuntimeTable:
    """What one runtime computes otherwise than the simulation.

    Attributes:
        title: the runtime, and the version that was measured.
        refused: dtype of an activation -> readers (as `Readers.label` names them) that do not run on it.
        off: dtype of an activation -> readers that are more than one step off.
        shifts: types of integers that it shifts wrong: `uint64` where 64 bits are computed in 32, `uint32` from 2**31
            on. The integer-only files of `to_integer` consist of such shifts, but for those of the portable target.
    """

    title: str
    refused: Mapping[str, frozenset[str]]
    off: Mapping[str, Mapping[str, Fault]]
    shifts: frozenset[str] = frozenset()

    def fault(self, dtype: str, label: str) -> Fault | None:
        """Return what is wrong with a reader of an activation of a probed dtype, or None."""
        if label in self.refused[dtype]:
            return Fault(REFUSED)
        return self.off[dtype].get(label)


def _labels(ops: str, weights: str = "") -> frozenset[str]:
    """Return the labels of ops, or of layers with each of these weights (a comma separates them)."""
    if not weights:
        return frozenset(ops.split())
    return frozenset(f"{op}/{weight.strip()}" for op in ops.split() for weight in weights.split(","))


def _off(steps: float, where: Where, labels: frozenset[str], **conditions: bool) -> dict[str, Fault]:
    return {label: Fault(steps, where, **conditions) for label in labels}


_LAYERS = "Conv ConvTranspose Gemm MatMul"
_NOT_ON_HTP = _labels(_LAYERS, "float8e4m3fn, uint8, int8 blocks, uint8 blocks, int4 blocks") | _labels("Erf")
_INT16_WEIGHTS = _labels(_LAYERS, "int16")
_FLOAT_WEIGHTS = "float16, float32"
#: op types that the tables were measured on; of others nothing is known
PROBED = _labels(
    f"{_LAYERS} Abs Add AveragePool Cast Clip Concat DepthToSpace Div Elu Erf Exp Expand Flatten Gather Gelu "
    "GlobalAveragePool GlobalMaxPool GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization "
    "LayerNormalization LeakyRelu LogSoftmax LpNormalization Max MaxPool Mean Min Mul Neg Pad Pow QuantizeLinear "
    "ReduceMax ReduceMean ReduceSum Relu Reshape Resize Sigmoid Slice Softmax Softplus Split Squeeze Sub Tanh Tile "
    "Transpose Unsqueeze Where"
)

OPENVINO = RuntimeTable(
    "OpenVINO 2026.4 (CPU)",
    {
        "uint8": _labels("Conv", "uint8"),
        "int8": _labels("Conv", "uint8"),
        **dict.fromkeys(("uint16", "int16", "uint4"), frozenset[str]()),
    },
    {
        "uint8": {},
        # products of two int8 activations overflow; a ConvTranspose of them saturates
        "int8": _off(255, "anywhere", _labels("MatMul")) | _off(11, "anywhere", _labels("ConvTranspose", "int8")),
        # computed in float32: the rounding to float16 in between is dropped
        "uint16": _off(28, "anywhere", _labels("Cast")),
        "int16": _off(14, "anywhere", _labels("Cast")),
        "uint4": _off(5, "input", _labels("Gemm MatMul", "int8, uint8")),
    },
    shifts=frozenset({"uint32", "uint64"}),
)

QNN = RuntimeTable(
    "QNN HTP 2.7 (v73, emulated)",
    {
        "uint8": _NOT_ON_HTP | _INT16_WEIGHTS,
        "int8": _NOT_ON_HTP
        | _INT16_WEIGHTS
        | _labels(_LAYERS, "int4")
        | _labels("HardSigmoid LeakyRelu LogSoftmax Neg"),
        "uint16": _NOT_ON_HTP,
    },
    {
        "uint8": {
            # float weights between quantized activations are computed in float16
            **_off(6, "anywhere", _labels("Conv ConvTranspose", _FLOAT_WEIGHTS)),
            **_off(2, "anywhere", _labels("Gemm", _FLOAT_WEIGHTS)),
            # a second operand is rounded to a signed grid
            **_off(6, "input", _labels("MatMul"), second_operand=True),
            **_off(118, "output", _labels("Softmax")),  # it drops the zero point
        },
        "int8": {
            **_off(4, "anywhere", _labels("Conv ConvTranspose", _FLOAT_WEIGHTS)),
            **_off(130, "input", _labels("Pad")),  # it pads with the code 0
            **_off(129, "anywhere", _labels("Softmax")),
        },
        "uint16": {
            **_off(1769, "anywhere", _labels("Conv ConvTranspose", _FLOAT_WEIGHTS)),
            **_off(468, "anywhere", _labels("Gemm", _FLOAT_WEIGHTS)),
            **_off(69, "anywhere", _labels("MatMul", _FLOAT_WEIGHTS)),
            **_off(98, "anywhere", _labels(_LAYERS, "int4")),
            **_off(5, "anywhere", _labels(_LAYERS, "int8, int16")),
            **_off(89, "anywhere", _labels("Pow Softplus")),
            **_off(16, "anywhere", _labels("Gelu GroupNormalization InstanceNormalization")),
            **_off(14, "anywhere", _labels("Div")),
            **_off(3, "anywhere", _labels("AveragePool Elu Exp HardSwish LeakyRelu")),
            **_off(133, "anywhere", _labels("MatMul")),
            **_off(1272, "input", _labels("Tanh")),
            **_off(1272, "input", _labels("Transpose>"), between_grids=True),
            **_off(12, "anywhere", _labels("LayerNormalization")),
            **_off(65535, "input", _labels("LpNormalization")),
            # a pair right behind another goes through float16, and so do these
            **_off(28, "anywhere", _labels("Expand Flatten> Gather> Identity Mean QuantizeLinear Split")),
            **_off(28, "output", _labels("Pad>")),
            # and these, from one grid of 16 bits to another
            **_off(
                28, "anywhere", _labels("Flatten Gather MaxPool Reshape Squeeze Tile Unsqueeze"), between_grids=True
            ),
            **_off(116, "anywhere", frozenset({"Resize", "Resize linear"}), between_grids=True),
        },
    },
    shifts=frozenset({"uint32"}),
)

TABLES: Mapping[str, RuntimeTable] = {"openvino": OPENVINO, "qnn": QNN}
