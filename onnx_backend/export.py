"""Export a sim to an ONNX file with its encodings beside it; the model file is written last and commits the rest."""

import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Literal, TypeVar, cast, get_args

import numpy.typing as npt
import onnx
from onnx import ModelProto

from onnx_backend.lower import lower
from onnx_backend.passes.adapter_inputs import Matrices, adapter_files, take_adapters
from onnx_backend.passes.integer_cache import CACHE_KEY, take_integer_cache
from onnx_backend.passes.static_sizes import leave_out_empty_inputs, propagate_static_sizes, with_stored_codes
from onnx_backend.proto.companion import ENCODINGS_KEY, FILE_KEY, HASH_KEY, SUFFIX, encodings_path
from onnx_backend.proto.graph_queries import nodes_reaching
from onnx_backend.proto.inputs import noted_example, open_inputs, sizes_by_input, with_shapes
from onnx_backend.proto.model_io import drop_properties, set_properties
from onnx_backend.proto.nodes import copied, drop_unused_initializers, metadata, replace_nodes
from onnx_backend.proto.sizes import sizes
from onnx_backend.proto.weightless import checkable
from onnx_backend.proto.write_file import Check, write_files
from onnx_backend.qdq.fast_forms import with_pairs
from onnx_backend.qdq.narrow_regions import narrow_regions, sites_inside
from onnx_backend.qdq.older_opsets import LOWEST
from onnx_backend.qdq.read import mark_frozen, require_written
from onnx_backend.qdq.stored_weights import bytes_of_whole
from onnx_backend.runtimes.registry import runtime_named
from onnx_backend.runtimes.runtime import Prefer, Runtime
from onnx_backend.runtimes.validate import require_readable
from onnx_backend.workarounds.onnxruntime_barriers import needed_options
from qsdk.core.config.for_dialect import AnyDialect
from qsdk.core.encodings import qsdk_format
from qsdk.core.errors import CalibrationError, ConfigError, ExportError
from qsdk.core.lazy_arrays import LazyMapping
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerBlock
from qsdk.core.planning.plan import Plan, by_type, casts_of
from qsdk.core.precision.advice import wide_containers
from qsdk.core.report import Report

#: scales of a weight in blocks from which on they are written once
_MANY_SCALES = 256
_OPSETS = range(LOWEST, 26)
_IN_MEMORY = 1 << 24  # bytes of an encodings file
T = TypeVar("T")
#: changes a lowered model in place and returns facts for the report
Rewrite = Callable[[ModelProto], dict[str, Any]]
#: input name -> all of its sizes, or the name of an open axis -> its size
Shapes = Mapping[str, int | Sequence[int]]


def write_model(
    marked: ModelProto,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    path: str | os.PathLike[str],
    *,
    opset: int,
    dialect: AnyDialect | Runtime,
    provenance: Mapping[str, Any],
    tensors: Mapping[str, str] | None = None,
    external_data: bool | None = None,
    weights: Mapping[str, npt.NDArray[Any]] | None = None,
    in_use: Collection[Path] = (),
    shapes: Shapes | Mapping[str, Shapes] | None = None,
    integer_edges: Collection[str] | None = None,
    check: Check | None = None,
    prefer: Prefer = "speed",
    adapters: Mapping[str, Matrices] | None = None,
    rewrite: Rewrite | None = None,
) -> Report:
    """Lower a marked model, check it and write it with its encodings, holding one large weight at a time.

    Args:
        marked: the float model with marks.
        plan: the decision for each site.
        encodings: of every quantized site.
        path: of the model.
        opset: 13 to 25.
        dialect: see `qsdk.export`.
        provenance: the origin that the encodings file records.
        tensors: site -> name of its tensor in the float model, for the encodings file.
        external_data: see `qsdk.export`.
        weights: the values of stored tensors that the model has only stubs of, by name.
        in_use: data files that a sim still reads.
        shapes: see `qsdk.export`.
        integer_edges: the inputs and outputs with keys and values, which are to be integers; None for float ones.
        check: see `write_files`.
        prefer: see `qsdk.export`.
        adapters: name -> the matrices that are to be inputs, the ones that the model has first.
        rewrite: changes each lowered model in place, last, and returns facts for the report.
    """
    _require_choices(path, opset, prefer)
    runtime = runtime_named(dialect)
    require_written(plan.decisions.values())  # first: its remedy is for every dialect
    if runtime.refuse is not None:
        runtime.refuse(encodings)
    qdq = lower(marked, plan, encodings, opset=opset, dialect=dialect, weights=weights, prefer=prefer)
    parts = _parts(path, shapes)
    models = {Path(path): qdq.model} if parts is None else {part: copied(qdq.model) for part in parts}
    wanted = [cast("Shapes | None", shapes)] if parts is None else [*parts.values()]
    forms = [_form(m, own, runtime, integer_edges, parts) for m, own in zip(models.values(), wanted, strict=True)]
    base = Path(path) if parts is None else Path(path).with_suffix(".shared")
    companion = encodings_path(path) if parts is None else base.with_name(f"{base.name}{SUFFIX}")
    shared = companion.name if parts else ""
    with SpooledTemporaryFile(max_size=_IN_MEMORY) as text:
        named_onnx = Path(path).suffix == ".onnx"  # so that the model is found from its encodings
        _embed_facts(
            [*models.values()], text, plan, encodings, provenance, tensors or {}, shared, named_onnx=named_onnx
        )
        for model, form in zip(models.values(), forms, strict=True):
            beside = adapter_files(take_adapters(model, adapters or {}))
            runtime.speed_up(model)  # its forms have no node for a site's facts
            form |= {} if rewrite is None else rewrite(model)
            _require_valid(model, form["fixed_shapes"])
        written = write_files(
            models,
            qdq.large,
            base=base,
            external_data=external_data,
            companions={companion: text, **{_beside(path, name): file for name, file in beside.items()}},
            in_use=in_use,
            check=check,
        )
    facts = {"paths": [str(name) for name in written], **_facts_of(forms, parts)}
    sizes = _size_facts(next(iter(models.values())), [name for name in written if name != companion], encodings)
    return _report(plan, qdq.rows, sizes, facts)


def _beside(path: str | os.PathLike[str], name: str) -> Path:
    return Path(path).with_suffix(f".{name}.onnx_adapter")


def _report(plan: Plan, rows: list[dict[str, Any]], sizes: Mapping[str, Any], facts: Mapping[str, Any]) -> Report:
    saved = {"zero_point_bytes_saved": sum(int(row["zero_point_bytes_saved"]) for row in rows)}
    return Report("Export", rows, {**sizes, **_types_of(plan, rows), **saved, **facts})


def _facts_of(forms: Sequence[Mapping[str, Any]], parts: Mapping[Path, Shapes] | None) -> dict[str, Any]:
    facts = {name: value for form in forms for name, value in form.items() if value}
    if parts is not None:
        facts["fixed_shapes"] = {part.name: form["fixed_shapes"] for part, form in zip(parts, forms, strict=True)}
    return facts


def _parts(path: str | os.PathLike[str], shapes: Shapes | Mapping[str, Shapes] | None) -> dict[Path, Shapes] | None:
    """Return the files that `shapes` asks for, such as `decoder.prefill.onnx`, with their sizes; None for one file."""
    named = {name: sizes for name, sizes in (shapes or {}).items() if isinstance(sizes, Mapping)}
    if not named:
        return None
    wrong = [name for name in shapes or {} if name not in named or not re.fullmatch(r"[\w-]+", name)]
    if wrong:
        raise ConfigError(
            f"shapes has files ({', '.join(named)}), and {wrong[0]!r} is none: give every file a name of letters and "
            "digits, and a mapping of its sizes"
        )
    whole = Path(path)
    return {whole.with_name(f"{whole.stem}.{name}{whole.suffix}"): sizes for name, sizes in named.items()}


def _form(
    model: ModelProto,
    shapes: Shapes | None,
    runtime: Runtime,
    integer_edges: Collection[str] | None,
    parts: Mapping[Path, Shapes] | None,
) -> dict[str, Any]:
    """Give a lowered model the sizes and the edges that are wanted, in place, and return facts for the report."""
    sizes = _fix_sizes(model, shapes, runtime, required=parts is not None or runtime.target.fixed_sizes)
    runtime.with_sizes(model)
    narrow_regions(model, {"float16", *runtime.pair_types})
    drop_properties(model, (CACHE_KEY, FILE_KEY))
    if integer_edges is not None:
        take_integer_cache(model, integer_edges)
    facts = {"fixed_shapes": sizes, "session_options": needed_options(model)}
    return {**require_readable(model, runtime), **facts, "cache": metadata(model).get(CACHE_KEY)}


def _types_of(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of the written sites by op type; nothing where there are none."""
    types = by_type([{"op_type": plan.decisions[row["site"]].op_type, "dtype": row["dtype"]} for row in rows])
    return {"by_type": types} if types else {}


def _size_facts(lowered: ModelProto, written: Sequence[Path], encodings: Mapping[str, Encoding]) -> dict[str, Any]:
    """Return the bytes of the file, what they would be with weights in float32, and what takes them for nothing."""
    lowered = with_pairs(lowered)
    size = sizes(lowered, sum(path.stat().st_size for path in written))
    remarks = [*wide_containers(encodings), *_what_dominates(size)]
    saved = bytes_of_whole(lowered)
    packed = {"bytes_if_packed": size.summary["bytes"] - saved} if saved else {}
    return {**size.summary, **packed, **({"size_remarks": remarks} if remarks else {})}


def _what_dominates(size: Report) -> list[str]:
    """Return a remark on what takes most of a file without being weights that are quantized."""
    parts = {
        "float tensors": [row for row in size.rows if row["what"] == "other tensors" and "float" in row["dtype"]],
        "scales and zero points": [row for row in size.rows if row["what"] in ("scales", "zero points")],
    }
    taken = {name: sum(row["bytes"] for row in rows) for name, rows in parts.items()}
    total = size.summary["bytes"]
    taken["the nodes and their names"] = total - size.summary["stored_bytes"]
    return [
        f"{name}: {taken[name]:,} of {total:,} bytes; fewer bits for weights make this file little smaller"
        for name in taken
        if taken[name] > total / 2
    ]


def _embed_facts(
    models: Sequence[ModelProto],
    text: IO[bytes],
    plan: Plan,
    encodings: Mapping[str, Encoding],
    provenance: Mapping[str, Any],
    tensors: Mapping[str, str],
    shared: str,
    *,
    named_onnx: bool,
) -> None:
    """Write the encodings file, and into lowered models its hash and what the nodes cannot express.

    The scales stand in the nodes, so the models have no second copy of them, nor has the file of those of blocks.
    """
    ordered, casts = _in_order_of_nodes(encodings, models[0]), _in_order_of_nodes(casts_of(plan), models[0])
    kinds = {site: decision.kind for site, decision in plan.decisions.items()}
    digest, blocked = hashlib.sha256(), _blocked_in_nodes(plan, models[0]) if named_onnx else ()
    for piece in qsdk_format.pieces(ordered, provenance, casts, tensors=tensors, kinds=kinds, in_model=blocked):
        data = piece.encode()
        digest.update(data)
        text.write(data)
    text.seek(0)
    embedded = qsdk_format.dumps({}, provenance, casts, tensors=tensors, kinds=kinds)
    for model in models:
        set_properties(model, {ENCODINGS_KEY: embedded, HASH_KEY: digest.hexdigest()})
        set_properties(model, {FILE_KEY: shared} if shared else {})
        mark_frozen(model, ordered)


def _fix_sizes(
    model: ModelProto, shapes: Shapes | None, runtime: Runtime, *, required: bool
) -> dict[str, list[int | None]]:
    """Fix the open axes of a lowered model's inputs, in place, and compute all that follows from their sizes.

    Without `shapes`, the sizes of the example count where fixed ones are `required`. The sizes of the inputs that were
    open are returned.
    """
    wanted: Mapping[str, Sequence[int | None]] = noted_example(model) if required and shapes is None else {}
    if shapes is not None:
        wanted = sizes_by_input(model, shapes)
    if wanted or required:
        fixed = propagate_static_sizes(with_shapes(model, wanted, least=0))
        leave_out_empty_inputs(fixed)
        fixed = with_stored_codes(fixed) if runtime.target.fixed_sizes else fixed
        replace_nodes(fixed.graph, nodes_reaching(fixed.graph.node, [value.name for value in fixed.graph.output]))
        drop_unused_initializers(fixed.graph)
        model.CopyFrom(fixed)
    left = open_inputs(model) if required else {}
    if left:
        named = ", ".join(f"{name}: {tuple('?' if n is None else n for n in sizes)}" for name, sizes in left.items())
        raise ConfigError(
            f"this file has one size of every input, and axes are open here: {named}; give all sizes, such as "
            "shapes={" + f'"{next(iter(left))}": (1, 3, 224, 224)' + "}"
        )
    return {name: list(sizes) for name, sizes in wanted.items()}


def _require_choices(path: str | os.PathLike[str], opset: int, prefer: str) -> None:
    if prefer not in get_args(Prefer):
        raise ConfigError(f"prefer={prefer!r} is unknown; choose one of {', '.join(get_args(Prefer))}")
    if not Path(path).name or Path(path).is_dir():
        raise ExportError(f"cannot write: {os.fspath(path) or 'the path'} is a directory; give the name of a file")
    if opset not in _OPSETS:
        raise ConfigError(f"opset {opset} cannot be written; choose one of {_OPSETS[0]} to {_OPSETS[-1]}")


def _require_valid(model: ModelProto, sizes: Mapping[str, Sequence[int | None]]) -> None:
    try:
        onnx.checker.check_model(checkable(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        if sizes and isinstance(error, onnx.shape_inference.InferenceError):
            given = ", ".join(f"{name} {tuple(size)}" for name, size in sizes.items())
            raise ConfigError(f"these sizes do not fit each other: {given}; {error}") from error
        raise ExportError(f"the lowered model is invalid, which is a defect of qsdk: {error}") from error


def _in_order_of_nodes(by_site: Mapping[str, T], lowered: ModelProto) -> Mapping[str, T]:
    """Sort by the order of the nodes, so that a file that is opened and exported again comes out the same."""
    places: dict[str, int] = {}
    for place, node in enumerate(lowered.graph.node):
        for site in (metadata(node).get("qsdk.site", ""), *sites_inside(node)):
            places.setdefault(site, place)
    return LazyMapping(sorted(by_site, key=lambda site: places.get(site, len(lowered.graph.node))), by_site.__getitem__)


def _blocked_in_nodes(plan: Plan, lowered: ModelProto) -> frozenset[str]:
    """Return the sites with many scales of blocks, which as text take nearly as many bytes as codes of 4 bits.

    Only those on nodes of the main graph, from which they are read.
    """
    on_nodes = {metadata(node).get("qsdk.site", "") for node in lowered.graph.node}
    result = set()
    for site in on_nodes & plan.decisions.keys():
        spec, shape = plan.decisions[site].spec, plan.decisions[site].shape
        sizes = [n for n in shape or () if isinstance(n, int)]
        if spec is not None and isinstance(spec.granularity, PerBlock):
            by = spec.granularity
            if math.prod(sizes) > _MANY_SCALES * by.size:
                result.add(site)
    return frozenset(result)


def without_uncalibrated(plan: Plan, ready: Mapping[str, bool], uncalibrated: Literal["error", "float"]) -> Plan:
    """Leave sites without an encoding float, or refuse."""
    if uncalibrated not in ("error", "float"):
        raise ConfigError(f'uncalibrated={uncalibrated!r} is unknown; choose "error" or "float"')
    missing = [site for site, is_ready in ready.items() if not is_ready]
    if missing and uncalibrated == "error":
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise CalibrationError(
            f"these sites have no encoding: {shown}; call qsdk.calibrate(sim, batches), or export with "
            'uncalibrated="float"'
        )
    kept = {
        site: replace(decision, spec=None, reason="not calibrated") if site in missing else decision
        for site, decision in plan.decisions.items()
    }
    return replace(plan, decisions=kept)
