"""Writing a sim of a causal language model as one GGUF file."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qsdk.core.atomic_files import write_atomically
from qsdk.core.errors import ConfigError, ExportError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.read_files import parse_json, read_text
from qsdk.core.report import Report
from qsdk.core.site import owner_of, site_name
from torch_bridge.compressed.write import require_plain, source_folder
from torch_bridge.gguf.architectures import Architecture, architecture_of, facts_of, in_pairs, rope_factors
from torch_bridge.gguf.blocks import NoTypeError, bytes_of
from torch_bridge.sim import QuantSim
from torch_bridge.wrapping.wrapped_state import encoding_keys
from torch_bridge.wrapping.wrapper import float_class

# --- The tokenizer of a checkpoint folder as a GGUF file holds it -----------------------------------------------------

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_FILE = "tokenizer.json"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
#: how a tokenizer of bytes splits texts before it merges -> what llama.cpp calls that
_SPLITS = {
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "dbrx",
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}


@dataclass(frozen=True)
class Vocabulary:
    """What a file says of a tokenizer.

    Attributes:
        model: `llama` for SentencePiece, `gpt2` for BPE of bytes.
        pre: how texts are split before, for `gpt2`.
        tokens: by id.
        types: of tokens, by id.
        scores: by id, for `llama`: the higher one of two pairs is merged first.
        add_space_prefix: whether a text is read as with a space in front, for `llama`.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    add_space_prefix: bool | None


def read_vocabulary(folder: Path | None, size: int) -> Vocabulary | str:
    """Return the vocabulary of the tokenizer in a folder, or why a file cannot have it, in words.

    Args:
        folder: of a checkpoint; None for a model that was read from none.
        size: tokens that the model knows.
    """
    if folder is None or not (folder / _FILE).is_file():
        return f"none: {'the model was read from no folder' if folder is None else f'{folder} has no {_FILE}'}"
    data = parse_json(read_text(folder / _FILE, "download the checkpoint again"), str(folder / _FILE))
    model = data.get("model") or {}
    if model.get("type") != "BPE":
        return f"none: the {model.get('type')} model of {_FILE} is no BPE"
    if len(model["vocab"]) > size:
        return f"none: {_FILE} has {len(model['vocab'])} tokens, and the model {size}"
    merges = [one.split(" ") if isinstance(one, str) else one for one in model.get("merges", [])]
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [_UNUSED] * size
    pieces = bool(model.get("byte_fallback"))
    for token, number in model["vocab"].items():
        is_byte = pieces and len(token) == 6 and token.startswith("<0x")
        tokens[number], types[number] = token, _BYTE if is_byte else _NORMAL
    for added in data.get("added_tokens", []):
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added.get("special") else _USER
    if pieces:
        if model.get("unk_token") in model["vocab"]:
            types[model["vocab"][model["unk_token"]]] = _UNKNOWN
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(merges):
            ranks.setdefault(left + right, rank)
        scores = [-float(ranks.get(token, 0)) for token in tokens]
        return Vocabulary("llama", "default", tokens, types, scores, _has_space_prefix(data))
    pre = _split_of(data.get("pre_tokenizer") or {}, ignore_merges=bool(model.get("ignore_merges")))
    if pre is None:
        return f"none: llama.cpp has no name for how {_FILE} splits texts"
    return Vocabulary("gpt2", pre, tokens, types, None, None)


def _has_space_prefix(data: Mapping[str, Any]) -> bool:
    steps = [step for name in ("normalizer", "pre_tokenizer") for step in _steps(data.get(name) or {})]
    return any(step.get("type") == "Prepend" or _prepends(step) for step in steps)


def _prepends(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"


def _steps(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(step.get("normalizers") or step.get("pretokenizers") or [step])


def _split_of(pre_tokenizer: Mapping[str, Any], *, ignore_merges: bool) -> str | None:
    """Return what llama.cpp calls the way in which a tokenizer of bytes splits texts, or None."""
    match _steps(pre_tokenizer):
        case [*others, {"type": "ByteLevel", "add_prefix_space": False} as last] if last.get("use_regex", True):
            digits = [{"type": "Digits", "individual_digits": True}]
            return {0: "gpt-2", 1: "smollm" if others == digits else None}.get(len(others))
        case [{"type": "Split", "pattern": {"Regex": str(pattern)}}, {"type": "ByteLevel", "use_regex": False}]:
            found = _SPLITS.get(pattern)
            return "llama-bpe" if ignore_merges and found == "dbrx" else found
        case _:
            return None


# --- The file ---------------------------------------------------------------------------------------------------------

_REMEDY = 'quantize with qsdk.weight_only("int4", block_size=32).for_dialect("gguf"), and skip what is named here'


@dataclass(frozen=True)
class _Stored:
    """A tensor as the file holds it: its name there, its site, its type and its bytes or values."""

    name: str
    site: str
    type: str
    data: npt.NDArray[Any]
    elements: int


def write_gguf(sim: QuantSim, plan: Plan, encodings: Mapping[str, Encoding], path: str | os.PathLike[str]) -> Report:
    """Write a sim of a causal model of transformers as one file for llama.cpp.

    Raises:
        ConfigError: the package gguf is not installed.
        ExportError: no architecture of llama.cpp computes this model, or no type of GGUF holds a weight or activation.
    """
    library, model = _library(), sim.model
    require_plain(model)
    config = _config_of(model)
    found = architecture_of(config)
    _require_weights_alone(plan)
    folder = source_folder(model)
    vocabulary = read_vocabulary(folder, int(config["vocab_size"]))
    # the header names types and sizes of all tensors, so they are packed twice rather than held at once
    stored = [_without_data(one) for one in _tensors(library, sim, plan, encodings, config, found)]
    types = Counter(one.type for one in stored)

    def write(temporary: Path) -> None:
        """Write the whole file, one tensor after the other."""
        writer = library.GGUFWriter(temporary, found.name)
        try:
            _add_facts(writer, library, found, config, stored, Path(folder or "model").name)
            _add_vocabulary(writer, library, vocabulary, folder)
            for one in stored:
                kind = library.GGMLQuantizationType[one.type]
                writer.add_tensor_info(one.name, one.data.shape, one.data.dtype, one.data.nbytes, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for one in _tensors(library, sim, plan, encodings, config, found):
                writer.write_tensor_data(one.data)
        finally:
            writer.close()

    write_atomically(path, write)
    rows = [
        {"site": one.site, "dtype": _dtype(encodings, one.site), "form": f"{one.type}, {one.name}"} for one in stored
    ]
    quantized = [one for one in stored if one.site in encodings and one.type not in _FLOATS]
    bits = 8 * sum(one.data.nbytes for one in quantized) / max(sum(one.elements for one in quantized), 1)
    summary = {
        "architecture": found.name,
        "types": ", ".join(f"{count} {name}" for name, count in types.most_common()),
        "bits_per_weight": round(bits, 3),
        "tokenizer": vocabulary if isinstance(vocabulary, str) else f"{vocabulary.model}, {vocabulary.pre}",
        **_products(model),
        "bytes": Path(path).stat().st_size,
        "paths": [str(path)],
    }
    return Report("Export", rows, summary)


_FLOATS = ("F32", "F16", "BF16")


def _library() -> Any:
    try:
        return import_module("gguf")
    except ModuleNotFoundError as error:
        raise ConfigError("a GGUF file needs the package gguf: pip install 'qsdk[gguf]'") from error


def _config_of(model: nn.Module) -> dict[str, Any]:
    """Return the config of a causal model of transformers."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not float_class(model).__name__.endswith("ForCausalLM"):
        raise ExportError(
            f"GGUF holds causal language models of transformers, and {float_class(model).__name__} is none; export it "
            "as ONNX"
        )
    return dict(config.to_dict())


def _require_weights_alone(plan: Plan) -> None:
    """Refuse sites besides weights that are not float in the sim: the file has no place for them."""
    others = [
        f"{site} ({decision.spec.dtype})"
        for site, decision in plan.decisions.items()
        if decision.spec is not None and decision.kind != "weight"
    ]
    if others:
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        raise ExportError(f"GGUF holds weights alone, and has no place for {', '.join(others[:4])}{more}: {_REMEDY}")


def _tensors(
    library: Any,
    sim: QuantSim,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    config: Mapping[str, Any],
    found: Architecture,
) -> Iterator[_Stored]:
    """Yield the tensors of a model as the file holds them, one at a time."""
    kinds = {name: kind for kind, name in library.MODEL_ARCH_NAMES.items()}
    names = library.get_tensor_name_map(kinds[found.name], int(config["num_hidden_layers"]))
    own, model = encoding_keys(sim.model), sim.model
    tied = model.get_output_embeddings() is not None and config.get("tie_word_embeddings")  # type: ignore[operator]
    unknown = {site for site, decision in plan.decisions.items() if decision.quantized and ":" in site}
    for key, value in model.state_dict().items():
        if key in own or not isinstance(value, Tensor):
            continue
        owner, _, port = key.rpartition(".")
        site = site_name(owner, port)
        unknown.discard(site)
        if tied and key == "lm_head.weight":
            continue  # llama.cpp reads the table of the embedding in its place
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ExportError(f"{key} has no name in GGUF for a {found.name} model; {_REMEDY}")
        decision = plan.decisions.get(site)
        quantizer = sim.quantizers.get(site) if decision is not None and decision.quantized else None
        yield _stored(library, site, name, value.detach(), quantizer, encodings, config, found)
    factors = rope_factors(config)
    if factors is not None:
        yield _Stored("rope_freqs.weight", "rope_freqs", "F32", factors.numpy(), factors.numel())
    if unknown:
        raise ExportError(f"GGUF has no place for {', '.join(sorted(unknown)[:4])}: {_REMEDY}")


@torch.no_grad()
def _stored(
    library: Any,
    site: str,
    name: str,
    value: Tensor,
    quantizer: Any,
    encodings: Mapping[str, Encoding],
    config: Mapping[str, Any],
    found: Architecture,
) -> _Stored:
    """Return a tensor as the file holds it, read back and compared with the sim's."""
    projection = owner_of(site).rpartition(".")[2] if found.pairs else ""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(projection)
    used = value if quantizer is None else quantizer(value)
    if quantizer is None or value.ndim < 2:
        used = used if heads is None else in_pairs(used, config[heads])
        return _floats(name, site, used + found.norm_offset if _is_norm(site) else used)
    encoding = encodings[quantizer.decision.encoding_site]
    try:
        kind, data = bytes_of(value.float().cpu().numpy(), encoding)
    except NoTypeError as reason:
        raise ExportError(f"no type of GGUF holds the weight {site}: {reason}; {_REMEDY}") from None
    read = library.dequantize(data, library.GGMLQuantizationType[kind])
    if value.dtype == torch.float32 and not np.array_equal(read, used.cpu().numpy()):
        raise ExportError(f"a reader of {kind} would not compute the weight that the sim has at {site}")
    if heads is not None:
        data = in_pairs(torch.from_numpy(data), config[heads]).numpy()
    return _Stored(name, site, kind, data, value.numel())


def _floats(name: str, site: str, value: Tensor) -> _Stored:
    """Return a float tensor: matrices in their own type, and everything else in float32, as llama.cpp wants it."""
    kept = value.contiguous().cpu()
    if kept.ndim < 2 or kept.dtype not in (torch.float16, torch.bfloat16):
        return _Stored(name, site, "F32", kept.float().numpy(), kept.numel())
    if kept.dtype == torch.float16:
        return _Stored(name, site, "F16", kept.numpy(), kept.numel())
    return _Stored(name, site, "BF16", kept.view(torch.int16).numpy().view(np.uint8), kept.numel())


def _is_norm(site: str) -> bool:
    return "norm" in owner_of(site).rpartition(".")[2]


def _without_data(one: _Stored) -> _Stored:
    """Return a tensor whose data has the shape and the type alone."""
    empty = np.lib.stride_tricks.as_strided(np.empty(1, one.data.dtype), one.data.shape, (0,) * one.data.ndim)
    return _Stored(one.name, one.site, one.type, empty, one.elements)


def _dtype(encodings: Mapping[str, Encoding], site: str) -> str:
    return encodings[site].dtype.name if site in encodings else "float32"


def _products(model: nn.Module) -> dict[str, str]:
    """Return what to say of a model in a narrow float type, whose weights the sim rounds once more."""
    dtype = next(model.parameters()).dtype
    if dtype == torch.float32:
        return {}
    name = str(dtype).removeprefix("torch.")
    return {"products": f"codes and scales are the sim's; llama.cpp multiplies them in float32, the sim in {name}"}


def _add_facts(
    writer: Any,
    library: Any,
    found: Architecture,
    config: Mapping[str, Any],
    stored: list[_Stored],
    name: str,
) -> None:
    """Write what the file says of the model."""
    writer.add_name(name)
    for key, value in facts_of(config, found).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{found.name}.{key}", value)
    sizes: Counter[str] = Counter()
    for one in stored:
        sizes[one.type] += one.elements
    most = sizes.most_common(1)[0][0]
    file_types = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
    writer.add_file_type(int(library.LlamaFileType[file_types.get(most, f"MOSTLY_{most}")]))
    writer.add_quantization_version(library.GGML_QUANT_VERSION)


def _add_vocabulary(writer: Any, library: Any, vocabulary: Vocabulary | str, folder: Path | None) -> None:
    """Write the tokenizer, or that there is none: the file then takes and gives the numbers of tokens."""
    if isinstance(vocabulary, str) or folder is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.add_space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.add_space_prefix)
    special = library.SpecialVocab(folder, load_merges=vocabulary.model == "gpt2", n_vocab=len(vocabulary.tokens))
    for kind in ("bos", "eos"):
        special.add_special_token.setdefault(kind, False)
    special.add_to_gguf(writer, quiet=True)
