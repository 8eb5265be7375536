"""The verbs on files of encodings and of whole sims. It knows both sides."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto
from torch import nn

from onnx_backend import saved as saved_onnx
from onnx_backend.opening.encodings_of_file import float_facts, stored_encodings
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto import model_io
from qsdk.core.atomic_files import write_text
from qsdk.core.config.config import QuantConfig
from qsdk.core.encodings import qsdk_format
from qsdk.core.encodings.aimet_write import dumps_aimet
from qsdk.core.encodings.formats import OWN, facts_of, own_rows, read_any, require_version
from qsdk.core.encodings.provenance import installed, provenance_of
from qsdk.core.encodings.qsdk_format import StoredEncodings
from qsdk.core.encodings.tensors import TensorFacts, counterparts, in_layout_of, tensor_facts
from qsdk.core.errors import ConfigError, FileFormatError, ModelError
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.expected_means import read_norms
from qsdk.core.planning.plan import casts_of
from qsdk.core.ranges.unrepresentable import left_float
from qsdk.core.read_files import read_text
from qsdk.core.report import Report
from qsdk.core.sims.biases import read_biases, without_shifts
from qsdk.core.sims.load_encodings import where_quantized, with_loaded
from qsdk.core.sims.replan import require_config
from qsdk.core.sims.sim_file import SimFile, different_sites, read_sim, write_sim
from qsdk.core.sims.state import put_back_on_error, read_frozen_values, read_methods
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.doors.choose import OnnxSim, Sim
from qsdk.verbs.doors.module_sims import SIM_FILE, facts_to_save, save_module_sim
from qsdk.verbs.doors.read_checkpoint import read_model, require_known_attention
from qsdk.verbs.qdq_files import OnnxSource, opened_qdq, scales_beside
from qsdk.verbs.quantize import quantize
from torch_bridge import saved as saved_torch
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import as_example
from torch_bridge.torch_values.layers import ROTATION, remove_bounds, rotate_input, untie
from torch_bridge.torch_values.parameters import main_dtype


def save_encodings(
    sim_or_file: Sim | OnnxSource,
    path: str | os.PathLike[str],
    *,
    version: str | None = None,
    model: OnnxSource | None = None,
    allow_loss: bool = False,
) -> Report:
    """Write encodings, of a sim or those of another file, in qsdk's own format or in one of AIMET's.

    The file holds grids, no values: weights that `adaround`, `gptq` or `tune_blocks` have rounded, and biases that a
    verb has shifted, are in what `save` and `export` write. On `unwrap()`'s floats its grids round to nearest.

    Args:
        sim_or_file: a sim of either side; or a file of encodings of qsdk or AIMET, or a Q/DQ ONNX model (`.onnx`).
        path: of the file to write.
        version: None or "qsdk" for the own format; AIMET's "1.0.0", "2.0.0" or "2.1.0".
        model: a float ONNX model. Of a sim, with a version of AIMET, the one whose tensor names the entries are to
            carry, matched by structure alone; None for the names of the sim's own graph. Of a file, the one that it
            belongs to, needed where the file lacks what the other format holds: axes, and which tensors are parameters.
        allow_loss: leave out the sites that the version cannot express, instead of raising an error.

    Returns:
        Rows `site`, `tensor`, `dtype`, `form` and `loss`: the facts about the site that the file does not hold.

    Raises:
        CalibrationError: lists the sites that have no encoding.
        ConfigError: an unknown version, or a sim and a model for qsdk's own format, which identifies tensors by site.
        FileFormatError: the file cannot be read, does not fit the model, or needs one.
        ExportError: the folder cannot be written, or the version cannot express some sites: it lists them.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, x = tempfile.mkdtemp(), torch.randn(32, 8)
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x, "w8a8")
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> _ = qsdk.save_encodings(sim, folder + "/aimet.json", version="2.0.0")
        >>> qsdk.save_encodings(folder + "/aimet.json", folder + "/newer.json", version="2.1.0").summary["sites"]
        4
    """
    if isinstance(sim_or_file, str | os.PathLike | bytes | ModelProto):
        stored, tensors = _converted(sim_or_file, require_version(version), model)
    else:
        stored, tensors = _of_sim(sim_or_file, require_version(version), model)
    return _write(stored, tensors, path, require_version(version), allow_loss=allow_loss)


def _converted(
    source: OnnxSource, version: str, model: OnnxSource | None
) -> tuple[StoredEncodings, Mapping[str, TensorFacts]]:
    stored, listed = read_with(source, model)
    return stored, facts_of(stored, listed, model_io.source_name(source), needs_kinds=version == "1.0.0")


def _of_sim(sim: Sim, version: str, model: OnnxSource | None) -> tuple[StoredEncodings, Mapping[str, TensorFacts]]:
    require_sim(sim)
    if model is not None and version == OWN:
        raise ConfigError("model= gives AIMET's formats their tensor names; qsdk's own goes by sites: leave it out")
    encodings, tensors = sim.encodings, {facts.site: facts for facts in float_facts(sim.graph, sim.plan)}
    if model is not None:
        pairs = counterparts(sim.graph, sim.plan, _float_graph(model))
        tensors = {mine.site: theirs for mine, theirs in pairs}
        encodings |= {
            mine.site: in_layout_of(encodings[mine.site], mine, theirs)
            for mine, theirs in pairs
            if mine.site in encodings
        }
    kinds = {site: decision.kind for site, decision in sim.plan.decisions.items()}
    names = {site: facts.name for site, facts in tensors.items()}
    stored = StoredEncodings(encodings, casts_of(sim.plan), provenance_of(sim.config, sim.graph), names, kinds)
    specs = ((site, decision.spec) for site, decision in sim.plan.decisions.items())
    return replace(stored, moving={site: spec.dtype for site, spec in specs if spec and spec.dynamic}), tensors


def load_encodings(
    sim: Sim,
    path: OnnxSource,
    *,
    freeze: bool | str = False,
    strict: bool = True,
    model: OnnxSource | None = None,
) -> Report:
    """Replace the encodings of a sim by those of an encodings file, or of the Q/DQ nodes of an ONNX model.

    Args:
        sim: of either side.
        path: of a file that `save_encodings` or `export` wrote, of an AIMET encodings file (0.6.1 to 2.1.0), of an
            ONNX model (`.onnx`), or the model.
        freeze: True freezes all loaded encodings; `weights`, `activations`, a pattern or a site freeze those. Entries
            that are frozen in the file are frozen in any case.
        strict: raise an error for a file that does not fit the plan site by site; False loads what fits and leaves the
            rest unchanged: no quantizer is ever disabled.
        model: the float ONNX model whose tensor names an AIMET file carries; None for those of the sim's own graph.

    Returns:
        Rows `site`, `state` (loaded, missing, unexpected or different) and `detail`.

    Raises:
        FileFormatError: the file cannot be read; or, with `strict`, a list of all that is missing, unexpected or
            different. The sim is unchanged.
        ConfigError: `freeze` matches nothing.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, x = tempfile.mkdtemp(), torch.randn(32, 8)
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x, "w8a8")
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> _ = qsdk.save_encodings(sim, folder + "/encodings.json")
        >>> qsdk.load_encodings(sim, folder + "/encodings.json", freeze="weights").summary["loaded"]
        4
    """
    require_sim(sim)
    where = model_io.source_name(path)
    pairs = [(facts, facts) for facts in float_facts(sim.graph, sim.plan)]
    if model is not None:
        pairs = counterparts(sim.graph, sim.plan, _float_graph(model))
    # the layout of the file is that of its model; the names of sites and the dtypes are the sim's
    stored = read_stored(path, where, [replace(theirs, site=mine.site, wanted=mine.wanted) for mine, theirs in pairs])
    if model is not None:
        facts = {mine.site: (theirs, mine) for mine, theirs in pairs}
        stored = replace(
            stored, encodings={s: in_layout_of(e, *facts[s]) for s, e in stored.encodings.items() if s in facts}
        )
    elsewhere = partial(where_quantized, graph=sim.graph, plan=sim.plan, gone=sim.folded_away)
    state, report = with_loaded(sim.snapshot(), stored, where, freeze=freeze, strict=strict, elsewhere=elsewhere)
    with put_back_on_error(sim), without_shifts(sim, rounds=False):
        sim.restore(state)
    return report


def read_with(source: OnnxSource, model: OnnxSource | None) -> tuple[StoredEncodings, list[TensorFacts] | None]:
    """Return the encodings of a source, completed by the float model, and the tensors of that model."""
    where = model_io.source_name(source)
    listed = None if model is None else tensor_facts(_float_graph(model))
    stored = read_stored(source, where, listed)
    if stored.misfits:
        shown = "; ".join(f"{name}: {why}" for name, why in stored.misfits.items())
        raise FileFormatError(f"{where} does not fit the model: {shown}; give the float model that it was made for")
    return stored, listed


def _write(
    stored: StoredEncodings,
    tensors: Mapping[str, TensorFacts],
    path: str | os.PathLike[str],
    version: str,
    *,
    allow_loss: bool,
) -> Report:
    casts = stored.casts or {}
    if version == OWN:
        text = qsdk_format.dumps(stored.encodings, stored.provenance, casts, tensors=stored.tensors, kinds=stored.kinds)
        rows = own_rows(stored)
    else:
        text, rows = dumps_aimet(
            stored.encodings,
            casts,
            tensors,
            version=version,
            producer=installed("qsdk") or "",
            moving=stored.moving,
            allow_loss=allow_loss,
        )
    write_text(path, text)
    losses = sum(bool(row["loss"]) for row in rows)
    return Report(
        "Encodings", rows, {"path": os.fspath(path), "version": version, "sites": len(rows), "with a loss": losses}
    )


def _float_graph(model: OnnxSource) -> Graph:
    opened = model_io.load(model)
    if any(node.op_type == "QuantizeLinear" for node in opened.graph.node):
        raise ConfigError(f"{model_io.source_name(model)} is quantized; give the float model that it was made of")
    return read_graph(opened)


def read_stored(source: OnnxSource, where: str, tensors: Sequence[TensorFacts] | None) -> StoredEncodings:
    """Return the encodings of a file of any version or of a Q/DQ model's nodes; see `read_any` for `tensors`."""
    if isinstance(source, ModelProto) or Path(source).suffix == ".onnx":
        return stored_encodings(opened_qdq(source))
    text = read_text(source, "give an encodings file or an .onnx model")
    return read_any(text, where, tensors, partial(scales_beside, source, text))


def save(sim: Sim, path: str | os.PathLike[str]) -> None:
    """Write a whole sim to one file: config, plan, encodings and weights; no code, and no custom op.

    A sim of an nn.Module keeps its state_dict and the example that it was traced with, one of an ONNX model the model.

    Raises:
        ConfigError: the config holds patterns, which are Python.
        ExportError: the folder cannot be written, or the example is no plain data.
        ModelError: an ONNX model larger than 2 GiB.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, x = tempfile.mkdtemp(), torch.randn(32, 8)
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x, "w8a8")
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> qsdk.save(sim, folder + "/sim.qsdk")
        >>> bool((qsdk.load(folder + "/sim.qsdk", sim.unwrap())(x) == sim(x)).all())
        True
    """
    require_sim(sim)
    facts = facts_to_save(sim)
    if isinstance(sim, OnnxSim):
        parts = saved_onnx.parts_of(sim)  # with the initializers of the user that verbs have replaced
        write_sim(path, "onnx", sim.snapshot(), {**saved_onnx.facts_of(sim), **facts}, parts)
    else:
        save_module_sim(sim, path, facts)


def load(path: str | os.PathLike[str], model: nn.Module | None = None, *, example: Any = None, **options: Any) -> Sim:
    """Return the sim that `save` wrote, or `sim.model.save_pretrained(folder)` of a Hugging Face model.

    Its outputs are those of the saved sim, bit for bit. Such a folder is an ordinary checkpoint, with the sim beside it
    in `sim.qsdk`.

    Args:
        path: of the file or the folder.
        model: the float module that the saved sim was made of: with any weights for a file; for a folder, None reads it
            with transformers, in the class that its config names. None for a sim of an ONNX model.
        example: for a folder, as for `quantize`; None for the one that the sim was quantized with, which is saved.
        options: for a folder: of `from_pretrained` of that class, such as `device_map=`.

    Raises:
        FileFormatError: the file is missing, truncated, foreign or damaged.
        ConfigError: a module is missing, or there is one too many; transformers is not installed or lacks the class.
        ModelError: the module is another one, or its weights are not those that a folder was saved with.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, layer = tempfile.mkdtemp(), torch.nn.Linear(8, 4)
        >>> qsdk.save(qsdk.quantize(layer, torch.randn(64, 8)), folder + "/sim.qsdk")
        >>> qsdk.load(folder + "/sim.qsdk", layer)
        QuantSim(Linear: 4 quantized, 0 tied, 0 float; 0 of 4 quantizers ready)
    """
    if Path(path).is_dir():
        return _load_pretrained(Path(path), example, model, options)
    if example is not None or options:
        given = ", ".join([*(["example"] if example is not None else []), *options])
        raise ConfigError(f"{given}: for the folder of a checkpoint, and {os.fspath(path)} is none; leave it out")
    file, where = read_sim(path), os.fspath(path)
    if file.door == "onnx":
        if model is not None:
            raise ConfigError(f"{where} holds its own ONNX model; call qsdk.load(path) without a module")
        loaded = saved_onnx.restore_sim(file, where)
        _take_facts(loaded, file, where)
        return loaded
    if file.door != "torch":
        raise FileFormatError(f"{where} holds a sim of an unknown kind {file.door!r}; update qsdk")
    if model is None:
        raise ConfigError(f"{where} holds a sim of an nn.Module; pass the float module: qsdk.load(path, model)")
    return module_sim_of(file, model, where)


def _load_pretrained(folder: Path, example: Any, model: nn.Module | None, options: dict[str, Any]) -> QuantSim:
    path = folder / SIM_FILE
    if not path.is_file():
        raise FileFormatError(
            f"{os.fspath(folder)} is a folder; it holds no {SIM_FILE}: write it with "
            "sim.model.save_pretrained(folder), outside of a training block, or quantize the float model anew"
        )
    file = read_sim(path)
    if model is None:
        known = file.facts.get("attn_implementation")
        if "attn_implementation" not in options:
            require_known_attention(known, os.fspath(path), "if you trust it, pass attn_implementation=")
        instead = "pass the float model: qsdk.load(folder, MyModel.from_pretrained(folder))"
        known_options = {"attn_implementation": known} if known else {}
        model = read_model(folder, instead, {**known_options, **options})
    elif options:
        raise ConfigError(f"{', '.join(options)}: options are for reading the model, which is given; leave them out")
    return module_sim_of(file, model, os.fspath(path), example)


def module_sim_of(file: SimFile, model: nn.Module, where: str, example: Any = None) -> QuantSim:
    """Return the saved sim of a module."""
    sim = _module_sim(file, model, where, example)
    _take_facts(sim, file, where)
    return sim


def _take_facts(sim: Sim, file: SimFile, where: str) -> None:
    sim.frozen_values = read_frozen_values(file.facts.get("frozen_values", []), sim.plan, where)
    sim.methods = read_methods(file.facts.get("methods"), where)
    sim.original_biases = read_biases(file.facts.get("biases", {}), sim, where)


def _module_sim(file: SimFile, model: nn.Module, where: str, example: Any) -> QuantSim:
    """Quantize the module like the saved one, compare the plans, and load everything."""
    first, fold = _quantize_options(file, where)
    given = saved_torch.on_device_of(model, saved_torch.read_example(file.parts, where))
    if example is not None:
        given = replace(as_example(example), dynamic_shapes=given.dynamic_shapes, float32_edges=given.float32_edges)
    now, then = main_dtype(model), saved_torch.read_dtype(file.facts, where)
    if then is not None:
        model, given = copy.deepcopy(model).to(then), given.converted(now, then)
    untied = saved_torch.read_untied(file.facts, model, where)
    online = saved_torch.read_online_rotations(file.facts, model, where)
    if untied or online:
        model = copy.deepcopy(model)
        untie(model, untied)
    for layer, sizes in online.items():
        rotate_input(model.get_submodule(layer), [np.eye(size) for size in sizes])  # the file has the values
        first = first.override(f"{layer}.{ROTATION}", weight="float32")  # blocks need not divide it
    sim = quantize(model, given, first, dynamic_shapes=given.dynamic_shapes, fold_batch_norm=fold)
    assert isinstance(sim, QuantSim)
    sim.untied = untied
    if then is not None:
        sim.model.to(now)
    planned = sim.planned(require_config(file.state.config), kept_float=left_float(file.state.plan))
    different = different_sites(file.state.plan, planned.plan)
    if different:
        raise ModelError(
            f"{where} was saved from another model, or by a qsdk that planned otherwise: {', '.join(different[:8])} "
            "differ; pass the module that it was saved from, or quantize anew and call qsdk.load_encodings"
        )
    if "weights_digest" in file.facts:  # the weights are in the checkpoint beside the file
        saved_torch.require_weights(sim, file.facts["weights_digest"], where)
    else:
        saved_torch.load_weights(sim, file.parts, where)
    saved_torch.load_given(sim, file.parts, where)
    remove_bounds(sim.model, file.facts.get("relu6_as_relu", ()))
    sim.folded_norms.update(read_norms(file.facts.get("norms", {}), where))
    sim.restore(replace(planned, own=file.state.own))
    return sim


def _quantize_options(file: SimFile, where: str) -> tuple[QuantConfig, bool]:
    try:
        config = QuantConfig.from_dict(file.facts["quantized_with"], where=where)
        return config.of_saved_sim(), bool(file.facts["fold_batch_norm"])
    except (KeyError, TypeError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error
