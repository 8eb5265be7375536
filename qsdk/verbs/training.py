"""What serves training: losses of distillation, and schedules."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsdk.core.errors import ConfigError, DataError, ModelError
from qsdk.core.sims.state import matched_owners, matches_site
from qsdk.core.sims.stateful import require_sim
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed
from torch_bridge.torch_values.pytree import floats_of
from torch_bridge.training.training import ScheduleState, eval_mode

SiteLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Distilled:
    """The result of `distill_loss`.

    Attributes:
        loss: the sum of its parts, to call `backward` on.
        outputs: of the student's forward pass, for a loss on labels.
        logits: the part of the loss from the outputs; None without it.
        sites: the part of the loss from each site, before `site_weight`.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(model, x), [x], progress=False)
        >>> found = qsdk.distill_loss(sim, model, x)
        >>> found.outputs.shape, bool(found.loss == found.logits)
        (torch.Size([8, 2]), True)
    """

    loss: Tensor
    outputs: Any
    logits: Tensor | None
    sites: Mapping[str, Tensor]


def distill_loss(
    sim: QuantSim,
    teacher: nn.Module | QuantSim,
    batch: Any,
    *,
    temperature: float | None = 1.0,
    logits: Callable[[Any], Tensor] | None = None,
    sites: str | tuple[str, ...] = (),
    site_loss: Literal["mse", "cosine"] | SiteLoss = "mse",
    site_weight: float = 1.0,
    forward: Forward | None = None,
) -> Distilled:
    """Run student and teacher on a batch and return how far the student is from the teacher.

    The outputs count by the KL divergence of their softmax over the last axis at a temperature, times its square
    (Hinton et al. 2015, section 2), averaged over all other axes; sites by `site_loss`, averaged over them (Romero et
    al. 2015, FitNets). Gradients flow to the student alone; the teacher runs in eval mode.

    Args:
        sim: the student; its model is run as it is, in train mode inside `sim.training()`.
        teacher: the float model, or any other that takes the same batch; for `sites`, a sim with the same sites, whose
            float model is run: `copy.deepcopy(sim)` before training.
        batch: as for `calibrate`.
        temperature: of the softmax; None leaves the outputs out.
        logits: returns the logits [..., classes] from the outputs of either model; None where the outputs are one
            tensor, or have one of the name `logits`.
        sites: patterns of owners (`layer*`) or of sites (`layer2/add*:output`) of activations.
        site_loss: of the student's quantized values and the teacher's: `mse` relative to the teacher's mean square,
            `cosine` (1 minus the similarity along the last axis), or a function of both such as `F.l1_loss`.
        site_weight: factor of the mean over sites.
        forward: `(model, batch)`, to call the models yourself. The student is passed as `sim.model`; to call a wrapper
            of it instead: `lambda m, b: ddp(b) if m is sim.model else m(b)`.

    Raises:
        ConfigError: an option out of its bounds, nothing to compare, or patterns that match no activation.
        ModelError: outputs without logits, a teacher without the sites, or a site that its forward pass did not reach.
        DataError: data the models do not take, or outputs of another shape.

    Examples:
        >>> import torch, qsdk
        >>> net, x = torch.nn.Linear(4, 3), torch.randn(8, 4)
        >>> sim = qsdk.quantize(net, x, qsdk.w8a8())
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> with sim.training():
        ...     found = qsdk.distill_loss(sim, net, x, temperature=4.0)
        ...     found.loss.backward()
    """
    wanted = _matched_activations(sim, teacher, (sites,) if isinstance(sites, str) else tuple(sites))
    _require_something(temperature, wanted)
    compare = _site_loss(site_loss)
    teacher_outputs, teacher_values = _teacher(sim, teacher, batch, wanted, forward)
    outputs, values = _student(sim, batch, wanted, forward)
    parts = {site: compare(x, teacher_values[site].to(x)) for site, x in values.items()}
    losses = [] if not parts else [site_weight * torch.stack(list(parts.values())).mean()]
    of_logits = None
    if temperature is not None:
        choose = logits or _logits
        of_logits = _divergence(choose(outputs), choose(teacher_outputs), temperature)
        losses.append(of_logits)
    return Distilled(torch.stack(losses).sum(), outputs, of_logits, parts)


def _matched_activations(sim: QuantSim, teacher: nn.Module | QuantSim, patterns: tuple[str, ...]) -> frozenset[str]:
    """Return the activations that the patterns match."""
    require_sim(sim)
    if not isinstance(sim, QuantSim):
        raise ModelError("distill_loss needs gradients, which an ONNX model has not: quantize the nn.Module")
    computed = [d.site for d in sim.plan.decisions.values() if d.kind in ("activation", "output")]
    sites: set[str] = set()
    for pattern in patterns:
        matched = {site for site in computed if matches_site(pattern, site)}
        if not matched:
            raise ConfigError(f"sites={pattern!r} matches no activation; sim.coverage() lists them")
        sites |= matched
    if sites and not isinstance(teacher, QuantSim):
        raise ModelError(
            f"a plain {type(teacher).__name__} does not know the sites of a sim; for sites= the teacher is a sim whose "
            "float model is run: teacher = copy.deepcopy(sim), before training"
        )
    if isinstance(teacher, QuantSim) and (missing := sorted(sites - teacher.plan.decisions.keys())):
        raise ModelError(f"the teacher has no site {', '.join(missing[:5])}; give the sim of the same network")
    return frozenset(sites)


def _require_something(temperature: float | None, wanted: frozenset[str]) -> None:
    if temperature is None and not wanted:
        raise ConfigError("there is nothing to distill: give a temperature for the outputs, or sites=")
    if temperature is not None and not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be positive; None leaves the outputs out")


def _site_loss(given: str | SiteLoss) -> SiteLoss:
    if callable(given):
        return given
    if given not in ("mse", "cosine"):
        raise ConfigError(f"site_loss={given!r} is unknown; choose mse or cosine, or give a function of two tensors")
    return _relative_mse if given == "mse" else _cosine_distance


def _relative_mse(x: Tensor, wanted: Tensor) -> Tensor:
    x, wanted = x.float(), wanted.float()
    return (x - wanted).square().mean() / wanted.square().mean().clamp(min=torch.finfo(torch.float32).tiny)


def _cosine_distance(x: Tensor, wanted: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(x.float(), wanted.float(), dim=-1).mean()


def _divergence(logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    if logits.shape != wanted.shape:
        raise DataError(
            f"the student's logits have the shape {tuple(logits.shape)}, the teacher's {tuple(wanted.shape)}"
        )
    student, teacher = (F.log_softmax(x.float() / temperature, -1) for x in (logits, wanted.to(logits.device)))
    pointwise = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return pointwise.mean() * temperature**2


def _logits(outputs: Any) -> Tensor:
    """Return the logits among the outputs of a model."""
    if isinstance(outputs, Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(named, Tensor):
        return named
    floats = floats_of(outputs)
    if len(floats) == 1:
        return floats[0]
    raise ModelError(
        f"the model gives {len(floats)} tensors; say which are the logits: logits=lambda outputs: outputs[0], or "
        "temperature=None for sites alone"
    )


def _teacher(
    sim: QuantSim, teacher: nn.Module | QuantSim, batch: Any, wanted: frozenset[str], forward: Forward | None
) -> tuple[Any, Mapping[str, Tensor]]:
    seen: dict[str, Tensor] = {}
    model = teacher.model if isinstance(teacher, QuantSim) else teacher
    with torch.no_grad(), eval_mode(model):
        if not isinstance(teacher, QuantSim):
            return feed(model, batch, sim.example, forward, "the batch"), seen

        keep = _keeper(teacher, wanted, seen)

        def visit(site: str, x: Tensor) -> Tensor:
            keep(site, x)
            return x

        with teacher.runtime.in_phase("visit", visit):
            outputs = feed(model, batch, sim.example, forward, "the batch")
    _require_reached(wanted, seen, "the teacher")
    return outputs, seen


def _student(
    sim: QuantSim, batch: Any, wanted: frozenset[str], forward: Forward | None
) -> tuple[Any, Mapping[str, Tensor]]:
    seen: dict[str, Tensor] = {}
    with sim.runtime.observing_sites(_keeper(sim, wanted, seen)) if wanted else nullcontext():
        outputs = feed(sim.model, batch, sim.example, forward, "the batch")
    _require_reached(wanted, seen, "the student")
    lost = sorted(site for site, x in seen.items() if not x.requires_grad)
    if lost and torch.is_grad_enabled():
        raise ModelError(
            f"what {', '.join(lost[:5])} shows has no gradient; in a part that is checkpointed, use_reentrant=False "
            "keeps it"
        )
    return outputs, seen


def _keeper(sim: QuantSim, wanted: frozenset[str], seen: dict[str, Tensor]) -> Callable[[str, Tensor], None]:
    overwritten = sim.runtime.written.overwritten

    def keep(site: str, x: Tensor) -> None:
        if site in wanted:
            seen[site] = x.clone() if site in overwritten else x

    return keep


def _require_reached(wanted: frozenset[str], seen: Mapping[str, Tensor], who: str) -> None:
    missing = sorted(wanted - seen.keys())
    if missing:
        raise ModelError(f"{who} did not reach {', '.join(missing[:5])} with this batch; leave them out of sites=")


Schedule = Callable[[QuantSim, int], None]


def freeze_ranges(after: int, match: str = "*", *, until: int | None = None) -> Schedule:
    """Return a schedule that holds ranges from some optimizer step on: they are not learned.

    It holds them inside the training block only; `sim.freeze` outside of it does so for good.

    Args:
        after: number of optimizer steps.
        match: as in `sim.freeze`: a pattern of owners or sites, `weights` or `activations`.
        until: the step after which they move again; None for never.

    Raises:
        ConfigError: an empty span; when called, nothing matches, or no training block.

    Examples:
        >>> import torch, qsdk
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x := torch.randn(64, 8))
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> with sim.training(learn_scales=True, schedules=[qsdk.train.freeze_ranges(after=100)]) as model:
        ...     _ = model(x)  # the loop of your training
    """
    if after < 0 or (until is not None and until <= after):
        raise ConfigError(f"freeze_ranges({after}, until={until}) holds nothing; give steps from 0, in order")
    return _FreezeRanges(after, match, until)


@dataclass(frozen=True, eq=False)
class _FreezeRanges:
    after: int
    match: str
    until: int | None

    def __call__(self, sim: QuantSim, step: int) -> None:
        require_sim(sim)
        state = sim.runtime.schedule_state if isinstance(sim, QuantSim) else None
        if not isinstance(state, ScheduleState):
            raise ConfigError(
                "a schedule changes a sim of an nn.Module while it is trained; use it inside sim.training()"
            )
        holding = step >= self.after and (self.until is None or step < self.until)
        if holding == (self in state.held) and step > 0:
            return
        matched = matched_owners(sim.plan, self.match, "freeze_ranges")  # also at step 0, for its errors
        if holding:
            state.held[self] = frozenset(matched)
        else:
            state.held.pop(self, None)
