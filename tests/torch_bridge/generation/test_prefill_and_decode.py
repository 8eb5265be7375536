"""`export(shapes={"prefill": ..., "decode": ...})`: two files of fixed lengths that share one file of weights."""

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from tiny_decoders import CACHE, decoder, generate, session_of, step_example, tokens
from torch import nn
from transformers.cache_utils import DynamicCache

import qsdk
from qsdk import ConfigError, FileFormatError, QuantSim

PROMPT, PAST = 12, 40
PREFILL = {"batch": 1, "sequence_length": PROMPT, "past_sequence_length": 0}
DECODE = {"batch": 1, "sequence_length": 1, "past_sequence_length": PAST}
BOTH = {"prefill": PREFILL, "decode": DECODE}


def _decoder() -> nn.Module:
    return decoder("Llama", num_hidden_layers=1, vocab_size=512)  # its table is large enough for a file of weights


@functools.cache
def _sim() -> QuantSim:
    sim = qsdk.quantize(_decoder(), {"input_ids": tokens(0)}, qsdk.w8a8(kv_cache="int8"))
    qsdk.calibrate(sim, [{"input_ids": tokens(seed)} for seed in range(1, 4)], progress=False)
    return sim


def _generate(folder: Path, ids: npt.NDArray[np.int64], count: int) -> list[int]:
    """Return a prompt with `count` more tokens: both files are padded on the left, and the mask says where."""
    prefill, decode = (session_of(str(folder / f"model.{name}.onnx")) for name in ("prefill", "decode"))
    names = [one.name for one in prefill.get_outputs()]
    found, used = ids.tolist(), len(ids)
    feeds: dict[str, Any] = {
        "input_ids": np.zeros((1, PROMPT), np.int64),
        "position_ids": np.zeros((1, PROMPT), np.int64),
    }
    feeds["input_ids"][0, -used:], feeds["position_ids"][0, -used:] = ids, np.arange(used)
    results = prefill.run(None, {**feeds, "attention_mask": _mask(PROMPT, used)})
    past = {name.replace("present", "past_key_values"): x for name, x in zip(names, results, strict=True)}
    past = {
        name: np.pad(x, [(0, 0), (0, 0), (PAST - PROMPT, 0), (0, 0)]) for name, x in past.items() if name != "logits"
    }
    for _ in range(count - 1):
        found.append(int(results[0][0, -1].argmax()))
        feeds = {"input_ids": np.array([found[-1:]]), "position_ids": np.array([[len(found) - 1]])}
        results = decode.run(None, {**feeds, "attention_mask": _mask(PAST + 1, len(found)), **past})
        past = {name: x[:, :, 1:] for name, x in zip(past, results[1:], strict=True)}
    return [*found, int(results[0][0, -1].argmax())]


def _mask(length: int, used: int) -> npt.NDArray[np.int64]:
    return (np.arange(length) >= length - used).astype(np.int64)[None]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["float", "integer"])
def test_the_tokens_are_those_of_the_single_file(cache: Any, tmp_path: Path) -> None:
    sim, ids = _sim(), tokens(9).numpy()
    qsdk.export(sim, tmp_path / "single.onnx")
    qsdk.export(sim, tmp_path / "model.onnx", shapes=BOTH, cache=cache)
    wanted = generate(session_of(str(tmp_path / "single.onnx")), ids, 24)[0]
    assert _generate(tmp_path, ids[0], 24) == wanted.tolist()


@pytest.mark.slow
def test_the_weights_are_written_once_and_old_ones_go(tmp_path: Path) -> None:
    written = [qsdk.export(_sim(), tmp_path / "model.onnx", shapes=sizes) for sizes in ({"other": DECODE}, BOTH)]
    (data,) = tmp_path.glob("*.data")
    names = {"model.prefill.onnx", "model.decode.onnx", "model.shared.encodings.json", data.name}
    assert {Path(path).name for path in written[1].summary["paths"]} == names
    assert written[1].summary["fixed_shapes"]["model.prefill.onnx"]["attention_mask"] == [1, PROMPT]
    for name in ("prefill", "decode"):
        path = tmp_path / f"model.{name}.onnx"
        graph = onnx.load(path, load_external_data=False).graph
        places = {entry.value for t in graph.initializer for entry in t.external_data if entry.key == "location"}
        assert places == {data.name}
        assert all(dim.dim_value for value in graph.input for dim in value.type.tensor_type.shape.dim)
        assert ("past_key_values.0.key" in {value.name for value in graph.input}) == (name == "decode")
        assert qsdk.validate(path).summary["errors"] == 0
    assert data.stat().st_size < 2 * 512 * 32 + 2**16


@pytest.mark.slow
def test_parity_of_both_files(tmp_path: Path) -> None:
    qsdk.export(_sim(), tmp_path / "model.onnx", shapes=BOTH, cache="integer")
    ids = tokens(3, length=PROMPT)
    facts = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(PROMPT)[None]}
    prompt = {"input_ids": ids, **facts, CACHE: DynamicCache()}
    step = step_example(_decoder(), batch=1, past=PAST, step=1)
    for name, batch in (("prefill", prompt), ("decode", step)):
        report = qsdk.check_parity(_sim(), tmp_path / f"model.{name}.onnx", [batch], progress=False)
        assert report.summary["passed"], report


@pytest.mark.slow
def test_a_file_without_one_of_its_parts_is_refused(tmp_path: Path) -> None:
    qsdk.export(_sim(), tmp_path / "model.onnx", shapes=BOTH)
    encodings = tmp_path / "model.shared.encodings.json"
    text = encodings.read_text()
    encodings.write_text(text + "\n")
    with pytest.raises(
        FileFormatError, match=r"model\.shared\.encodings\.json does not belong to .*model\.decode\.onnx"
    ):
        qsdk.quantize(tmp_path / "model.decode.onnx", None)
    encodings.write_text(text)
    (data,) = tmp_path.glob("*.data")
    os.truncate(data, 100)
    with pytest.raises(FileFormatError, match="has 100 bytes"):
        qsdk.quantize(tmp_path / "model.prefill.onnx", None)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": {**DECODE, "total_sequence_length": PAST}}, r"40 tokens of the past .* and 1 new ones .* are not 40"),
        ({"a": {"batch": 1, "sequence_length": 1}}, r"axes are open here: attention_mask: \(1, '\?'\)"),
        ({"a": DECODE, "batch": 1}, "'batch' is none: give every file a name"),
        ({"../a": DECODE}, "give every file a name of letters and digits"),
        ({"a": {"rows": 1}}, "names the axes rows; open are batch, past_sequence_length, sequence_length"),
        (
            {"a": {"batch": 1, "sequence_length": 0, "past_sequence_length": 4}},
            "only keys and values of a cache may be",
        ),
    ],
    ids=["contradiction", "open", "mixed", "name", "unknown", "no tokens"],
)
def test_sizes_that_cannot_be_are_refused(shapes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        qsdk.export(_sim(), tmp_path / "model.onnx", shapes=shapes)
    assert not list(tmp_path.iterdir())
