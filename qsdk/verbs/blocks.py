"""The verb that tunes blocks by gradient; it needs autograd through a module, so it is for the PyTorch side."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from qsdk.algorithms.checkpoint import Checkpoint
from qsdk.core.errors import ConfigError, ModelError
from qsdk.core.layers.layer_problem import Solution
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec
from qsdk.core.report import Report
from qsdk.core.run_options import Run, WalkOptions, run_of
from qsdk.core.sims.biases import without_shifts
from qsdk.progress import Progress, progress_of
from qsdk.verbs.doors.choose import Sim, module_sim
from qsdk.verbs.doors.same_on_ranks import same_on_ranks
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.parameters import find_stored
from torch_bridge.torch_values.pytree import floats_of
from torch_bridge.tuning.block_tuning import (
    BlockRun,
    BlockTuningOptions,
    Piece,
    SiteChange,
    TuningResult,
    learnable_sites,
    pieces_of,
    split_parameters,
    tune_block,
)
from torch_bridge.tuning.find_blocks import ModuleBlocks, find_blocks
from torch_bridge.tuning.importance import output_importance
from torch_bridge.walk.module_walk import ModuleCall, ModuleStep, ModuleWalk, walk_modules
from torch_bridge.walk.paused_forward import attributes_set_by

_LEARN = ("rounding", "scales")
_WEIGHTINGS = ("equal", "fisher")


@same_on_ranks
class BlockOptions(WalkOptions, total=False):
    """What `tune_blocks` takes that changes how a block learns."""

    drop: float
    weighting: str


def tune_blocks(
    sim: Sim,
    data: Iterable[Any],
    *,
    blocks: Sequence[str] | None = None,
    iterations: int = 200,
    learn: Sequence[str] = _LEARN,
    batch_size: int = 32,
    lr: float = 0.04,
    **options: Unpack[BlockOptions],
) -> Report:
    """Learn, block by block, the rounding of weights and the scales, or all parameters, by the error of its output.

    Each block reads its quantized inputs and learns to reproduce the float model's output. The result is kept where the
    error on held-back samples fell. Rounded weights are exactly on their grids, and their encodings frozen.

    Args:
        sim: of an nn.Module, calibrated. Sites that are float, frozen or shared with other modules stay as they are.
        data: batches as for `calibrate`, read once; a forward pass of each is held at the current block.
        blocks: shell globs of modules (`"layers.*"`), each tuned as one. None finds them: repeated members of lists
            and sequences, modules with branches, and single layers where there are none.
        iterations: optimizer steps per block.
        learn: `rounding` of weights (each moves by a step at most before it is rounded), `scales`, or both. Or `all`:
            weights move as far as they like, and scales, biases and the gains of norms are learned with them, for 2 and
            3 bits. Weights then stay floats that round to their grids, and nothing is frozen, so that training of the
            whole model can follow.
        batch_size: samples per step, as rows of the batches.
        lr: how far first steps move a weight, in steps of its scale; falls linearly to 0.
        options: `forward`, `progress`, `seed`, `max_memory`: see `qsdk.options`. And `checkpoint`, a folder for the
            solved layers, from which a second run continues. And `drop` (0.0): the share of the elements, at random, of
            a block's input that is taken from the float model and of each activation in it that is not quantized, while
            it learns (QDrop, where it is 0.5). And `weighting` of the errors at a block's output: `equal`, or `fisher`,
            by the squared gradient there of the float model's outputs, which takes one more pass and a backward pass
            over the data (BRECQ).

    Returns:
        Rows `block`, `error_before`, `error_after` (of the output on held-back samples, relative to its energy),
        `iterations`, `seconds` and `note`; summary `blocks`, `left`, `seconds`, and `passes`: the same in float passes.

    Raises:
        ModelError: the sim is of an ONNX model.
        ConfigError: an option that does not exist, a pattern that names no block, or the checkpoint of another run.
        CalibrationError: the sim is not calibrated.
        DataError: data that the model does not take. In every case the sim is unchanged.

    Source: Li et al. 2021, BRECQ; Cheng et al. 2024, SignRound, for the rounding; Esser et al. 2020, LSQ, for scales;
    Wei et al. 2022, QDrop; Chen et al. 2024, EfficientQAT, for all parameters.

    Examples:
        >>> import torch, qsdk
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x := torch.randn(64, 8), "w4a8")
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> qsdk.tune_blocks(sim, [x], iterations=5, progress=False).rows[0]["block"]
        'self'
    """
    run = run_of(tune_blocks, options)
    tuned = module_sim(sim, "tune_blocks", "use qsdk.adaround or qsdk.gptq here")
    drop, weighting = options.get("drop", 0.0), options.get("weighting", "equal")
    chosen = _options(iterations, learn, batch_size, lr, drop)
    if weighting not in _WEIGHTINGS:
        raise ConfigError(f"weighting={weighting!r} is unknown; choose one of {', '.join(_WEIGHTINGS)}")
    found = find_blocks(tuned, [blocks] if isinstance(blocks, str) else blocks)
    return _tune_all(tuned, data, found, chosen, run, weighting)


def _tune_all(
    sim: QuantSim, data: Iterable[Any], blocks: ModuleBlocks, options: BlockTuningOptions, run: Run, weighting: str
) -> Report:
    start, importance = time.perf_counter(), dict[str, Sequence[Tensor]]()
    if weighting == "fisher":
        data, generator = list(data), torch.Generator().manual_seed(run.seed)
        _ = sim.encodings  # raises where a site has no encoding, before anything is computed
        importance |= output_importance(sim, data, list(blocks.modules), run.forward, generator)
    walked = walk_modules(sim, data, list(blocks.modules), forward=run.forward, max_memory=run.max_memory)
    with without_shifts(sim), torch.inference_mode(False), walked as walk:
        facts = {
            "verb": "tune_blocks",
            "seed": run.seed,
            "weighting": weighting,
            **asdict(options),
            "blocks": " ".join(walk.order),
        }
        store = None if run.checkpoint is None else Checkpoint(run.checkpoint, _LearnedSites(sim), facts)
        with progress_of("tune_blocks", len(walk.order), show=run.progress, unit="block") as bar:
            rows = [
                _tune(sim, walk, step, options, store, bar, importance.get(step.path, ()), seed=run.seed + at)
                for at, step in enumerate(walk)
            ]
        return _report(rows, blocks, walk, time.perf_counter() - start)


def _tune(
    sim: QuantSim,
    walk: ModuleWalk,
    step: ModuleStep,
    options: BlockTuningOptions,
    store: Checkpoint | None,
    bar: Progress,
    importance: Sequence[Tensor],
    *,
    seed: int,
) -> dict[str, Any]:
    begun = time.perf_counter()
    bar.now(step.path or "self")
    run, results = BlockRun(sim, sim.model.get_submodule(step.path), importance), []

    def tune() -> None:
        with walk.weights.floats():
            pieces = pieces_of(run, step.calls)
        results.append(_tune_or_replay(run, pieces, step.calls, options, store, torch.Generator().manual_seed(seed)))

    try:
        attributes_set_by(run.module, tune)  # undoes the attributes that the block's forward sets on itself
    except ModelError as error:  # its forward is not repeatable, or has an op that cannot be trained
        results.append(TuningResult(note=str(error)))
    result = results[0]
    if result.error_before is not None and result.error_after is not None:
        bar.log(error_before=result.error_before, error_after=result.error_after)
    bar.done()
    for change in result.changes:
        frozen = change.weight is not None and change.rounded  # any other grid would round the weight again
        walk.weights.write(change.site, encoding=change.encoding, weight=change.weight, frozen=frozen)
    for site, values in result.stored.items():
        walk.weights.shift(site, values.float() - walk.weights.original(site))
    return _row(step.path, result, options.iterations, time.perf_counter() - begun)


def _tune_or_replay(
    run: BlockRun,
    pieces: Sequence[Piece],
    calls: Sequence[ModuleCall],
    options: BlockTuningOptions,
    store: Checkpoint | None,
    generator: torch.Generator,
) -> TuningResult:
    """Tune a block, or take its result from a checkpoint."""
    sites = [] if store is None else learnable_sites(run, pieces, options)
    if store is None or not sites:
        return tune_block(run, pieces, options, generator)
    means = _mean_magnitudes([call.result for call in calls]), _mean_magnitudes([call.quantized for call in calls])
    means_by_site = [_InputMeans(site, *means) for site in sites]
    now = {site: run.sim.quantizers[site].encoding() for site in sites}
    if store.has_next():
        solutions = dict(zip(sites, store.replay(means_by_site), strict=True))
        changed = {site: s for site, s in solutions.items() if s.weight is not None or s.encoding != now[site]}
        first = solutions[sites[0]]
        rounded = not options.everything
        changes = [SiteChange(site, s.encoding, s.weight, rounded) for site, s in changed.items()]
        stored = {} if first.bias_shift is None else split_parameters(run, first.bias_shift)
        return TuningResult(changes, first.error_before, first.error_after, first.note, stored)
    tuned = tune_block(run, pieces, options, generator)
    new = {change.site: change for change in tuned.changes}
    assert tuned.error_before is not None
    assert tuned.error_after is not None
    errors = tuned.error_before, tuned.error_after, tuned.note
    changes = [new.get(site, SiteChange(site, now[site])) for site in sites]
    # the first site keeps what has no encoding, one behind the other
    flat = torch.cat([values.flatten().float() for values in tuned.stored.values()]) if tuned.stored else None
    others = [flat, *([None] * (len(changes) - 1))]
    solved = zip(changes, others, strict=True)
    store.keep(means_by_site, [Solution(c.encoding, c.weight, *errors, bias_shift=kept) for c, kept in solved])
    return tuned


def _mean_magnitudes(values: Any) -> Tensor:
    """Return a fingerprint of data: the mean magnitude of all tensors."""
    tensors = floats_of([(v.args, v.kwargs) if hasattr(v, "args") else v for v in values])
    return torch.stack([x.double().abs().mean().cpu() for x in tensors])


@dataclass(frozen=True)
class _InputMeans:
    site: str
    mean: Tensor
    mean_quantized: Tensor


@dataclass(frozen=True)
class _LearnedSite:
    site: str
    spec: Spec


@dataclass(frozen=True)
class _LearnedSites:
    """The view of a sim that a checkpoint compares: all encodings that sites own, and the stored tensors among them."""

    sim: QuantSim

    @property
    def layers(self) -> list[_LearnedSite]:
        """Return the sites that own an encoding, each with its spec."""
        owning = [q for q in self.sim.quantizers.values() if q.owns_encoding]
        return [_LearnedSite(q.site, q.decision.spec) for q in owning if q.decision.spec is not None]

    def weight(self, site: str) -> Tensor:
        """Return the stored tensor at a site; an empty one for an activation."""
        stored = find_stored(self.sim.model, site)
        return torch.empty(0) if stored is None else stored.detach().float()

    def encoding(self, site: str) -> Encoding:
        """Return the encoding of a site."""
        return self.sim.quantizers[site].encoding()


def _report(rows: list[dict[str, Any]], module_blocks: ModuleBlocks, walk: ModuleWalk, seconds: float) -> Report:
    means_by_site = {row["block"] for row in rows}
    left = {
        path: walk.left.get(path, "no batch reaches it")
        for path in module_blocks.modules
        if (path or "self") not in means_by_site
    }
    left |= {path: f"no block: {why}" for path, why in module_blocks.left.items()}
    rows = [*rows, *(_row(path, TuningResult(note=why), None, None) for path, why in left.items())]
    improved = sum(row["error_after"] is not None and row["error_after"] < row["error_before"] for row in rows)
    summary = {
        "blocks": improved,
        "left": len(rows) - improved,
        "seconds": seconds,
        "passes": seconds / walk.float_seconds if walk.float_seconds else None,
    }
    return Report("Block tuning", rows, summary)


def _row(block: str, tuned: TuningResult, iterations: int | None, seconds: float | None) -> dict[str, Any]:
    return {
        "block": block or "self",
        "error_before": tuned.error_before,
        "error_after": tuned.error_after,
        "iterations": iterations if tuned.changes else None,
        "seconds": seconds,
        "note": tuned.note,
    }


def _options(iterations: int, learn: Sequence[str], batch_size: int, lr: float, drop: float) -> BlockTuningOptions:
    everything = learn == "all"
    chosen = list(_LEARN) if everything else [learn] if isinstance(learn, str) else list(learn)
    unknown = [name for name in chosen if name not in _LEARN]
    if unknown or not chosen:
        raise ConfigError(f"learn={learn!r}: blocks learn {' and '.join(_LEARN)}, one of them or both, or 'all'")
    if iterations < 1 or batch_size < 1:
        raise ConfigError(f"iterations={iterations} and batch_size={batch_size} must be 1 at least")
    if not lr > 0 or not 0 <= drop <= 1:
        raise ConfigError(f"lr={lr} must be positive, and drop={drop} a share from 0 to 1")
    return BlockTuningOptions(iterations, "rounding" in chosen, "scales" in chosen, batch_size, lr, drop, everything)
