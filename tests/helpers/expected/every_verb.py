"""Every verb of post-training quantization as a call, the sims they are called on, and all that a sim consists of."""

import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from float_files import float_onnx
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from walked import float_model
from zoo_models import ZOO, distinct

import qsdk
from onnx_backend.runtime.session import simulation_session
from qsdk import OnnxSim, QuantConfig, QuantSim, Report, w4a8, w4a16, w8a8, weight_only
from qsdk.verbs.doors.choose import Sim

Verb = Callable[..., Report]

CONFIGS: dict[str, Callable[[], QuantConfig]] = {
    "w8a8": w8a8,
    "w4a8": w4a8,
    "w4a16": w4a16,
    "blocks": lambda: w4a16(block_size=4),
    "weight only": lambda: weight_only("int2", block_size=8),
    "asymmetric": lambda: weight_only("uint4").override("*", symmetric_weights=False),
    "per tensor": lambda: w4a8().override("*", per_channel=False),
    "dynamic": lambda: w8a8().override("*", dynamic_activations=True),
    "mxfp4": lambda: weight_only("mxfp4"),
    "mxfp8": lambda: weight_only("mxfp8"),
    "nvfp4": lambda: weight_only("nvfp4"),
    "float8": lambda: w8a8(symmetric_activations=True).override("*", activation="float8e4m3fn"),
    "two levels": lambda: w4a16(block_size=4).override("*", two_level_scales=True),
    "4 scale bits": lambda: w4a8().override("*", scale_bits=4),
    "int2": lambda: w4a8().override("*", weight="int2"),
    "float16 layers": lambda: w4a8().skip("*", "float16", op_type=("Gemm", "LSTM", "GRU"), optional=True),
    "some frozen": w4a8,
}

#: what changes weights or their encodings, layer by layer
LAYERS: dict[str, Verb] = {
    "seq_mse": lambda sim, data, **k: qsdk.seq_mse(sim, data, candidates=8, **k),
    "seq_mse spilled": lambda sim, data, **k: qsdk.seq_mse(sim, data, candidates=5, max_memory=1, **k),
    "adaround": lambda sim, data, **k: qsdk.adaround(sim, data, iterations=2, starts=2, **k),
    "adaround relaxed": lambda sim, data, **k: qsdk.adaround(sim, data, method="relaxed", iterations=5, **k),
    "gptq": qsdk.gptq,
    "gptq fixed": lambda sim, data, **k: qsdk.gptq(sim, data, scales="fixed", act_order=False, block_size=3, **k),
}
BIASES: dict[str, Verb] = {
    "correct_bias": qsdk.correct_bias,
    "analytic": lambda sim, data, forward=None, **k: qsdk.correct_bias(sim, method="analytic", **k),
}
SCALINGS: dict[str, Verb] = {
    "equalize": qsdk.equalize,
    "smooth_quant": qsdk.smooth_quant,
    "smooth_quant auto": lambda sim, data, **k: qsdk.smooth_quant(sim, data, alpha="auto", **k),
    "awq": lambda sim, data, **k: qsdk.awq(sim, data, grid=4, **k),
}
NORMS: dict[str, Verb] = {"reestimate_batch_norm": qsdk.reestimate_batch_norm}
GRADIENTS: dict[str, Verb] = {
    "tune_blocks": lambda sim, data, **k: qsdk.tune_blocks(sim, data, iterations=3, batch_size=4, **k),
    "tune_ranges": lambda sim, data, **k: qsdk.train.tune_ranges(sim, data, steps=3, **k),
}
VERBS = {**LAYERS, **BIASES, **SCALINGS, **NORMS, **GRADIENTS}


def zoo_sim(name: str, config: str, door: str, *, count: int = 5) -> tuple[Sim, list[Any]]:
    """A calibrated sim of a network of `ZOO`, and its batches, as tuples."""
    build, inputs = ZOO[name]
    model, data = distinct(build()), [inputs(seed) for seed in range(count)]
    if door == "torch":
        sim = qsdk.quantize(model, data[0], CONFIGS[config]())
    else:
        sim = qsdk.quantize(float_onnx(model, data[0]), None, CONFIGS[config]())
        data = [tuple(x.numpy() for x in batch) for batch in data]
    qsdk.calibrate(sim, data, progress=False)
    if config == "some frozen":
        freeze_half(sim)
    return sim, data


def freeze_half(sim: Sim) -> None:
    """Freeze every second weight that has an encoding of its own."""
    own = sim.snapshot().own
    for site in [site for site in own if sim.plan.decisions[site].kind == "weight"][::2]:
        sim.freeze(site)


# --- forms of data ---------------------------------------------------------------------------------------------------


def as_loader(data: list[Any]) -> tuple[Iterable[Any], None]:
    return DataLoader(data, batch_size=None, collate_fn=lambda batch: batch), None  # type: ignore[arg-type]


def as_generator(data: list[Any]) -> tuple[Iterable[Any], None]:
    return (batch for batch in data), None


def with_labels(data: list[Any]) -> tuple[Iterable[Any], Callable[..., Any]]:
    def forward(model: Any, batch: Any) -> Any:
        given = batch[0]
        return model(**given) if isinstance(given, dict) else model(*given)

    return [(batch, "label") for batch in data], forward


# --- all that a sim is -----------------------------------------------------------------------------------------------


def everything(sim: Sim) -> dict[str, Any]:
    """All that a verb could leave behind, bit for bit: in the sim, in torch, in threads and in files."""
    return {
        "encodings": dict(sim.snapshot().own),
        "planned": (sim.plan, sim.config, sim.methods),
        "biases": {site: tuple(x.tobytes() for x in pair) for site, pair in sim.original_biases.items()},
        "norms": repr(sim.folded_norms),
        "threads": threading.active_count(),
        "files": sorted(path.name for path in Path(tempfile.gettempdir()).glob("qsdk-*")),
        "torch": (torch.is_grad_enabled(), len(_get_current_function_mode_stack())),
        "stored": of_module(sim) if isinstance(sim, QuantSim) else of_model(sim),
    }


def of_module(sim: QuantSim) -> dict[str, Any]:
    found: dict[str, Any] = {"runtime": (sim.runtime.phase, sim.runtime.frame, sim.runtime.visitor)}
    for path, module in sim.model.named_modules():
        parameters = {
            name: p if p is None else (id(p), p.requires_grad, p.grad, bits(p))
            for name, p in module._parameters.items()
        }
        buffers = {n: bits(b) for n, b in module._buffers.items()}
        hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
        found[path] = parameters, buffers, hooks, module.training, sorted(module.__dict__)
    return found


def bits(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.detach().numpy().tobytes())


def of_model(sim: OnnxSim) -> dict[str, bytes]:
    return {tensor.name: tensor.SerializeToString() for tensor in sim.traced().model.graph.initializer}


def arrays(result: Any) -> list[np.ndarray]:
    """The tensors of a result, in order."""
    values = result.to_tuple() if hasattr(result, "to_tuple") else result
    return [np.asarray(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor | np.ndarray)]


def float_outputs(sim: Sim, batch: Any) -> list[np.ndarray]:
    """What the sim's float model gives."""
    if isinstance(sim, QuantSim):
        model = sim.unwrap().eval()
        with torch.no_grad():
            return arrays(model(**batch) if isinstance(batch, dict) else model(*batch))
    session = simulation_session(float_model(sim))
    names = [value.name for value in session.get_inputs()]
    return arrays(session.run(None, dict(zip(names, batch, strict=True))))
