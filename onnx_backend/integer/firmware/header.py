"""Write a firmware program as a C99 header for a batch of 1: constants, one arena for all else, a function a layer.

The header is made to be included by one source file, such as `examples/firmware/main.c`. `layers` writes the functions.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_backend.integer.firmware.arena import StaticProgram, StaticTensor
from onnx_backend.integer.firmware.layers import HELPERS, layer, number
from onnx_backend.integer.firmware.program import FirmwareProgram
from onnx_backend.integer.firmware.static import static_program

_WIDTH = 110
_ARENA = """\
/* Every tensor that is no constant, while it is needed. */
static union {
    int64_t alignment;
    uint8_t bytes[QSDK_ARENA_BYTES];
} qsdk_arena;
"""
_EDGE = """
/* What the model takes or gives: value = (code - zero_point) * scale; scales is 0 where it holds no codes, 1 per
   tensor, else one for every index of the axis. */
struct qsdk_edge {
    const char *name, *type;
    void *data;
    int32_t bytes, scales, axis;
    const double *scale;
    const int32_t *zero_point;
};
"""


def header(program: FirmwareProgram) -> str:
    """Return a program as a C99 header with static data for a batch of 1; equal programs have equal texts.

    Raises:
        IntegerError: sizes are not static, or an operation has no form in the header; it is named.
    """
    static = static_program(program)
    stored = [tensor for tensor in static.tensors.values() if tensor.values is not None]
    constants = {tensor.name: _identifier(i, tensor.name) for i, tensor in enumerate(stored)}
    functions, calls = [], []
    for i, op in enumerate(static.ops):
        function, call = layer(op, _identifier(i, op.node, op.kind.lower()), static.tensors, constants)
        functions += ["", f"/* {_comment(op.node)} */", *function]
        calls.append(f"    {call}")
    used = set(re.findall(r"qsdk_\d+\w*", "\n".join(functions)))  # a single number stands where it is used
    lines = [
        *_declarations(static),
        *_constants([t for t in stored if constants[t.name] in used], constants),
        *functions,
    ]
    lines += ["", "/* Computes the outputs from the inputs. */", "static void qsdk_run(void)", "{", *calls, "}", _EDGE]
    for kind, entries in (("inputs", static.inputs), ("outputs", static.outputs)):
        lines += _edges(kind, entries, static.tensors)
    return "\n".join([*lines, "#endif", ""])


def _declarations(static: StaticProgram) -> Iterator[str]:
    yield "/* An integer-only network, written by qsdk. Sizes are those of a batch of 1. */"
    yield from ("#ifndef QSDK_NETWORK_H", "#define QSDK_NETWORK_H", "", "#include <stdint.h>", "")
    sizes = {"ARENA_BYTES": max(static.arena, 1), "INPUTS": len(static.inputs), "OUTPUTS": len(static.outputs)}
    yield from (f"#define QSDK_{name} {size}" for name, size in sizes.items())
    yield HELPERS
    yield from (
        "/* Every tensor that is no constant, while it is needed. */",
        "static union {",
        "    int64_t alignment;",
    )
    yield from ("    uint8_t bytes[QSDK_ARENA_BYTES];", "} qsdk_arena;", "")


def _constants(stored: Sequence[StaticTensor], names: Mapping[str, str]) -> Iterator[str]:
    for tensor in stored:
        values = np.asarray(tensor.values)
        yield f"static const {tensor.dtype}_t {names[tensor.name]}[{max(values.size, 1)}] = {{"
        yield from _rows([number(value) for value in values.reshape(-1).tolist()] or ["0"])
        yield "};"


def _rows(texts: Sequence[str]) -> Iterator[str]:
    line = "   "
    for text in texts:
        if len(line) + len(text) + 2 > _WIDTH:
            yield line
            line = "   "
        line += f" {text},"
    yield line


def _edges(kind: str, entries: Sequence[Mapping[str, Any]], tensors: Mapping[str, StaticTensor]) -> Iterator[str]:
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
        tensor = tensors[entry["tensor"]]
        data = f'"{tensor.dtype}", qsdk_arena.bytes + {tensor.offset}, {tensor.bytes}'
        place = f"{data}, {len(scales)}, {entry.get('axis') or 0}"
        rows.append(f'    {{"{_text(entry["model_name"])}", {place}, {names[0]}, {names[1]}}},')
    yield from (f"static const struct qsdk_edge qsdk_{kind}[] = {{", *rows, "};", "")


def _identifier(index: int, *names: str) -> str:
    # the number makes it unique, whatever two names have in common once they are C
    parts = (re.sub(r"[^A-Za-z0-9]+", "_", name)[:60].strip("_") for name in names)
    return "_".join(["qsdk", str(index), *parts])


def _comment(name: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", name).replace("*/", "* /").replace("/*", "/ *").replace("\\", "/")


def _text(name: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", name).replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
