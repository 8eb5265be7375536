"""Matching the entries of an encodings file to the tensors of a model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from qsdk.core.encodings.qsdk_format import StoredEncodings
from qsdk.core.encodings.tensor_facts import TensorFacts, by_name, counterparts, in_layout_of, tensor_facts
from qsdk.core.errors import FileFormatError
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.folded import fold_constants
from qsdk.core.planning.from_encodings import bias_parts, misfit
from qsdk.core.planning.ties import JOINS, keeps_grid

UNMATCHED, MISFIT = "unmatched", "misfit"


@dataclass(frozen=True)
class MatchedEncodings:
    """The entries of an encodings file, matched to a model.

    Attributes:
        encodings: by site of the model.
        casts: site -> float16 or bfloat16.
        names: site -> name in the file.
        problems: name in the file -> `unmatched` or `misfit`, and why.
        absorbed: name of a table in the file -> its encoding, and the site of its rows, which the model stores instead.
    """

    encodings: Mapping[str, Encoding]
    casts: Mapping[str, DType]
    names: Mapping[str, str]
    problems: Mapping[str, tuple[str, str]]
    absorbed: Mapping[str, tuple[Encoding, str]] = field(default_factory=dict)


def match_by_name(file: StoredEncodings, graph: Graph) -> MatchedEncodings:
    """Match the entries of a file to the tensors that they name: by tensor, by site, or as a parameter's path.

    Args:
        file: read with the facts of the graph, where its format needs them.
        graph: of the model.
    """
    known = by_name(facts for facts in tensor_facts(graph) if facts.site in graph.sites)
    targets = {name: (facts, None) for name in _names(file) if (facts := _named(file, name, known)) is not None}
    targets |= {name: (facts, None) for name, facts in _biases(file, graph, targets, known)}
    if any(name not in targets for name in _names(file)) and file.tensors:
        # numbered names (`add_1`) are not reliable if the exporter numbered other tensors
        targets = {name: pair for name, pair in targets.items() if pair[0].stored or pair[0].site == name}
    placed = _match(file, targets, known)
    file_misfits = {name: (MISFIT if name in known else UNMATCHED, why) for name, why in file.misfits.items()}
    return MatchedEncodings(placed.encodings, placed.casts, placed.names, {**placed.problems, **file_misfits})


def match_by_structure(file: StoredEncodings, source: Graph, graph: Graph) -> MatchedEncodings:
    """Match the entries of a file to the tensors of another model that play the same part.

    Entries that name no site of the file's own graph were added by hand, and are matched by name.

    Args:
        file: its encodings, by site.
        source: the graph of the model that the file was written for.
        graph: of the model.
    """
    placed = _match_counterparts(file, source, graph)
    if not placed.problems:
        return placed
    shorter = fold_constants(source)  # where sizes are fixed, an exporter folds what depends on no input
    absorbed = _absorbed(file, source, shorter)
    kept = {name: encoding for name, encoding in file.encodings.items() if name not in absorbed}
    again = _match_counterparts(replace(file, encodings=kept), shorter, graph)
    sites = {name: site for site, name in again.names.items()}
    moved_in = {name: (file.encodings[name], sites[rows]) for name, rows in absorbed.items() if rows in sites}
    return replace(again, absorbed=moved_in) if len(again.problems) < len(placed.problems) else placed


def _match_counterparts(file: StoredEncodings, source: Graph, graph: Graph) -> MatchedEncodings:
    pairs = counterparts(source, None, graph)
    known = by_name(facts for facts in tensor_facts(graph) if facts.site in graph.sites)
    targets: dict[str, tuple[TensorFacts, TensorFacts | None]] = {}
    for name in _names(file):
        if name not in source.sites and (named := _named(file, name, known)) is not None:
            targets[name] = named, None
    targets |= {mine.site: (theirs, mine) for mine, theirs in pairs if theirs.site in graph.sites}
    kept = {n: e for n, e in file.encodings.items() if n in targets or not _moves(file, source, n)}
    return _match(replace(file, encodings=kept), targets, known)


def _moves(file: StoredEncodings, graph: Graph, site: str) -> bool:
    """Return whether a site only passes on values under the encoding that they have, so that a model may lack it."""
    maker = graph.producer.get(graph.sites[site]) if site in graph.sites else None
    op = None if maker is None else graph.ops[maker]
    if op is None or op.type in JOINS or not keeps_grid(graph, op) or op.inputs[0] is None:
        return False
    return file.encodings.get(graph.tensors[op.inputs[0]].site or "") == file.encodings[site]


def _absorbed(file: StoredEncodings, source: Graph, shorter: Graph) -> dict[str, str]:
    """Return the tables that nothing reads any more because their rows are stored, and the sites of these."""
    result = {}
    for op in source.ops:
        table = op.inputs[0] if op.inputs else None
        if table is None or not source.tensors[table].constant or shorter.consumers[table]:
            continue
        name, rows = source.tensors[table].site or "", source.tensors[op.outputs[0]].site or ""
        taken = name in file.encodings and file.encodings[name].axis is None and rows in file.encodings
        if taken and keeps_grid(source, op) and shorter.tensors[op.outputs[0]].constant:
            result[name] = rows
    return result


def _named(file: StoredEncodings, name: str, known: Mapping[str, TensorFacts]) -> TensorFacts | None:
    """Return the tensor that an entry names; the weight of a layer with a folded BatchNorm has a new name."""
    # the tensor's name comes first: folding moves a site to another tensor
    tried = (file.tensors.get(name, name), name, f"{name.replace(':', '.')}_folded")
    return next((known[result] for result in tried if result in known), None)


def _biases(
    file: StoredEncodings,
    graph: Graph,
    targets: Mapping[str, tuple[TensorFacts, None]],
    known: Mapping[str, TensorFacts],
) -> Iterator[tuple[str, TensorFacts]]:
    """Yield the bias of a layer whose weight is matched: folding a BatchNorm creates one with a new name."""
    beside = {weight: bias for bias, (_, weight) in bias_parts(graph).items()}
    for name in _names(file):
        weight = targets.get(name.removesuffix(":bias") + ":weight")
        if name not in targets and name.endswith(":bias") and weight is not None and weight[0].site in beside:
            yield name, known[beside[weight[0].site]]


def _names(file: StoredEncodings) -> Iterator[str]:
    yield from file.encodings
    yield from file.casts or {}


def _match(
    file: StoredEncodings,
    targets: Mapping[str, tuple[TensorFacts, TensorFacts | None]],
    known: Mapping[str, TensorFacts],
) -> MatchedEncodings:
    encodings: dict[str, Encoding] = {}
    casts: dict[str, DType] = {}
    names: dict[str, str] = {}
    problems: dict[str, tuple[str, str]] = {}
    for name in _names(file):
        if name not in targets:
            near = get_close_matches(name, known, n=2, cutoff=0.5)
            problems[name] = (UNMATCHED, f"the nearest here: {', '.join(near)}" if near else "nothing here is like it")
            continue
        target, source = targets[name]
        site = target.site
        encoding, cast = file.encodings.get(name), (file.casts or {}).get(name)
        if encoding is not None and source is not None:
            encoding = in_layout_of(encoding, source, target)
        if site in names:
            if encodings.get(site) != encoding or casts.get(site) != cast:
                problems[name] = (MISFIT, f"{names[site]} is the same tensor here, and says otherwise")
            continue
        why = "" if encoding is None else misfit(encoding, target.shape)
        if why:
            problems[name] = (MISFIT, f"{why}, which is that of {site}")
            continue
        names[site] = name
        if encoding is not None:
            encodings[site] = encoding
        elif cast is not None:
            casts[site] = cast
    return MatchedEncodings(encodings, casts, names, problems)


def require_matched(placed: MatchedEncodings, where: str, *, strict: bool) -> None:
    """Raise an error for entries that do not fit their tensor and, with `strict`, for unmatched ones.

    Raises:
        FileFormatError: lists all of them.
    """
    kinds = (MISFIT, UNMATCHED) if strict else (MISFIT,)
    lines = [_listed(kind, placed.problems.items()) for kind in kinds]
    if not any(lines):
        return
    remedy = "correct the file"
    if lines[-1] and strict:
        remedy = (
            "give the float model that the encodings were found on (of a module: torch's export with optimize=True); "
            "or instead of a file without a graph (of AIMET, or earlier versions) the Q/DQ model that it belongs to, "
            "which is matched on structure; or pass strict=False to leave these out"
        )
    raise FileFormatError(f"{where} does not fit the model:\n" + "".join(lines) + remedy)


def _listed(kind: str, problems: Iterable[tuple[str, tuple[str, str]]]) -> str:
    result = [f"{name} ({why})" for name, (what, why) in problems if what == kind]
    title = "no tensor of that name" if kind == UNMATCHED else "not of the tensor's shape"
    return f"  {len(result)} {title}: {', '.join(result)}\n" if result else ""
