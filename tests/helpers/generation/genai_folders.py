"""Folders for onnxruntime-genai: what they hold, and the tokens that runtime and simulation go on with."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

from onnx_backend.genai.check import generate
from qsdk import QuantSim


def nodes(folder: Path) -> Counter[str]:
    """Return how many nodes of each type the model of a folder has."""
    return Counter(node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node)


def text(folder: Path, prompt: list[int], count: int, adapter: str = "") -> list[int]:
    """Return the tokens that onnxruntime-genai goes on with, from the files of a folder alone."""
    config = json.loads((folder / "genai_config.json").read_text())
    file = folder / f"{adapter}.onnx_adapter" if adapter else None
    return generate(folder / "model.onnx", config, prompt, count, file)[0].tolist()


def steps(folder: Path, sim: QuantSim, prompt: list[int], count: int) -> float:
    """Return how far the logits of a few steps in onnxruntime-genai are from a simulation without a cache."""
    config = json.loads((folder / "genai_config.json").read_text())
    found, logits = generate(folder / "model.onnx", config, prompt, count)
    with torch.no_grad():
        wanted = sim.model(input_ids=torch.from_numpy(found[None, :-1])).logits[0, len(prompt) - 1 :].numpy()
    return float(np.abs(logits - wanted).max() / np.abs(wanted).max())


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that `generate` of transformers goes on with."""
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()
