"""The logits of a language model, whatever it is: a module, a sim of either side, or a function."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qsdk.core.errors import ConfigError, DataError
from qsdk.verbs.doors.choose import OnnxSim, QuantSim
from qsdk.verbs.doors.door import Forward
from torch_bridge.training.training import eval_mode

Logits = Callable[[Tensor], Tensor]


@contextmanager
def reading(model: Any, forward: Forward | None) -> Iterator[Logits]:
    """Yield a function of token ids [texts, length] whose value is the logits [texts, length, vocabulary], float32.

    Args:
        model: a module (in eval mode inside the block), a sim, or a function of token ids.
        forward: `(model, ids)`, to call it yourself.

    Raises:
        ConfigError: it is none of these.
        DataError: what it returns is not the logits of every token, or not finite.
    """
    module = model.model if isinstance(model, QuantSim) else model
    if not (callable(model) or isinstance(model, OnnxSim) or forward is not None):
        raise ConfigError(f"{type(model).__name__} is no model; give a module, a sim, or a function of token ids")

    def logits(ids: Tensor) -> Tensor:
        placed = ids.to(_device(module)) if isinstance(module, nn.Module) else ids
        with torch.no_grad():
            if forward is not None:
                result = forward(model, placed)
            else:
                result = model.run(_feeds(model, ids)) if isinstance(model, OnnxSim) else model(placed)
        return _checked(_found(result), ids)

    if isinstance(module, nn.Module):
        with eval_mode(module):
            yield logits
    else:
        yield logits


def _device(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _feeds(sim: OnnxSim, ids: Tensor) -> dict[str, Any]:
    """Return the inputs of an ONNX decoder for whole texts: ids, and what follows from them.

    Raises:
        ConfigError: it has an input besides.
    """
    names = [sim.graph.tensors[tensor].name for tensor in sim.graph.inputs]
    texts, length = ids.shape
    known = {"attention_mask": np.ones((texts, length), np.int64)}
    known["position_ids"] = np.tile(np.arange(length), (texts, 1))
    own = names[0] if len(names) == 1 else "input_ids"
    given = {own: ids.numpy(), **{name: known[name] for name in names if name in known}}
    if missing := [name for name in names if name not in given]:
        raise ConfigError(f"the model takes {', '.join(missing)} besides token ids; call it yourself with forward=")
    return given


def _found(result: Any) -> Any:
    """Return the logits in what a model returns: by that name, or the first tensor of three dimensions."""
    if isinstance(result, Mapping) and "logits" in result:
        return result["logits"]
    if hasattr(result, "logits"):
        return result.logits
    if isinstance(result, tuple | list):
        return next((one for one in result if getattr(one, "ndim", 0) == 3), result)
    return result


def _checked(found: Any, ids: Tensor) -> Tensor:
    shape = tuple(getattr(found, "shape", ()))
    if len(shape) != 3 or shape[:2] != tuple(ids.shape):
        what = f"values of shape {shape}" if shape else f"a {type(found).__name__}"
        raise DataError(
            f"the model gives {what} for token ids {tuple(ids.shape)}, not logits [texts, length, vocabulary]; give "
            "forward=lambda model, ids: ... that returns them"
        )
    if int(ids.max()) >= shape[2]:
        raise DataError(
            f"token {int(ids.max())} is beyond the {shape[2]} that the model knows; give its own tokenizer's"
        )
    result = torch.as_tensor(found).detach().float().cpu()
    if not bool(torch.isfinite(result).any(-1).all()) or bool(result.isnan().any()):
        raise DataError(f"the logits for tokens {ids[0, :4].tolist()}... are NaN, or all infinite")
    return result
