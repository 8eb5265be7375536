"""Loading encodings into a sim: every entry is compared with the plan, and all differences are listed."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from qsdk.core.encodings.qsdk_format import StoredEncodings
from qsdk.core.errors import ConfigError, FileFormatError
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec, axis_of, block_size_of
from qsdk.core.planning.from_encodings import granularity_of
from qsdk.core.planning.plan import Decision, Plan, casts_of
from qsdk.core.report import Report
from qsdk.core.sims.state import SimState, encoding_of, matched_owners, owns_encoding
from qsdk.core.site import owner_of


def as_in_file(plan: Plan, encodings: Mapping[str, Encoding], sites: Collection[str]) -> str:
    """Return the overrides that give weights at sites the form that a file has for them, "" where there is none."""
    weights = {site: decision for site, decision in plan.decisions.items() if decision.kind == "weight"}
    options = {
        site: _options(decision.spec, encodings[site])
        for site, decision in weights.items()
        if site in sites and site in encodings and decision.spec is not None
    }
    result: dict[str, None] = {}
    for site, wanted in options.items():
        op_type = weights[site].op_type
        alike = [other for other, decision in weights.items() if decision.op_type == op_type]
        whole = len(alike) > 1 and all(options.get(other) == wanted for other in alike)
        if wanted:
            pattern = f'"*", op_type="{op_type}"' if whole else f'"{owner_of(site)}"'
            result[f".override({pattern}, {wanted})"] = None
    return "".join(result)


def _options(spec: Spec, given: Encoding) -> str:
    result = []
    if given.dtype != spec.dtype:
        result.append(f'weight="{given.dtype}"')
    if given.block_size not in (None, block_size_of(spec.granularity)):
        result.append(f"block_size={given.block_size}")
    elif (given.axis is None) != (axis_of(spec.granularity) is None):
        result.append(f"per_channel={given.axis is not None}")
    if spec.symmetric and not given.symmetric:
        result.append("symmetric_weights=False")
    return ", ".join(result)


_STATES = ("missing", "unexpected", "different")


@dataclass(frozen=True)
class LoadResult:
    """The result for one site: `loaded`, or `missing`, `unexpected` or `different` and why."""

    site: str
    state: str
    detail: str = ""


def with_loaded(
    state: SimState,
    file: StoredEncodings,
    where: str,
    *,
    freeze: bool | str,
    strict: bool,
    elsewhere: Callable[[str], str] = lambda name: "",
) -> tuple[SimState, Report]:
    """Replace the sim's encodings by those of a file.

    Args:
        state: of the sim.
        file: its content.
        where: its name, for messages.
        freeze: True freezes all that is loaded; `weights`, `activations`, a pattern or a site freeze those; False
            leaves the flags of the file.
        strict: raise an error for a file that does not fit the plan site by site; otherwise load what fits and leave
            the rest unchanged: no quantizer is ever disabled.
        elsewhere: says of a site or tensor that has no encoding here where its values are quantized, and the remedy.

    Returns:
        The new state; rows `site`, `state` (loaded, missing, unexpected or different) and `detail`.
    """
    chosen = _frozen_sites(state.plan, freeze)
    own, results = dict(state.own), []
    for site, decision in state.plan.decisions.items():
        if not owns_encoding(decision):
            continue
        result, encoding = _check(state, decision, file)
        results.append(result)
        if encoding is not None:
            own[site] = replace(encoding, frozen=True) if site in chosen else encoding
    results += _shared(state.plan, file, own, {f.site for f in results if f.state == "loaded"})
    results += _casts(state.plan, file)
    results += _unexpected(state.plan, file, elsewhere)
    layouts = as_in_file(state.plan, file.encodings, [f.site for f in results if f.state == "different"])
    if strict and any(result.state in _STATES for result in results):
        raise FileFormatError(_mismatch_message(results, where, layouts))
    rows = [vars(result) for result in results]
    counts = {name: sum(f.state == name for f in results) for name in ("loaded", *_STATES)}
    remedy = {"config for the file": layouts} if layouts else {}
    return replace(state, own=own), Report("Loaded encodings", rows, {"file": where, **counts, **remedy})


def _frozen_sites(plan: Plan, freeze: bool | str) -> set[str]:
    if isinstance(freeze, str):
        return set(matched_owners(plan, freeze, "freeze"))
    if not isinstance(freeze, bool):
        raise ConfigError(f'freeze={freeze!r} is unknown; choose False, True, "weights", "activations" or a pattern')
    return {site for site, decision in plan.decisions.items() if freeze and owns_encoding(decision)}


def _check(state: SimState, decision: Decision, file: StoredEncodings) -> tuple[LoadResult, Encoding | None]:
    site, casts = decision.site, file.casts or {}
    given = file.encodings.get(site)
    if given is None and site in casts:
        assert decision.spec is not None
        return LoadResult(site, "different", f"{casts[site]} in the file, {_wanted(decision.spec)} in the plan"), None
    if given is None and site in file.misfits:
        return LoadResult(site, "different", file.misfits[site]), None
    if given is None:
        return LoadResult(site, "missing"), None
    fitting, why = _fit_to_plan(decision, given)
    if fitting is None:
        return LoadResult(site, "different", why), None
    present = state.own.get(site)
    stays = present is not None and present.frozen
    if stays and present != fitting:
        return LoadResult(site, "different", "frozen in the sim with another encoding; call sim.unfreeze first"), None
    return LoadResult(site, "loaded"), replace(fitting, frozen=fitting.frozen or stays)


def _fit_to_plan(decision: Decision, given: Encoding) -> tuple[Encoding | None, str]:
    """Return the encoding in the plan's own layout, or why it does not fit."""
    spec = decision.spec
    assert spec is not None
    rank = len(decision.shape) if decision.shape is not None else None
    if given.dtype != spec.dtype or not _same_layout(spec, given, rank, decision.shape):
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


def _same_layout(spec: Spec, given: Encoding, rank: int | None, shape: tuple[int | str | None, ...] | None) -> bool:
    axis, block = axis_of(spec.granularity), block_size_of(spec.granularity)
    if given.scale.size == 1 and given.block_size is None and block is None:
        return given.axis is not None or axis is None or shape is None or shape[axis] == 1
    if (axis is None) != (given.axis is None) or block != given.block_size:
        return False
    if axis is None or given.axis is None or rank is None:
        return axis == given.axis
    return axis % rank == given.axis % rank


def _text(encoding: Encoding) -> str:
    return f"{encoding.dtype} {granularity_of(encoding)}"


def _wanted(spec: Spec) -> str:
    return f"{spec.dtype} {spec.granularity}" if spec.dtype.is_quantized else spec.dtype.name


def _shared(plan: Plan, file: StoredEncodings, own: dict[str, Encoding], loaded: set[str]) -> Iterator[LoadResult]:
    """Compare the entries of tied sites and derived biases with the encodings that they follow from."""
    for site, decision in plan.decisions.items():
        given = file.encodings.get(site)
        if given is None or not decision.quantized or owns_encoding(decision):
            continue
        parts = decision.bias_of or (decision.encoding_site,)
        if not loaded.issuperset(parts):
            continue  # those are listed
        fitting, why = _fit_to_plan(decision, given)
        if fitting is not None and fitting == encoding_of(decision, own):
            yield LoadResult(site, "loaded", f"follows from {' and '.join(parts)}")
        elif fitting is not None:
            yield LoadResult(
                site, "different", f"it follows from {' and '.join(parts)} here, whose entries say otherwise"
            )
        else:
            yield LoadResult(site, "different", why)


def _casts(plan: Plan, file: StoredEncodings) -> Iterator[LoadResult]:
    for site, dtype in casts_of(plan).items():
        if site in file.encodings:
            yield LoadResult(site, "different", f"{_text(file.encodings[site])} in the file, {dtype} in the plan")
        elif file.casts is not None and site not in file.casts:
            yield LoadResult(site, "missing")
        elif file.casts is not None:
            same = file.casts[site] == dtype
            detail = "" if same else f"{file.casts[site]} in the file, {dtype} in the plan"
            yield LoadResult(site, "loaded" if same else "different", detail)


def where_quantized(name: str, graph: Graph, plan: Plan, gone: Mapping[str, str]) -> str:
    """Return where the values of a site or tensor are quantized that was folded or is inside a supergroup; else "".

    `gone`: site or tensor that folding has left out -> the site that it is in now.
    """
    decision, taken_up = plan.decisions.get(name), gone.get(name, "")
    if not taken_up and (decision is None or not decision.reason.startswith("inside ")):
        return ""
    tensor, carrier = graph.sites.get(taken_up or name), ""
    while tensor is not None and not carrier:
        found, readers = plan.decisions.get(graph.tensors[tensor].site or ""), graph.consumers[tensor]
        carrier = found.encoding_site if found is not None and found.quantized else ""
        tensor = graph.ops[readers[0]].outputs[0] if readers else None
    has_range = f"{carrier} has the range" if carrier else "nothing behind it is quantized"
    if not taken_up:
        return f"{has_range}; .override({owner_of(name)!r}, supergroup=False) gives it one of its own"
    here = taken_up if taken_up == carrier else f"{taken_up} ({has_range})"
    return f"folded into {here}; quantize(..., fold_batch_norm=False) keeps it apart"


def _unexpected(plan: Plan, file: StoredEncodings, elsewhere: Callable[[str], str]) -> Iterator[LoadResult]:
    known = list(plan.decisions)
    for name, why in file.misfits.items():
        decision = plan.decisions.get(name)
        if decision is None or decision.spec is None:
            yield LoadResult(name, "unexpected", elsewhere(name) or why)
        elif not owns_encoding(decision):
            yield LoadResult(name, "different", why)
    for site in (*file.encodings, *(file.casts or ())):
        decision = plan.decisions.get(site)
        if decision is None:
            near = get_close_matches(site, known, n=2, cutoff=0.5)
            like = f"the nearest here: {', '.join(near)}" if near else "nothing here is like it"
            yield LoadResult(site, "unexpected", elsewhere(site) or like)
        elif decision.spec is None:
            more = f"; {found}" if (found := elsewhere(site)) else ""
            yield LoadResult(site, "unexpected", f"float32 in the plan: {decision.reason}{more}")
        elif decision.quantized and not owns_encoding(decision) and site in (file.casts or ()):
            yield LoadResult(
                site, "different", f"{(file.casts or {})[site]} in the file, {_wanted(decision.spec)} in the plan"
            )


def _mismatch_message(results: Iterable[LoadResult], where: str, layouts: str) -> str:
    """Return one message for everything that does not fit."""
    groups: dict[str, list[LoadResult]] = {name: [] for name in _STATES}
    for result in results:
        if result.state in groups:
            groups[result.state].append(result)
    titles = {"missing": "not in the file", "unexpected": "unexpected", "different": "different"}
    lines = []
    for name, found in groups.items():
        shown = ", ".join(f.site + (f" ({f.detail})" if f.detail else "") for f in found)
        lines += [f"  {len(found)} {titles[name]}: {shown}"] if found else []
    ours = f", for its weights yours with {layouts}" if layouts else ""
    return (
        f"{where} does not fit the sim:\n"
        + "\n".join(lines)
        + f"\nquantize with the config that the file was made with{ours}, or pass strict=False to load what fits and "
        "leave the rest as it is"
    )
