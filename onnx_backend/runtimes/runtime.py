"""What a runtime is to qsdk: how to write for it, what it refuses or misreads, how to run it and how to time it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from onnx import ModelProto, NodeProto

from onnx_backend.profiling.kernels import Profile
from onnx_backend.proto.lazy_tensors import LargeTensor
from onnx_backend.readers import Form
from onnx_backend.runtimes.runner import Runner
from onnx_backend.runtimes.tables import RuntimeTable
from onnx_backend.validation.scope import Finding
from qsdk.core.arrays import Array
from qsdk.core.config.target import Target
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding

Prefer = Literal["speed", "size"]
#: adds to a lowered model, in place, what a runtime needs to compute it right (with the stored tensors that it has only
#: stubs of, and whether nothing but weights is quantized); returns the pairs that got zero points
Adapt = Callable[[ModelProto, Mapping[str, LargeTensor], bool], Sequence[NodeProto]]
#: times a model with numbered nodes (its inputs, threads or None for the runtime's own choice, repeats)
TimeKernels = Callable[[ModelProto, Mapping[str, Array], int | None, int], Profile]


def _as_it_is(model: ModelProto) -> None:
    """Leave a model as it is."""


def _nothing(model: ModelProto) -> Iterator[Finding]:
    yield from ()


@dataclass(frozen=True)
class Runtime:
    """One runtime, or the standard's own form; the defaults are those of the standard.

    Attributes:
        target: its facts that need no code: the dialect in which files are written for it, its dtypes.
        version: that all of this was measured on; "" for none.
        simulates: it is the runtime of simulations, whose CPU must be able to load every file.
        opens: ONNX Runtime opens its files, so that export can compare them with the simulation.
        by_zero_point: containers whose QuantizeLinear has a zero point in any case.
        pair_types: float types, other than float32, that pairs can have.
        narrow_scales: block scales of float8 and float4 are stored in the narrow type that holds them.
        clipped: activation types whose values are clipped to the grid in front of the QuantizeLinear, because the
            runtime removes the pair, and with it the bounds.
        kernel_casts: ops without a kernel for float64 or bfloat16 compute in float32 between casts.
        single_ops: norms, rotary embeddings and attention are one operator each, at opsets that have these.
        whole_bytes: weights of 4 bits beside quantized activations have integer kernels in 8 bits alone.
        refuse: raises ExportError for encodings that it cannot run.
        adapt: see `Adapt`.
        finish: changes a lowered model in place, behind `adapt` and the casts.
        with_sizes: changes it in place when the sizes of its inputs are known.
        speed_up: writes it in the forms that are fast, in place, last.
        findings: what the runtime refuses, misreads or computes otherwise than the simulation.
        table: what was measured of that, op by op.
        open: opens a model as an application would; None where it cannot be run here.
        open_part: opens a part of a model, whose inputs may lack a rank; None for `open`.
        time: see `TimeKernels`; None where times cannot be taken.
    """

    target: Target
    version: str = ""
    simulates: bool = False
    opens: bool = False
    by_zero_point: frozenset[str] = frozenset()
    pair_types: tuple[str, ...] = ()
    narrow_scales: bool = False
    clipped: frozenset[str] = frozenset()
    kernel_casts: bool = False
    single_ops: bool = False
    whole_bytes: bool = False
    refuse: Callable[[Mapping[str, Encoding]], None] | None = None
    adapt: Adapt | None = None
    finish: Callable[[ModelProto], None] = field(default=_as_it_is)
    with_sizes: Callable[[ModelProto], None] = field(default=_as_it_is)
    speed_up: Callable[[ModelProto], None] = field(default=_as_it_is)
    findings: Callable[[ModelProto], Iterator[Finding]] = field(default=_nothing)
    table: RuntimeTable | None = None
    open: Callable[[ModelProto], Runner] | None = None
    open_part: Callable[[ModelProto], Runner] | None = None
    time: TimeKernels | None = None

    @property
    def name(self) -> str:
        """Return the name of the dialect in which files are written for it."""
        return self.target.name

    @property
    def explicit(self) -> bool:
        """Return whether every QuantizeLinear and DequantizeLinear has a zero point, and none an `output_dtype`.

        It is for runtimes that do not know the attribute: one computes in floats, or takes unsigned 8 bits for signed.
        """
        return self.target.zero_points

    @property
    def in_bfloat16(self) -> bool:
        """Return whether bfloat16 is written as it is, without casts around ops."""
        return "bfloat16" in self.pair_types

    def form(self, dtype: DType, symmetric: bool) -> Form:
        """Return how a QuantizeLinear of an activation states its type; `symmetric`: every zero point is 0."""
        if self.explicit or dtype.container in self.by_zero_point:
            return "zero_point"
        return "output_dtype" if symmetric else "both"
