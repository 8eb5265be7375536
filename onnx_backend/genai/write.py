"""A sim of a decoder as a folder that onnxruntime-genai runs: the model in fused forms, its config, other files."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.genai.config import DecoderFacts, genai_config
from onnx_backend.genai.fuse import Fused, fuse
from onnx_backend.genai.products import IN_FLOATS
from onnx_backend.lower import lower
from onnx_backend.passes.adapter_inputs import Matrices, adapter_files, take_adapters
from onnx_backend.passes.in_float32 import in_float32
from onnx_backend.passes.simplify import without_last_identities
from onnx_backend.proto.nodes import replace_nodes
from onnx_backend.proto.write_file import StagedModel, write_files
from onnx_backend.qdq.layer_inputs import quantize_inputs
from onnx_backend.runtimes.registry import runtime_named
from qsdk.core.errors import ExportError
from qsdk.core.freed_memory import give_back
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.report import Report

MODEL, CONFIG = "model.onnx", "genai_config.json"
_BEGINS_AGAIN = 4096  # tokens, behind which onnxruntime-genai (0.18) computes all keys again
#: (model file, config) -> facts for the report; raises an error about a folder that is not to be written
CheckFolder = Callable[[Path, Mapping[str, Any]], Mapping[str, Any]]


def write_genai(
    marked: ModelProto,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    folder: Path,
    facts: DecoderFacts,
    *,
    weights: Mapping[str, npt.NDArray[Any]] | None = None,
    beside: Mapping[str, bytes] | None = None,
    in_use: Collection[Path] = (),
    adapters: Mapping[str, Matrices] | None = None,
    check: CheckFolder | None = None,
) -> Report:
    """Write a marked decoder as a folder; what was there under the same names is replaced when all is complete.

    Args:
        marked: the float model with marks.
        plan: the decision for each site.
        encodings: of every quantized site.
        folder: is made.
        facts: of the model, for the config.
        weights: the values of stored tensors that the model has only stubs of, by name.
        beside: further files, such as a tokenizer's.
        in_use: data files that a sim still reads.
        adapters: see `write_model`.
        check: see `CheckFolder`.

    Raises:
        ExportError: the model is no decoder with a cache, or its folder cannot be written.
    """
    runtime = runtime_named("onnxruntime")
    if runtime.refuse is not None:
        runtime.refuse(encodings)
    lowered = lower(marked, plan, encodings, dialect="onnxruntime", weights=weights, prefer="size", unfinished=True)
    large, rows = dict(lowered.large), lowered.rows
    model = in_float32(lowered.model, large)
    widened = model is not lowered.model
    quantize_inputs(model)  # of layers in float32 too, which those in bfloat16 are now
    runtime.finish(model)
    del lowered  # its scales are many
    give_back()
    results = [value.name for value in model.graph.output]
    replace_nodes(model.graph, without_last_identities([*model.graph.node], results))
    runtime.speed_up(model)
    values = take_adapters(model, adapters or {}, turned=True)
    fused = fuse(model, large, positions=facts.positions)
    read = {value.name for value in fused.model.graph.input}
    for name, own in values.items():
        values[name] = {n: value for n, value in own.items() if n in read}
        values[name] |= {n: joined(own) for n, joined in fused.joined.items()}
    files = {f"{name}.onnx_adapter": file for name, file in adapter_files(values).items()}
    config = genai_config(fused.model, facts, MODEL, shares_buffers=not fused.left)
    text = json.dumps(config, indent=4) + "\n"
    companions: dict[Path, str | bytes] = {folder / name: data for name, data in {**(beside or {}), **files}.items()}
    said: dict[str, Any] = {}

    def checked(file: StagedModel) -> None:
        give_back()  # what the file was made in, before the simulation runs
        said.update(check(file.staged, config) if check is not None else {})

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot write {folder}: {error.strerror}; name a folder that can be written") from error
    written = write_files(
        {folder / MODEL: fused.model},
        fused.large,
        base=folder / MODEL,
        external_data=True,
        companions={**companions, folder / CONFIG: text},
        in_use=in_use,
        check=checked if check is not None else None,
    )
    narrow = {decision.tensor_type for decision in plan.decisions.values()} & {"bfloat16", "float16"}
    if narrow and widened:
        said["computes"] = f"float32, where the simulation rounds each result to {' and '.join(sorted(narrow))}"
    return _report(rows, fused, config, written, said)


def _report(
    rows: list[dict[str, Any]],
    fused: Fused,
    config: Mapping[str, Any],
    written: list[Path],
    said: Mapping[str, Any],
) -> Report:
    known = [{**row, "form": fused.forms.get(row["site"], row["form"])} for row in rows]
    for row in known:
        row.pop("zero_point_bytes_saved", None)
    left = {**fused.left, **fused.left_experts}
    plain = {"plain": [f"{name}: {why}" for name, why in left.items()]} if left else {}
    size: dict[str, Any] = {"bytes": sum(path.stat().st_size for path in written), "nodes": len(fused.model.graph.node)}
    slow = [site for site, form in fused.forms.items() if form.endswith(IN_FLOATS)]
    if slow:
        remedy = 'choose compute="int8", as for_dialect("genai") does, or 4 bits'
        size["slow"] = f"the kernel of 8 bits is not made for floats ({', '.join(slow[:4])}): {remedy}"
    mixtures = {"experts": fused.experts} if fused.experts or fused.left_experts else {}
    forms = {"attentions": fused.attentions, **mixtures, "paths": [str(path) for path in written]}
    for switch in fused.switches:
        begins_again = switch == _BEGINS_AGAIN and config["model"]["type"] in ("phi3", "phimoe")
        then = "begins again" if begins_again else "keeps the keys of before: give it to a new Generator there"
        short = f"texts of {switch} tokens and fewer have rotary positions of their own"
        size["switch"] = f"{short}; in onnxruntime-genai one that grows longer {then}"
    return Report("Export", known, {**size, **forms, **plain, **said})
