"""What ops are written with: values with their layout, and the tensors of the program under way.

A value knows its ONNX shape and the order in which the file holds its axes, so a Transpose costs nothing where it is
read: layers of images write channels last, and what follows stays so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_backend.litert.program import Grid, Op, Program, Tensor

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
NONE, RELU, RELU_N1_TO_1, RELU6 = 0, 1, 2, 3
_FUSED = {(0.0, 6.0): RELU6, (-1.0, 1.0): RELU_N1_TO_1}
FOR_LITERT = 'quantize with config.for_dialect("litert")'
#: how much finer a grid may be than that on which a kernel has rounded, so that codes stay within one step
_FINEST = 0.59


class Refused(Exception):  # noqa: N818
    """An op cannot be said in the format: why, and what the user can do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


@dataclass(frozen=True)
class Failed:
    """The result of an op that was refused; what reads it is not refused as well."""


@dataclass(frozen=True)
class Codes:
    """A tensor of the program as a value of the ONNX graph.

    Attributes:
        tensor: its number.
        shape: the ONNX shape.
        perm: the file's axis i is axis `perm[i]` of `shape`; of `before` where that is set.
        before: a shape that was flattened into `shape` after its axes had been reordered.
    """

    tensor: int
    shape: Shape
    perm: Shape
    before: Shape | None = None


@dataclass(frozen=True)
class Stored:
    """A stored tensor: integers with their scales and zero points, or floats without.

    `own_perm` is the order in which the file has the axes of the simulation's own tensor, where they differ; `tensor`
    is where the program has these codes already.
    """

    values: Array
    grid: Grid | None = None
    site: str = ""
    own_perm: Shape | None = None
    tensor: int | None = None

    def floats(self) -> Array:
        """Return what the integers stand for."""
        if self.grid is None:
            return np.asarray(self.values, np.float32)
        sizes = [1] * self.values.ndim
        if self.grid.scale.size > 1:
            sizes[self.grid.axis] = self.grid.scale.size
        scale, zero = self.grid.scale.reshape(sizes), self.grid.zero_point.reshape(sizes)
        return np.asarray((self.values - zero).astype(np.float32) * scale, np.float32)


@dataclass(frozen=True)
class Pending:
    """A result whose grid the QuantizeLinear behind it will state.

    Attributes:
        shape: the ONNX shape.
        write: writes the op for a grid, a name and a fused activation.
        fuses: whether the op has one.
        low: the least value, of a Relu or Clip behind the op.
        high: the largest value.
        own: the grid that the op has where none is stated.
        biased: adds a stored bias by its name, where the op has room for one.
    """

    shape: Shape
    write: Callable[[Grid, str, int], Codes]
    fuses: bool = False
    low: float = -np.inf
    high: float = np.inf
    own: Grid | None = None
    biased: "Callable[[str], Pending] | None" = None


Value = Codes | Stored | Pending | Failed


@dataclass
class Writer:
    """The program under way.

    Attributes:
        program: what is written so far.
        values: by name of an ONNX tensor.
        shapes: by name of an ONNX tensor.
        whole_numbers: the names of a model's inputs that are integers.
        inputs: by name of a model's input, as its first QuantizeLinear has it.
        sites: site -> kind, tensor, the shape in ONNX's order and the order in which the file holds its axes.
    """

    shapes: Mapping[str, Shape]
    whole_numbers: frozenset[str] = frozenset()
    program: Program = field(default_factory=Program)
    values: dict[str, Value] = field(default_factory=dict)
    sites: dict[str, dict[str, Any]] = field(default_factory=dict)
    inputs: dict[str, Codes] = field(default_factory=dict)

    # tensors

    def grid(self, value: Codes) -> Grid:
        """Return the grid of a value."""
        grid = self.program.tensors[value.tensor].grid
        assert grid is not None
        return grid

    def emit(self, op: str, inputs: Sequence[int], shape: Shape, grid: Grid, name: str, **options: Any) -> int:
        """Write an op with one result, and return the number of its tensor."""
        made = self.program.add(Tensor(name, shape, grid.dtype, grid))
        self.program.ops.append(Op(op, tuple(inputs), (made,), options))
        return made

    def ints(self, values: Sequence[int] | Array, name: str) -> int:
        """Store integers that an op takes as an input, such as axes."""
        array = np.asarray(values, np.int32)
        return self.program.add(Tensor(name, array.shape, "int32", None, array))

    def store(self, values: Array, grid: Grid, name: str) -> int:
        """Store codes."""
        held = values.astype(np.int8 if grid.dtype == "int4" else np.dtype(grid.dtype))
        return self.program.add(Tensor(name, held.shape, grid.dtype, grid, held))

    def note(self, site: str, kind: str, tensor: int, shape: Shape, perm: Shape, own_perm: Shape | None = None) -> None:
        """Note where the file holds a site."""
        self.sites[site] = {"kind": kind, "tensor": tensor, "shape": list(shape), "perm": list(perm)}
        if own_perm is not None:
            self.sites[site]["own_perm"] = list(own_perm)

    # values

    def integers(self, name: str) -> int:
        """Return the tensor of an input of whole numbers, such as token ids."""
        if name not in self.whole_numbers:
            raise Refused(f"its indices {name!r} are computed, and must be stored or an input", "compute them outside")
        if name not in self.inputs:
            shape = self.shapes[name]
            number, perm = self.program.add(Tensor(name, shape, "int32")), tuple(range(len(shape)))
            self.program.inputs.append(number)
            self.inputs[name] = Codes(number, shape, perm)
            self.note(name, "input", number, shape, perm)
        return self.inputs[name].tensor

    def codes(self, name: str, *, flat: bool = False) -> Codes:
        """Return a value as codes, in its own layout; `flat` takes one that was flattened after it was reordered."""
        value = self.values.get(name)
        if isinstance(value, Pending) and value.own is not None:
            value = self.values[name] = self.settle(value, value.own, name)
        if isinstance(value, Failed):
            raise Refused("", "")
        if not isinstance(value, Codes):
            raise Refused(f"it reads {name!r}, which is not quantized", f"quantize that tensor: {FOR_LITERT}")
        return value if flat or value.before is None else self.plain(value)

    def stored(self, name: str) -> Stored:
        """Return a stored tensor."""
        value = self.values.get(name)
        if isinstance(value, Failed):
            raise Refused("", "")
        if not isinstance(value, Stored):
            raise Refused(f"{name!r} is computed, and must be stored", "fold what computes it, or leave the op out")
        return value

    def constant(self, name: str) -> list[int]:
        """Return stored integers, such as axes."""
        return [int(one) for one in self.stored(name).values.reshape(-1)]

    def settle(self, value: Pending, grid: Grid, name: str) -> Codes:
        """Write a pending op for a grid, with its bounds as the format can say them."""
        lowest, highest = grid.bounds
        low = grid.code(value.low) if np.isfinite(value.low) else lowest
        high = grid.code(value.high) if np.isfinite(value.high) else highest
        if low <= lowest and high >= highest:
            return value.write(grid, name, NONE)
        fused = RELU if value.low == 0 and high >= highest else _FUSED.get((value.low, value.high))
        if value.fuses and fused is not None:
            return value.write(grid, name, fused)
        found, wanted = value.write(grid, f"{name}/free", NONE), name
        for op, code in (("MAXIMUM", low), ("MINIMUM", high)):
            if code not in (lowest, highest):
                bound = self.store(np.array(code), grid, f"{name}/{op.lower()}_bound")
                shape = self.program.tensors[found.tensor].shape
                found = replace(found, tensor=self.emit(op, [found.tensor, bound], shape, grid, wanted))
        return found

    def requantized(self, value: Codes, grid: Grid, name: str, *, rounded: bool = False) -> Codes:
        """Return a value on another grid; `rounded`: its own was chosen by a kernel, not by the model."""
        own = self.grid(value)
        if own.same(grid):
            return value
        if rounded and grid.step < _FINEST * own.step:
            raise Refused(
                f"LiteRT computes it on a scale of {own.step:.4g}, and the model wants the finer {grid.step:.4g}",
                FOR_LITERT,
            )
        shape = self.program.tensors[value.tensor].shape
        return replace(value, tensor=self.emit("QUANTIZE", [value.tensor], shape, grid, name))

    def fixed(self, shape: Shape, grid: Grid, write: Callable[[Grid, str], Codes]) -> Pending:
        """Return the result of an op that LiteRT computes on this grid alone."""

        def written(wanted: Grid, name: str, _: int) -> Codes:
            if wanted.dtype != grid.dtype:
                raise Refused(f"LiteRT computes it from {grid.dtype} to {grid.dtype}", FOR_LITERT)
            inner = name if grid.same(wanted) else f"{name}/own_grid"
            return self.requantized(write(grid, inner), wanted, name, rounded=True)

        return Pending(shape, written, own=grid)

    # layout

    def at(self, value: Codes, perm: Sequence[int]) -> Codes:
        """Return a value whose axes the file holds in this order."""
        value, wanted = self.plain(value) if value.before is not None else value, tuple(perm)
        if value.perm == wanted:
            return value
        shape = tuple(value.shape[axis] for axis in wanted)
        grid, name = self.grid(value), self.program.tensors[value.tensor].name
        if _long(value.perm, value.shape) == _long(wanted, value.shape):
            made = self.reshape(value.tensor, shape, f"{name}/reshaped")
        else:
            order = self.ints([value.perm.index(axis) for axis in wanted], f"{name}/order")
            made = self.emit("TRANSPOSE", [value.tensor, order], shape, grid, f"{name}/transposed")
        return Codes(made, value.shape, wanted)

    def plain(self, value: Codes) -> Codes:
        """Return a value in ONNX's own order of axes."""
        if value.before is None:
            return self.at(value, range(len(value.shape)))
        shape, name = tuple(value.before[axis] for axis in value.perm), self.program.tensors[value.tensor].name
        whole = Codes(self.reshape(value.tensor, shape, f"{name}/whole"), value.before, value.perm)
        flat = self.reshape(self.plain(whole).tensor, value.shape, f"{name}/flat")
        return Codes(flat, value.shape, tuple(range(len(value.shape))))

    def reshape(self, tensor: int, shape: Shape, name: str) -> int:
        """Write a RESHAPE, or nothing where the shape is the same."""
        known = self.program.tensors[tensor]
        if known.shape == shape:
            return tensor
        assert known.grid is not None
        return self.emit("RESHAPE", [tensor, self.ints(shape, f"{name}/shape")], shape, known.grid, name)

    def reshaped(self, value: Codes, shape: Shape, name: str) -> Codes:
        """Return a value in another ONNX shape, without a TRANSPOSE where its layout allows."""
        value = self.plain(value) if value.before is not None else value
        perm = regrouped(value.shape, value.perm, shape)
        if perm is not None:
            return Codes(self.reshape(value.tensor, tuple(shape[axis] for axis in perm), name), shape, perm)
        if len(shape) == 2 and value.perm[0] == 0 and shape[0] == value.shape[0]:
            return Codes(self.reshape(value.tensor, shape, name), shape, value.perm, value.shape)
        value = self.plain(value)
        return Codes(self.reshape(value.tensor, shape, name), shape, tuple(range(len(shape))))

    def ranked(self, value: Codes, rank: int) -> Codes:
        """Return a value with axes of size 1 in front, up to a rank."""
        more = rank - len(value.shape)
        if more <= 0:
            return value
        perm = (*range(more), *(axis + more for axis in value.perm))
        shape = (1,) * more + value.shape
        name = f"{self.program.tensors[value.tensor].name}/rank{rank}"
        return Codes(self.reshape(value.tensor, tuple(shape[axis] for axis in perm), name), shape, perm)


def _long(perm: Shape, shape: Shape) -> list[int]:
    return [axis for axis in perm if shape[axis] != 1]


def regrouped(shape: Shape, perm: Shape, wanted: Shape) -> Shape | None:
    """Return the order of the axes of `wanted` when a tensor held in order `perm` is reshaped as it lies.

    None where axes that become one lie apart, or out of order.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(wanted):
        before, after, left, right = [], [], 1, 1
        if i < len(shape):
            before, left, i = [i], shape[i], i + 1
        if j < len(wanted):
            after, right, j = [j], wanted[j], j + 1
        while left != right:
            if left < right and i < len(shape):
                before, left, i = [*before, i], left * shape[i], i + 1
            elif j < len(wanted):
                after, right, j = [*after, j], right * wanted[j], j + 1
            else:
                return None
        groups.append((before, after))
    places = {axis: place for place, axis in enumerate(_long(perm, shape))}
    order: list[tuple[int, list[int]]] = []
    last = -1
    for before, after in groups:
        lies = [places[axis] for axis in before if axis in places]
        if lies and lies != list(range(lies[0], lies[0] + len(lies))):
            return None
        last = lies[0] if lies else last
        order.append((last, after))
    return tuple(axis for _, after in sorted(order, key=lambda one: one[0]) for axis in after)
