"""The verb `rotate`: orthogonal rotations of residual streams and attention heads, merged into the weights."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import length_hint
from typing import Any, Literal, Unpack, get_args

import numpy as np
import numpy.typing as npt

from qsdk.algorithms.rotation.learned import LearnedRotation, Turned, learn_rotation
from qsdk.algorithms.rotation.orthogonal import keeping_the_mean, online_factors, random_orthogonal, randomized_hadamard
from qsdk.core.channel_maps.rotated_weights import (
    InputRotation,
    OnlineRotation,
    find_online,
    fold_obstacle,
    gain_of,
    rotated_values,
)
from qsdk.core.channel_maps.rotation_groups import RotatedTensor, RotationGroup, find_rotation_groups
from qsdk.core.channel_maps.scalings import obstacle, specs_of
from qsdk.core.errors import ConfigError, DataError
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import PerBlock, PerChannel, Spec
from qsdk.core.report import Report
from qsdk.core.run_options import Run, SeededOptions, run_of
from qsdk.core.sims.biases import without_shifts
from qsdk.core.sims.state import put_back_on_error
from qsdk.core.sims.stateful import require_sim
from qsdk.core.site import owner_of
from qsdk.verbs.calibrate import calibrate
from qsdk.verbs.doors.changed_sims import rotated, untied
from qsdk.verbs.doors.choose import OnnxSim, Sim, door_of
from torch_bridge.torch_values.batches import as_example
from torch_bridge.torch_values.pytree import is_cache

Rows = npt.NDArray[np.float32]

_ROWS = 512  # of a tensor or weight
Method = Literal["hadamard", "random", "learned"]
Array = npt.NDArray[np.generic]

_NOT_AHEAD = (
    "nothing can be put in front of one of these layers: not all are Linears in memory, or a BatchNorm is folded"
)


def rotate(
    sim: Sim,
    data: Iterable[Any] | None = None,
    *,
    method: Method = "hadamard",
    online: bool = False,
    **options: Unpack[SeededOptions],
) -> Report:
    """Rotate the residual streams of a transformer, so that no channel of them has outliers.

    Every vector of a stream is multiplied by one orthogonal matrix, and so are the weights that write and read it: the
    float model computes the same (Ashkboos et al. 2024, QuaRot). The gain of each norm moves into the layers that read
    it, since only a norm without one commutes with a rotation (SliceGPT). A stream with a LayerNorm gets a rotation
    that leaves the mean over its channels as it is, so that LayerNorm commutes with it as well and stays. The values
    of attention heads are rotated head by head, and where `kv_cache` is chosen the cache holds them rotated: logits and
    generated text stay those of the float model, but `present.0.value` of the exported file and caches of the float
    model differ. A stream that cannot be rotated as a whole is left as it is.

    Where an embedding shares its table with the last layer, the gain of the norm before that layer unties them: each
    gets a copy (`untied` in the summary), and on the PyTorch side `sim.model` is then another module than before.

    Args:
        sim: of either side. A calibrated sim is calibrated again, with the method of the last time.
        data: batches as for `calibrate`; None will do where the sim has no activation to calibrate again.
        method: `hadamard` spreads each channel evenly over all others; `random` is a random orthogonal matrix;
            `learned` goes on from `hadamard` by descent over orthogonal matrices, to where the noise of quantizing a
            residual stream and its weights is least (after Liu et al. 2024, SpinQuant; needs data, read twice).
        online: also rotate, while the model runs, what no merged rotation reaches: the inputs of layers that write a
            residual stream from behind an activation function. The exported file has one or two small MatMuls in front
            of each. Where more than linear layers is quantized, these read 16 bits. A `state_dict` gets more keys.
        options: `forward`, `progress`, `seed`; see `qsdk.options`.

    Returns:
        Rows `stream` (its first and last layer), `kind`, `size` (of the rotation), `writers`, `readers`, `norms` (whose
        gains were folded), `noise_before` and `noise_after` (of `learned`: noise over signal, all that is quantized
        together, with the Hadamard matrix and with the learned one) and `reason` (why it is left as it is).

    Raises:
        ConfigError: a method that does not exist, or data that is missing.
        DataError: data that the model does not take, or a filled cache in it where caches hold rotated values.
            Whatever is raised, the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True).eval()
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(model, x := torch.randn(4, 5, 8)), [x], progress=False)
        >>> qsdk.rotate(sim, [x], progress=False).summary["rotated"]
        1
    """
    run = run_of(rotate, options)
    _require_options(sim, data, method)
    batches: Iterable[Any] = [] if data is None else data
    started = time.perf_counter()
    names = _tied_names(sim)
    with ExitStack() as undone_on_error:
        was_tied = bool(names) and undone_on_error.enter_context(untied(sim, names))
        ahead = undone_on_error.enter_context(_turned_online(sim, run.seed)) if online else []
        undone_on_error.enter_context(put_back_on_error(sim, weights=True))
        undone_on_error.enter_context(without_shifts(sim))
        graph = door_of(sim).running_graph()
        streams = _turned(sim, graph, method, run.seed)
        in_caches = sum(one.cached and not one.blocked for one in streams)
        batches = without_caches(batches) if in_caches else batches
        noises = _learn(sim, graph, batches, run) if method == "learned" else {}
        turned, at_run_time = sum(not one.blocked for one in streams), sum(not row["reason"] for row in ahead)
        again = turned + at_run_time > 0 and any(sim.ready().values())
        if again:
            calibrate(sim, batches, **sim.methods.options, forward=run.forward, progress=run.progress)
        summary = {
            "rotated": turned,
            "left": len(streams) - turned,
            **({"at_run_time": at_run_time} if online else {}),
            **({"in_caches": f"{in_caches}: caches of the model before do not fit any more"} if in_caches else {}),
            "untied": ", ".join(names) if was_tied else "",
            "calibrated_again": sim.methods.method if again else "no: nothing changed or it was not calibrated before",
            "seconds": time.perf_counter() - started,
        }
        rows = [_row(graph, stream, noises.get(stream.seed)) for stream in streams]
        return Report("Rotation", rows + ahead, summary)


def obstacle_to_rotating(sim: Sim) -> str:
    """Return why `rotate` has no residual stream to rotate, or would have to untie one; "" where neither is so."""
    graph = door_of(sim).running_graph()
    residual = [stream for stream in _streams(sim, graph) if stream.kind == "residual stream"]
    free = [stream for stream in residual if not stream.blocked]
    if not free:
        return residual[0].blocked if residual else "there is no residual stream"
    return "an embedding shares its table with the last layer" if any(stream.ties for stream in free) else ""


def _require_options(sim: Sim, data: Iterable[Any] | None, method: str) -> None:
    require_sim(sim)
    if method not in get_args(Method):
        raise ConfigError(f"method={method!r}; choose {', '.join(get_args(Method))}")
    if data is None and method == "learned":
        raise ConfigError("method='learned' measures the noise of quantization on data: give data")
    if data is None and any(sim.ready().values()) and sim.plan.calibrated_sites():
        raise ConfigError("the sim was calibrated, and its ranges will have changed: give data to calibrate it again")


@contextmanager
def _turned_online(sim: Sim, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Put rotations in front of layers, and yield rows of the report; if the block raises, nothing has changed."""
    graph, stored, own = door_of(sim).running_graph(), door_of(sim).stored_values(), sim.snapshot().own
    streams = _streams(sim, graph, tied=False)
    turns, rotations = [], dict[str, InputRotation]()
    for turn in find_online(graph, streams, sim.plan):
        site = graph.tensors[graph.ops[turn.op].inputs[0] or 0].site
        blocked = turn.blocked or obstacle([turn.root], [], graph, sim.plan, own, stored)
        if not blocked and graph.tensors[turn.root].site in sim.frozen_values:
            blocked = f"the values of {graph.tensors[turn.root].site} are frozen"
        turns.append(replace(turn, blocked=blocked))
        if not blocked and site is not None:
            spec = sim.plan.decisions[site].spec
            factors = online_factors(turn.size, seed + 2 * len(rotations))
            signed = spec is not None and spec.dtype.signed
            rotations[graph.tensors[turn.root].name] = InputRotation(site, signed, factors)
    if not rotations:
        yield [_row_online(graph, turn) for turn in turns]
        return
    with rotated(sim, rotations) as done:
        turns = turns if done else [replace(turn, blocked=turn.blocked or _NOT_AHEAD) for turn in turns]
        yield [_row_online(graph, turn) for turn in turns]


def _turned(sim: Sim, graph: Graph, method: Method, seed: int) -> list[RotationGroup]:
    """Rotate what can be rotated, and return all streams."""
    streams = _streams(sim, graph, tied=False)
    for number, stream in enumerate(streams):
        if not stream.blocked:
            _write(sim, graph, stream, _rotation(stream, method, seed + number))
    return streams


def _learn(sim: Sim, graph: Graph, data: Iterable[Any], run: Run) -> dict[int, LearnedRotation]:
    """Rotate residual streams on, as is best for the data; return the rotation of each by its seed."""
    streams = [one for one in _streams(sim, graph) if one.kind == "residual stream" and not (one.blocked or one.ties)]
    samples = samples_of(sim, graph, streams, data, run)
    result = {}
    for stream, turned in zip(streams, samples, strict=True):
        if turned:
            learned = learn_rotation(turned, stream.size, keeps_mean=stream.keeps_mean)
            _write(sim, graph, stream, learned.rotation)
            result[stream.seed] = learned
    return result


def _tied_names(sim: Sim) -> list[str]:
    """Return the stored tensors whose readers need a copy each before a stream can be rotated."""
    graph = door_of(sim).running_graph()
    roots = [root for stream in _streams(sim, graph) if not stream.blocked for root in stream.ties]
    return [graph.tensors[root].name for root in dict.fromkeys(roots)]


def _streams(sim: Sim, graph: Graph, *, tied: bool = True) -> list[RotationGroup]:
    """Return the streams of a sim, with the reasons why some of them cannot be rotated; ties are one unless `tied`."""
    stored, own = door_of(sim).stored_values(), sim.snapshot().own

    def read(root: int) -> Array:
        return stored[graph.tensors[root].name]

    def gain(norm: Any) -> npt.NDArray[np.float64] | None:
        known = norm.gain is None or graph.tensors[norm.gain].name in stored
        return gain_of(norm, read) if known else np.arange(2.0)

    result = []
    for stream in find_rotation_groups(graph, gain, caches_stay=_why_caches_stay(sim)):
        roots = [turn.root for turn in stream.rotated]
        for one in stream.folded:
            roots += [root for root in (one.norm.gain, one.norm.shift) if root is not None]
        why = stream.blocked or obstacle(roots, stream.members, graph, sim.plan, own, stored)
        why = why or fold_obstacle(graph, stream, read) or ("" if tied else _tie(graph, stream))
        result.append(replace(stream, blocked=why))
    return result


def _tie(graph: Graph, stream: RotationGroup) -> str:
    if not stream.ties:
        return ""
    name = graph.tensors[stream.ties[0]].name
    return f"{name} is shared by layers before and behind a norm, and its readers cannot have a copy each"


def _rotation(stream: RotationGroup, method: Method, seed: int) -> npt.NDArray[np.float64]:
    made = random_orthogonal(stream.size, seed) if method == "random" else randomized_hadamard(stream.size, seed)
    return keeping_the_mean(made) if stream.keeps_mean else made


def _write(sim: Sim, graph: Graph, stream: RotationGroup, rotation: npt.NDArray[np.float64]) -> None:
    stored = door_of(sim).stored_values()
    values: Mapping[int, Array] = rotated_values(graph, stream, rotation, lambda root: stored[graph.tensors[root].name])
    door_of(sim).store_values({graph.tensors[root].name: value for root, value in values.items()})


def _row(graph: Graph, stream: RotationGroup, learned: LearnedRotation | None) -> dict[str, Any]:
    ends = (min(stream.writers, key=lambda turn: turn.op), max(stream.readers, key=lambda turn: turn.op))
    sites = [graph.tensors[turn.root].site for turn in ends]
    names = [
        graph.ops[turn.op].name if site is None else owner_of(site) for turn, site in zip(ends, sites, strict=True)
    ]
    return {
        "stream": " ... ".join(names),
        "kind": stream.kind,
        "size": stream.size,
        "writers": len(stream.writers),
        "readers": len(stream.readers),
        "norms": len(stream.folded),
        "noise_before": None if learned is None else learned.before,
        "noise_after": None if learned is None else learned.after,
        "reason": stream.blocked,
    }


def _row_online(graph: Graph, turn: OnlineRotation) -> dict[str, Any]:
    site = graph.tensors[turn.root].site
    counts = {"writers": 0, "readers": int(not turn.blocked), "norms": 0, "noise_before": None, "noise_after": None}
    name = graph.tensors[turn.root].name if site is None else owner_of(site)
    kind = {"stream": name, "kind": "input of a layer, at run time", "size": turn.size}
    return {**kind, **counts, "reason": turn.blocked}


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
    sim: Sim, graph: Graph, groups: Sequence[RotationGroup], data: Iterable[Any], run: Run
) -> list[list[Turned]]:
    """Return what the rotation of each group turns, as far as it is quantized, after one float pass over the data."""
    specs = {site: spec for site, spec in specs_of(sim.plan).items() if spec.dtype.is_quantized}
    samplers: dict[str, SampledRows] = {}
    for group in groups:
        for tensor, ids in group.members.items():
            site = graph.tensors[tensor].site
            if site in specs and ids.size == ids.shape[-1] == group.size and site is not None:
                samplers[site] = SampledRows(tensor)

    def look(site: str, x: npt.NDArray[Any]) -> None:
        samplers[site].add(np.asarray(x, np.float32).reshape(-1, x.shape[-1]))

    door_of(sim, run).visit(data, look, title="rotation", sites=samplers)
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


class DataWithoutCaches:
    """Batches that are refused as they are read where they bring a filled cache."""

    def __init__(self, data: Iterable[Any]) -> None:
        """Read nothing yet."""
        self._data = data

    def __length_hint__(self) -> int:
        """Return how many batches there are, as far as the data knows."""
        return length_hint(self._data, 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches."""
        for number, batch in enumerate(self._data):
            if isinstance(batch, tuple | list | Mapping):
                given = as_example(batch)
                for value in (*given.args, *given.kwargs.values()):
                    if is_cache(value) and value.get_seq_length() > 0:
                        raise DataError(
                            f"batch {number} brings a cache that was filled before the rotation, which turns what "
                            "caches hold; give tokens alone, or an empty cache"
                        )
            yield batch


def without_caches(data: Iterable[Any]) -> Iterable[Any]:
    """Return data that is refused as soon as a batch brings a filled cache; it can be read again if the data can."""
    one_batch = isinstance(data, Mapping | str | bytes) or hasattr(data, "__array__")
    if one_batch or not isinstance(data, Iterable):
        return data  # whoever reads it raises the error
    checked = DataWithoutCaches(data)
    return iter(checked) if isinstance(data, Iterator) else checked


def _why_caches_stay(sim: Sim) -> str:
    """Return why a cache's keys and values must stay as they are, which a filled one holds; "" if none come in."""
    if isinstance(sim, OnnxSim):  # whoever runs the file holds its caches
        return "the cache that the file takes and gives holds it: one that the float file has filled would not fit"
    if sim.config.has_kv_cache:  # the sim fills them
        return ""
    return "the cache holds it, and the example and the data bring caches; choose kv_cache= and give tokens alone"
