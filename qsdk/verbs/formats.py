"""Formats beside Q/DQ files: `export(sim, path, format=)` in each, and its comparison with the sim."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto

from onnx_backend.genai.check import check_folder
from onnx_backend.genai.config import DecoderFacts
from onnx_backend.genai.write import write_genai
from onnx_backend.litert import check as litert
from onnx_backend.litert.program import Program
from onnx_backend.litert.write import fixed_sizes, write_tflite
from onnx_backend.proto.inputs import with_shapes
from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError, ExportError, FileFormatError, ModelError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.report import Report
from qsdk.core.run_options import Run
from qsdk.verbs.doors.choose import Door, OnnxSim, QuantSim, Sim, door_of
from qsdk.verbs.doors.parts import parts_of
from torch_bridge.compressed.write import processing_files
from torch_bridge.programs import check as programs
from torch_bridge.programs.executorch import ExecuTorch
from torch_bridge.programs.write import write_program
from torch_bridge.torch_values.adapters import Matrices
from torch_bridge.wrapping.in_float32 import computing_in_float32

EXECUTORCH = "executorch"
LITERT = "litert"

# --- `format="pt2e"`: a program of PyTorch, compared there or in ExecuTorch -------------------------------------------


def is_program(model: Any) -> bool:
    """Return whether a model is given as the path of a program of PyTorch, or of ExecuTorch."""
    return isinstance(model, str | os.PathLike) and Path(model).suffix.lower() in (".pt2", ".pte")


def write_program_of(
    sim: QuantSim,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    path: str | os.PathLike[str],
    longest: Mapping[str, int],
    *,
    check: bool,
) -> Report:
    """Write a sim as a program, and with `check` compare it with the sim on its example first."""

    def compared(staged: Path) -> Report:
        return _compared_program(sim, staged, door_of(sim, Run(progress=False)).simulated_example(ModelProto()), None)

    return write_program(sim, plan, encodings, path, longest, check=compared if check else None)


def check_program(sim: Sim, path: str | os.PathLike[str], data: Iterable[Any], runtime: str | None, run: Run) -> Report:
    """Compare a program with its sim; see `check_parity`."""
    if runtime not in (None, EXECUTORCH):
        raise ConfigError(f"runtime={runtime!r} does not read programs of PyTorch; choose {EXECUTORCH!r} or None")
    if Path(path).suffix.lower() == ".pte":
        raise FileFormatError(
            f"{path} holds no sites to compare; give the .pt2 file that it was made of, with runtime={EXECUTORCH!r}"
        )
    if isinstance(sim, OnnxSim):
        raise ModelError(f"{path} holds a module of PyTorch; compare it with the sim of that module")
    return _compared_program(sim, Path(path), door_of(sim, run).simulated(data), runtime)


def _compared_program(sim: QuantSim, path: Path, runs: Iterable[Any], runtime: str | None) -> Report:
    loaded = programs.opened(path)
    return programs.check(sim, loaded, runs, ExecuTorch(loaded) if runtime == EXECUTORCH else None)


# --- `format="genai"`: a folder for onnxruntime-genai -----------------------------------------------------------------

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size")
_PROMPT = 12  # tokens of the text that is gone on with


def write_folder_for_genai(
    sim: Sim,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    adapters: Mapping[str, Matrices] | None = None,
    check: bool = True,
) -> Report:
    """Write a sim of a causal model of transformers as a folder for onnxruntime-genai.

    Raises:
        ExportError: the sim is of no such model, has no cache, or the runtime computes something else.
    """
    if isinstance(sim, OnnxSim) or not hasattr(getattr(sim.model, "config", None), "get_text_config"):
        raise ExportError("format='genai' is for causal models of transformers; quantize the module, or its folder")
    if Path(path).is_file():
        raise ExportError(f"cannot write: {os.fspath(path)} is a file, and format='genai' writes a folder")
    door = door_of(sim)
    traced = door.traced()
    return write_genai(
        traced.model,
        plan,
        encodings,
        Path(path),
        decoder_facts(sim.model),
        weights=traced.weights,
        beside=_beside(sim.model, tokenizer),
        adapters=adapters,
        in_use=door.files_read(),
        check=partial(_check, sim) if check else None,
    )


def decoder_facts(model: Any) -> DecoderFacts:
    """Return what the configs of a model of transformers say of it."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ExportError(
            f"format='genai' writes a model that generates by itself; {model.config.model_type} has an encoder beside "
            "its decoder: export the two as ONNX files"
        )
    config = model.config.get_text_config()
    generation = getattr(model, "generation_config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not isinstance(positions, int):
        raise ConfigError("the model's config has no max_position_embeddings, the most tokens that it reads; set it")
    tokens: dict[str, Any] = {}
    for name in _TOKENS:
        both = (getattr(one, name, None) for one in (generation, config))
        token = next((token for token in both if token is not None), None)
        inside = [one for one in (token if isinstance(token, list) else [token]) if _is_token(one, config.vocab_size)]
        if inside:
            tokens[name] = inside if isinstance(token, list) else token
    ends: Any = tokens.setdefault("eos_token_id", [])  # without one, a text ends where its length does
    tokens.setdefault("pad_token_id", ends if not isinstance(ends, list) else next(iter(ends), 0))
    search = {name: found for name in _SEARCH if (found := getattr(generation, name, None)) is not None}
    return DecoderFacts(config.model_type, positions, config.vocab_size, config.hidden_size, search, tokens)


def _is_token(token: Any, count: int) -> bool:
    """Return whether a token is one of the vocabulary, which the runtime asks for."""
    return token is not None and 0 <= token < count


def _beside(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """Return the files of the tokenizer: of the given one, or of the folder that the model was read from."""
    if tokenizer is None:
        return {source.name: source.read_bytes() for source in processing_files(model)}
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:
        tokenizer.save_pretrained(folder)
        return {source.name: source.read_bytes() for source in Path(folder).iterdir() if source.is_file()}


def _check(sim: QuantSim, model: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Generate from the file and compare with the sim."""
    facts = config["model"]
    length = min(_PROMPT, int(facts["context_length"]) // 2)
    prompt = np.random.default_rng(0).integers(0, facts["vocab_size"], length)

    @torch.no_grad()
    def logits(tokens: Array, in_floats: bool) -> Array:
        place = next(sim.model.parameters()).device
        with computing_in_float32(sim.model), _inputs_in_floats(sim) if in_floats else nullcontext():
            found = sim.model(input_ids=torch.as_tensor(tokens, device=place)[None], use_cache=False)
        values: Array = found.logits[0].float().cpu().numpy()
        return values

    return check_folder(model, config, prompt.tolist(), logits, in_floats=not sim.plan.calibrated_sites())


@contextmanager
def _inputs_in_floats(sim: QuantSim) -> Iterator[None]:
    """Have layers that round their input to int8 read it as it is, inside the block."""
    before = {quantizer: quantizer.decision for quantizer in sim.quantizers.values()}
    try:
        for quantizer, decision in before.items():
            quantizer.decision = replace(decision, input_block=None)
        yield
    finally:
        for quantizer, decision in before.items():
            quantizer.decision = decision


# --- `format="tflite"`: a file of LiteRT ------------------------------------------------------------------------------


def is_tflite(model: Any) -> bool:
    """Return whether a model is given as the path of a `.tflite` file."""
    return isinstance(model, str | os.PathLike) and Path(model).suffix.lower() == ".tflite"


def write_tflite_of(sim: Sim, model: ModelProto, path: str | os.PathLike[str], *, check: bool) -> Report:
    """Write the Q/DQ model of a sim as a `.tflite` file, and with `check` compare it with the sim first."""
    door = door_of(sim, Run(progress=False))

    def compared(program: Program) -> Report:
        sized = with_shapes(model, fixed_sizes(model), least=0)
        return _compared_tflite(door, program, door.simulated_example(sized))

    return write_tflite(model, path, compared if check else None)


def check_tflite(door: Door, path: str | os.PathLike[str], data: Iterable[Any], runtime: str | None) -> Report:
    """Compare a `.tflite` file with its sim; see `check_parity`."""
    if runtime not in (None, LITERT):
        raise ConfigError(f"runtime={runtime!r} does not read .tflite files; leave it out: LiteRT runs them")
    program = litert.opened(Path(path))
    # the sim gets one part at a time: a site such as [steps * batch, width] does not say which rows are whose
    sizes = [program.facts["sites"][site]["shape"] for site in litert.input_sites(program)]
    return _compared_tflite(door, program, door.simulated(parts_of(data, sizes)))


def check_in_litert(door: Door, model: ModelProto, data: Iterable[Any]) -> Report:
    """Compare what `format="tflite"` makes of a Q/DQ model with its sim; see `check_parity`."""
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:
        path = Path(folder) / "model.tflite"
        write_tflite(model, path, None)
        return check_tflite(door, path, data, LITERT)


def _compared_tflite(door: Door, program: Program, runs: Iterable[Any]) -> Report:
    return litert.check(program, runs, door.stored_at_sites(), door.sim.encodings)
