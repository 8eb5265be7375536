"""The C of each operation: a function of plain loops with every size a number, which compilers unroll and vectorise.

Products are sums over two rows of 16-bit integers, four pixels at a time: the form that becomes a multiply-add of pairs
on every processor that has one. All numbers are those of the reference, whatever the order of the sums.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from onnx_backend.integer.firmware.static import StaticOp, StaticTensor, spatial

#: What all functions share. The right shift of a negative number is left to the compiler by C: these have none.
HELPERS = """
/* A layer stays a function of its own. GCC 12 that sees the places in the arena may take calls for needless. */
#if defined(__clang__)
#define QSDK_LAYER static __attribute__((noinline))
#elif defined(__GNUC__) && __GNUC__ >= 8
#define QSDK_LAYER static __attribute__((noipa))
#elif defined(__GNUC__)
#define QSDK_LAYER static __attribute__((noinline, noclone))
#else
#define QSDK_LAYER static
#endif

/* floor(p / 2**n), n >= 1, of a signed number in an unsigned one */
static inline int64_t qsdk_shift(uint64_t p, int32_t n)
{
    return (int64_t)((p + ((uint64_t)1 << 63)) >> n) - (int64_t)(((uint64_t)1 << 63) >> n);
}

/* x * m for m >= 0, as an unsigned product, which compilers vectorise */
static inline uint64_t qsdk_product(int32_t x, int32_t m)
{
    return (uint64_t)((uint32_t)x + ((uint32_t)1 << 31)) * (uint32_t)m - ((uint64_t)(uint32_t)m << 31);
}

/* p / 2**n, n >= 1, rounded to the nearest integer; the names say what becomes of halves. */
static inline int64_t qsdk_half_up(uint64_t p, int32_t n)
{
    return qsdk_shift(p + ((uint64_t)1 << (n - 1)), n);
}

static inline int64_t qsdk_half_even(uint64_t p, int32_t n)
{
    return qsdk_shift(p + ((uint64_t)1 << (n - 1)) - 1 + ((uint64_t)qsdk_shift(p, n) & 1), n);
}

static inline int64_t qsdk_half_away(uint64_t p, int32_t n)
{
    return qsdk_shift(p + ((uint64_t)1 << (n - 1)) - (p >> 63), n);
}

/* by at most 31 bits half up, then by the others half away */
static inline int64_t qsdk_gemmlowp(uint64_t p, int32_t n)
{
    const int64_t high = qsdk_half_up(p, n < 31 ? n : 31);
    return n > 31 ? qsdk_half_away((uint64_t)high, n - 31) : high;
}

static inline int64_t qsdk_max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t qsdk_min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int32_t qsdk_max32(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t qsdk_min32(int32_t a, int32_t b) { return a < b ? a : b; }
"""
_UNROLLED = 8  # taps of a row, at most
_OPERATORS: Mapping[str, str] = MappingProxyType({"ADD": "+", "SUBTRACT": "-", "AND": "&", "SHIFT_RIGHT": ">>"})
_WIDE = frozenset({"uint32", "int64"})
#: Factors of 1 and terms of 0, which the sizes of many layers leave.
_NOTHING = re.compile(r" [*/] 1\b|(?<=[\[(])0 \+ | [+-] 0\b")
_ROW = 64  # sums of a row that are taken at once
Lines = list[str]


def number(value: int) -> str:
    """Return an integer as C writes it."""
    for bits in (32, 64):
        if value == -(1 << (bits - 1)):  # these have no literal: the minus is an operator on a number that is too large
            return f"INT{bits}_MIN"
    return str(value) if abs(value) < 1 << 31 else f"INT64_C({value})"


def _less(zero: int) -> str:
    return f" - {number(zero)}" if zero > 0 else f" + {number(-zero)}" if zero else ""


def layer(
    op: StaticOp, name: str, tensors: Mapping[str, StaticTensor], constants: Mapping[str, str]
) -> tuple[Lines, str]:
    """Return the C function of an operation and the call of it; `constants` are the C names of arrays."""
    made = _Layer(op, tensors, constants)
    body, parameters, arguments = _FORMS[op.kind](made), [], []
    for text, tensor in made.parameters.items():
        const = "" if text in ("out", "room") else "const "
        parameters.append(f"{const}{tensor.dtype}_t *restrict {text}")
        arguments.append(f"({const}{tensor.dtype}_t *)(qsdk_arena.bytes + {tensor.offset})")
    lines = [f"QSDK_LAYER void {name}({', '.join(parameters)})", "{", *body, "}"]
    return _indented(lines), f"{name}({', '.join(arguments)});"


def _indented(lines: Sequence[str]) -> Lines:
    depth, found = 0, []
    for line in lines:
        depth -= line.startswith("}")
        found.append("    " * depth + _NOTHING.sub("", line))
        depth += line.endswith("{")
    return found


class _Layer:
    """An operation with the C names of its tensors: `x0`, `x1`, ... come in, `out` goes out, `room` is for work."""

    def __init__(self, op: StaticOp, tensors: Mapping[str, StaticTensor], constants: Mapping[str, str]) -> None:
        self.op, self.fields, self.out = op, op.fields, tensors[op.output]
        self.inputs = [tensors[name] for name in op.inputs]
        moving = [name for name in dict.fromkeys(op.inputs) if tensors[name].values is None]
        self._names = {name: f"x{i}" for i, name in enumerate(moving)}
        self.parameters = {text: tensors[name] for name, text in self._names.items()} | {"out": self.out}
        if op.room:
            self.parameters["room"] = tensors[op.room]
        self._names |= constants

    @property
    def work(self) -> str:
        """The C type of the room for work."""
        return f"{self.parameters['room'].dtype}_t"

    @property
    def width(self) -> str:
        """The bits in which the elements are combined."""
        return "64" if _WIDE & {tensor.dtype for tensor in (*self.inputs, self.out)} else "32"

    def name(self, index: int) -> str:
        """Return the C name of an input."""
        return self.named(self.inputs[index])

    def named(self, tensor: StaticTensor) -> str:
        """Return the C name of a tensor that comes in."""
        return self._names[tensor.name]

    def centred(self, place: str, value: str, zero: int) -> str:
        """Return the assignment of a code less its zero point to a place in the room."""
        return f"{place} = ({self.work})({value}{_less(zero)});"

    def read(self, tensor: StaticTensor, place: str) -> str:
        """Return an element of an input, a number where it is known."""
        if tensor.values is not None and tensor.values.size == 1:
            value = int(tensor.values.item())
            return number(value) if value >= 0 else f"({number(value)})"
        return f"{self.named(tensor)}[{place}]"

    def store(self, place: str, value: str) -> str:
        """Return the assignment of an element of the output."""
        return f"out[{place}] = ({self.out.dtype}_t)({value});"

    def stored_sum(self, place: str, value: str, channel: str) -> str:
        """Return the assignment of a sum of products, requantized where that is the next operation."""
        if self.op.then is None:
            return self.store(place, value)
        names = self.op.then.inputs[1:]
        given = [value, *(self.read(tensor, channel) for tensor in self.inputs[-len(names) :])]
        return self.store(place, _requantized(self.op.then, given, self.inputs))


def _loop(name: str, stop: int, lines: Sequence[str], start: int = 0, step: int = 1) -> Lines:
    """Return lines that run for `name` from `start` on."""
    on = f"{name}++" if step == 1 else f"{name} += {step}"
    return [f"for (int32_t {name} = {start}; {name} < {stop}; {on}) {{", *lines, "}"]


def _blocks(name: str, total: int, size: int, lines: Sequence[str]) -> Lines:
    """Return lines that run for blocks which `name` begins; the last one ends where all end."""
    at = f"{name}_" if total % size == 0 else f"{name}_ < {total - size} ? {name}_ : {total - size}"
    return _loop(f"{name}_", total, [f"const int32_t {name} = {at};", *lines], step=size)


def _steps(shape: Sequence[int], to: Sequence[int]) -> list[int]:
    """Return the strides that read a tensor as if it had the shape `to`, by ONNX's rules of broadcasting."""
    sizes = [1] * (len(to) - len(shape)) + list(shape)
    return [0 if size == 1 else int(np.prod(sizes[i + 1 :])) for i, size in enumerate(sizes)]


def _nest(shape: Sequence[int], steps: Sequence[Sequence[int]], body: Callable[..., Lines]) -> Lines:
    """Return loops over a shape: `body` takes the place in each operand; what all step through as one is one loop."""
    axes: list[list[int]] = []
    for axis in zip(shape, *steps, strict=True):
        if axes and all(outer == inner * axis[0] for outer, inner in zip(axes[-1][1:], axis[1:], strict=True)):
            axes[-1] = [axes[-1][0] * axis[0], *axis[1:]]
        elif axis[0] != 1:
            axes.append(list(axis))
    places = [[f"i{n} * {axis[k]}" for n, axis in enumerate(axes) if axis[k]] for k in range(1, len(steps) + 1)]
    lines = body(*(" + ".join(terms) or "0" for terms in places))
    for n in reversed(range(len(axes))):
        lines = _loop(f"i{n}", axes[n][0], lines)
    return lines


def _elementwise(low: _Layer, value: Callable[..., str], inputs: Sequence[StaticTensor] | None = None) -> Lines:
    """Return the loops that set every element to a value of the elements of some inputs."""
    read = low.inputs if inputs is None else inputs
    shape = low.out.shape
    steps = [_steps(tensor.shape, shape) for tensor in read]

    def body(to: str, *places: str) -> Lines:
        return [low.store(to, value(*(low.read(t, place) for t, place in zip(read, places, strict=True))))]

    return _nest(shape, [_steps(shape, shape), *steps], body)


# --- one element at a time -------------------------------------------------------------------------------------------


def _binary(low: _Layer) -> Lines:
    symbol = _OPERATORS[low.op.kind]
    return _elementwise(low, lambda *parts: f" {symbol} ".join(f"(int{low.width}_t){part}" for part in parts))


def _multiply(low: _Layer) -> Lines:
    a, b = low.fields.get("zero_point", (0, 0))
    return _elementwise(low, lambda x, y: f"((int{low.width}_t){x}{_less(a)}) * ((int{low.width}_t){y}{_less(b)})")


def _extreme(low: _Layer) -> Lines:
    function = f"qsdk_{low.op.kind[:3].lower()}{low.width}"

    def value(first: str, *others: str) -> str:
        for other in others:
            first = f"{function}({first}, {other})"
        return first

    return _elementwise(low, value)


def _clip(low: _Layer) -> Lines:
    lo, hi = number(low.fields["lo"]), number(low.fields["hi"])
    return _elementwise(low, lambda x: f"qsdk_max{low.width}({lo}, qsdk_min{low.width}({x}, {hi}))")


def _same(low: _Layer) -> Lines:
    return _elementwise(low, lambda x: x)


def _table(low: _Layer) -> Lines:
    return _elementwise(low, lambda x: f"{low.name(1)}[{x}]", low.inputs[:1])


def _requantize(low: _Layer) -> Lines:
    return _elementwise(low, lambda *given: _requantized(low.op, given, low.inputs))


def _requantized(op: StaticOp, given: Sequence[str], tensors: Sequence[StaticTensor]) -> str:
    """Return the code of the terms, their constants, the shift and the addend, with which `tensors` end too."""
    terms, shift, addend = op.fields["terms"], given[-2], given[-1]
    zero, lo, hi = (number(op.fields[key]) for key in ("code_zero_point", "lo", "hi"))
    parts, wide = [], any(tensor.dtype in _WIDE for tensor in tensors[: -2 - terms])
    for x, m, tensor in zip(given, given[terms:], tensors[-2 - terms :], strict=False):
        plain = tensor.dtype == "int32" and _least(tensor) >= 0 and not wide
        parts.append(f"qsdk_product({x}, {m})" if plain else f"(uint64_t)((int64_t){x} * {m})")
    # a bias times a mantissa does not depend on the element: it leaves the loops
    last = f"((int64_t){addend} * {given[1]})" if op.fields["bias_first"] else addend
    rounded = f"qsdk_{op.fields['rounding']}({' + '.join([*parts[:terms], f'(uint64_t){last}'])}, {shift})"
    if _least(tensors[-2]) > 32:  # of 63 bits, less than 31 are left
        return f"qsdk_max32({lo}, qsdk_min32((int32_t){rounded} + {zero}, {hi}))"
    return f"qsdk_max64({lo}, qsdk_min64({rounded} + {zero}, {hi}))"


def _least(tensor: StaticTensor) -> int:
    return int(np.min(np.asarray(tensor.values)))


# --- elements at other places ----------------------------------------------------------------------------------------


def _strided(low: _Layer) -> Lines:
    shape, start = low.out.shape, low.fields["start"]
    steps = [_steps(shape, shape), low.fields["step"]]
    return _nest(shape, steps, lambda to, place: [low.store(to, f"{low.name(0)}[{start} + {place}]")])


def _copy(low: _Layer) -> Lines:
    return _loop("i", int(np.prod(low.out.shape)), [low.store("i", f"{low.name(0)}[i]")])


def _gather(low: _Layer) -> Lines:
    source, fill = low.name(0), number(low.fields["fill"])
    return _elementwise(low, lambda at: f"{at} < 0 ? {fill} : {source}[{at}]", low.inputs[1:])


def _concat(low: _Layer) -> Lines:
    lines, start, axis = [], 0, low.fields["axis"]
    inner = int(np.prod(low.out.shape[axis + 1 :]))
    for tensor in low.inputs:
        width = tensor.shape[axis] * inner
        value = low.read(tensor, f"i * {width} + k")
        store = low.store(f"i * {low.out.shape[axis] * inner} + {start} + k", value)
        lines += _loop("i", int(np.prod(tensor.shape[:axis])), _loop("k", width, [store]))
        start += width
    return lines


def _reduce(low: _Layer) -> Lines:
    source, zero = low.inputs[0], low.fields["zero_point"][0]
    largest = low.op.kind == "AXIS_MAX"
    kept = [1 if reduced else size for size, reduced in zip(source.shape, low.fields["reduced"], strict=True)]
    first = number(int(np.iinfo(low.out.dtype).min)) if largest else "0"

    def body(place: str, to: str) -> Lines:
        value = f"{low.name(0)}[{place}]"
        given = f"qsdk_max{low.width}(out[{to}], {value})" if largest else f"out[{to}] + {value}{_less(zero)}"
        return [low.store(to, given)]

    return [
        *_loop("i", int(np.prod(low.out.shape)), [low.store("i", first)]),
        *_nest(source.shape, [_steps(source.shape, source.shape), _steps(kept, source.shape)], body),
    ]


# --- sums of products ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """What the pixels are multiplied with, and where the sums go.

    Attributes:
        tensor: with the rows, one behind the other.
        zero: their zero point.
        count: of rows for a pixel.
        length: of a row and of a pixel.
        steps: in the output, from a row and from a pixel to the next.
    """

    tensor: StaticTensor
    zero: int
    count: int
    length: int
    steps: tuple[int, int]


def _products(low: _Layer, pixels: int, rows: _Rows, places: Sequence[str], gather: Lines) -> Lines:
    """Return the sums of the products of every pixel with every row.

    `gather` are the lines that write the pixel `p + j` to `to`; `places` are those of the first row, of the first
    output and of the first channel.
    """
    row, out, channel = places
    block, lanes, length = low.fields["block"], min(4, pixels), rows.length
    sums = [
        f"const {low.work} *from = room + j * {length};",
        f"int32_t {', '.join(f's{i} = 0' for i in range(lanes))};",
        *_loop(
            "k",
            length,
            [
                f"const int32_t w = row[k]{_less(rows.zero)};",
                *(f"s{i} += w * from[{i * length} + k];" for i in range(lanes)),
            ],
        ),
        *(f"sums[j + {i}] = s{i};" for i in range(lanes)),
    ]
    place = f"{out} + f * {rows.steps[0]} + (p + j) * {rows.steps[1]}"
    each_row = [
        f"const {rows.tensor.dtype}_t *row = {low.named(rows.tensor)} + {row} + f * {length};",
        f"int32_t sums[{block}];",
        *_loop("j", block, sums, step=lanes),
        *_loop("j", block, [low.stored_sum(place, "sums[j]", f"{channel} + f")]),
    ]
    pixel = _loop("j", block, [f"{low.work} *to = room + j * {length};", *gather])
    return _blocks("p", pixels, block, [*pixel, *_loop("f", rows.count, each_row)])


def _matmul(low: _Layer) -> Lines:
    """The pixels are the rows of the left operand where the right is stored transposed, else the right's columns."""
    (left, right), out = low.inputs[:2], low.out
    stored, zeros, depth = low.fields["transposed"], low.fields["zero_point"], left.shape[-1]
    height, width = left.shape[-2], right.shape[-2 if stored else -1]
    source, zero = (left, zeros[0]) if stored else (right, zeros[1])
    batch, parts = out.shape[:-2], (left, right, out)
    steps = [[step * int(np.prod(t.shape[-2:])) for step in _steps(t.shape[:-2], batch)] for t in parts]
    if stored and all(size == 1 for size in right.shape[:-2]):  # all of the batch is rows
        batch, height, steps = (), height * int(np.prod(batch)), [[], [], []]

    def body(a: str, b: str, to: str) -> Lines:
        at = f"{a} + (p + j) * {depth} + k" if stored else f"{b} + k * {width} + p + j"
        gather = _loop("k", depth, [low.centred("to[k]", f"{low.named(source)}[{at}]", zero)])
        if stored:
            return _products(
                low, height, _Rows(right, zeros[1], width, right.shape[-1], (1, width)), (b, to, "0"), gather
            )
        return _products(low, width, _Rows(left, zeros[0], height, depth, (width, 1)), (a, to, "0"), gather)

    return _nest(batch, steps, body)


def _conv(low: _Layer) -> Lines:
    (source, weight), group, depth = low.inputs[:2], low.fields["group"], low.fields["depth"]
    image, pixels = int(np.prod(source.shape[2:])), int(np.prod(low.out.shape[2:]))
    filters, length = weight.shape[0] // group, weight.shape[-1]
    rows = _Rows(weight, 0, filters, length, (pixels, 1))
    steps = [[group * depth * image, depth * image], [0, filters * length]]
    steps += [[group * filters * pixels, filters * pixels], [0, filters]]

    def body(place: str, *places: str) -> Lines:
        return _products(low, pixels, rows, places, _window(low, place))

    return _nest((source.shape[0], group), steps, body)


def _window(low: _Layer, place: str) -> Lines:
    """Return the lines that write the window of the pixel `p + j`, tap by tap, all channels of each; outside are 0."""
    source, made, fields = low.inputs[0], spatial(low.out.shape), low.fields
    sizes, depth = spatial(source.shape), fields["depth"]
    value = low.centred("to[c]", f"from[c * {int(np.prod(sizes))}]", fields["zero_point"][0])
    start = f"{low.named(source)} + {place} + (z * {sizes[1]} + y) * {sizes[2]} + x"
    lines = [f"const {source.dtype}_t *from = {start};", *_loop("c", depth, [value])]
    inside, axes = [], []
    for name, size, count, below, *window in zip(
        *("zyx", sizes, made, (made[1] * made[2], made[2], 1)),
        *(fields[key] for key in ("kernel", "stride", "dilation", "pad")),
        strict=True,
    ):
        kernel, stride, dilation, pad = window
        over = (count - 1) * stride - pad + (kernel - 1) * dilation >= size
        inside += [f"{name} >= 0"] * (pad > 0) + [f"{name} < {size}"] * over
        at = f"(p + j) / {below} % {count} * {stride} - {pad} + k{name} * {dilation}"
        axes.append((name, kernel, at))
    if inside:
        lines = [f"if ({' && '.join(inside)}) {{", *lines, "} else {", *_loop("c", depth, ["to[c] = 0;"]), "}"]
    lines.append(f"to += {depth};")
    for name, kernel, at in reversed(axes):
        lines = [f"const int32_t {name} = {at};", *lines]
        lines = _loop(f"k{name}", kernel, lines) if kernel > 1 else [line.replace(f"k{name}", "0") for line in lines]
    return lines


# --- channel by channel ----------------------------------------------------------------------------------------------


def _channelwise(low: _Layer) -> Lines:
    """A window of one channel: the sum with a weight or without, or the largest; from a plane with its pads."""
    source, fields, largest = low.inputs[0], low.fields, low.op.kind == "MAX_POOL"
    weight = low.inputs[1] if low.op.kind == "CHANNEL_CONV" else None
    made, channels, pixels = spatial(low.out.shape), source.shape[1], int(np.prod(low.out.shape[2:]))
    count = weight.shape[0] // channels if weight is not None else 1  # of filters for a channel
    fill = number(int(np.iinfo(source.dtype).min)) if largest else "0"
    size = min(made[2], _ROW)
    taps = _taps(low, weight, size)
    for name, kernel in (("ky", fields["kernel"][1]), ("kz", fields["kernel"][0])):
        taps = _loop(name, kernel, taps)
    place = f"f * {pixels} + (z * {made[1]} + y) * {made[2]} + x + i"
    row = [
        f"{low.work if largest else 'int32_t'} sums[{size}];",
        *_loop("i", size, [f"sums[i] = {fill};"]),
        *taps,
        *_loop("i", size, [low.stored_sum(place, "sums[i]", f"f % {channels * count}")]),
    ]
    image = _loop("z", made[0], _loop("y", made[1], _blocks("x", made[2], size, row)))
    filters = _loop("m", count, [f"const int32_t f = c * {count} + m;", *image])
    return _loop("c", source.shape[0] * channels, [*_plane(low, fill), *filters])


def _plane(low: _Layer, fill: str) -> Lines:
    """Return the lines that write the channel `c` with its pads."""
    source, pad, padded = low.inputs[0], low.fields["pad"], low.fields["padded"]
    sizes = spatial(source.shape)
    last = [min(p + n, room) for p, n, room in zip(pad, sizes, padded, strict=True)]
    place = f"c * {int(np.prod(sizes))} + ((z - {pad[0]}) * {sizes[1]} + y - {pad[1]}) * {sizes[2]} + x - {pad[2]}"
    to = f"room[(z * {padded[1]} + y) * {padded[2]} + x]"
    lines = [low.centred(to, f"{low.named(source)}[{place}]", low.fields["zero_point"][0])]
    for name, start, stop in zip("xyz", reversed(pad), reversed(last), strict=True):
        lines = _loop(name, stop, lines, start)
    whole = not any(pad) and last == list(padded)
    return lines if whole else [*_loop("i", int(np.prod(padded)), [f"room[i] = {fill};"]), *lines]


def _taps(low: _Layer, weight: StaticTensor | None, size: int) -> Lines:
    """Return the lines that take in a row of taps, `kz` and `ky`, for `size` outputs."""
    padded, (kernel, stride, dilation) = low.fields["padded"], (low.fields[k] for k in ("kernel", "stride", "dilation"))
    some = kernel[2] if kernel[2] <= _UNROLLED else 1
    at = f"((z * {stride[0]} + kz * {dilation[0]}) * {padded[1]} + y * {stride[1]} + ky * {dilation[1]}) * {padded[2]}"
    lines = [f"const {low.work} *row = room + {at} + x * {stride[2]} + kx * {dilation[2]};"]
    values = [f"row[i * {stride[2]} + {k * dilation[2]}]" for k in range(some)]
    if low.op.kind == "MAX_POOL":
        each = [f"sums[i] = sums[i] > {value} ? sums[i] : {value};" for value in values]
        return _loop("kx", kernel[2], [*lines, *_loop("i", size, each)], step=some)
    if weight is not None:
        place = f"((f % {weight.shape[0]} * {kernel[0]} + kz) * {kernel[1]} + ky) * {kernel[2]} + kx"
        lines += [f"const {low.work} w{k} = {low.named(weight)}[{place} + {k}];" for k in range(some)]
        values = [f"w{k} * {value}" for k, value in enumerate(values)]
    return _loop("kx", kernel[2], [*lines, *_loop("i", size, [f"sums[i] += {' + '.join(values)};"])], step=some)


_FORMS: Mapping[str, Callable[[_Layer], Lines]] = MappingProxyType(
    {
        **dict.fromkeys(_OPERATORS, _binary),
        **dict.fromkeys(("MAXIMUM", "MINIMUM"), _extreme),
        "REQUANTIZE": _requantize,
        **dict.fromkeys(("CHANNEL_CONV", "WINDOW_SUM", "MAX_POOL"), _channelwise),
        **dict.fromkeys(("AXIS_SUM", "AXIS_MAX"), _reduce),
        "CAST": _same,
        "CLIP": _clip,
        "CONCAT": _concat,
        "CONV": _conv,
        "COPY": _copy,
        "GATHER": _gather,
        "MATMUL": _matmul,
        "MULTIPLY": _multiply,
        "STRIDED": _strided,
        "TABLE": _table,
    }
)
