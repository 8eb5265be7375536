"""Random networks in every float type and config, exported and opened as a user does: does the file compute the sim?"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_networks import random_network
from torch import Tensor, nn

import qsdk
from qsdk import QsdkError, QuantConfig, w4a8, w8a8, w8a16, weight_only

DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
#: what an export may say of an ordinary session: roundings that turned, and the file's own need of an option
EXPLAINED = (
    "each site is within a step of it",
    "the runtime rounds float16 and bfloat16 at other places",
    "open it with the entries that session_options names",
)


def random_case(seed: int) -> tuple[nn.Module, Any, QuantConfig]:
    """A network in some float type, its example, and a config."""
    rng = random.Random(seed + 5000)
    dtype = rng.choice(DTYPES)
    net, example = random_network(seed)
    return net.to(dtype), _mapped(example, lambda x: x.to(dtype)), _config(rng)


def _config(rng: random.Random) -> QuantConfig:
    block = rng.choice([None, None, None, 2, 16])
    if rng.random() < 0.15:
        return weight_only(rng.choice(["int8", "int4", "uint8"]), block_size=block)
    if rng.random() < 0.15:
        return rng.choice([w8a8, w4a8])(block_size=block).override("*", dynamic_activations=True)
    config = rng.choice([w8a8, w8a8, w8a16, w4a8])(block_size=block, symmetric_activations=rng.random() < 0.25)
    if rng.random() < 0.2:
        config = config.override("*", activation="int8")
    if rng.random() < 0.3:
        op_type = rng.choice(["Conv", "Gemm", "MatMul", "Add", "Relu", "Softmax", "LayerNormalization"])
        config = config.override("*", activation="float32", op_type=op_type, optional=True)
    return config


def _mapped(example: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(example, Tensor):
        return function(example)
    if isinstance(example, dict):
        return {name: function(value) for name, value in example.items()}
    return tuple(function(value) for value in example)


def compared(seed: int, path: Path) -> tuple[str, str]:
    """What becomes of the network of a seed: `agrees`, `explained`, `differs` or `refused`; and what was said."""
    net, example, config = random_case(seed)
    rng = torch.Generator().manual_seed(seed)
    other = _mapped(example, lambda x: (x.float() + 0.3 * torch.randn(x.shape, generator=rng)).to(x.dtype))
    told = f"seed {seed}, {next(net.parameters(), torch.zeros(1)).dtype}, {config}: "
    try:
        sim = qsdk.quantize(net, example, config)
        qsdk.calibrate(sim, [example, other], progress=False)
        said = qsdk.export(sim, path).summary.get("default_session", "")  # it opens the file, in a process of its own
        parity = qsdk.check_parity(sim, path, [example, other], progress=False)
    except QsdkError as error:
        return ("differs" if "was not written" in str(error) else "refused"), told + str(error)
    if not parity.summary["passed"]:
        return "differs", f"{told}{parity}"
    if said and not any(words in said for words in EXPLAINED):
        return "differs", told + said
    return ("explained" if said else "agrees"), told + said
