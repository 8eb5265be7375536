"""The verbs `correct_bias`, by which biases absorb the mean error of quantized weights, and `reestimate_batch_norm`."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt
import torch

from qsdk.algorithms import ranks
from qsdk.algorithms.problems.gather import GatherOptions
from qsdk.algorithms.solvers import bias
from qsdk.algorithms.solvers.outputs import SAMPLES
from qsdk.core.errors import ConfigError
from qsdk.core.layers.expected_means import ExpectedMoments, expected_values
from qsdk.core.layers.graph_layers import GraphLayer, graph_layers
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.ranges.statistics import ChannelStatistics, merge
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, Run, WalkOptions, run_of
from qsdk.core.sims.biases import float_biases, noting_shifts, rounded_for_good, take_back_shifts, with_notes
from qsdk.core.sims.state import SimState, put_back_on_error, require_frozen_values
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.layers import solve_each_layer

_GATHERS = GatherOptions(second_moments=False, samples=SAMPLES, held_back=0)
_TITLE = "Bias correction"


def correct_bias(
    sim: Sim,
    data: Iterable[Any] | None = None,
    *,
    method: Literal["empirical", "analytic"] = "empirical",
    **options: Unpack[WalkOptions],
) -> Report:
    """Shift the bias of each layer so that the mean of its output is that of the float model (Nagel et al. 2019).

    Quantized weights, and ranges that are narrower than the values, move the mean of a layer's output, and the layers
    behind it take that for a signal. No encoding changes: only stored biases do.

    `empirical` compares the float and the quantized model on data, layer by layer, each after the corrections before
    it, and behind its Relu, Clip or LeakyRelu where it has one. Earlier corrections are undone first, so a second
    call does not add to the first. Layers that `adaround` or `gptq` has rounded together with their biases are skipped:
    their float weights are lost. Every fourth batch is held back (where there are fewer, the first one is used for
    both); if the model's outputs there are not nearer to the float model's, all biases stay as they were. `analytic`
    needs no data: it takes the means of a layer's inputs from the BatchNorm in front of it, folded or not, through
    Relu, Relu6 and pooling; other layers are skipped.

    Args:
        sim: calibrated, of either side.
        data: batches as for `calibrate`; None with `analytic`.
        method: `empirical`, or `analytic` where there is no data.
        options: `forward`, `progress`, `seed`, `max_memory`: see `qsdk.options`. And `checkpoint`, a folder for the
            solved layers, from which a second run continues.

    Returns:
        Rows `site` (of the weight), `error_before` and `error_after` (relative to the float output, behind the
        activation function; with `analytic` of the means alone, over the means), `seconds`, `note`: why a layer was
        skipped. A bias that does not fit int32 any more has a row of its own, with a note about it. Summary
        `layers`, `left`, `seconds`, `passes`, and with `empirical` `output_error_before`, `output_error_after` (of the
        model's outputs on held-back data, relative to their energy) and `kept`.

    Raises:
        CalibrationError: the sim is not calibrated.
        ConfigError: another method, no data, or data with `analytic`; a checkpoint of another run.
        DataError: data that the model does not take. In every case the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> x = torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x, "w4a8"), [x], progress=False)
        >>> qsdk.correct_bias(sim, [x], progress=False).rows[0]["site"]
        'self:weight'
    """
    run = run_of(correct_bias, options)
    require_sim(sim)
    _require_consistent(method, data, options.get("forward"))
    return _correct(sim, data, run)


def _correct(sim: Sim, data: Iterable[Any] | None, run: Run) -> Report:
    _ = sim.encodings  # names the sites that have none
    remarks = sim.bias_remarks()
    with put_back_on_error(sim, weights=True) as before:
        if data is None:
            take_back_shifts(sim)  # else they would be applied twice
            with noting_shifts(sim):
                report = _analytic(sim)
        else:
            report = _empirical(sim, before, data, run)
        new = {site: remark for site, remark in sim.bias_remarks().items() if remarks.get(site) != remark}
        return with_notes(report, new)


def _empirical(sim: Sim, before: SimState, data: Iterable[Any], run: Run) -> Report:
    held_back = HeldBack(data)
    left = rounded_for_good(sim) | _with_frozen_biases(sim)
    own = {site: replace(e, frozen=site in left) for site, e in before.own.items()}
    sim.restore(replace(before, own=own, stored=None))  # a walk skips frozen layers
    report = solve_each_layer(sim, held_back.others(), bias.solve, _TITLE, "correct_bias", run, {}, _GATHERS)
    sim.restore(replace(before, stored=None))
    return _keep_if_better(sim, before, report, held_back.batches, run)


def _with_frozen_biases(sim: Sim) -> set[str]:
    """Return the weights of the layers whose biases hold frozen values."""
    layers = [graph_layer.layer for graph_layer in graph_layers(sim.graph, sim.plan, frozen=())[0]]
    return {layer.site for layer in layers if layer.bias in sim.frozen_values}


def _keep_if_better(sim: Sim, before: SimState, report: Report, batches: Sequence[Any], run: Run) -> Report:
    """Keep the corrections if they bring the model's outputs nearer to the float model's, else undo them.

    Only biases were changed since `before`, which holds the weights.
    """
    start = time.perf_counter()
    sites = [site for site, decision in sim.plan.decisions.items() if decision.kind == "bias"]
    corrected = {site: values.copy() for site, values in sim.stored_floats(sites).items()}
    known = dict(sim.original_biases)
    door = door_of(sim, run)
    after = list(door.outputs(batches, in_float=False))
    sim.store_floats(float_biases(sim))
    exact = list(door.outputs(batches, in_float=True))
    sim.restore(before)
    untouched = list(door.outputs(batches, in_float=False))
    errors = [output_error(exact, outputs) for outputs in (untouched, after)]
    kept = errors[0] is None or errors[1] is None or errors[1] <= errors[0]
    if kept:
        sim.store_floats(corrected)
        sim.original_biases = known
    spent, old = time.perf_counter() - start, report.summary
    total = old["seconds"] + spent
    summary = {
        "layers": old["layers"] if kept else 0,
        "left": old["left"] if kept else len(report.rows),
        "output_error_before": errors[0],
        "output_error_after": errors[int(kept)],
        "kept": kept,
        "seconds": total,
        "passes": old["passes"] and old["passes"] * total / old["seconds"],
    }
    rows = report.rows if kept else [_undone(row) for row in report.rows]
    return Report(report.title, rows, summary)


def _undone(row: Mapping[str, Any]) -> dict[str, Any]:
    note = row["note"] or "put back: with all corrections the model's outputs on held-back data were worse"
    return {**row, "error_after": row["error_before"], "note": note}


def _require_consistent(method: str, data: Any, forward: Any) -> None:
    if method not in ("empirical", "analytic"):
        raise ConfigError(f"method={method!r} is no way to correct biases; choose 'empirical' or 'analytic'")
    if method == "empirical" and data is None:
        raise ConfigError("empirical bias correction reads data; pass batches, or method='analytic'")
    if method == "analytic" and (data is not None or forward is not None):
        raise ConfigError(
            "analytic bias correction reads no data; pass data=None and no forward, or method='empirical'"
        )


def _analytic(sim: Sim) -> Report:
    start = time.perf_counter()
    layers, left = graph_layers(sim.graph, sim.plan, frozen=())
    expected = expected_values(sim.graph, sim.folded_norms, sim.stored_by_name)
    sites = [layer.layer.site for layer in layers]
    weights, encodings, shifts, rows = sim.stored_floats(sites), sim.encodings, {}, []
    for graph_layer in layers:
        begun, site = time.perf_counter(), graph_layer.layer.site
        means = _means(graph_layer, expected)
        row: dict[str, Any] = {"site": site, "error_before": None, "error_after": None, "seconds": None, "note": ""}
        if not graph_layer.layer.bias:
            row["note"] = "it has no bias that could take the shift"
        elif graph_layer.layer.bias in sim.frozen_values:
            row["note"] = "the values of its bias are frozen"
        elif means is None:
            row["note"] = "no BatchNorm says what its input is"
        else:
            shift, error = _shift(graph_layer, weights[site], encodings[site], means)
            shifts[graph_layer.layer.bias] = shift
            row |= {"error_before": error, "error_after": 0.0, "seconds": time.perf_counter() - begun}
        rows.append(row)
    biases = sim.stored_floats(list(shifts))
    sim.store_floats({site: biases[site] + shift.astype(np.float32) for site, shift in shifts.items()})
    done = [row for row in rows if not row["note"]]
    rows += [{"site": site, "note": note} for site, note in left.items()]
    summary = {
        "layers": len(done),
        "left": len(rows) - len(done),
        "seconds": time.perf_counter() - start,
        "passes": 0.0,
    }
    return Report(_TITLE, rows, summary)


def _means(graph_layer: GraphLayer, expected: Mapping[int, ExpectedMoments]) -> Any:
    """Return the mean of a layer's input, float64 [groups, K]; None where it is unknown."""
    geometry, (groups, _, k) = graph_layer.layer.geometry, graph_layer.layer.layout.matrix_shape
    known = expected.get(graph_layer.inputs[0])
    if known is None or len(graph_layer.inputs) > 1:
        return None
    channels = groups * k // (1 if geometry is None else int(np.prod(geometry.kernel)))
    if known.mean.size != channels:
        return None
    # a transposed convolution leaves zeros between its inputs
    share = math.prod(geometry.stride) if geometry is not None and geometry.transposed else 1
    return np.repeat(known.mean, groups * k // channels).reshape(groups, k) / share


def _shift(graph_layer: GraphLayer, weight: Any, encoding: Encoding, means: Any) -> tuple[Any, float]:
    """Return `(W - W~) E[x]` per output channel, and its size relative to `W E[x]`."""
    layout = graph_layer.layer.layout
    exact = layout.to_matrix(weight.astype(np.float64))
    rounded = layout.to_matrix(encoding.fake_quantize(weight).astype(np.float64))
    shift = ((exact - rounded) @ means[..., None])[..., 0]
    size = float(np.square((exact @ means[..., None])[..., 0]).sum())
    return shift.reshape(-1), float(np.square(shift).sum()) / size if size > 0 else 0.0


def reestimate_batch_norm(
    sim: Sim,
    data: Iterable[Any],
    **options: Unpack[DataOptions],
) -> Report:
    """Set the statistics of each BatchNorm in the model to those of its input over the data, in the simulation.

    The statistics that training left are moving averages over batches of a model that was still changing. Here they
    are those of all the data at once, whatever the sizes of its batches, and each BatchNorm reads the output of the
    updated ones before it. This costs one simulated pass, in which all batches are in flight. The variance is the
    unbiased one, as in PyTorch. Encodings stay as they are: parameters of a BatchNorm have none, and its output keeps
    its range; call `qsdk.calibrate` again to update that. To go back, take `sim.snapshot(weights=True)` beforehand.

    A BatchNorm that was folded is in the model inside `sim.training(freeze_bn_after=...)` only. There the scales of its
    layer's weight follow its factor, where each output channel has a scale of its own that may change, so that the
    stored integers stay as they are.

    Where `torch.distributed` is initialised, the data of all ranks counts.

    Args:
        sim: calibrated, of either side.
        data: batches as for `calibrate`.
        options: `forward`, `progress`; see `qsdk.options`.

    Returns:
        Rows `site` (owner of the BatchNorm), `error_before` and `error_after` (how far the normalised values are from
        mean 0 and deviation 1, root mean square over channels), `seconds`, `note`: why it was skipped, or why stored
        integers change. Summary `layers`, `left`, `seconds`, `passes`.

    Raises:
        CalibrationError: the sim is not calibrated.
        DataError: no data, data that the model does not take, or NaN or inf; the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.ReLU()), torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(model, x), [x], progress=False)
        >>> qsdk.reestimate_batch_norm(sim, [x], progress=False).rows[0]["site"]
        '0'
    """
    run = run_of(reestimate_batch_norm, options)
    door, start = door_of(sim, run), time.perf_counter()
    _ = sim.encodings  # a missing calibration is reported before the data is used up
    with require_frozen_values(sim):
        rows, float_seconds = door.reestimate_batch_norm(data, _together)
    spent = time.perf_counter() - start
    left = sum(row["error_after"] is None for row in rows)
    passes = spent / float_seconds if float_seconds else None
    summary = {"layers": len(rows) - left, "left": left, "seconds": spent, "passes": passes}
    return Report("BatchNorm re-estimation", rows, summary)


def _together(owner: str, statistics: ChannelStatistics) -> ChannelStatistics:
    ranks.require_same_layers([owner])
    return merge(ranks.all_gather(statistics))


#: one batch of so many is held back
EVERY = 4


class HeldBack:
    """The data without every fourth batch, which is held back.

    Of fewer batches all are used, and the first is held back too.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        """Read nothing yet."""
        self.batches: list[Any] = []
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        """Yield the other batches."""
        self.batches = []
        first = None
        for number, batch in enumerate(self._data):
            if number % EVERY == EVERY - 1:
                self.batches.append(batch)
                continue
            first = [batch] if first is None else first
            yield batch
        self.batches = self.batches or first or []

    def others(self) -> Iterable[Any]:
        """Return the data without the held-back batches; it can be read again if the data can."""
        one_batch = isinstance(self._data, Mapping) or hasattr(self._data, "__array__")
        if one_batch or not isinstance(self._data, Iterable):
            return self._data  # whoever reads it raises the error
        return iter(self) if isinstance(self._data, Iterator) else self


def output_error(
    wanted: Sequence[Sequence[npt.NDArray[np.float32]]], outputs: Sequence[Sequence[npt.NDArray[np.float32]]]
) -> float | None:
    """Return the squared error of outputs relative to their energy, over all batches and ranks, averaged over outputs.

    Values that are not finite are left out. None where there are no outputs.
    """
    sums = np.zeros((2, max(map(len, wanted), default=0)))
    for exact, given in zip(wanted, outputs, strict=True):
        for index, (y, x) in enumerate(zip(exact, given, strict=True)):
            finite = np.isfinite(y) & np.isfinite(x)
            exactly, missed = y[finite].astype(np.float64), (x - y)[finite].astype(np.float64)
            sums[:, index] += float(missed @ missed), float(exactly @ exactly)
    total = torch.from_numpy(sums)
    ranks.all_reduce_sum([total])
    errors, energies = total
    return None if not len(errors) else float((errors / energies.clip(torch.finfo(torch.float64).tiny)).mean())
