"""What verbs have done to a model's stored values for good, which no noise of quantizing them now can show."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics.encoding import Encoding
from qsdk.core.rotations.cached_values import cached_tensors
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.doors.door import Forward


def rounded_weights(sim: Sim) -> list[str]:
    """Return the weights that lie on their grid already: rounded by a verb, by training, or in the file they are from.

    Args:
        sim: calibrated, of either side.
    """
    encodings = sim.encodings
    weights = [d.site for d in sim.plan.decisions.values() if d.kind == "weight" and d.site in encodings]
    held = sim.stored_floats(weights)
    return [site for site in held if _is_rounded(held[site], encodings[site])]


def _is_rounded(values: npt.NDArray[Any], encoding: Encoding) -> bool:
    if encoding.axis == 0 and encoding.block_size is None and len(values):
        # most weights are not rounded, and one channel or row tells
        first = replace(encoding, scale=encoding.scale[:1], zero_point=encoding.zero_point[:1])
        if not np.array_equal(first.fake_quantize(values[:1]), values[:1]):
            return False
    elif encoding.axis is None:
        first_row = values[:1] if values.ndim else values
        if not np.array_equal(encoding.fake_quantize(first_row), first_row):
            return False
    return np.array_equal(encoding.fake_quantize(values), values)


def rounded_facts(sim: Sim) -> dict[str, Any]:
    """Return the entries of a summary that say what rows of weights leave out; empty where they leave out nothing."""
    found = rounded_weights(sim)
    if not found:
        return {}
    remark = (
        f"{len(found)} weights are stored as they are rounded (by adaround, gptq, tune_blocks, or in the file): their "
        "rows have none of the noise that rounding made; run this before such a verb to see it"
    )
    return {"rounded": found, "remark": remark}


def outputs_as_given(
    sim: Sim, batches: Iterable[Any], forward: Forward | None
) -> list[Sequence[npt.NDArray[np.float32]]] | None:
    """Return the float outputs of the model as the user gave it, for each batch.

    Keys and values that go into a cache are those of the float model as it is now: a rotation may have turned them, and
    the difference would be no noise.

    Returns:
        None where no verb has changed a stored value since.
    """
    door, batches = door_of(sim), list(batches)
    given: list[Sequence[npt.NDArray[np.float32]]] = []
    with door.as_given() as moved:
        if not moved:
            return None
        given += door.outputs(batches, forward, in_float=True)
    handed_on = _handed_on(sim)
    if handed_on:
        for index, now in enumerate(door.outputs(batches, forward, in_float=True)):
            given[index] = [new if at in handed_on else given[index][at] for at, new in enumerate(now)]
    return given


def _handed_on(sim: Sim) -> set[int]:
    """Return the places of the float outputs that go into a cache of keys and values."""
    graph = sim.graph
    cached = cached_tensors(graph)
    floats = [tensor for tensor in graph.outputs if graph.tensors[tensor].is_float]
    return {index for index, tensor in enumerate(floats) if tensor in cached}
