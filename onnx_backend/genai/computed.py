"""What a decoder computes of positions and masks alone: the parts are run, and their values say what form they have.

No spelling is matched: the table of a rotary embedding is what the model computes for each position, and a mask is
causal, or a window, if what it lets through is that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, helper, numpy_helper

from onnx_backend.genai.editor import Editor
from onnx_backend.proto.graph_queries import nodes_reaching
from onnx_backend.proto.nodes import attributes, copied
from onnx_backend.proto.subgraphs import reads
from qsdk.core.arrays import Array
from qsdk.core.graph.graph import PAST, STEP, TOTAL

_STEP = 3  # tokens of a step that a mask is asked about
_HIDDEN = -1e4  # what is added to scores that a softmax is not to see
_PROMPT = 24
_NOTHING: Mapping[str, Array] = {}


@dataclass
class Computed:
    """The parts of a decoder that depend on its edges alone.

    Attributes:
        editor: the decoder.
        positions: of tokens, up to which it reads.
    """

    editor: Editor
    positions: int
    _windows_of: dict[str, int | None] = field(default_factory=dict)
    _tables: dict[str, tuple[Array, int] | None] = field(default_factory=dict)

    def table(self, tensor: str) -> tuple[Array, int] | None:
        """Return the rows of what is computed of the position of a token, and a length; or None if more counts.

        Where texts of at most that length have rows of their own, as LongRoPE has them (Ding et al. 2024,
        arXiv:2402.13753), those come first: [length + positions, n]. Else it is 0, and the rows are [positions, n].
        """
        if tensor not in self._tables:
            self._tables[tensor] = self._table(tensor)
        return self._tables[tensor]

    def window(self, mask: str) -> int | None:
        """Return the length of the window that a mask lets through, -1 for all tokens before; None if it is neither.

        What is added to scores is 0 where it lets through; texts are not padded.
        """
        if mask not in self._windows_of:
            self._windows_of[mask] = self._window(mask)
        return self._windows_of[mask]

    def of(self, tensor: str, given: Mapping[str, Array], tokens: int) -> Array | None:
        """Return the value of a tensor that is computed of given ones and of sizes, in a step of some tokens."""
        model = self._part(tensor, {STEP: tokens, PAST: 0, TOTAL: tokens}, given)
        if model is None or any(value.name not in given for value in model.graph.input):
            return None
        return _run(model, {value.name: given[value.name] for value in model.graph.input})

    def numbers(self, tensor: str, given: Mapping[str, Array], tokens: int) -> set[float]:
        """Return the stored numbers that count in the value of a tensor."""
        model = self._part(tensor, {STEP: tokens, PAST: 0, TOTAL: tokens}, given)
        stored = [] if model is None else [numpy_helper.to_array(one) for one in model.graph.initializer]
        return {float(value.reshape(-1)[0]) for value in stored if value.size == 1}

    def _table(self, tensor: str) -> tuple[Array, int] | None:
        whole = self._rows(tensor, self.positions)
        first = self._rows(tensor, min(2, self.positions))
        if whole is None or first is None:
            return None
        if np.array_equal(first, whole[: len(first)]):
            found: tuple[Array, int] = (whole, 0)
        else:
            low, high = 2, self.positions  # rows change between texts of these lengths
            while high - low > 1:
                middle = (low + high) // 2
                rows = self._rows(tensor, middle)
                if rows is None:
                    return None
                low, high = (low, middle) if np.array_equal(rows, whole[:middle]) else (middle, high)
            short = self._rows(tensor, low)
            if short is None:
                return None
            found = np.concatenate([short, whole]), low
        return found if all(self._agrees(tensor, *found, length) for length in self._lengths(found[1])) else None

    def _lengths(self, switch: int) -> set[int]:
        """Return lengths of texts by which rows are tried."""
        lengths = {1, switch // 2, switch, switch + 1, (switch + self.positions) // 2}
        return {length for length in lengths if 0 < length <= self.positions}

    def _agrees(self, tensor: str, rows: Array, switch: int, length: int) -> bool:
        """Return whether a text of a length has its rows, and the last of them in a step of one token."""
        start = switch if length > switch else 0
        wanted = rows[start : start + length]
        steps = ((wanted, self._rows(tensor, length)), (wanted[-1:], self._rows(tensor, 1, length - 1)))
        return all(got is not None and np.array_equal(expected, got) for expected, got in steps)

    def _rows(self, tensor: str, step: int, past: int = 0) -> Array | None:
        """Return what is computed of each position of a step, or None if more counts."""
        model = self._part(tensor, {STEP: step, PAST: past, TOTAL: past + step})
        if model is None or any(value.name != "position_ids" for value in model.graph.input):
            return None
        feeds = {"position_ids": np.arange(past, past + step)[None]} if model.graph.input else {}
        values = _run(model, feeds)
        if values is None or values.size % step or values.dtype != np.float32:
            return None
        rows = values.reshape(-1, values.shape[-1])
        return rows if len(rows) == step else None

    def _window(self, mask: str) -> int | None:
        past = max(self.positions - _STEP, 0)  # so that no window can be longer
        found = {self._seen(mask, step, before) for step, before in ((_PROMPT, 0), (_STEP, past), (1, past))}
        found.discard(-1)
        if not found:
            return -1
        return found.pop() if len(found) == 1 else None

    def _seen(self, mask: str, step: int, past: int) -> int | None:
        """Return how many tokens the last of a step sees: -1 for all, None if what is seen is no window."""
        total = past + step
        model = self._part(mask, {STEP: step, PAST: past, TOTAL: total})
        given = {"attention_mask": np.ones((1, total), np.int64), "input_ids": np.ones((1, step), np.int64)}
        given["position_ids"] = np.arange(past, total)[None]
        if model is None or any(value.name not in given for value in model.graph.input):
            return None
        values = _run(model, {value.name: given[value.name] for value in model.graph.input})
        if values is None or values.shape[-1] != total or values.size not in (total, step * total):
            return None
        seen = np.broadcast_to(values if values.dtype == bool else values > _HIDDEN, (*values.shape[:-2], step, total))
        seen = seen.reshape(step, total)
        if values.dtype != bool and np.any(np.where(seen, values.reshape(-1, total), 0)):
            return None  # it is a bias
        count = int(seen[-1].sum())
        away = np.arange(past, total)[:, None] - np.arange(total)
        if not np.array_equal(seen, (away >= 0) & (away < count)):
            return None
        return -1 if count == total else count

    def _part(self, tensor: str, sizes: Mapping[str, int], given: Mapping[str, Array] = _NOTHING) -> ModelProto | None:
        """Return the model that computes a tensor of given ones and of the edges of the decoder.

        The open axes of those have these sizes.
        """
        graph, index = self.editor.model.graph, self.editor.index
        cuts = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in given.items()
        ]
        edges = {value.name: value for value in (*graph.input, *cuts)}
        inside = [node for node in graph.node if not any(name in given for name in node.output)]
        part = ModelProto(ir_version=self.editor.model.ir_version, opset_import=self.editor.model.opset_import)
        nodes, known = list[Any](), set[str]()
        for node in nodes_reaching(inside, [tensor]):
            shape = _sizes(edges.get(node.input[0]), sizes) if node.op_type == "Shape" and node.input else None
            if shape is not None:
                facts = attributes(node)
                cut = shape[facts.get("start", 0) : facts.get("end", len(shape))]
                part.graph.initializer.append(numpy_helper.from_array(np.array(cut, np.int64), node.output[0]))
                known.add(node.output[0])
            else:
                nodes.append(node)
        nodes = nodes_reaching(nodes, [tensor])
        for name in dict.fromkeys(name for node in nodes for name in reads(node)):
            if name in edges:
                part.graph.input.append(edges[name])
            elif name in index.stored and name not in known:
                if self.editor.value(name) is None:
                    return None
                part.graph.initializer.append(index.stored[name])
        part.graph.name = "part"
        part.graph.node.extend(nodes)
        part.graph.output.add(name=tensor)  # the runtime finds its type
        return copied(part)


def _sizes(edge: Any, sizes: Mapping[str, int]) -> list[int] | None:
    """Return the sizes of an edge of the model, of one text."""
    if edge is None:
        return None
    named = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in edge.type.tensor_type.shape.dim]
    return [size if isinstance(size, int) else sizes.get(size, 1) for size in named]


def _run(model: ModelProto, feeds: Mapping[str, Array]) -> Array | None:
    if not model.graph.node:
        return None
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, dict(feeds))[0])
    except Exception:  # the runtime's own exception types are private; a part that does not run alone has no form
        return None
