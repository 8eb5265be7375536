"""Tiny transformers with random weights, also of their norms, for rotations; and their float outputs at both doors."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn

import qsdk
from qsdk.verbs.doors.choose import Sim, door_of

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "max_position_embeddings": 32}
SIZES = {**SMALL, "hidden_size": 24, "intermediate_size": 36}
GROUPED = {**SIZES, "num_key_value_heads": 2, "use_cache": False}
APART = {"tie_word_embeddings": False}
PICTURES = {"image_size": 16, "patch_size": 8, "num_labels": 5}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 32, "use_cache": False}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


class Logits(nn.Module):
    """The first output of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[0]


BUILD: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, **APART)),
    "tied llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, **APART, head_dim=8)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED, **APART, head_dim=8)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **NO_TOKENS, **APART)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**{**SIZES, **PICTURES})),
}


def model_and_input(name: str) -> tuple[nn.Module, Tensor]:
    """A model whose norms have gains and shifts of their own, and an input for it."""
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    x = torch.randn(2, 3, 16, 16) if name == "vit" else torch.randint(0, 50, (2, 6))
    return Logits(model), x


def exact(model: nn.Module, x: Tensor) -> np.ndarray:
    """The outputs of a model in float64."""
    with torch.no_grad():
        result: Any = copy.deepcopy(model).double()(x.double() if x.is_floating_point() else x)
    return result.numpy()


def float_file(sim: Sim, path: Path) -> str:
    """The float model of a sim that was not calibrated, as an ONNX file."""
    qsdk.export(sim, path, uncalibrated="float")
    return str(path)


def in_float(sim: Sim, x: Tensor) -> np.ndarray:
    """The outputs of the float model of a sim of an ONNX file."""
    return next(iter(door_of(sim).outputs([(x.numpy(),)], in_float=True)))[0]


def off(result: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, relative to the largest value."""
    return float(np.abs(result - wanted).max() / np.abs(wanted).max())
