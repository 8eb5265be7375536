"""Teacher-forced parity: every quantizer of the Q/DQ model recomputed from the integer model's own codes.

The Q/DQ model is cut at every QuantizeLinear: readers of its output read the integer model's codes instead. One run of
that model computes, at every site, the Q/DQ result for exactly the inputs that the integer operation had, so a
difference is that operation's alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto

from onnx_backend.integer.ir.context import label
from onnx_backend.integer.ir.values import GRIDS, Codes
from onnx_backend.parity.cuts import Cut, with_outputs
from onnx_backend.parity.teacher import RunOn, SessionRunner, Teacher
from onnx_backend.runtime.session import simulation_session
from qsdk.core.comparing.tally import Tally

Array = npt.NDArray[Any]
_SIMULATED = RunOn(opener=lambda cut: SessionRunner(simulation_session(cut), "the codes of the integer model"))


def run_teacher_forced(
    source: ModelProto, integer: ModelProto, sites: Mapping[str, Codes], feeds: Mapping[str, Array]
) -> list[dict[str, Any]]:
    """Compare the operations of an integer model with those of its Q/DQ model, each on the same inputs.

    `sites` names the codes of each QuantizeLinear's output. Return a row for each that exists in the integer model:
    `site` (the QuantizeLinear), `op_type` of the op it quantizes, `max_lsb`, `differing` elements and `elements`.
    """
    computed = {name for node in integer.graph.node for name in node.output}
    kept = {name: codes for name, codes in sites.items() if codes.name in computed}
    names = sorted({found.name for found in kept.values()})
    watched = simulation_session(with_outputs(integer, names))
    codes = dict(zip(names, watched.run(names, dict(feeds)), strict=True))
    makers = {name: node for node in source.graph.node for name in node.output}
    quantizers = [makers[name] for name in kept]
    dtypes = {name: TensorProto.DataType.Name(found.encoding.dtype).lower() for name, found in kept.items()}
    cuts = [Cut(name, "", name, name, dtypes[name]) for name in kept]
    values = {name: _dequantized(codes[found.name], found) for name, found in kept.items()}
    forced = Teacher(source, cuts, {}, _SIMULATED).run({**feeds, **values})
    rows = []
    for node in quantizers:
        name, maker, tally = node.output[0], makers.get(node.input[0]), Tally("")
        offset = GRIDS[kept[name].encoding.dtype][0]
        tally.add(np.abs(forced.codes[name].astype(np.int64) + offset - codes[kept[name].name].astype(np.int64)))
        row = {"site": label(node), "op_type": "input" if maker is None else maker.op_type}
        rows.append(row | {"max_lsb": int(tally.largest), "differing": tally.differing, "elements": tally.elements})
    return rows


def _dequantized(codes: Array, found: Codes) -> Array:
    """Return the values of codes in float32, of which the model's own quantizer makes these codes again."""
    known = found.encoding
    return np.asarray((codes.astype(np.int64) - known.zero_point).astype(np.float32) * np.float32(known.scale))


def operations(parity: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the rows of `run_teacher_forced`: the largest difference, and the share of elements that differ."""
    if not parity:
        return {"operations_max_lsb": None, "operations_differing": None}
    elements = max(sum(row["elements"] for row in parity), 1)
    differing = sum(row["differing"] for row in parity) / elements
    return {"operations_max_lsb": max(row["max_lsb"] for row in parity), "operations_differing": differing}


def add_op_parity(rows: Sequence[Mapping[str, Any]], parity: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the report rows, one per operation, with `max_lsb` against the QuantizeLinear (`site`) of each."""
    found = {row["site"]: row["max_lsb"] for row in parity}
    return [{**row, "max_lsb": found.get(row["site"])} for row in rows]
