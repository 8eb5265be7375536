"""The tokenizer of a checkpoint folder as a GGUF file holds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsdk.core.read_files import parse_json, read_text

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
