"""What an ordinary session makes of a file: the kernel that runs each site, and what it computes in floats for nothing.

Both are read from the graph that the runtime itself makes of the file at its default level.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, NodeProto

from onnx_backend.profiling.kernels import Kernel, nodes_of, plain_type
from onnx_backend.proto.nodes import metadata
from onnx_backend.readers import Readers, type_name
from onnx_backend.runtime.session_input import stored_bytes
from onnx_backend.runtime.user_session import EndedProcessError, UserSession, user_session
from onnx_backend.validation.scope import Finding, note
from qsdk.core.planning.fast_table import LAYERS_ON_CODES, kernel_of
from qsdk.core.site import owner_of

_WEIGHTS = "weights"
_OWN = frozenset({"Transpose", "Cast", "QuantizeLinear", "DequantizeLinear", "ReorderInput", "ReorderOutput"})
_MOST = 2**30  # bytes of weights; a session takes two to three times as much
_SHOWN = 5  # names in a finding
_MATRIX = 2  # axes; vectors, such as biases, take no time
_ON_CODES = 'qsdk.w8a8().for_dialect("onnxruntime")'
_AGAIN = 'write it again, in the forms that have kernels: qsdk.export(qsdk.quantize("this file"), "new file")'


@dataclass(frozen=True)
class Slow:
    """A cause of time that a file takes for nothing.

    Attributes:
        problem: in words.
        remedy: what to write into the config, or to call.
        option: that a rule of the config needs for each of the places, if it is such a rule that helps.
        kernels: names of the kernels that it brings about.
        at: the sites, or nodes of the file, where it is so.
    """

    problem: str
    remedy: str
    option: str = ""
    kernels: tuple[str, ...] = ()
    at: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the problem and its places."""
        return f"{self.problem} ({len(self.at)} in the file: {', '.join(self.at[:_SHOWN])}{_more(len(self.at))})"

    @property
    def cure(self) -> str:
        """Return the remedy, with the rules of the config that it needs."""
        owners = list(dict.fromkeys(owner_of(at) or at for at in self.at))
        rules = "".join(f'.override("{owner}", {self.option})' for owner in owners[:_SHOWN])
        return f"{self.remedy}: config{rules}{_more(len(owners))}" if self.option else self.remedy

    def finding(self) -> Finding:
        """Return the row of a validation report."""
        node = self.at[0].partition(" (")[0]
        return note(node, "speed", str(self), self.cure)


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""


def open_watched(
    model: ModelProto | Path, options: Mapping[str, Any], folder: str
) -> tuple[UserSession, GraphProto | None]:
    """Open an ordinary session, and return it with the graph that the runtime has made of the model, if it writes one.

    The graph goes into an empty folder, its weights nowhere where the system lets them be dropped. What the runtime
    raises is passed on, in its words.
    """
    path = Path(folder) / "optimized.onnx"
    with suppress(OSError):
        (path.parent / _WEIGHTS).symlink_to(os.devnull)
    writing = {"session.optimized_model_external_initializers_file_name": _WEIGHTS}
    try:
        session = user_session(model, options={**options, "optimized_model_filepath": str(path)}, entries=writing)
        return session, onnx.load(path, load_external_data=False).graph
    except (EndedProcessError, RuntimeError):
        return user_session(model, options=options), None


def slow_parts(model: ModelProto) -> list[Slow]:
    """Return what an ordinary session computes in floats for nothing.

    Nothing of a model without a DequantizeLinear, larger than 1 GiB, or that does not load.
    """
    if stored_bytes(model) > _MOST or all(node.op_type != "DequantizeLinear" for node in model.graph.node):
        return []
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder, suppress(EndedProcessError, RuntimeError):
        graph = open_watched(model, {"intra_op_num_threads": 1}, folder)[1]
        return [] if graph is None else slow_in(graph)
    return []


def slow_in(graph: GraphProto, label: Callable[[str], str] = str) -> list[Slow]:
    """Return the causes in a graph that the runtime has made, one for all places of a kind.

    `label` turns the name of a node of the file into what it is called.
    """
    known, found = Readers(graph), dict[Slow, list[Slow]]()
    for node in graph.node:
        readers = known.readers.get(node.output[0], []) if node.output else []
        slow = None
        if node.op_type == "QuantizeLinear" and readers and node.output[0] not in known.outputs:
            slow = _useless_pair(node, readers, known)
        elif node.op_type == "DequantizeLinear" and readers and _is_stored(node, known):
            slow = _dequantized_weight(node, readers[0], known)
        if slow is not None:
            at = label(node.name or node.output[0]).removesuffix("/dequantize").removesuffix("/quantize")
            found.setdefault(replace(slow, kernels=(), at=()), []).append(replace(slow, at=(at + "".join(slow.at),)))
    return [
        replace(
            cause,
            kernels=tuple(name for one in places for name in one.kernels),
            at=tuple(dict.fromkeys(at for one in places for at in one.at)),
        )
        for cause, places in found.items()
    ]


def _useless_pair(quantize: NodeProto, readers: Sequence[NodeProto], known: Readers) -> Slow | None:
    """Return what to say of a QuantizeLinear whose codes nothing computes on; the ops around it stand for its place."""
    readers = [
        behind
        for reader in readers  # a Reshape costs nothing, on codes or not
        for behind in (known.readers.get(reader.output[0], []) if reader.op_type == "Reshape" else [reader])
    ]
    if not readers or any(reader.op_type != "DequantizeLinear" for reader in readers):
        return None
    maker = known.makers.get(_before(quantize.input[0], known))
    around = [] if maker is None else [maker]
    around += [_behind(one, known) for reader in readers for one in known.readers.get(reader.output[0], [])]
    beside = [known.makers.get(name) for one in around for name in one.input]
    if any(one is not None and one.op_type == "DequantizeLinear" and _is_stored(one, known) for one in beside):
        return None  # a layer that would compute on codes: that its weight is dequantized is the cause
    ops = sorted({plain_type(one.op_type) for one in around} - _OWN)
    problem = "no integer kernel reads or writes the codes of a pair: two passes over the tensor in every run"
    remedy = f"leave such tensors float: {_ON_CODES}"
    names = (quantize.name, *(reader.name for reader in readers))
    return Slow(problem, remedy, "", names, (f" ({', '.join(ops)})",) if ops else ())


def _behind(reader: NodeProto, known: Readers) -> NodeProto:
    """Return a reader, or the one behind a Sum of one operand, which keeps kernels right and computes nothing."""
    while reader.op_type == "Sum" and len(reader.input) == 1 and known.readers.get(reader.output[0]):
        reader = known.readers[reader.output[0]][0]
    return reader


def _before(tensor: str, known: Readers) -> str:
    """Return a tensor, or the one in front of a Sum of one operand."""
    maker = known.makers.get(tensor)
    while maker is not None and maker.op_type == "Sum" and len(maker.input) == 1:
        tensor = maker.input[0]
        maker = known.makers.get(tensor)
    return tensor


def _is_stored(dequantize: NodeProto, known: Readers) -> bool:
    """Return True for the DequantizeLinear of a stored matrix, or of a tensor of more axes."""
    stored = known.stored.get(dequantize.input[0])
    return stored is not None and len(stored.dims) >= _MATRIX


def _dequantized_weight(node: NodeProto, reader: NodeProto, known: Readers) -> Slow:
    """Return what to say of a DequantizeLinear of a stored tensor, which the runtime runs as it stands."""
    reader = _behind(reader, known)
    op, weight = plain_type(reader.op_type), known.weight(node.output[0])
    problem, codes = f"the weight of {op} is dequantized in every run", _codes_of(reader.input[0], known)
    if op == "Gather":
        return Slow(problem, _AGAIN, "", (node.name,))
    stack = op != "Conv" and len(known.stored[node.input[0]].dims) > _MATRIX
    if stack or kernel_of(f"{op}/{weight}", codes or "uint8") is None:
        weight += f"{', stacked,' if stack else ''} beside {codes}" if stack or kernel_of(f"{op}/{weight}") else ""
        problem += f"; ONNX Runtime has no integer kernel of {op} with a weight of {weight}"
        narrow = op in LAYERS_ON_CODES and weight.removesuffix(" blocks") in ("int4", "uint4", "int2", "uint2")
        remedy = 'export it with prefer="speed", or leave it float' if narrow else "leave it float, which takes bytes"
        return Slow(problem, remedy, 'weight="float32"', (node.name,))
    if codes is None:
        remedy = f'quantize that too, {_ON_CODES}, or weight_only(..., compute="int8")'
        return Slow(f"{problem}, because what it reads is float", remedy, "", (node.name,))
    if op == "Conv":
        problem += ", because its result is read in floats"
        return Slow(problem, "quantize the result too", 'activation="uint8"', (node.name,))
    return Slow(problem, _AGAIN, "", (node.name,))


def _codes_of(tensor: str, known: Readers) -> str | None:
    """Return the dtype of the codes that a tensor was dequantized from, if it was."""
    source = known.makers.get(_before(tensor, known))
    if source is None or source.op_type != "DequantizeLinear":
        return None
    zero = known.stored.get(source.input[2]) if len(source.input) > 2 else None
    maker = known.makers.get(source.input[0])
    if zero is not None:
        return type_name(zero.data_type)
    return known.dtype(maker) if maker is not None and maker.op_type == "QuantizeLinear" else "uint8"


def kernels_by_site(model: ModelProto, graph: GraphProto) -> dict[str, str]:
    """Return site -> the kernels that run it: of a stored tensor its reader's, of an activation its maker's.

    `graph` is what the runtime has made of the model.
    """
    names = {node.name for node in model.graph.node}
    kernels = [
        Kernel(
            n.name,
            n.op_type,
            tuple(n.input),
            tuple(n.output),
            () if is_own(n, n.name in names) else (n.name, *n.output),
            "index",
            0,
        )
        for n in graph.node
    ]
    ran = {
        name: kernel.op_type
        for kernel, nodes in zip(kernels, nodes_of(model, kernels), strict=True)
        for node in nodes
        for name in node.output
    }
    known, found = Readers(model.graph), dict[str, str]()
    for node in model.graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        pair = known.makers.get(node.input[0])
        readers = known.readers.get(node.output[0], [])
        if pair is None:
            parts = [
                ran.get(name, "") for name in (node.output[0], *(_behind(r, known).output[0] for r in readers[:1]))
            ]
        else:
            parts = [ran.get(_before(pair.input[0], known), ""), ran.get(pair.output[0], "")]
        found.setdefault(metadata(node).get("qsdk.site", ""), ", ".join(dict.fromkeys(filter(None, parts))))
    return found


def is_own(node: NodeProto, named: bool) -> bool:
    """Return True for a kernel between others that computes nothing, unless a node of the file has its name."""
    return node.op_type in _OWN and not named
