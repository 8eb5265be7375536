"""Write a firmware program as a C99 header for a batch of 1: constants, tensors in one arena, a table of operations.

The header is made to be included by one source file, such as `examples/c_interpreter/interpreter.c`, whose comments say
how each kind of operation is computed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from onnx_backend.integer.firmware.arena import StaticOp, StaticProgram, StaticTensor
from onnx_backend.integer.firmware.program import FirmwareProgram
from onnx_backend.integer.firmware.static import static_program
from onnx_backend.integer.ir.values import Array
from qsdk.core.errors import IntegerError

_WIDTH = 110
_INPUTS, _RANK = 7, 4
#: The enum of the header, in order, with the computation of each kind.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "CONV": "sum((code - zero_point[0]) * weight) over a window; outside the image code - zero_point[0] is 0",
        "MATMUL": "(a - zero_point[0]) @ (b - zero_point[1])",
        "MULTIPLY": "(a - zero_point[0]) * (b - zero_point[1])",
        "WINDOW_SUM": "sum(code - zero_point[0]) over a window, channel by channel",
        "AXIS_SUM": "sum(code - zero_point[0]) over the reduced axes",
        "REQUANTIZE": "clamp(round_shift(p, shift) + code_zero_point, lo, hi); inputs: terms, mantissas, shift, addend;"
        " p = sum(term * mantissa) + addend, or (term + addend) * mantissa if bias_first",
        "REQUANTIZE_32": "the same in 32 bits; inputs: terms, mantissas, zeros, cuts, shifts in front, shift, addend;"
        " p = sum(round_shift(clamp(term - zero, -cut, cut), before) * mantissa) + addend; 0 cuts or shifts nothing",
        "TABLE": "inputs[1][code]",
        "INTERPOLATE": "inputs: codes, bits, first, base, slope; of cell = code >> 8 and rest = code & 255 it is"
        " clamp(base[s] + slope[s] * (rest % (1 << bits[cell])), 0, hi << fraction) >> fraction with"
        " s = first[cell] + (rest >> bits[cell])",
        "CONCAT": "the inputs one after the other along the axis",
        "MAX_POOL": "the largest of a window",
        "AXIS_MAX": "the largest along the reduced axes",
        "COPY": "the elements in the same order, in another shape",
        "STRIDED": "the element at start + sum(index[i] * step[i])",
        "GATHER": "the element at the position in inputs[1], fill where that is -1",
        "CLIP": "the element within lo..hi",
        "CAST": "the element in another type",
        "ADD": "a + b",
        "SUBTRACT": "a - b",
        "AND": "a & b",
        "SHIFT_RIGHT": "a >> b",
        "MAXIMUM": "the largest of all inputs",
        "MINIMUM": "the smallest of all inputs",
    }
)
_ROUNDINGS = ("half_even", "half_up", "half_away", "gemmlowp")
_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")


def header(program: FirmwareProgram) -> str:
    """Return a program as a C99 header with static data for a batch of 1; equal programs have equal texts.

    Raises:
        IntegerError: sizes are not static, or an operation has no form in the header; it is named.
    """
    static = static_program(program)
    index = {name: i for i, name in enumerate(static.tensors)}
    # never fewer than the code of any kind names, so that compilers find no access outside an array
    largest = max([_INPUTS, *(len(op.inputs) for op in static.ops)])
    rank = max([_RANK, *(len(tensor.shape) for tensor in static.tensors.values())])
    lines = [*_declarations(static, largest, rank), *_constants(static.tensors)]
    lines += ["", "static const struct qsdk_tensor qsdk_tensors[] = {"]
    lines += [f"    {_tensor(tensor, i)}" for i, tensor in enumerate(static.tensors.values())]
    lines += ["};", "", "static const struct qsdk_op qsdk_ops[] = {"]
    lines += [f"    {_op(op, index)}" for op in static.ops] or ["    {.kind = QSDK_KINDS}, /* no operation */"]
    lines += ["};", ""]
    for kind, entries in (("inputs", static.inputs), ("outputs", static.outputs)):
        lines += _edges(kind, entries, index)
    return "\n".join([*lines, "#endif", ""])


def _declarations(static: StaticProgram, inputs: int, rank: int) -> Iterator[str]:
    yield "/* An integer-only network, written by qsdk. Sizes are those of a batch of 1. */"
    yield from ("#ifndef QSDK_NETWORK_H", "#define QSDK_NETWORK_H", "", "#include <stdint.h>", "")
    sizes = {"RANK": rank, "OP_INPUTS": inputs, "ARENA_BYTES": max(static.arena, 1)}
    sizes |= {"TENSORS": len(static.tensors), "OPS": len(static.ops)}
    sizes |= {"INPUTS": len(static.inputs), "OUTPUTS": len(static.outputs)}
    yield from (f"#define QSDK_{name} {size}" for name, size in sizes.items())
    yield from ("", "enum qsdk_kind {")
    for name, text in _KINDS.items():
        yield f"    QSDK_{name}, /* {text} */"
    yield from ("    QSDK_KINDS", "};", "")
    yield f"enum qsdk_rounding {{ {', '.join(f'QSDK_{name.upper()}' for name in _ROUNDINGS)} }};"
    yield f"enum qsdk_type {{ {', '.join(f'QSDK_{name.upper()}' for name in _TYPES)} }};"
    yield _STRUCTS


_STRUCTS = """
/* A constant, or a place in the arena. */
struct qsdk_tensor {
    const void *constant;
    uint32_t offset;
    uint32_t elements;
    enum qsdk_type type;
    int32_t rank;
    int32_t dims[QSDK_RANK];
};

/* Fields that a kind does not use are 0. Windows have 3 spatial axes; the first ones are of size 1. */
struct qsdk_op {
    enum qsdk_kind kind;
    int32_t count; /* of inputs */
    int32_t inputs[QSDK_OP_INPUTS];
    int32_t output;
    int32_t zero_point[2];
    int32_t group, kernel[3], stride[3], dilation[3], pad[3];
    int32_t terms, bias_first;
    enum qsdk_rounding rounding;
    int32_t code_zero_point, lo, hi, fill, axis, fraction;
    int32_t reduced[QSDK_RANK];
    int32_t start, step[QSDK_RANK];
};

/* What the model takes or gives: value = (code - zero_point) * scale; scales is 0 where it holds no codes, 1 per
   tensor, else one for every index of the axis. */
struct qsdk_edge {
    const char *name;
    int32_t tensor, scales, axis;
    const double *scale;
    const int32_t *zero_point;
};
"""


def _constants(tensors: Mapping[str, StaticTensor]) -> Iterator[str]:
    for index, tensor in enumerate(tensors.values()):
        if tensor.values is not None:
            yield f"static const {tensor.dtype}_t {_identifier(index, tensor.name)}[{max(tensor.values.size, 1)}] = {{"
            yield from _rows(_literals(tensor.values))
            yield "};"


def _literals(values: Array) -> list[str]:
    suffix = {"int64": "LL", "uint32": "U"}.get(values.dtype.name, "")
    texts = [f"{value}{suffix}" for value in values.reshape(-1).tolist()] or ["0"]
    # these have no literal: the minus is an operator on a number that is too large
    least = {"int32": (-(1 << 31), "INT32_MIN"), "int64": (-(1 << 63), "INT64_MIN")}.get(values.dtype.name)
    return texts if least is None else [least[1] if text == f"{least[0]}{suffix}" else text for text in texts]


def _rows(texts: Sequence[str]) -> Iterator[str]:
    line = "   "
    for text in texts:
        if len(line) + len(text) + 2 > _WIDTH:
            yield line
            line = "   "
        line += f" {text},"
    yield line


def _tensor(tensor: StaticTensor, index: int) -> str:
    data = _identifier(index, tensor.name) if tensor.values is not None else "0"
    place = f"{data}, {tensor.offset}, {int(np.prod(tensor.shape))}, QSDK_{tensor.dtype.upper()}, {len(tensor.shape)}"
    dims = ", ".join(str(size) for size in tensor.shape or (1,))
    return f"{{{place}, {{{dims}}}}}, /* {index}: {_comment(tensor.name)} */"


def _op(op: StaticOp, index: Mapping[str, int]) -> str:
    given = {"count": len(op.inputs), "inputs": [index[name] for name in op.inputs], "output": index[op.output]}
    fields = ", ".join(f".{key} = {_value(key, value)}" for key, value in {**given, **op.fields}.items())
    return f"{{.kind = QSDK_{op.kind}, {fields}}}, /* {_comment(op.node)} */"


def _value(key: str, value: Any) -> str:
    if key == "rounding":
        return f"QSDK_{value.upper()}"
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if not -(1 << 31) < part < 1 << 31:
            raise IntegerError(f"{key}={part} does not fit in 32 bits; write the program as .npz")
    return f"{{{', '.join(map(str, value)) or '0'}}}" if isinstance(value, list) else str(value)


def _edges(kind: str, entries: Sequence[Mapping[str, Any]], index: Mapping[str, int]) -> Iterator[str]:
    rows = []
    for i, entry in enumerate(entries):
        scales, zeros = (np.asarray(entry.get(key, [])).reshape(-1).tolist() for key in ("scale", "zero_point"))
        names = ["0", "0"]
        if scales:
            names = [f"qsdk_{kind}_{i}_scale", f"qsdk_{kind}_{i}_zero_point"]
            yield f"static const double {names[0]}[] = {{"
            yield from _rows([repr(float(scale)) for scale in scales])
            yield from ("};", f"static const int32_t {names[1]}[] = {{")
            yield from _rows([str(int(zero)) for zero in zeros])
            yield "};"
        place = f"{index[entry['tensor']]}, {len(scales)}, {entry.get('axis') or 0}"
        rows.append(f'    {{"{_text(entry["model_name"])}", {place}, {names[0]}, {names[1]}}},')
    yield from (f"static const struct qsdk_edge qsdk_{kind}[] = {{", *rows, "};", "")


def _identifier(index: int, name: str) -> str:
    # the number makes it unique, whatever two names have in common once they are C
    return f"qsdk_{index}_{re.sub(r'[^A-Za-z0-9]+', '_', name)[:60].strip('_')}"


def _comment(name: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", name).replace("*/", "* /").replace("/*", "/ *").replace("\\", "/")


def _text(name: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", name).replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
