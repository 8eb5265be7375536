"""The parts of a saved sim of an nn.Module besides its state: weights and example, read without running code."""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ExportError, FileFormatError, ModelError
from qsdk.core.read_files import first_line_of, require_modest_size
from qsdk.core.sims.sim_file import Part
from torch_bridge.sim import QuantSim
from torch_bridge.stored_weights import Before
from torch_bridge.torch_values.batches import Example
from torch_bridge.torch_values.parameters import dtype_name, main_dtype
from torch_bridge.torch_values.pytree import Path, from_plain_form, map_arguments, plain_form
from torch_bridge.wrapping.wrapped_state import encoding_keys, weights_digest
from torch_bridge.wrapping.wrapper import FOLDED

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WEIGHTS, EXAMPLE, GIVEN = "weights.pt", "example.pt", "given.pt"


def parts_of(sim: QuantSim) -> dict[str, Part]:
    """Return the parts of a sim's file: its state_dict without encodings, and the arguments it was traced with.

    Where verbs have changed weights, the values that were given are included.
    """
    own = encoding_keys(sim.model)
    weights = {name: value for name, value in sim.model.state_dict().items() if name not in own}
    given = sim.current_example
    args, kwargs = tuple(map(plain_form, given.args)), {name: plain_form(x) for name, x in given.kwargs.items()}
    example = {"args": args, "kwargs": kwargs, "dynamic_shapes": given.dynamic_shapes}
    example |= {"float32_edges": True} if given.float32_edges else {}
    example |= {"apart": [list(path) for path in sorted(given.apart)]} if given.apart else {}
    extra = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
    for what, value in (("the example", example), (f"the state of {', '.join(extra)}", extra)):
        _require_plain(what, value)

    kept = {key: (before.given, before.in_float) for key, before in sim.given.changed(sim.model).items()}
    held = {WEIGHTS: weights, EXAMPLE: example, **({GIVEN: kept} if kept else {})}
    return {name: partial(torch.save, value) for name, value in held.items()}


def dtype_facts(sim: QuantSim) -> dict[str, str]:
    """Return the dtype that the model was quantized in, which its plan is for, where it was converted afterwards."""
    then = sim.dtype_when_quantized
    return {} if then is None or then == main_dtype(sim.model) else {"quantized_in": dtype_name(then)}


def read_dtype(facts: Mapping[str, Any], where: str) -> torch.dtype | None:
    """Return the dtype that `dtype_facts` wrote, or None."""
    name = facts.get("quantized_in")
    if name is None:
        return None
    for dtype in _FLOATS:
        if dtype_name(dtype) == name:
            return dtype
    raise FileFormatError(f"{where} was quantized in {name!r}, which is no float dtype; write it again with qsdk.save")


def read_untied(facts: Mapping[str, Any], model: nn.Module, where: str) -> tuple[str, ...]:
    """Return the paths of the parameters that are shared in the module that was given, and copies in the sim."""
    given = facts.get("untied", [])
    known = {path for path, _ in model.named_parameters(remove_duplicate=False)}
    if not isinstance(given, list) or not known.issuperset(given):
        raise FileFormatError(
            f"{where} names parameters that the module lacks: {given!r}; pass the one it was saved of"
        )
    return tuple(given)


def read_online_rotations(facts: Mapping[str, Any], model: nn.Module, where: str) -> dict[str, list[int]]:
    """Return path of each Linear that has a rotation in front of it in the sim -> the sizes of its factors."""
    given: dict[str, list[int]] = facts.get("online_rotations", {})
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    known = isinstance(given, dict) and layers.keys() >= given.keys()
    if not known or any(math.prod(sizes) != layers[path].in_features for path, sizes in given.items()):
        raise FileFormatError(
            f"{where} rotates the inputs of layers that the module lacks; pass the one it was saved of"
        )
    return given


def read_example(parts: Mapping[str, bytes], where: str) -> Example:
    """Return the arguments that the sim was traced with, on the CPU."""
    read = _read(parts, EXAMPLE, where)
    try:
        apart = frozenset(tuple(path) for path in read.get("apart", ()))
        args = tuple(map(from_plain_form, read["args"]))
        kwargs = {name: from_plain_form(value) for name, value in dict(read["kwargs"]).items()}
        edges = bool(read.get("float32_edges"))
        return Example(args, kwargs, read.get("dynamic_shapes"), apart=apart, float32_edges=edges)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise FileFormatError(f"{EXAMPLE} in {where} is damaged; write the file again with qsdk.save") from error


def load_weights(sim: QuantSim, parts: Mapping[str, bytes], where: str) -> None:
    """Load the weights of a file into a sim."""
    read = _read(parts, WEIGHTS, where)
    if not isinstance(read, Mapping) or not all(isinstance(name, str) for name in read):
        raise FileFormatError(f"{WEIGHTS} in {where} holds no state_dict; write it again with qsdk.save(sim, path)")
    weights = OrderedDict(read)
    weights._metadata = {"": {FOLDED: True}}  # type: ignore[attr-defined]
    present = sim.model.state_dict()
    for name, value in weights.items():
        known = present.get(name)
        if isinstance(value, Tensor) and isinstance(known, Tensor) and known.dtype != value.dtype:
            raise ModelError(
                f"{name} is {known.dtype} in the model and {value.dtype} in {where}; convert the model first"
            )
    try:
        sim.model.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(
            f"{where} holds the weights of another model: {error}; pass the one it was saved from"
        ) from error


def require_weights(sim: QuantSim, digest: Any, where: str) -> None:
    """Refuse a model whose weights are not those beside which the sim was written."""
    if weights_digest(sim.model) != digest:
        raise ModelError(
            f"{where} belongs to other weights than those of the model: they were changed since; write both with "
            "sim.model.save_pretrained(folder)"
        )


def load_given(sim: QuantSim, parts: Mapping[str, bytes], where: str) -> None:
    """Load the values that were given of the weights that verbs had changed, and those of the float model."""
    kept = _read(parts, GIVEN, where) if GIVEN in parts else {}
    try:
        pairs = {
            key: value if isinstance(value, tuple) else (value, None) for key, value in kept.items()
        }  # None: older
        sim.given.load(sim.model, {(str(path), str(name)): Before(*pair) for (path, name), pair in pairs.items()})
    except (ModelError, AttributeError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{GIVEN} in {where} is damaged ({error}); write it again with qsdk.save(sim, path)"
        ) from error


def on_device_of(model: nn.Module, example: Example) -> Example:
    """Return the example on the device of the model's first tensor, apart from tensors that were on another one."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))

    def move(path: Path, leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) and path not in example.apart else leaf

    args, kwargs = map_arguments(model.forward, example.args, example.kwargs, move)
    return replace(example, args=args, kwargs=kwargs)


def _require_plain(what: str, value: Any) -> None:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), map_location="cpu", weights_only=True)
    except (pickle.PickleError, RuntimeError, TypeError, AttributeError) as error:
        raise ExportError(
            f"{what} cannot be saved as plain data: {first_line_of(error)}; use tensors, numbers, strings, "
            "tuples, lists and dicts"
        ) from error


def _read(parts: Mapping[str, bytes], name: str, where: str) -> Any:
    if name not in parts:
        raise FileFormatError(f"{where} has no {name}; write the file again with qsdk.save(sim, path)")
    data = io.BytesIO(parts[name])
    try:
        if zipfile.is_zipfile(data):
            with zipfile.ZipFile(data) as archive:
                require_modest_size(archive, len(parts[name]), f"{name} in {where}")
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)
    except FileFormatError:
        raise
    except Exception as error:  # on damaged bytes, torch's reader raises nearly anything
        raise FileFormatError(
            f"{name} in {where} is damaged ({first_line_of(error)}); write it again with qsdk.save(sim, path)"
        ) from error
