"""The verbs that solve layers one after the other; each combines the layer walk of one side with a solver."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Unpack

from qsdk.algorithms import ranks
from qsdk.algorithms.problems.gather import GatherOptions
from qsdk.algorithms.solve_layers import solve_layers
from qsdk.algorithms.solvers import adaround as adaround_solver
from qsdk.algorithms.solvers import gptq as gptq_solver
from qsdk.algorithms.solvers import seq_mse as seq_mse_solver
from qsdk.algorithms.solvers.outputs import SAMPLES
from qsdk.algorithms.solvers.rounding import BLOCK
from qsdk.core.layers.accumulators import require_bits, require_fits, require_room
from qsdk.core.layers.layer_problem import Solution
from qsdk.core.report import Report
from qsdk.core.run_options import LayerOptions, Run, run_of
from qsdk.core.sims.state import put_back_on_error
from qsdk.verbs.doors.choose import Sim, door_of

_ALL = GatherOptions()


class RoundingOptions(LayerOptions, total=False):
    """What verbs take that round weights by their layers' second moments."""

    damping: float | None
    shift_bias: bool


def seq_mse(
    sim: Sim,
    data: Iterable[Any],
    *,
    candidates: int = 20,
    loss: seq_mse_solver.LossName = "mse",
    refine: bool = True,
    shift_bias: bool = True,
    **options: Unpack[LayerOptions],
) -> Report:
    """Choose better weight ranges, layer by layer, by the error of each layer's output (SeqMSE).

    The report holds squared errors whatever the loss, so with `l1` and `sqnr` that of a layer can rise.

    Source: AIMET's sequential MSE, to which `refine` (codes and scales in turns) and `shift_bias` are added; with both
    off it is AIMET's, with `loss="mse"` on all of the data.

    Args:
        sim: calibrated, of either side.
        data: batches as for `calibrate`.
        candidates: number of ranges, (min, max) * i / candidates, that are tried. More make a finer search that takes
            longer.
        loss: `mse`, the squared error of the output; `sqnr`, relative to the energy of each channel, for channels that
            share a scale; `l1`, the absolute error on samples of the inputs, which weighs outliers less.
        refine: whether scales are then fitted to the codes that they lead to. Off for ranges on the candidates alone.
        shift_bias: whether biases absorb the mean error that their layer's new range leaves, behind its Relu, Clip or
            LeakyRelu where it has one (as `correct_bias`). Off where biases must stay.
        options: `forward`, `progress`, `seed`, `max_memory`: see `qsdk.options`. And `checkpoint`, a folder for the
            solved layers, from which a second run continues. And `all_experts`: whether experts of a mixture that got
            fewer tokens than they have inputs are solved with all tokens, for which each token runs through every
            expert (the model computes what it does without).

    Raises:
        CalibrationError: the sim is not calibrated.
        DataError: data that the model does not take; the sim is unchanged.
        ConfigError: an option that does not exist, or the checkpoint of another run.

    Examples:
        >>> import torch, qsdk
        >>> x = torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x, "w4a8"), [x], progress=False)
        >>> qsdk.seq_mse(sim, [x], progress=False).rows[0]["site"]
        'self:weight'
    """
    run = run_of(seq_mse, options)
    choices: dict[str, Any] = {"candidates": candidates, "loss": loss, "refine": refine, "shift_bias": shift_bias}
    samples = seq_mse_solver.SAMPLES if loss == "l1" or shift_bias else 0
    gathers = GatherOptions(samples=samples, rows=seq_mse_solver.ROWS)
    return solve_each_layer(sim, data, seq_mse_solver.solve, "SeqMSE", "seq_mse", run, choices, gathers)


def adaround(
    sim: Sim,
    data: Iterable[Any],
    *,
    method: adaround_solver.Method = "coordinate_descent",
    iterations: int | None = None,
    starts: int = 4,
    scales: adaround_solver.Scales | None = None,
    activation: bool = False,
    **options: Unpack[RoundingOptions],
) -> Report:
    """Choose for every weight whether to round up or down, by the error of its layer's output (Nagel et al. 2020).

    The problem is the paper's, its solution by default is not: coordinate descent gets nearer in a fraction of the
    time, and biases absorb the mean error. `method="relaxed", activation=True, shift_bias=False, iterations=10000` is
    the paper's, but for the data: all of it counts at every step, as second moments (with `activation`: as samples),
    and an output that nearest rounding serves better keeps that.

    Args:
        sim: calibrated, of either side.
        data: batches as for `calibrate`.
        method: `coordinate_descent`, from error feedback on, or `relaxed`, the paper's soft rounding by gradient
            descent, hardened at the end: slower, for comparison with the paper.
        iterations: sweeps of coordinate descent (None: 5) or steps of gradient descent (None: 500), at most.
        starts: number of input orders that `coordinate_descent` starts from; the best is kept. 1 is the fastest.
        scales: `search` also tries the ranges of `seq_mse`, searched with the layer's inputs as they are now, and keeps
            them where the rounded output is nearer, on held-back data too; `fixed` keeps the ranges. None: `search`
            for coordinate descent, `fixed` for `relaxed`, as in the paper.
        activation: with `relaxed` alone: measure errors behind a layer's Relu, Clip or LeakyRelu, on sampled inputs.
        options: `forward`, `progress`, `seed`, `max_memory`: see `qsdk.options`. And `checkpoint`, a folder for the
            solved layers, from which a second run continues. And `all_experts`: whether experts of a mixture that got
            fewer tokens than they have inputs are solved with all tokens, for which each token runs through every
            expert (the model computes what it does without). And `damping`, as for `gptq`: raise it where accuracy
            falls on data that the solver has not seen; `shift_bias=False` where biases must stay, which absorb the mean
            error that their layer's rounding leaves.

    Raises:
        CalibrationError: the sim is not calibrated.
        DataError: data that the model does not take; the sim is unchanged.
        ConfigError: an option that does not exist or is out of its range, or the checkpoint of another run.

    Examples:
        >>> import torch, qsdk
        >>> x = torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x, "w4a8"), [x], progress=False)
        >>> qsdk.adaround(sim, [x], progress=False).rows[0]["site"]
        'self:weight'
    """
    run = run_of(adaround, options)
    choices: dict[str, Any] = {"method": method, "iterations": iterations, "starts": starts}
    scales = scales or ("search" if method == "coordinate_descent" else "fixed")
    choices |= {"scales": scales, "activation": activation, **_rounding_choices(options)}
    gathers = GatherOptions(samples=SAMPLES if activation else 0)
    return solve_each_layer(sim, data, adaround_solver.solve, "AdaRound", "adaround", run, choices, gathers)


def gptq(
    sim: Sim,
    data: Iterable[Any],
    *,
    act_order: bool = True,
    block_size: int = BLOCK,
    scales: gptq_solver.Scales = "search",
    sweeps: int = 1,
    accumulator_bits: int | None = None,
    accumulator_tile: int | None = None,
    **options: Unpack[RoundingOptions],
) -> Report:
    """Round weights one input at a time; the remaining inputs make up for the error so far (Frantar et al. 2022, GPTQ).

    Args:
        sim: calibrated, of either side.
        data: batches as for `calibrate`.
        act_order: take the inputs by falling second moment, else in their own order.
        block_size: inputs that are rounded one by one before the others are updated; affects speed only.
        scales: `search` also multiplies each channel's scales by the best of some factors, and in blocks then finds
            the best scale of each block for its codes; `fixed` keeps them.
        sweeps: of coordinate descent afterwards, at most; 0 for GPTQ alone.
        accumulator_bits: no sum of products of a layer with integer inputs leaves a signed accumulator of so many bits,
            for any input on its grid; the bias is added outside of it (Colbert et al. 2024, AXE). None for any sum.
            The report has `accumulator_bound` and `accumulator_bits` of each layer, as `qsdk.analysis.accumulators`.
        accumulator_tile: products that such an accumulator adds up, whose result goes to a wide one; None for all.
        options: `forward`, `progress`, `seed`, `max_memory`: see `qsdk.options`. And `checkpoint`, a folder for the
            solved layers, from which a second run continues. And `all_experts`: whether experts of a mixture that got
            fewer tokens than they have inputs are solved with all tokens, for which each token runs through every
            expert (the model computes what it does without). And `damping`, the share of its mean that is added to the
            diagonal of the second moments (None: 0.03, and more where data is scarce); `shift_bias=False` where biases
            must stay, which absorb the mean error that their layer's rounding leaves.

    Raises:
        CalibrationError: the sim is not calibrated.
        DataError: data that the model does not take; the sim is unchanged.
        ConfigError: an option that does not exist or is out of its range, the checkpoint of another run, or layers
            that cannot have such accumulators; the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> x = torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x, "w4a8"), [x], progress=False)
        >>> qsdk.gptq(sim, [x], progress=False).rows[0]["site"]
        'self:weight'
    """
    run = run_of(gptq, options)
    choices: dict[str, Any] = {"act_order": act_order, "block_size": block_size, "scales": scales, "sweeps": sweeps}
    choices |= _rounding_choices(options)
    bits, tile = accumulator_bits, accumulator_tile
    require_bits(bits, tile)
    if bits is None:
        return solve_each_layer(sim, data, gptq_solver.solve, "GPTQ", "gptq", run, choices)
    choices |= {"accumulator_bits": bits, "accumulator_tile": tile}
    require_room(sim, bits, tile)
    with put_back_on_error(sim, weights=True):
        report = solve_each_layer(sim, data, gptq_solver.solve, "GPTQ", "gptq", run, choices)
        return _with_accumulators(report, require_fits(sim, bits, tile))


def _rounding_choices(options: RoundingOptions) -> dict[str, Any]:
    return {"damping": options.get("damping"), "shift_bias": options.get("shift_bias", True)}


def _with_accumulators(report: Report, found: Report) -> Report:
    """Return a report on layers, with what the accumulator of each needs."""
    needs = {row["site"]: row for row in found.rows}

    def of(site: str) -> dict[str, Any]:
        row = needs.get(site, {})
        return {"accumulator_bound": row.get("bound"), "accumulator_bits": row.get("bits")}

    rows = [{**row, **of(row["site"])} for row in report.rows]
    return Report(report.title, rows, {**report.summary, "accumulator_bits": found.summary["bits"]})


def solve_each_layer(
    sim: Sim,
    data: Iterable[Any],
    solve: Callable[..., Solution],
    title: str,
    verb: str,
    run: Run,
    choices: Mapping[str, Any],
    gathers: GatherOptions = _ALL,
) -> Report:
    """Run a layer solver with its choices over a sim of either side; if it fails, the sim is unchanged."""
    with ExitStack() as stack:
        with ranks.telling_others():
            walk, rounded = stack.enter_context(door_of(sim, run).layer_walk(data))
        ranks.require_same_layers([])
        shared: dict[str, Any] = {"progress": run.progress, "seed": run.seed, "checkpoint": run.checkpoint}
        asked: dict[str, Any] = {"verb": verb, "gathers": gathers, "options": choices, "rounded": rounded}
        return solve_layers(walk, partial(solve, **choices), title=title, **asked, **shared)
