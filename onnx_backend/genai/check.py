"""The last act of writing a folder: open it in onnxruntime-genai, generate, and compare with the simulation."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from onnx_backend.genai import generator
from qsdk.core.arrays import Array
from qsdk.core.errors import ExportError

#: tokens [n], and whether layers leave their inputs in floats -> the logits [n, vocabulary] of the simulation
Logits = Callable[[Array, bool], Array]
_TOKENS = 8  # that are generated
_LEAST_DB = 20.0  # below that, logits are another model's: kernels round a code in thousands otherwise
_LEAST_DB_IN_FLOATS = 60.0  # where nothing is rounded on the way: an epsilon or a scale that is a little off shows
_INSTALL = "pip install 'qsdk[genai]'"


def check_folder(
    model: Path,
    config: Mapping[str, Any],
    prompt: Sequence[int],
    logits: Logits,
    *,
    count: int = _TOKENS,
    in_floats: bool = False,
) -> dict[str, Any]:
    """Generate from a model file and return what that says: `generated`, `tokens_equal`, `logits_sqnr_db`.

    The simulation reads the tokens that the runtime has chosen, so that one near tie does not count for all that
    follows. Where layers round their inputs, a code that falls to the other side hides what a form has wrong by a
    little: `in_floats`, for a model that rounds nothing else on the way, compares once more with those inputs as they
    are, on both sides, and notes `forms_sqnr_db`.

    Raises:
        ExportError: the runtime does not open the file, ends its process, or computes other logits.
    """
    if find_spec("onnxruntime_genai") is None:
        return {"default_session": f"not opened: onnxruntime-genai is not installed ({_INSTALL})"}
    count = min(count, int(config["model"]["context_length"]) - len(prompt))
    tokens, got = generate(model, config, prompt, count)
    wanted = logits(tokens[:-1], False)[len(prompt) - 1 :]
    decibels = _decibels(wanted, got)
    _require(model, decibels, _LEAST_DB, "")
    equal = int((wanted.argmax(-1) == tokens[len(prompt) :]).sum())
    facts = {"generated": count, "tokens_equal": equal, "logits_sqnr_db": decibels}
    if in_floats:
        tokens, got = generate(model, config, prompt, count, in_floats=True)
        facts["forms_sqnr_db"] = _decibels(logits(tokens[:-1], True)[len(prompt) - 1 :], got)
        _require(model, facts["forms_sqnr_db"], _LEAST_DB_IN_FLOATS, ", with the inputs of all layers in floats,")
    return facts


def _decibels(wanted: Array, got: Array) -> float:
    """Return the ratio of logits, less the mean of each token's, to their difference; -inf for no numbers."""
    noise = float(np.square(got.astype(np.float64) - wanted).sum())
    signal = float(np.square(wanted - wanted.mean(-1, keepdims=True), dtype=np.float64).sum())
    if not np.isfinite(noise):
        return -np.inf
    return float(10 * np.log10(signal / noise)) if noise and signal else 200.0


def _require(model: Path, decibels: float, least: float, how: str) -> None:
    if decibels < least:
        raise ExportError(
            f"{model} was not written: in onnxruntime-genai{how} its logits are {decibels:.1f} dB from the "
            f"simulation's, where {least:.0f} are the least; report this, or write the folder as it is with check=False"
        )


def generate(
    model: Path,
    config: Mapping[str, Any],
    prompt: Sequence[int],
    count: int,
    adapter: Path | None = None,
    *,
    in_floats: bool = False,
) -> tuple[Array, Array]:
    """Return the tokens [n] of a text that the runtime goes on with, and its logits [count, vocabulary].

    With `in_floats`, no kernel rounds what it multiplies.
    """
    with tempfile.TemporaryDirectory(prefix=".qsdk-", dir=model.parent) as folder:
        name = Path(folder, config["model"]["decoder"]["filename"])
        if in_floats:
            onnx.save(_rounding_nothing(model), name)
        else:
            _link(model, name)
        for data in model.parent.glob("*.data"):  # the runtime wants all that it reads in one folder
            _link(data, Path(folder, data.name))
        Path(folder, "genai_config.json").write_text(json.dumps(config))
        result = Path(folder, "result.npz")
        asked = {"folder": folder, "prompt": [int(token) for token in prompt], "count": count, "result": str(result)}
        asked["adapter"] = "" if adapter is None else str(adapter)
        paths = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, "-P", generator.__file__],
            input=json.dumps({**asked, "vocabulary": config["model"]["vocab_size"]}),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
        if done.returncode or not result.exists():
            why = done.stderr.strip().splitlines()[-1:] or [f"its process ends with code {done.returncode}"]
            raise ExportError(
                f"{model} was not written: onnxruntime-genai does not run it: {why[0]}; report this, or write the "
                "folder as it is with check=False"
            )
        with np.load(result) as arrays:
            return arrays["tokens"], arrays["logits"]


def _rounding_nothing(model: Path) -> ModelProto:
    """Return a model, without the data beside it, whose products read floats."""
    result = onnx.load(model, load_external_data=False)
    for node in result.graph.node:
        for option in node.attribute:
            if option.name == "accuracy_level":
                option.i = 0
    return result


def _link(source: Path, name: Path) -> None:
    try:
        os.link(source, name)
    except OSError:  # a file system without links
        shutil.copyfile(source, name)
