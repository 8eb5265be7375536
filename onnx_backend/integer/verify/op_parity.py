"""Teacher-forced parity: every quantizer of the Q/DQ model recomputed from the integer model's own codes.

The Q/DQ model is cut at every QuantizeLinear: readers of its output read the integer model's codes instead. One run of
that model computes, at every site, the Q/DQ result for exactly the inputs that the integer operation had, so a
difference is that operation's alone.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.integer.ir.context import label
from onnx_backend.integer.ir.values import GRIDS, Codes
from onnx_backend.runtime.session import simulation_session

Array = npt.NDArray[Any]
_PACKED: Mapping[int, int] = MappingProxyType(
    {TensorProto.INT4: TensorProto.INT8, TensorProto.UINT4: TensorProto.UINT8}
)
_COMPUTED = "/computed"


def run_teacher_forced(
    source: ModelProto, integer: ModelProto, sites: Mapping[str, Codes], feeds: Mapping[str, Array]
) -> list[dict[str, Any]]:
    """Compare the operations of an integer model with those of its Q/DQ model, each on the same inputs.

    Args:
        source: the Q/DQ model.
        integer: the integer-only model converted from it, with float edges.
        sites: name of a QuantizeLinear's output in `source` -> its codes in `integer`.
        feeds: of both models.

    Returns:
        A row per site that exists in the integer model: `site` (the QuantizeLinear), `op_type` of the op it quantizes,
        `max_lsb`, `differing` elements and `elements`.
    """
    computed = {name for node in integer.graph.node for name in node.output}
    kept = {name: codes for name, codes in sites.items() if codes.name in computed}
    codes = _codes(integer, sorted({found.name for found in kept.values()}), feeds)
    forced, quantizers = _cut(source, kept)
    given = {name: _stored(codes[found.name], found) for name, found in kept.items()}
    whole = {f"{name}/whole": codes for name, codes in given.items()}
    read = {info.name for info in forced.graph.input}
    session = simulation_session(forced)
    names = [name + _COMPUTED for name in quantizers]
    results = session.run(names, {k: v for k, v in {**feeds, **given, **whole}.items() if k in read})
    makers = {name: node.op_type for node in source.graph.node for name in node.output}
    rows = []
    for (name, node), result in zip(quantizers.items(), results, strict=True):
        steps = np.abs(result.astype(np.int64) - given[name].astype(np.int64))
        rows.append(
            {
                "site": label(node),
                "op_type": makers.get(node.input[0], "input"),
                "max_lsb": int(steps.max(initial=0)),
                "differing": int((steps > 0).sum()),
                "elements": int(steps.size),
            }
        )
    return rows


def _codes(integer: ModelProto, names: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
    watched = ModelProto()
    watched.CopyFrom(integer)
    outputs = {info.name for info in watched.graph.output}
    extra = [name for name in names if name not in outputs]
    watched.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in extra)
    found = simulation_session(watched).run(list(names), dict(feeds))
    return dict(zip(names, found, strict=True))


def _stored(codes: Array, found: Codes) -> Array:
    """Return codes in the dtype that the Q/DQ model stores, 4 bits in 8."""
    dtype = _PACKED.get(found.encoding.dtype, found.encoding.dtype)
    stored = codes.astype(np.int64) - GRIDS[found.encoding.dtype][0]
    return np.asarray(stored, helper.tensor_dtype_to_np_dtype(dtype))  # of a scalar too


def _cut(source: ModelProto, sites: Mapping[str, Codes]) -> tuple[ModelProto, dict[str, NodeProto]]:
    """Return the model that reads the codes of every site and recomputes them there, and the sites' nodes."""
    forced = ModelProto()
    forced.CopyFrom(source)
    graph, nodes, quantizers = forced.graph, list(forced.graph.node), {}
    del graph.node[:], graph.output[:]
    for node in nodes:
        name = node.output[0] if node.op_type == "QuantizeLinear" else ""
        if name not in sites:
            graph.node.append(node)
            continue
        dtype = sites[name].encoding.dtype
        outer = _PACKED.get(dtype, dtype)
        before = NodeProto()
        before.CopyFrom(node)
        quantizers[name] = before
        computed = name + _COMPUTED
        inner = computed if outer == dtype else computed + "/packed"
        node.output[0] = inner
        graph.node.append(node)
        graph.input.append(helper.make_tensor_value_info(name if outer == dtype else name + "/whole", outer, None))
        if outer != dtype:
            graph.node.insert(0, helper.make_node("Cast", [name + "/whole"], [name], to=dtype))
            graph.node.append(helper.make_node("Cast", [inner], [computed], to=outer))
        graph.output.append(helper.make_tensor_value_info(computed, outer, None))
    return forced, quantizers


def operations(parity: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the rows of `teacher_forced`: the largest difference, and the share of elements that differ."""
    if not parity:
        return {"operations_max_lsb": None, "operations_differing": None}
    elements = sum(row["elements"] for row in parity)
    differing = sum(row["differing"] for row in parity)
    return {
        "operations_max_lsb": max(row["max_lsb"] for row in parity),
        "operations_differing": differing / max(elements, 1),
    }


def add_op_parity(rows: Sequence[Mapping[str, Any]], parity: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the report rows, one per operation, with `max_lsb` against the QuantizeLinear (`site`) of each."""
    found = {row["site"]: row["max_lsb"] for row in parity}
    return [{**row, "max_lsb": found.get(row["site"])} for row in rows]
