"""Where a forward comes by the layers of a sim: at a module, at a function that reads a weight, in a recurrent op."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsdk.core.layers.graph_layers import graph_layers
from qsdk.core.layers.layer_problem import PatchGeometry
from qsdk.core.layers.layer_walk import Layer
from qsdk.core.site import owner_of, port_of, site_name
from torch_bridge.sim import QuantSim
from torch_bridge.sites.attention import multi_head_attention_forward
from torch_bridge.sites.call_scopes import Frame
from torch_bridge.sites.functional import op_name
from torch_bridge.sites.recurrent import hidden_inputs, run_recurrent
from torch_bridge.torch_values.gate_order import is_recurrent, suffixes
from torch_bridge.torch_values.parameters import find_stored, third_of
from torch_bridge.torch_values.relu6 import graph_as_it_runs
from torch_bridge.walk.paused_forward import same_input
from torch_bridge.wrapping.wrapper import state_of

#: what is called with (weight site, input of its layer)
Reached = Callable[[str, Tensor], None]
Key = tuple[int, int, int]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# op -> where its data and its weight stand, and what torch calls them
_OPS = {
    "linear": ((0, "input"), (1, "weight")),
    **{f"conv{n}d": ((0, "input"), (1, "weight")) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": ((0, "input"), (1, "weight")) for n in (1, 2, 3)},
    "matmul": ((0, "input"), (1, "other")),
    "mm": ((0, "input"), (1, "mat2")),
    "addmm": ((1, "mat1"), (2, "mat2")),
    "embedding": ((0, "input"), (1, "weight")),
}
# in float, torch runs a recurrent cell at once: input, state, weights of either
_CELLS = (torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)


@dataclass(frozen=True)
class Stop:
    """A layer, and how a forward comes by it.

    Attributes:
        layer: what is solved.
        module: whose call reads its input; None where a function or a recurrent op does.
        repeated: whether one forward comes by several times.
        recurrent: whether a recurrent op reads it.
    """

    layer: Layer
    module: nn.Module | None
    repeated: bool
    recurrent: bool = False


@dataclass(frozen=True)
class Came:
    """A layer that a forward came to: the site of its weight, and its input (and which version of it)."""

    site: str
    x: Tensor
    version: int

    @classmethod
    def to(cls, site: str, x: Tensor) -> "Came":
        """With the input as it is now."""
        return cls(site, x, 0 if x.is_inference() else x._version)

    def repeats(self, other: "Came") -> bool:
        """Whether the input is the other one, and nothing was written into it in between."""
        return self.version == other.version and same_input(self.x, other.x)


@dataclass
class Stops:
    """The layers of a sim in the order of the graph.

    Attributes:
        by_site: weight site -> its stop.
        left: weight site -> why it is none.
        functions: sites whose weights are read by functions.
        groups: sites of layers that read one input, one directly after another, in order.
    """

    by_site: dict[str, Stop]
    left: dict[str, str]
    functions: set[str]
    groups: list[list[str]] = field(default_factory=list)

    def read_early(self, sites: Iterable[str] | None = None) -> set[str]:
        """What a forward holds while it stands before the functions that multiply with these weights (all of them)."""
        among = self.functions if sites is None else self.functions.intersection(sites)
        return {*among, *(self.by_site[site].layer.bias for site in among)} - {""}

    def group_of(self, site: str) -> list[str]:
        """A layer, and those directly after it that read the same input."""
        group = next((group for group in self.groups if site in group), [site])
        return group[group.index(site) :]


def find_stops(sim: QuantSim) -> Stops:
    """The stops of a sim, as far as its graph and its modules tell; `Probe` says which functions read the rest."""
    frozen = {site for site, quantizer in sim.quantizers.items() if quantizer.is_frozen}
    layers, left = graph_layers(graph_as_it_runs(sim.model, sim.graph), sim.plan, frozen)
    modules = dict(sim.model.named_modules())
    by_site, functions = {}, set()
    for found in layers:
        site = found.layer.site
        owner = modules.get("" if owner_of(site) == "self" else owner_of(site))
        if isinstance(owner, nn.RNNBase) and is_recurrent(owner):
            by_site[site] = Stop(found.layer, None, len(found.ops) > 1, recurrent=True)
        elif owner is not None and port_of(site) == "weight" and _is_plain_layer(owner):
            layer = replace(found.layer, geometry=_geometry(owner))
            by_site[site] = Stop(layer, owner, len(found.ops) > 1)
        else:
            by_site[site] = Stop(found.layer, None, len(found.ops) > 1)
            functions.add(site)
    return Stops(by_site, left, functions)


def _is_plain_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding, *_CONVOLUTIONS, *_TRANSPOSED)) and state_of(module).leaf


def _geometry(module: nn.Module) -> PatchGeometry | None:
    if not isinstance(module, nn.modules.conv._ConvNd):
        return None
    kernel, dilation = tuple(module.kernel_size), tuple(module.dilation)
    if isinstance(module.padding, str):
        totals = [d * (k - 1) if module.padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple((total // 2, total - total // 2) for total in totals)
    else:
        padding = tuple((pad, pad) for pad in module.padding)
    transposed = isinstance(module, _TRANSPOSED)
    return PatchGeometry(
        kernel,
        tuple(module.stride),
        padding,
        dilation,
        module.groups,
        module.padding_mode,
        transposed,
        tuple(module.output_padding) if transposed else (),
    )


@contextmanager
def settling(sim: QuantSim, stops: Stops) -> Iterator[None]:
    """Inside, one float forward is run; it tells which functions read the weights that no module reads itself.

    A weight that neither reads is left; so is one that both read. It also tells which layers read one input.
    """
    seen = _Seen()
    keys = _float_keys(sim, [site for site, stop in stops.by_site.items() if not stop.recurrent])
    with stopping(sim, stops, seen.by_module), Watch(keys, seen.by_function):
        yield
    for site, stop in list(stops.by_site.items()):
        modules, functions = seen.modules[site], seen.functions[site]
        if stop.module is not None and not modules and functions:  # as MultiheadAttention reads its out_proj
            stops.functions.add(site)
            stop = replace(stop, module=None)
        stops.by_site[site] = replace(stop, repeated=stop.repeated or max(modules, functions) > 1)
        if site in stops.functions and not functions:
            stops.left[site] = "no linear function of torch reads it in the first batch"
        elif stop.module is not None and functions not in (0, modules):
            stops.left[site] = "its module reads it and a function too"
    for site in stops.left.keys() & stops.by_site.keys():
        del stops.by_site[site]
        stops.functions.discard(site)
    once = {site for site, stop in stops.by_site.items() if not stop.repeated}
    stops.groups = [group for group in seen.groups if len(group) > 1 and once.issuperset(group)]


class _Seen:
    """How often one forward came by each layer, and which layers read one input."""

    def __init__(self) -> None:
        self.modules: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self.groups: list[list[str]] = []
        self._last: Came | None = None

    def by_module(self, site: str, x: Tensor) -> None:
        self.modules[site] += 1
        self._group(Came.to(site, x))

    def by_function(self, site: str, x: Tensor) -> None:
        self.functions[site] += 1
        if not self.modules[site]:
            self._group(Came.to(site, x))

    def _group(self, came: Came) -> None:
        if self._last is None or not came.repeats(self._last):
            self.groups.append([])
        self._last = came
        self.groups[-1].append(came.site)


@contextmanager
def stopping(sim: QuantSim, stops: Stops, reached: Reached) -> Iterator[None]:
    """Inside, modules and recurrent ops that read a layer's input tell it before they do."""
    runtime, handles = sim.runtime, []

    def before(site: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            reached(site, args[0] if args else kwargs["input"])

        return hook

    def recurrent(module: nn.RNNBase, layer: int, x: Tensor, states: list[Tensor]) -> None:
        path, directions = state_of(module).path, len(suffixes(module))
        inputs, hidden = (site_name(path, f"weight_{name}_l{layer}") for name in ("ih", "hh"))
        if inputs in stops.by_site:
            reached(inputs, torch.cat([x] * directions, dim=-1))
        if hidden in stops.by_site:
            reached(hidden, hidden_inputs(module, runtime, layer, x, states))

    try:
        for site, stop in stops.by_site.items():
            if stop.module is not None:
                handles.append(stop.module.register_forward_pre_hook(before(site), with_kwargs=True))
        for module in _recurrent_modules(sim, stops):
            handles.append(module.register_forward_pre_hook(_run_layer_by_layer, with_kwargs=True))
        runtime.recurrent = recurrent
        yield
    finally:
        runtime.recurrent = None
        for handle in handles:
            handle.remove()


def _recurrent_modules(sim: QuantSim, stops: Stops) -> list[nn.RNNBase]:
    owners = {owner_of(site) for site in stops.by_site}
    return [
        module
        for path, module in sim.model.named_modules()
        if isinstance(module, nn.RNNBase) and is_recurrent(module) and (path or "self") in owners
    ]


def _run_layer_by_layer(module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """In float, torch runs all layers at once; run them one by one beforehand, so that each can be told of."""
    state = state_of(module)
    runtime, frame = state.runtime, state.runtime.frame
    if runtime.phase != "float":
        return
    runtime.frame = Frame(state.path, state.path, True)
    try:
        run_recurrent(module, runtime, *args, **kwargs)
    finally:
        runtime.frame = frame


class Watch(TorchFunctionMode):
    """Tells of the linear functions that read the weight of a layer, before they run."""

    def __init__(self, keys: Callable[[], Mapping[Key, str]], reached: Reached) -> None:
        """Watch for the tensors at these keys (see `key_of`), weight sites."""
        super().__init__()
        self._keys, self._reached = keys, reached

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look at the function's operands, then run it."""
        named = kwargs or {}
        if func is F.multi_head_attention_forward:  # in float; a simulation has taken it apart already
            with self:
                return multi_head_attention_forward(*args, read=_read_part, **named)
        if func in _CELLS:
            x, state, input_weight, state_weight = args[:4]
            self._look(state[0] if isinstance(state, tuple | list) else state, state_weight)  # the order of `run_cell`
            self._look(x, input_weight)
        operands = _OPS.get(op_name(func) or "")
        if operands is not None:
            left, right = (args[at] if len(args) > at else named.get(name) for at, name in operands)
            if isinstance(left, Tensor) and isinstance(right, Tensor):
                self._look(left, right)
        return func(*args, **named)

    def _look(self, left: Tensor, right: Tensor) -> None:
        keys = self._keys()
        site = keys.get(key_of(right))
        if site is not None:
            self._reached(site, left)
            return
        site = keys.get(key_of(left))
        if site is not None:  # W @ x: the rows of data are the columns of x
            self._reached(site, right.mT if right.dim() > 1 else right)


def _read_part(name: str, packed: Tensor, part: str) -> Tensor:
    return third_of(packed, part) if part else packed


def key_of(tensor: Tensor) -> Key:
    """What a tensor shares with its transpose and with nothing else: the place of its values, and their number."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _float_keys(sim: QuantSim, sites: Collection[str]) -> Callable[[], Mapping[Key, str]]:
    stored = {site: find_stored(sim.model, site) for site in sites}
    keys = {key_of(x): site for site, x in stored.items() if x is not None}
    return lambda: keys


def watches(
    sim: QuantSim, stops: Stops, held: Callable[[], Mapping[str, Tensor]], reached: Reached
) -> dict[bool, TorchFunctionMode] | None:
    """What float (False) and quantized forwards enter, to tell of functions that read weights; None if none does.

    To be made before any weight is written.

    Args:
        sim: with its weights in float.
        stops: settled.
        held: gives site -> the fake-quantized weights that quantized forwards hold.
        reached: is told.
    """
    if not stops.functions:
        return None
    in_simulation = Watch(lambda: {key_of(x): site for site, x in held().items()}, reached)
    return {False: Watch(_float_keys(sim, stops.functions), reached), True: in_simulation}
