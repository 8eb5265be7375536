"""Write a firmware program as a file: a NumPy archive, which holds everything, or a C99 header for a batch of 1.

The header has constants, one arena for all else, and a function a layer, which `layers` writes. It is made to be
included by one source file, such as `examples/firmware/main.c`.
"""

import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backend.integer.convert import IntegerResult
from onnx_backend.integer.firmware.layers import HELPERS, layer, number
from onnx_backend.integer.firmware.program import FirmwareProgram, firmware_program
from onnx_backend.integer.firmware.static import StaticProgram, StaticTensor, static_program
from onnx_backend.integer.ir.context import FIXED_SIZES
from qsdk.core.errors import ConfigError, IntegerError

_WIDTH = 110
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
    """Return a program as a C99 header for a batch of 1; equal programs have equal texts.

    Sizes that are not static and operations without a form in C are an IntegerError that names them.
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


_SUFFIXES = (".npz", ".h")
_PROGRAM = "program.json"


def require_firmware_path(path: str | os.PathLike[str] | None, *others: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a path without a known suffix, or one of the other files to write; None is fine."""
    if path is None:
        return
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"firmware={os.fspath(path)!r} ends in no known format; end it in .npz or .h")
    if os.path.realpath(path) in [os.path.realpath(other) for other in others]:
        raise ConfigError(f"firmware={os.fspath(path)!r} is the model's own path; give it another name")


def require_straight(result: IntegerResult) -> None:
    """Raise IntegerError for a conversion with a Scan: firmware programs are a straight line of operations."""
    for node in result.model.graph.node:
        if node.op_type == "Scan":
            raise IntegerError(
                f"firmware has no loops, and the length of the sequence of {node.name!r} is dynamic; {FIXED_SIZES}"
            )


def firmware_file(result: IntegerResult, path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of the file `path`: a NumPy archive for `.npz`, a C99 header for `.h`.

    Another suffix, or kernels and float nodes in the conversion, are a ConfigError; an operation that a header cannot
    express is an IntegerError that names it.
    """
    require_firmware_path(path)
    require_straight(result)
    program = firmware_program(result)
    return archive(program) if Path(path).suffix == ".npz" else header(program).encode()


def archive(program: FirmwareProgram) -> bytes:
    """Return a program as the bytes of a NumPy archive.

    The member `program.json` is a 0-dimensional array with the text of `Program.to_dict()` as JSON, and in it `arrays`,
    which leads from the names of arrays to the members that hold them. Equal programs have equal bytes.
    """
    members = {name: f"array_{index}" for index, name in enumerate(program.arrays)}
    text = json.dumps({**program.to_dict(), "arrays": members}, indent=1)
    contents: dict[str, Any] = {_PROGRAM: np.array(text)}
    contents |= {members[name]: values for name, values in program.arrays.items()}
    file = io.BytesIO()
    np.savez_compressed(file, **contents)
    return file.getvalue()
