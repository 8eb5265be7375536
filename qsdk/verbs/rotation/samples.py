"""What a learned rotation looks at: samples of the tensors of a group, and of the weights that take it up."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.algorithms.rotation.learned import Turned
from qsdk.core.channel_maps.rotation_groups import RotatedTensor, RotationGroup
from qsdk.core.channel_maps.scalings import specs_of
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import PerBlock, PerChannel, Spec
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.doors.door import Forward

Rows = npt.NDArray[np.float32]

_ROWS = 512  # of a tensor or weight


class SampledRows:
    """Rows of a tensor: those with the largest elements, which decide about ranges, and as many others."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._peaks: Rows | None = None
        self._others: Rows | None = None

    def add(self, rows: Rows) -> None:
        """Add rows [n, size]."""
        known = rows if self._peaks is None else np.concatenate([self._peaks, rows])
        self._peaks = known[np.argsort(-np.abs(known).max(axis=1), kind="stable")[: _ROWS // 2]].copy()
        known = rows if self._others is None else np.concatenate([self._others, rows])
        self._others = known[self._generator.permutation(len(known))[: _ROWS // 2]].copy()

    def rows(self) -> Rows:
        """Return the sample."""
        assert self._peaks is not None
        assert self._others is not None
        return np.concatenate([self._peaks, self._others])


def samples_of(
    sim: Sim,
    graph: Graph,
    groups: Iterable[RotationGroup],
    data: Iterable[Any],
    *,
    forward: Forward | None,
    progress: bool,
) -> list[list[Turned]]:
    """Return what the rotation of each group turns, as far as it is quantized, after one float pass over the data."""
    specs = {site: spec for site, spec in specs_of(sim.plan).items() if spec.dtype.is_quantized}
    groups = list(groups)
    samplers: dict[str, SampledRows] = {}
    for group in groups:
        for tensor, ids in group.members.items():
            site = graph.tensors[tensor].site
            if site in specs and ids.size == ids.shape[-1] == group.size and site is not None:
                samplers[site] = SampledRows(tensor)

    def look(site: str, x: npt.NDArray[Any]) -> None:
        samplers[site].add(np.asarray(x, np.float32).reshape(-1, x.shape[-1]))

    door_of(sim).visit(data, look, title="rotation", sites=samplers, forward=forward, progress=progress)
    stored = door_of(sim).stored_values()
    result = []
    for group in groups:
        sites = [graph.tensors[tensor].site or "" for tensor in group.members]
        found = [_activation(samplers[site].rows(), specs[site]) for site in sites if site in samplers]
        for one in (*group.writers, *group.readers):
            spec = specs.get(graph.tensors[one.root].site or "")
            if spec is not None:
                found.append(_weight(stored[graph.tensors[one.root].name], one, spec, group.size))
        result.append(found)
    return result


def _activation(rows: Rows, spec: Spec) -> Turned:
    levels = spec.dtype.hi - spec.dtype.lo
    return Turned(rows, levels, spec.symmetric, "column" if isinstance(spec.granularity, PerChannel) else "tensor")


def _weight(value: npt.NDArray[Any], rotated: RotatedTensor, spec: Spec, size: int) -> Turned:
    last = np.moveaxis(np.asarray(value), rotated.axis, -1)
    rows = np.asarray(last[..., rotated.ids.reshape(-1) >= 0], np.float32).reshape(-1, size)
    some = rows[np.random.default_rng(0).permutation(len(rows))[: 4 * _ROWS]]
    kept = spec.granularity
    ranges: Any = "tensor"
    if isinstance(kept, PerBlock) and kept.axis == rotated.axis:
        ranges = kept.size
    elif isinstance(kept, PerChannel | PerBlock):
        ranges = "column" if kept.axis == rotated.axis or isinstance(kept, PerBlock) else "row"
    return Turned(some, spec.dtype.hi - spec.dtype.lo, spec.symmetric, ranges)
