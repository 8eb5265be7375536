"""The tensors of a model that encodings files need to know, and which of them an entry of a file belongs to."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from qsdk.core.encodings.qsdk_format import StoredEncodings
from qsdk.core.errors import FileFormatError
from qsdk.core.graph.graph import Graph, Op
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerBlock, PerChannel
from qsdk.core.planning.from_encodings import bias_parts, misfit
from qsdk.core.planning.graph_matching import match_graphs
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Plan
from qsdk.core.planning.ties import JOINS, keeps_grid
from qsdk.core.site import owner_of


@dataclass(frozen=True)
class TensorFacts:
    """The facts about a tensor of a model.

    Attributes:
        site: its site, or the tensor's name where there is none.
        name: its name in the ONNX model; for a parameter of a module its path.
        stored: whether it is a parameter.
        shape: dimensions; a name or None where dynamic; None where even the rank is unknown.
        channel_axis: output channels, None where per channel has no meaning.
        block_axis: input channels, which blocks run along.
        wanted: its dtype in a plan, or None.
        readers: the modules that take it, as `read_by` names it.
    """

    site: str
    name: str
    stored: bool = False
    shape: tuple[int | str | None, ...] | None = None
    channel_axis: int | None = None
    block_axis: int | None = None
    wanted: DType | None = None
    readers: tuple[str, ...] = ()

    @property
    def whole_shape(self) -> tuple[int, ...] | None:
        """Return the shape, if no dimension is dynamic."""
        if self.shape is None or not all(isinstance(n, int) for n in self.shape):
            return None
        return tuple(n for n in self.shape if isinstance(n, int))


def tensor_facts(graph: Graph, plan: Plan | None = None) -> list[TensorFacts]:
    """Return the facts about the float tensors of a graph, those with a site first and in graph order.

    The axes and dtypes of a plan take precedence over those of the ops.
    """
    facts = _facts_by_id(graph, plan)
    sited = [facts[index] for index in graph.sites.values()]
    return sited + [result for index, result in facts.items() if graph.tensors[index].site is None]


def _facts_by_id(graph: Graph, plan: Plan | None) -> dict[int, TensorFacts]:
    axes, readers = _axes(graph), _readers(graph)
    result = {}
    for index, tensor in enumerate(graph.tensors):
        if tensor.site is None and not tensor.is_float:
            continue
        site = tensor.site or tensor.name
        decision = None if plan is None else plan.decisions.get(site)
        spec = None if decision is None else decision.spec
        channel, block = axes.get(index, (None, None))
        if spec is not None and isinstance(spec.granularity, PerChannel):
            channel = spec.granularity.axis
        if spec is not None and isinstance(spec.granularity, PerBlock):
            block = spec.granularity.axis
        wanted = None if spec is None else spec.dtype
        result[index] = TensorFacts(
            site, tensor.name, tensor.constant, tensor.shape, channel, block, wanted, tuple(readers.get(index, ()))
        )
    return result


def read_by(module: str, index: int | str) -> str:
    """Return the name of the tensor that is an argument of a module, for files that go by modules."""
    return f"{module} (input {index})"


def _readers(graph: Graph) -> dict[int, list[str]]:
    """Return, by computed tensor, the arguments of modules that it is: those of the first op of each."""
    result: dict[int, list[str]] = {}
    seen: set[str] = set()
    for op in graph.ops:
        roots = [None if index is None else graph.constant_root(index) for index in op.inputs]
        sites = [graph.tensors[index].site for index in (*roots, *op.outputs) if index is not None]
        owners = {owner_of(site) for site in sites if site is not None} - seen
        seen |= owners
        taken = [index for index, root in zip(op.inputs, roots, strict=True) if index is not None and root is None]
        for place, index in enumerate(index for index in taken if graph.tensors[index].is_float):
            result.setdefault(index, []).extend(read_by(owner, place) for owner in sorted(owners))
    return result


def _axes(graph: Graph) -> dict[int, tuple[int | None, int | None]]:
    """Return, by stored tensor, the axes of output and input channels in the first op that reads it."""
    result: dict[int, tuple[int | None, int | None]] = {}
    for index in range(len(graph.ops)):
        for operand in operands_of(graph, index):
            result.setdefault(operand.root, (operand.channel_axis, operand.input_axis))
    return result


def by_name(tensors: Iterable[TensorFacts]) -> dict[str, TensorFacts]:
    """Return the tensors by every name that an encodings file may use: name, site, `owner.weight`, or who reads it."""
    listed = list(tensors)
    result = {tensor.name: tensor for tensor in reversed(listed)}
    for tensor in listed:
        result.setdefault(tensor.site, tensor)
    for tensor in listed:
        if tensor.stored:
            result.setdefault(tensor.site.replace(":", "."), tensor)
        for reader in tensor.readers:
            result.setdefault(reader, tensor)
    return result


def counterparts(graph: Graph, plan: Plan | None, model: Graph) -> list[tuple[TensorFacts, TensorFacts]]:
    """Return pairs of the tensors of a graph and of another model that play the same part, by structure alone."""
    mine, theirs = _facts_by_id(graph, plan), _facts_by_id(model, None)
    matched = match_graphs(graph, model)
    return [
        (mine[index], theirs[matched[index]])
        for index in graph.sites.values()
        if index in matched and matched[index] in theirs
    ]


def in_layout_of(encoding: Encoding, source: TensorFacts, target: TensorFacts) -> Encoding:
    """Return the encoding of a matrix in the layout of its counterpart, which may be stored transposed."""
    pair = (source.channel_axis, target.channel_axis)
    if encoding.axis is None or None in pair or pair[0] == pair[1] or len(source.shape or ()) != 2:
        return encoding
    # of channels alone they are vectors, which a transpose leaves as they are
    return replace(encoding, scale=encoding.scale.T, zero_point=encoding.zero_point.T, axis=1 - encoding.axis % 2)


# --- entries of a file ------------------------------------------------------------------------------------------------


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
    """Match the entries of a file to the tensors that they name: by tensor, by site, or as a parameter's path."""
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
    """Match the entries of a file to the tensors of another model that play the same part as in `source`, its own.

    Entries that name no site of the file's own graph were added by hand, and are matched by name.
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
    """Raise FileFormatError for entries that do not fit their tensor and, with `strict`, for unmatched ones."""
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


# --- as an exporter that folds constants sees a graph -----------------------------------------------------------------


_SIZED = frozenset({"Expand", "Reshape", "Tile"})  # their sizes are constants in a file with fixed input sizes


def fold_constants(graph: Graph) -> Graph:
    """Return a graph in which sites that depend on stored tensors alone are stored themselves; ids and sites stay."""
    derived = {index for index, tensor in enumerate(graph.tensors) if tensor.constant}
    for op in graph.ops:
        read = _data(op)
        if read and derived.issuperset(read) and graph.output_set.isdisjoint(op.outputs):
            derived.update(op.outputs)
    stored = {index for index in derived if graph.tensors[index].constant or graph.tensors[index].site is not None}
    tensors = [replace(tensor, constant=index in stored) for index, tensor in enumerate(graph.tensors)]
    return replace(graph, tensors=tensors, ops=_live_ops(graph, stored))


def _data(op: Op) -> list[int]:
    return [tensor for tensor in op.inputs[: 1 if op.type in _SIZED else None] if tensor is not None]


def _live_ops(graph: Graph, stored: set[int]) -> list[Op]:
    """Return the ops that lead to an output, without those that compute stored tensors."""
    wanted, kept = set(graph.outputs), []
    for op in reversed(graph.ops):
        if wanted.difference(stored).intersection(op.outputs):
            wanted.update(tensor for tensor in op.inputs if tensor is not None)
            kept.append(op)
    return kept[::-1]
