"""`export(sim, "folder", format="genai")`: a folder for onnxruntime-genai."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from onnx_backend.genai.check import check_folder
from onnx_backend.genai.config import DecoderFacts
from onnx_backend.genai.write import write_genai
from onnx_backend.sim import OnnxSim
from qsdk.core.errors import ConfigError, ExportError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.report import Report
from qsdk.verbs.doors.choose import Sim, door_of
from torch_bridge.compressed.write import processing_files
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.adapters import Matrices
from torch_bridge.wrapping.in_float32 import computing_in_float32

Array = npt.NDArray[Any]
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
