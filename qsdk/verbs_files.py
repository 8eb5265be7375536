"""The verbs on files of encodings and of whole sims. Like `workflow`, it knows both doors."""

import os
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto
from torch import nn

from onnx_backend import saved as saved_onnx
from onnx_backend.sim import OnnxSim
from onnx_backend.stored_encodings import stored_encodings
from qsdk.core import encodings_file
from qsdk.core.config import QuantConfig
from qsdk.core.encodings_file import StoredEncodings
from qsdk.core.errors import ConfigError, FileFormatError, ModelError
from qsdk.core.files import write_text
from qsdk.core.planning.plan import casts_of
from qsdk.core.report import Report
from qsdk.core.sims.load_encodings import with_loaded
from qsdk.core.sims.plan_json import different_sites
from qsdk.core.sims.replan import require_config
from qsdk.core.sims.sim_file import SimFile, read_sim, write_sim
from qsdk.core.sims.state import put_back_on_error
from qsdk.workflow import OnnxSource, Sim, opened_qdq, quantize
from torch_bridge import saved as saved_torch
from torch_bridge.sim import QuantSim


def save_encodings(sim: Sim, path: str | os.PathLike[str]) -> Report:
    """Write the encodings of a sim, as they stand beside an exported model, to a file of their own.

    Raises:
        CalibrationError: lists the sites that have none.
        ExportError: the folder cannot be written.
    """
    encodings, casts = sim.encodings, casts_of(sim.plan)
    write_text(path, encodings_file.dumps(encodings, {"tool": "qsdk", "config": str(sim.config)}, casts))
    rows = [{"site": site, "dtype": e.dtype.name, "frozen": e.frozen} for site, e in encodings.items()]
    rows += [{"site": site, "dtype": dtype.name, "frozen": False} for site, dtype in casts.items()]
    return Report("Encodings", rows, {"path": os.fspath(path), "sites": len(rows)})


def load_encodings(sim: Sim, path: OnnxSource, *, freeze: bool | str = False, strict: bool = True) -> Report:
    """Give a sim the encodings of an encodings file, or of the Q/DQ nodes of an ONNX model.

    Args:
        sim: of either door.
        path: of a file that `save_encodings` or `export` wrote, of an ONNX model (`.onnx`), or the model.
        freeze: True freezes all that is loaded; `weights`, `activations`, a pattern or a site freeze those. What the
            file says is frozen is so in any case.
        strict: refuse a file that does not fit the plan site by site; otherwise load what fits and leave the rest as it
            is: no quantizer is ever disabled.

    Returns:
        Rows `site`, `state` (loaded, missing, unexpected or different) and `detail`.

    Raises:
        FileFormatError: the file cannot be read; or, with `strict`, a list of all that is missing, unexpected or
            different. The sim stays as it was.
        ConfigError: `freeze` matches nothing.
    """
    where = "the model" if isinstance(path, ModelProto) else os.fspath(path)
    state, report = with_loaded(sim.snapshot(), _stored(path, where), where, freeze=freeze, strict=strict)
    with put_back_on_error(sim):
        sim.restore(state)
    return report


def _stored(source: OnnxSource, where: str) -> StoredEncodings:
    if isinstance(source, ModelProto) or Path(source).suffix == ".onnx":
        return stored_encodings(opened_qdq(source))
    try:
        return encodings_file.loads(Path(source).read_text(encoding="utf-8"), where)
    except OSError as error:
        raise FileFormatError(f"cannot read {where}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{where} is no text; give an encodings file or an .onnx model") from error


def save(sim: Sim, path: str | os.PathLike[str]) -> None:
    """Write a whole sim to one file: config, plan, encodings and weights; no code, and no custom op.

    A sim of an nn.Module keeps its state_dict and the example that it was traced with, one of an ONNX model the model.

    Raises:
        ConfigError: the config holds patterns, which are Python.
        ExportError: the folder cannot be written, or the example is no plain data.
        ModelError: an ONNX model larger than 2 GiB.
    """
    state = sim.snapshot()
    if isinstance(sim, OnnxSim):
        write_sim(path, "onnx", state, saved_onnx.facts_of(sim), saved_onnx.parts_of(sim))
        return
    facts = {"quantized_with": sim.quantized_with.to_dict(), "fold_batch_norm": sim.fold_batch_norm}
    write_sim(path, "torch", state, facts, saved_torch.parts_of(sim))


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> Sim:
    """Read a sim that `save` wrote: its outputs are those of the saved one, bit for bit.

    Args:
        path: of the file.
        model: the float module, with any weights, that the saved sim was made of; None for a sim of an ONNX model.

    Raises:
        FileFormatError: the file is missing, truncated, foreign or damaged.
        ConfigError: a module is missing, or there is one too many.
        ModelError: the module is another one.
    """
    file, where = read_sim(path), os.fspath(path)
    if file.door == "onnx":
        if model is not None:
            raise ConfigError(f"{where} holds its own ONNX model; call qsdk.load(path) without a module")
        return saved_onnx.restored(file, where)
    if file.door != "torch":
        raise FileFormatError(f"{where} holds a sim of an unknown kind {file.door!r}; update qsdk")
    if model is None:
        raise ConfigError(f"{where} holds a sim of an nn.Module; pass the float module: qsdk.load(path, model)")
    return _module_sim(file, model, where)


def _module_sim(file: SimFile, model: nn.Module, where: str) -> QuantSim:
    """Quantize the module as the saved one was, hold the plans against each other, and load everything."""
    first, fold = _how(file, where)
    given = saved_torch.on_device_of(model, saved_torch.read_example(file.parts, where))
    sim = quantize(model, given.kwargs or given.args, first, fold_batch_norm=fold)
    assert isinstance(sim, QuantSim)
    planned = sim.planned(require_config(file.state.config))
    different = different_sites(file.state.plan, planned.plan)
    if different:
        raise ModelError(
            f"{where} was saved from another model, or by a qsdk that planned otherwise: {', '.join(different[:8])} "
            "differ; pass the module that it was saved from, or quantize anew and call qsdk.load_encodings"
        )
    saved_torch.load_weights(sim, file.parts, where)
    sim.restore(replace(planned, own=file.state.own))
    return sim


def _how(file: SimFile, where: str) -> tuple[QuantConfig, bool]:
    try:
        return QuantConfig.from_dict(file.facts["quantized_with"], where=where), bool(file.facts["fold_batch_norm"])
    except (KeyError, TypeError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error
