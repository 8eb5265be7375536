"""What a runtime runs of a model, kernel by kernel, and whether a kernel computes in integers or in float."""

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Literal

from onnx import GraphProto

from qsdk.core.graph.op_facts import SHAPE_OPS

Precision = Literal["integer", "float", "conversion", "index"]

_FLOATS = frozenset({"float", "float16", "bfloat16", "double", "f32", "f16", "bf16", "f64"})
_CODES = frozenset({"int8", "uint8", "int16", "uint16", "int4", "uint4", "i8", "u8", "i16", "u16", "i4", "u4"})
_CONVERSIONS = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "FakeQuantize",  # OpenVINO's QuantizeLinear
        "ReorderInput",
        "ReorderOutput",
        "Reorder",
    }
)
_CASTS = frozenset({"Cast", "Convert"})


@dataclass(frozen=True)
class Kernel:
    """What a runtime runs in one piece: a node of the file, several that it fused, or a conversion of its own.

    Attributes:
        name: in the runtime.
        op_type: as it is executed.
        inputs: names of the tensors (OpenVINO: of the kernels) that it reads.
        outputs: names of its results.
        origins: names from which the nodes of the file that it replaced can be told; none for one of the runtime's own.
        precision: `integer` or `float` by what it computes with; `conversion` between the two, or of the layout;
            `index` for arithmetic on sizes and indices, which a float model has as well.
        ms: milliseconds of one run.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origins: tuple[str, ...]
    precision: Precision
    ms: float


@dataclass(frozen=True)
class Profile:
    """The time of a model in a runtime.

    Attributes:
        title: name and version of the runtime.
        runs: milliseconds of each run as an application waits for it, without the profiler.
        kernels: in the order in which they run.
        graph: that the runtime has made of the model, if it writes it.
    """

    title: str
    runs: tuple[float, ...]
    kernels: tuple[Kernel, ...]
    graph: GraphProto | None = None

    @property
    def ms(self) -> float:
        """Return the median of the runs."""
        return median(self.runs)

    @property
    def spread(self) -> float:
        """Return by how much the runs differ: the range of the middle eight tenths of them, over their median."""
        return (self.ends[1] - self.ends[0]) / self.ms if self.ms else 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """Return the milliseconds that a tenth of the runs stay below, and that a tenth take longer than."""
        ordered, beyond = sorted(self.runs), len(self.runs) // 10
        return ordered[beyond], ordered[-1 - beyond]


def precision_of(
    op_type: str, reads: Collection[str], makes: Collection[str], *, from_codes: bool, in_integers: bool
) -> Precision:
    """Return what a kernel computes with.

    Args:
        op_type: of the kernel.
        reads: types of its inputs, in the runtime's words.
        makes: types of its results.
        from_codes: it reads results of integer kernels: numbers in a type that indices have too.
        in_integers: it is known to multiply integers, although it reads float scales or gives float results.
    """
    float_in, float_out = not _FLOATS.isdisjoint(reads), not _FLOATS.isdisjoint(makes)
    if op_type in _CONVERSIONS or (op_type in _CASTS and (float_in or float_out)):
        return "conversion"
    if in_integers:
        return "integer"
    if op_type not in SHAPE_OPS and (float_in or float_out):
        return "float"
    return "integer" if from_codes or not _CODES.isdisjoint((*reads, *makes)) else "index"
