"""Tuning of one block: the rounding of its weights and its scales, by the gradient of its output error.

Sources: Li et al. 2021, BRECQ, for the block as the unit; Cheng et al. 2024, SignRound, for the rounding; Esser et al.
2020, LSQ, and Shao et al. 2024, OmniQuant, for scales that are learned with it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.callbacks import log
from qsdk.core.errors import ModelError
from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.exact_sums import on_exact_sums, with_exact_sums
from qsdk.core.numerics.spec import axis_of, block_size_of
from qsdk.core.numerics.stored_codes import reason_codes_get_lost
from qsdk.core.site import owner_of, port_of
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.parameters import dtype_name, find_stored, stored_tensor
from torch_bridge.torch_values.pytree import Path, floats_of, leaves_of, map_leaves
from torch_bridge.walk.module_walk import Arguments, ModuleCall

HELD_BACK = 8  # one sample in so many is used to judge the result, not to learn from


@dataclass(frozen=True)
class Piece:
    """Samples of one call.

    `rows` are int64 indices into the first axis of the arguments in `split`; None for the whole call.
    """

    call: ModuleCall
    rows: Tensor | None
    size: int
    split: frozenset[Path]

    def quantized_arguments(self, *, drop: float = 0.0, generator: torch.Generator | None = None) -> Arguments:
        """Return a copy of the arguments in the quantized model; the block may write over it.

        `drop` is the probability with which an element of a floating-point tensor is the float model's instead (Wei et
        al. 2022, QDrop, section 4, at the block's inputs).
        """
        in_float = dict(_leaves(self.call.float)) if drop else {}

        def mixed(path: Path, leaf: Any) -> Any:
            other = in_float.get(path)
            if not isinstance(other, Tensor) or not other.is_floating_point() or other.shape != leaf.shape:
                return self._select(path, leaf)
            quantized, float_value = self._select(path, leaf), self._select(path, other)
            drawn_on = generator.device if generator is not None else quantized.device
            drawn = torch.rand(quantized.shape, generator=generator, device=drawn_on)
            chosen = drawn.to(quantized.device) < drop
            return torch.where(chosen, float_value, quantized)

        return _map_arguments(self.call.quantized, mixed)

    def float_arguments(self) -> Arguments:
        """Return a copy of the arguments in the float model."""
        return _map_arguments(self.call.float, self._select)

    def outputs(self) -> list[Tensor]:
        """Return the float model's outputs for these samples."""
        tensors = floats_of(self.call.result)
        return [y if self.rows is None else y.index_select(0, self.rows.to(y.device)) for y in tensors]

    def chunks(self, size: int, generator: torch.Generator) -> list["Piece"]:
        """Return the samples in random order, at most `size` in each piece."""
        if self.rows is None:
            return [self]
        shuffled = self.rows[torch.randperm(self.size, generator=generator, device=generator.device)]
        parts = [shuffled[start : start + size] for start in range(0, self.size, size)]
        return [Piece(self.call, rows, len(rows), self.split) for rows in parts]

    def first(self, count: int) -> "Piece":
        """Return at most `count` of the samples, where they can be split."""
        if self.rows is None or self.size <= count:
            return self
        return Piece(self.call, self.rows[:count], count, self.split)

    def _select(self, path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self.rows is None or path not in self.split:
            return leaf.clone()
        return leaf.index_select(0, self.rows.to(leaf.device))


def arguments_with_samples(call: ModuleCall) -> frozenset[Path]:
    """Return the arguments whose first axis is as long as that of the outputs; empty where the outputs disagree."""
    samples = _samples(call)
    leaves = _leaves(call.quantized)
    return frozenset(path for path, x in leaves if isinstance(x, Tensor) and x.dim() and x.shape[0] == samples)


def all_samples(call: ModuleCall, split: frozenset[Path]) -> Piece:
    """Return all samples of a call, split where the arguments in `split` have as many rows as the outputs."""
    samples = _samples(call)
    if not split or samples is None or not split <= arguments_with_samples(call):
        return Piece(call, None, samples or 1, split)
    rows = torch.arange(samples, device=floats_of(call.result)[0].device)
    return Piece(call, rows, samples, split)


def _samples(call: ModuleCall) -> int | None:
    sizes = {int(y.shape[0]) if y.dim() else 0 for y in floats_of(call.result)}
    return sizes.pop() if len(sizes) == 1 and min(sizes) > 0 else None


def _leaves(arguments: Arguments) -> list[tuple[Path, Any]]:
    return leaves_of((arguments.args, arguments.kwargs))


def _map_arguments(arguments: Arguments, each: Callable[[Path, Any], Any]) -> Arguments:
    args, kwargs = map_leaves((arguments.args, arguments.kwargs), each)
    return Arguments(args, kwargs)


def split_held_back(pieces: Sequence[Piece], generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    """Split samples into those to learn from and those to judge by: one in `HELD_BACK` of each, at least one.

    The two lists are the same where there is only one sample, or one call whose samples cannot be split.
    """
    learn: list[Piece] = []
    judge: list[Piece] = []
    owed = 0.0
    for piece in pieces:
        owed += piece.size / HELD_BACK
        if piece.rows is not None and piece.size > 1:
            count = min(max(int(owed), int(not judge)), piece.size - 1)
            rows = piece.rows[torch.randperm(piece.size, generator=generator, device=generator.device)]
            learn.append(Piece(piece.call, rows[count:], piece.size - count, piece.split))
            judge += [Piece(piece.call, rows[:count], count, piece.split)] if count else []
            owed -= count
        elif owed >= piece.size:
            judge.append(piece)
            owed -= piece.size
        else:
            learn.append(piece)
    if not judge and len(learn) > 1:
        judge.append(learn.pop())
    return (learn, judge) if judge else (learn, learn)


#: how far a weight may be shifted before it is rounded, in steps of its scale
MAX_SHIFT = 1.0
#: first step of a bias or a gain as a share of its root mean square, per `lr`
OTHERS = 0.05
REPEAT_TOLERANCE = 1e-3  # relative difference up to which a block run alone repeats its result in the model


@dataclass(frozen=True)
class BlockTuningOptions:
    """The options of tuning a block.

    Attributes:
        iterations: optimizer steps per block.
        rounding: whether weights learn which way to round.
        scales: whether weights and activations learn their scales.
        batch_size: samples per step.
        lr: shift of a weight by the first step of the optimizer, in steps of its scale; it falls to 0.
        drop: share of the elements of a block's input, and of every activation in it, that are not quantized.
        everything: whether weights may go any way, and biases and the gains of norms are learned too.
    """

    iterations: int
    rounding: bool
    scales: bool
    batch_size: int
    lr: float
    drop: float
    everything: bool = False


@dataclass(frozen=True)
class SiteChange:
    """What was learned for one site.

    `weight` holds the new values, which are `rounded` or not; None where they stay.
    """

    site: str
    encoding: Encoding
    weight: Tensor | None = None
    rounded: bool = True


@dataclass(frozen=True)
class TuningResult:
    """The result of tuning a block.

    Errors are of the output on held-back samples, relative to the float output's energy. `stored` holds new values of
    what has no encoding, by site.
    """

    changes: Sequence[SiteChange] = ()
    error_before: float | None = None
    error_after: float | None = None
    note: str = ""
    stored: Mapping[str, Tensor] = field(default_factory=dict)


class _LearnedWeight:
    """The replacement of a weight's quantizer while the weight's rounding is learned.

    The weight is moved by `shift` steps and then rounded to the nearest grid point; the gradient passes straight
    through. So the weight that is judged is hard-rounded at any time, and nothing is left to harden at the end.
    """

    def __init__(self, quantizer: Quantizer, weight: Tensor) -> None:
        self.quantizer = quantizer
        self.shift = nn.Parameter(torch.zeros_like(weight, dtype=torch.float32))

    def __call__(self, weight: Tensor) -> Tensor:
        return self.quantizer(self.moved(weight)).to(weight.dtype)

    def moved(self, weight: Tensor) -> Tensor:
        """Return the weight, shifted but not rounded; what is judged and written has sums that kernels add exactly."""
        spec = self.quantizer.spec
        scale, _ = self.quantizer.scale_and_zero_point()
        axis, size = axis_of(spec.granularity), block_size_of(spec.granularity)
        aligned = affine.align(scale, tuple(weight.shape), axis, size)
        result = torch.addcmul(weight.detach().float(), self.shift, aligned)
        if not spec.dtype.exact_sums or torch.is_grad_enabled():
            return result
        return torch.from_numpy(on_exact_sums(self.quantizer.encoding(), result.cpu().numpy())).to(result)


@dataclass
class BlockRun:
    """A block that is run by itself, and the quantizers that it reaches.

    `learned` replaces the quantizers of these sites, `importance` weighs the errors of each output (all alike where it
    is empty), and while `drop` is set so many elements of each activation are not quantized (QDrop, section 4).
    """

    sim: QuantSim
    module: nn.Module
    importance: Sequence[Tensor] = ()
    learned: dict[str, _LearnedWeight] = field(default_factory=dict)
    visited: dict[str, Quantizer] = field(default_factory=dict)
    drop: tuple[float, torch.Generator] | None = None

    def run_quantized(self, arguments: Arguments) -> list[Tensor]:
        """Return the block's outputs as it is now."""
        with self.sim.runtime.in_phase("visit", self._visit, quantizes=True):
            return floats_of(self.module(*arguments.args, **arguments.kwargs))

    def run_float(self, arguments: Arguments) -> list[Tensor]:
        """Return the block's outputs in float."""
        with self.sim.float_phase():
            return floats_of(self.module(*arguments.args, **arguments.kwargs))

    def error(self, pieces: Sequence[Piece]) -> float:
        """Return the output's squared error, relative to the float output's energy."""
        squared_error = energy = 0.0
        with torch.no_grad():
            for piece in pieces:
                ran = self.run_quantized(piece.quantized_arguments())
                found, wanted = ([y.double() for y in ys] for ys in (ran, piece.outputs()))
                squared_error += float(self.squares([y - t for y, t in zip(found, wanted, strict=True)]))
                energy += float(self.squares(wanted))
        return squared_error / energy if energy else 0.0

    def squares(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of outputs or their errors, each by its importance."""
        squares = [y.square() for y in outputs]
        if self.importance:
            squares = [y * by.to(y.dtype) for y, by in zip(squares, self.importance, strict=True)]
        return torch.stack([y.sum() for y in squares]).sum()

    def _visit(self, site: str, x: Tensor) -> Tensor:
        learned = self.learned.get(site)
        if learned is not None:
            return learned(x)
        result = self.sim.runtime.quantize(site, x)
        quantizer = self.sim.runtime.quantizers[site]
        if quantizer is not None:
            self.visited[site] = quantizer
        if self.drop is None or quantizer is None or quantizer.decision.kind in ("weight", "bias"):
            return result
        share, generator = self.drop
        drawn = torch.rand(x.shape, generator=generator, device=generator.device).to(x.device)
        return torch.where(drawn < share, x, result)


def pieces_of(run: BlockRun, calls: Sequence[ModuleCall]) -> list[Piece]:
    """Return the calls as pieces, which can be split by samples if the block by itself shows that they can.

    The block has its float weights.
    """
    split = arguments_with_samples(calls[0])
    halved = all_samples(calls[0], split)
    if halved.rows is not None and _repeats_result(run, halved.first(max(halved.size // 2, 1))):
        return [all_samples(call, split) for call in calls]
    if _repeats_result(run, all_samples(calls[0], frozenset())):
        return [all_samples(call, frozenset()) for call in calls]
    raise ModelError("run by itself it does not give what it gave in the model, as with a cache (use_cache=False)")


def _repeats_result(run: BlockRun, piece: Piece) -> bool:
    """Return whether the block repeats its outputs in the model, twice (it may count its calls)."""
    wanted = piece.outputs()
    for _ in range(2):
        try:
            with torch.no_grad():
                outputs = run.run_float(piece.float_arguments())
        except (RuntimeError, ValueError, IndexError):
            return False
        if [y.shape for y in outputs] != [y.shape for y in wanted]:
            return False
        pairs = zip(outputs, wanted, strict=True)
        if any(float((y - t).double().norm()) > REPEAT_TOLERANCE * float(t.double().norm()) for y, t in pairs):
            return False
    return True


def learnable_sites(run: BlockRun, pieces: Sequence[Piece], options: BlockTuningOptions) -> list[str]:
    """Return the sites of a block whose rounding or scale can be learned without changing other blocks.

    They are in the order in which the block reaches them.
    """
    with torch.no_grad():
        run.run_quantized(pieces[0].first(1).quantized_arguments())
    weights, scales = _learnable(run, options)
    return list(dict.fromkeys(quantizer.site for quantizer in (*weights, *scales)))


def tune_block(
    run: BlockRun, pieces: Sequence[Piece], options: BlockTuningOptions, generator: torch.Generator
) -> TuningResult:
    """Learn the rounding and scales of a block; nothing is written."""
    learn, judge = split_held_back(pieces, generator)
    before = run.error(judge)
    weights, scales = _learnable(run, options)
    if not weights and not scales:
        return TuningResult(
            (), before, before, "nothing in it can be learned: float, frozen, or shared with other modules"
        )
    shared = learn is judge
    model = run.sim.model
    run.learned = {q.site: _LearnedWeight(q, stored_tensor(model, q.site).detach()) for q in weights}
    others = _other_parameters(run) if options.everything else {}
    try:
        with _learned_scales(scales), _trainable_copies(others) as copies:
            _descend(run, learn, scales, copies, options, generator)
            after = run.error(judge)
            changes = _changes(run, scales, rounded=not options.everything) if after < before else []
            stored = {site: parameter.detach() for site, parameter in zip(others, copies, strict=True)}
    finally:
        run.learned = {}
    if not changes:
        return TuningResult((), before, before, "kept as it was: the error on held-back samples did not fall")
    return TuningResult(changes, before, after, "judged by the one sample it was tuned on" if shared else "", stored)


def _descend(
    run: BlockRun,
    pieces: Sequence[Piece],
    scales: Sequence[Quantizer],
    others: Sequence[nn.Parameter],
    options: BlockTuningOptions,
    generator: torch.Generator,
) -> None:
    shifts = [weight.shift for weight in run.learned.values()]
    groups: list[dict[str, Any]] = [{"params": shifts, "lr": options.lr}] if shifts else []
    for other in others:
        size = float(other.detach().float().square().mean().sqrt())
        groups.append({"params": [other], "lr": OTHERS * options.lr * (size or 1.0)})
    for quantizer in scales:
        # so a step moves the ends of the grid a few times as far as a single weight
        factor = quantizer.owner._parameters[quantizer.log_scale_name]
        groups.append({"params": [factor], "lr": 8 * options.lr / 2**quantizer.spec.dtype.bits})
    parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
    # the gradients of a relative error, spread over all weights, are far below the usual epsilon
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), eps=1e-12)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.iterations)
    batches = _batches(pieces, options.batch_size, generator)
    for _ in range(options.iterations):
        loss, gradients = _gradients(run, next(batches), parameters, options, generator)
        log("tune_blocks/loss", loss)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for shift in [] if options.everything else shifts:
                shift.clamp_(-MAX_SHIFT, MAX_SHIFT)


def _gradients(
    run: BlockRun,
    batch: Sequence[Piece],
    parameters: Sequence[Tensor],
    options: BlockTuningOptions,
    generator: torch.Generator,
) -> tuple[float, list[Tensor]]:
    """Return the relative error on a batch and its gradients; one piece is in memory at a time."""
    wanted = [piece.outputs() for piece in batch]
    energy = sum(float(run.squares([y.float() for y in outputs])) for outputs in wanted) or 1.0
    sums, loss = [torch.zeros_like(parameter) for parameter in parameters], 0.0
    for piece, outputs in zip(batch, wanted, strict=True):
        with torch.enable_grad():
            run.drop = (options.drop, generator) if options.drop else None
            simulated = run.run_quantized(piece.quantized_arguments(drop=options.drop, generator=generator))
            run.drop = None
            missed = [y.float() - t.float() for y, t in zip(simulated, outputs, strict=True)]
            error = run.squares(missed) / energy
            # not backward(), which would write the gradients of the caller's parameters
            parts = torch.autograd.grad(error, parameters, allow_unused=True)
        loss += float(error.detach())
        for total, part in zip(sums, parts, strict=True):
            if part is not None:
                total += part
    return loss, sums


def _batches(pieces: Sequence[Piece], size: int, generator: torch.Generator) -> Iterator[list[Piece]]:
    """Yield batches of at least `size` samples in random order; only calls that stay whole make them larger."""
    waiting: list[Piece] = []
    while True:
        batch: list[Piece] = []
        while (short := size - sum(piece.size for piece in batch)) > 0:
            if not waiting:
                chunks = [chunk for piece in pieces for chunk in piece.chunks(size, generator)]
                order = torch.randperm(len(chunks), generator=generator, device=generator.device)
                waiting = [chunks[i] for i in order.tolist()]
            batch.append(waiting.pop().first(short))
        yield batch


def _changes(run: BlockRun, scales: Sequence[Quantizer], *, rounded: bool) -> list[SiteChange]:
    changes = {quantizer.site: SiteChange(quantizer.site, quantizer.encoding()) for quantizer in scales}
    with torch.no_grad():
        for site, change in changes.items():
            if change.encoding.dtype.exact_sums and site not in run.learned:
                stored = stored_tensor(run.sim.model, site).detach().float().cpu().numpy()
                changes[site] = replace(change, encoding=with_exact_sums(change.encoding, stored))
        for site, learned in run.learned.items():
            weight = stored_tensor(run.sim.model, site).detach()
            value = learned(weight) if rounded else learned.moved(weight)
            changes[site] = SiteChange(site, learned.quantizer.encoding(), value, rounded)
    return list(changes.values())


def _other_parameters(run: BlockRun) -> dict[str, tuple[nn.Module, str]]:
    """Return the block's own parameters that have no learned rounding: biases, the gains of norms.

    Left out are weights on a grid, what is frozen, what other modules hold too, and recurrent layers.
    """
    modules, sim = dict(run.sim.model.named_modules()), run.sim
    readers = Counter(id(t) for m in modules.values() for t in m._parameters.values())
    paths = {id(module): path for path, module in modules.items()}
    on_grids = [site for site, d in sim.plan.decisions.items() if d.kind == "weight" and d.quantized]
    held = [*on_grids, *sim.frozen_values]
    found = {}
    for module in run.module.modules():
        for name, parameter in module._parameters.items():
            site = f"{paths[id(module)] or 'self'}:{name}"
            if parameter is None or not parameter.is_floating_point() or isinstance(module, nn.RNNBase):
                continue
            if readers[id(parameter)] == 1 and not any(other.startswith(site) for other in held):
                found[site] = module, name
    return found


def split_parameters(run: BlockRun, flat: Tensor) -> dict[str, Tensor]:
    """Return the values of a block's parameters without learned rounding, by site, from all of them in a row."""
    found = {site: module._parameters[name] for site, (module, name) in _other_parameters(run).items()}
    shapes = {site: parameter.shape for site, parameter in found.items() if parameter is not None}
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {site: part.reshape(shape) for (site, shape), part in zip(shapes.items(), parts, strict=True)}


@contextmanager
def _trainable_copies(parameters: Mapping[str, tuple[nn.Module, str]]) -> Iterator[list[nn.Parameter]]:
    """Put copies in the place of parameters inside the block, which can be trained without writing the model's own."""
    before = [(module, name, module._parameters[name]) for module, name in parameters.values()]
    copies = [nn.Parameter(parameter.detach().clone()) for _, _, parameter in before if parameter is not None]
    try:
        for (module, name, _), copy in zip(before, copies, strict=True):
            module._parameters[name] = copy
        yield copies
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


def _learnable(run: BlockRun, options: BlockTuningOptions) -> tuple[list[Quantizer], list[Quantizer]]:
    """Return the block's quantizers whose rounding, and those whose scales, can be learned without changing others."""
    modules = dict(run.sim.model.named_modules())
    readers = Counter(id(t) for m in modules.values() for t in {**m._parameters, **m._buffers}.values())
    sharing: dict[str, set[str]] = {}
    for site, decision in run.sim.plan.decisions.items():
        sharing.setdefault(decision.encoding_site, set()).add(site)
    rounded, scaled = [], []
    for site, quantizer in run.visited.items():
        decision = quantizer.decision
        if not quantizer.owns_encoding or quantizer.frozen or not sharing[site] <= run.visited.keys():
            continue
        stored = decision.kind == "weight"
        if stored and (find_stored(run.sim.model, site) is None or _is_shared(site, modules, readers)):
            continue
        if stored and options.rounding and _can_learn_rounding(run.sim.model, quantizer):
            rounded.append(quantizer)
        if options.scales and quantizer.scales_are_fine:
            scaled.append(quantizer)
    return rounded, scaled


def _can_learn_rounding(model: nn.Module, quantizer: Quantizer) -> bool:
    spec, stored = quantizer.spec, stored_tensor(model, quantizer.site)
    return spec.dtype.is_integer and not reason_codes_get_lost(spec, dtype_name(stored.dtype))


def _is_shared(site: str, modules: dict[str, nn.Module], readers: Counter[int]) -> bool:
    """Return whether another module holds a tensor in which the site is stored, in parts or whole."""
    owner, port = owner_of(site), port_of(site)
    module = modules["" if owner == "self" else owner]
    own = {**module._parameters, **module._buffers}.items()
    held = [t for name, t in own if t is not None and (name.startswith(port) or port.startswith(name))]
    return any(readers[id(t)] > 1 for t in held)


@contextmanager
def _learned_scales(quantizers: Sequence[Quantizer]) -> Iterator[None]:
    """Give each quantizer's scale a factor that is a parameter, inside the block; then restore the scales."""
    factors = [(quantizer.owner._parameters, quantizer.log_scale_name) for quantizer in quantizers]
    try:
        for quantizer in quantizers:
            scale, _ = quantizer.scale_and_zero_point()
            factor = nn.Parameter(torch.zeros_like(scale, dtype=torch.float32))
            quantizer.owner.register_parameter(quantizer.log_scale_name, factor)
        yield
    finally:
        for parameters, name in factors:
            parameters.pop(name, None)
