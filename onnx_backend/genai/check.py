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
import numpy.typing as npt

from onnx_backend.genai import generator
from qsdk.core.errors import ExportError

Array = npt.NDArray[Any]
#: tokens [n] -> the logits [n, vocabulary] of the simulation
Logits = Callable[[Array], Array]
_TOKENS = 8  # that are generated
_LEAST_DB = 20.0  # below that, logits are another model's: kernels round a code in thousands otherwise
_LEAST_DB_NARROW = 10.0  # the simulation's own noise in bfloat16: 31 dB behind 22 layers
_INSTALL = "pip install 'qsdk[genai]'"


def check_folder(
    model: Path,
    config: Mapping[str, Any],
    prompt: Sequence[int],
    logits: Logits,
    *,
    count: int = _TOKENS,
    narrow: bool = False,
) -> dict[str, Any]:
    """Generate from a model file and return what that says: `generated`, `tokens_equal`, `logits_sqnr_db`.

    The simulation reads the tokens that the runtime has chosen, so that one near tie does not count for all that
    follows. It is `narrow` where it rounds results to bfloat16 or float16, which the runtime does not.

    Raises:
        ExportError: the runtime does not open the file, ends its process, or computes other logits.
    """
    if find_spec("onnxruntime_genai") is None:
        return {"default_session": f"not opened: onnxruntime-genai is not installed ({_INSTALL})"}
    count = min(count, int(config["model"]["context_length"]) - len(prompt))
    tokens, got = generate(model, config, prompt, count)
    wanted = logits(tokens[:-1])[len(prompt) - 1 :]
    noise = float(np.square(got.astype(np.float64) - wanted).sum())
    signal = float(np.square(wanted - wanted.mean(-1, keepdims=True), dtype=np.float64).sum())
    decibels = float(10 * np.log10(signal / noise)) if noise and signal else 200.0
    if not np.isfinite(got).all() or not decibels >= (_LEAST_DB_NARROW if narrow else _LEAST_DB):
        raise ExportError(
            f"{model} was not written: in onnxruntime-genai its logits are {decibels:.1f} dB from the simulation's; "
            "report this, or write the folder as it is with check=False"
        )
    equal = int((wanted.argmax(-1) == tokens[len(prompt) :]).sum())
    return {"generated": count, "tokens_equal": equal, "logits_sqnr_db": decibels}


def generate(
    model: Path, config: Mapping[str, Any], prompt: Sequence[int], count: int, adapter: Path | None = None
) -> tuple[Array, Array]:
    """Return the tokens [n] of a text that the runtime goes on with, and its logits [count, vocabulary]."""
    with tempfile.TemporaryDirectory(prefix=".qsdk-", dir=model.parent) as folder:
        _link(model, Path(folder, config["model"]["decoder"]["filename"]))
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


def _link(source: Path, name: Path) -> None:
    try:
        os.link(source, name)
    except OSError:  # a file system without links
        shutil.copyfile(source, name)
