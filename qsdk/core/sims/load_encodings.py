"""Loading encodings into a sim: every entry is held against the plan, and all that differs is listed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches

from qsdk.core.encodings.qsdk_format import StoredEncodings
from qsdk.core.errors import ConfigError, FileFormatError
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Granularity, PerBlock, PerChannel, PerTensor, Spec, axis_of, block_size_of
from qsdk.core.planning.plan import Decision, Plan, casts_of
from qsdk.core.report import Report
from qsdk.core.sims.state import SimState, encoding_of, matched_homes, owns_encoding

_STATES = ("missing", "unexpected", "different")


@dataclass(frozen=True)
class Finding:
    """What became of one site: `loaded`, or `missing`, `unexpected` or `different` and why."""

    site: str
    state: str
    detail: str = ""


def with_loaded(
    state: SimState, file: StoredEncodings, where: str, *, freeze: bool | str, strict: bool
) -> tuple[SimState, Report]:
    """Put the encodings of a file in place of the sim's own.

    Args:
        state: of the sim.
        file: what it says.
        where: its name, for messages.
        freeze: True freezes all that is loaded; `weights`, `activations`, a pattern or a site freeze those; False
            leaves the flags of the file.
        strict: refuse a file that does not fit the plan site by site; otherwise load what fits and leave the rest as
            it is: no quantizer is ever disabled.

    Returns:
        The new state; rows `site`, `state` (loaded, missing, unexpected or different) and `detail`.

    Raises:
        FileFormatError: with `strict`, lists every missing, unexpected and different name.
        ConfigError: `freeze` matches nothing.
    """
    chosen = _frozen_sites(state.plan, freeze)
    own, findings = dict(state.own), []
    for site, decision in state.plan.decisions.items():
        if not owns_encoding(decision):
            continue
        finding, encoding = _checked(state, decision, file)
        findings.append(finding)
        if encoding is not None:
            own[site] = replace(encoding, frozen=True) if site in chosen else encoding
    findings += _shared(state.plan, file, own, {f.site for f in findings if f.state == "loaded"})
    findings += _casts(state.plan, file)
    findings += _unexpected(state.plan, file)
    if strict and any(finding.state in _STATES for finding in findings):
        raise FileFormatError(_listed(findings, where))
    rows = [vars(finding) for finding in findings]
    counts = {name: sum(f.state == name for f in findings) for name in ("loaded", *_STATES)}
    return replace(state, own=own), Report("Loaded encodings", rows, {"file": where, **counts})


def _frozen_sites(plan: Plan, freeze: bool | str) -> set[str]:
    if isinstance(freeze, str):
        return set(matched_homes(plan, freeze, "freeze"))
    if not isinstance(freeze, bool):
        raise ConfigError(f'freeze={freeze!r} is unknown; choose False, True, "weights", "activations" or a pattern')
    return {site for site, decision in plan.decisions.items() if freeze and owns_encoding(decision)}


def _checked(state: SimState, decision: Decision, file: StoredEncodings) -> tuple[Finding, Encoding | None]:
    site, casts = decision.site, file.casts or {}
    given = file.encodings.get(site)
    if given is None and site in casts:
        assert decision.spec is not None
        return Finding(site, "different", f"{casts[site]} in the file, {_wanted(decision.spec)} in the plan"), None
    if given is None and site in file.misfits:
        return Finding(site, "different", file.misfits[site]), None
    if given is None:
        return Finding(site, "missing"), None
    fitting, why = _fitted(decision, given)
    if fitting is None:
        return Finding(site, "different", why), None
    present = state.own.get(site)
    stays = present is not None and present.frozen
    if stays and present != fitting:
        return Finding(site, "different", "frozen in the sim with another encoding; call sim.unfreeze first"), None
    return Finding(site, "loaded"), replace(fitting, frozen=fitting.frozen or stays)


def _fitted(decision: Decision, given: Encoding) -> tuple[Encoding | None, str]:
    """The encoding in the plan's own layout, or why it does not fit."""
    spec = decision.spec
    assert spec is not None
    rank = len(decision.shape) if decision.shape is not None else None
    if given.dtype != spec.dtype or not _same_layout(spec, given, rank):
        return None, f"{_text(given)} in the file, {_wanted(spec)} in the plan"
    if spec.symmetric and spec.dtype.signed and not given.symmetric:
        return None, "it has zero points, and the plan wants it symmetric"
    axis, block = axis_of(spec.granularity), block_size_of(spec.granularity)
    # one scale is one scale, whether the file calls it a tensor's or a channel's
    single = given.scale.size == 1 and block is None
    fitting = Encoding(
        spec.dtype,
        given.scale.reshape(1) if single else given.scale,
        given.zero_point.reshape(1) if single else given.zero_point,
        axis,
        block,
        given.frozen,
    )
    if decision.shape is not None and axis is not None and all(isinstance(n, int) for n in decision.shape):
        shape = tuple(n for n in decision.shape if isinstance(n, int))
        try:
            affine.align(fitting.scale, shape, axis, block)
        except ValueError as error:
            return None, str(error)
    return fitting, ""


def _same_layout(spec: Spec, given: Encoding, rank: int | None) -> bool:
    axis, block = axis_of(spec.granularity), block_size_of(spec.granularity)
    if given.scale.size == 1 and given.block_size is None and block is None:
        return True
    if (axis is None) != (given.axis is None) or block != given.block_size:
        return False
    if axis is None or given.axis is None or rank is None:
        return axis == given.axis
    return axis % rank == given.axis % rank


def _text(encoding: Encoding) -> str:
    granularity: Granularity = PerTensor()
    if encoding.axis is not None:
        granularity = PerChannel(encoding.axis)
        if encoding.block_size is not None:
            granularity = PerBlock(encoding.axis, encoding.block_size)
    return f"{encoding.dtype} {granularity}"


def _wanted(spec: Spec) -> str:
    return f"{spec.dtype} {spec.granularity}" if spec.dtype.is_quantized else spec.dtype.name


def _shared(plan: Plan, file: StoredEncodings, own: dict[str, Encoding], loaded: set[str]) -> Iterator[Finding]:
    """Hold the entries of tied sites and derived biases against what they follow from."""
    for site, decision in plan.decisions.items():
        given = file.encodings.get(site)
        if given is None or not decision.quantized or owns_encoding(decision):
            continue
        parts = decision.bias_of or (decision.encoding_site,)
        if not loaded.issuperset(parts):
            continue  # those are listed
        fitting, why = _fitted(decision, given)
        if fitting is not None and fitting == encoding_of(decision, own):
            yield Finding(site, "loaded", f"follows from {' and '.join(parts)}")
        elif fitting is not None:
            yield Finding(site, "different", f"it follows from {' and '.join(parts)} here, whose entries say otherwise")
        else:
            yield Finding(site, "different", why)


def _casts(plan: Plan, file: StoredEncodings) -> Iterator[Finding]:
    for site, dtype in casts_of(plan).items():
        if site in file.encodings:
            yield Finding(site, "different", f"{_text(file.encodings[site])} in the file, {dtype} in the plan")
        elif file.casts is not None:
            yield _cast(site, dtype, file.casts.get(site))


def _cast(site: str, wanted: DType, given: DType | None) -> Finding:
    if given is None:
        return Finding(site, "missing")
    same = given == wanted
    return Finding(
        site, "loaded" if same else "different", "" if same else f"{given} in the file, {wanted} in the plan"
    )


def _unexpected(plan: Plan, file: StoredEncodings) -> Iterator[Finding]:
    known = list(plan.decisions)
    for name, why in file.misfits.items():
        decision = plan.decisions.get(name)
        if decision is None or decision.spec is None:
            yield Finding(name, "unexpected", why)
        elif not owns_encoding(decision):
            yield Finding(name, "different", why)
    for site in (*file.encodings, *(file.casts or ())):
        decision = plan.decisions.get(site)
        if decision is None:
            near = get_close_matches(site, known, n=2, cutoff=0.5)
            yield Finding(
                site, "unexpected", f"the nearest here: {', '.join(near)}" if near else "nothing here is like it"
            )
        elif decision.spec is None:
            yield Finding(site, "unexpected", f"float32 in the plan: {decision.reason}")
        elif decision.quantized and not owns_encoding(decision) and site in (file.casts or ()):
            yield Finding(
                site, "different", f"{(file.casts or {})[site]} in the file, {_wanted(decision.spec)} in the plan"
            )


def _listed(findings: Iterable[Finding], where: str) -> str:
    """One error for everything that does not fit."""
    groups: dict[str, list[Finding]] = {name: [] for name in _STATES}
    for finding in findings:
        if finding.state in groups:
            groups[finding.state].append(finding)
    titles = {"missing": "not in the file", "unexpected": "unexpected", "different": "different"}
    lines = []
    for name, found in groups.items():
        shown = ", ".join(f.site + (f" ({f.detail})" if f.detail else "") for f in found)
        lines += [f"  {len(found)} {titles[name]}: {shown}"] if found else []
    return (
        f"{where} does not fit the sim:\n"
        + "\n".join(lines)
        + "\nquantize with the config that the file was made with, "
        "or pass strict=False to load what fits and leave the rest as it is"
    )
