"""The layers of a sim as a forward reaches them: hooks and a function mode that call back before each is multiplied."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsdk.core.layers.graph_layers import experts_of, graph_layers
from qsdk.core.layers.layer_problem import Layer, PatchGeometry
from qsdk.core.patterns.experts import stack_of
from qsdk.core.site import owner_of, port_of, site_name
from torch_bridge.sim import QuantSim
from torch_bridge.sites.attention import multi_head_attention_forward
from torch_bridge.sites.calls import Frame
from torch_bridge.sites.experts import ExpertReads
from torch_bridge.sites.functional import op_name
from torch_bridge.sites.recurrent import hidden_weight_inputs, run_recurrent
from torch_bridge.torch_values.layers import graph_as_it_runs
from torch_bridge.torch_values.parameters import (
    Key,
    direction_suffixes,
    dtype_name,
    find_stored,
    is_recurrent,
    packed_rows,
    storage_key,
)
from torch_bridge.walk.paused_forward import same_input
from torch_bridge.wrapping.wrapped_state import state_of

#: called with (weight site, input of the layer, number of the expert of each row, where the weight is a stack)
LayerCallback = Callable[[str, Tensor, Tensor | None], None]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# op -> position and keyword of its data and of its weight
_OPS = {
    "linear": ((0, "input"), (1, "weight")),
    **{f"conv{n}d": ((0, "input"), (1, "weight")) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": ((0, "input"), (1, "weight")) for n in (1, 2, 3)},
    "matmul": ((0, "input"), (1, "other")),
    "mm": ((0, "input"), (1, "mat2")),
    "addmm": ((1, "mat1"), (2, "mat2")),
    "embedding": ((0, "input"), (1, "weight")),
}
# in float, torch runs a recurrent cell as one function of input, state and their weights
_CELLS = (torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)


@dataclass(frozen=True)
class HookedLayer:
    """A layer, and where a forward reads it.

    `module` is the one whose call reads the layer's input; None where a function or a recurrent op does. A stack of
    experts is one layer here, and its `experts` are what is solved.
    """

    layer: Layer
    module: nn.Module | None
    repeated: bool
    recurrent: bool = False
    experts: Sequence[Layer] = ()


@dataclass(frozen=True)
class LayerInput:
    """The input of a layer that a forward has reached: site of the weight, tensor, and version of the tensor.

    For a stack, `numbers` has the number of the expert of each row.
    """

    site: str
    x: Tensor
    version: int
    numbers: Tensor | None = None

    @classmethod
    def to(cls, site: str, x: Tensor, numbers: Tensor | None = None) -> "LayerInput":
        """Return the input of the layer at a site, as it is now."""
        return cls(site, x, 0 if x.is_inference() else x._version, numbers)

    def repeats(self, other: "LayerInput") -> bool:
        """Return whether this is the same input as another one, and nothing was written into it in between."""
        return self.version == other.version and same_input(self.x, other.x)


@dataclass
class HookedLayers:
    """The layers of a sim in the order of the graph.

    Attributes:
        by_site: weight site -> its layer.
        left: weight site -> why it is not among them.
        functions: sites whose weights are read by functions.
        groups: sites of layers that read one input, one directly after another, in order.
    """

    by_site: dict[str, HookedLayer]
    left: dict[str, str]
    functions: set[str]
    groups: list[list[str]] = field(default_factory=list)

    def read_early(self, sites: Iterable[str] | None = None) -> set[str]:
        """Return the sites that a forward reads before it reaches the functions that use them.

        `sites` restricts them to these weights.
        """
        among = self.functions if sites is None else self.functions.intersection(sites)
        return {*among, *(self.by_site[site].layer.bias for site in among)} - {""}

    def group_of(self, site: str) -> list[str]:
        """Return a layer, and those directly after it that read the same input."""
        group = next((group for group in self.groups if site in group), [site])
        return group[group.index(site) :]


def find_hooked_layers(sim: QuantSim) -> HookedLayers:
    """Return the layers of a sim, as far as its graph and its modules tell.

    `resolving_readers` finds out which functions read the others.
    """
    frozen = {site for site, quantizer in sim.quantizers.items() if quantizer.is_frozen}
    layers, left = graph_layers(graph_as_it_runs(sim.model, sim.graph), sim.plan, frozen, experts=True)
    modules = dict(sim.model.named_modules())
    by_site, functions = {}, set()
    for graph_layer in layers:
        site = graph_layer.layer.site
        stored = find_stored(sim.model, site)
        if stored is not None:  # the graph has the dtype that the model had when it was traced
            graph_layer = replace(graph_layer, layer=replace(graph_layer.layer, dtype=dtype_name(stored.dtype)))
        owner = modules.get("" if owner_of(site) == "self" else owner_of(site))
        if isinstance(owner, nn.RNNBase) and is_recurrent(owner):
            by_site[site] = HookedLayer(graph_layer.layer, None, len(graph_layer.ops) > 1, recurrent=True)
        elif owner is not None and port_of(site) == "weight" and _is_plain_layer(owner):
            layer = replace(graph_layer.layer, geometry=_geometry(owner))
            by_site[site] = HookedLayer(layer, owner, len(graph_layer.ops) > 1)
        else:
            experts = experts_of(graph_layer.layer) if stack_of(sim.graph, graph_layer.ops[0]) else []
            by_site[site] = HookedLayer(graph_layer.layer, None, len(graph_layer.ops) > 1, experts=experts)
            functions.add(site)
            if not experts and stack_of(sim.graph, graph_layer.ops[0]):
                left[site] = "its experts share one scale"
    return HookedLayers(by_site, left, functions)


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
def resolving_readers(sim: QuantSim, hooked_layers: HookedLayers) -> Iterator[None]:
    """Find out which functions read the weights that no module reads, by the one float forward run inside the block.

    A weight that neither or both read is skipped. The block also finds out which layers read one input.
    """
    counts = _ReadCounts()
    keys = _float_keys(sim, [site for site, hooked in hooked_layers.by_site.items() if not hooked.recurrent])
    with hooks_before_layers(sim, hooked_layers, counts.by_module), WeightReadMode(keys, counts.by_function):
        yield
    for site, hooked in list(hooked_layers.by_site.items()):
        modules, functions = counts.modules[site], counts.functions[site]
        if hooked.module is not None and not modules and functions:  # as MultiheadAttention reads its out_proj
            hooked_layers.functions.add(site)
            hooked = replace(hooked, module=None)
        hooked_layers.by_site[site] = replace(hooked, repeated=hooked.repeated or max(modules, functions) > 1)
        if site in hooked_layers.functions and not functions:
            hooked_layers.left[site] = "no linear function of torch reads it in the first batch"
        elif hooked.module is not None and functions not in (0, modules):
            hooked_layers.left[site] = "its module reads it and a function too"
        elif hooked.experts and hooked_layers.by_site[site].repeated:
            hooked_layers.left[site] = "a batch calls its experts several times"
    for site in hooked_layers.left.keys() & hooked_layers.by_site.keys():
        del hooked_layers.by_site[site]
        hooked_layers.functions.discard(site)
    once = {site for site, hooked in hooked_layers.by_site.items() if not hooked.repeated}
    decisions = sim.plan.decisions
    groups = (
        list(found)
        for group in counts.groups
        for _, found in groupby(group, key=lambda site: getattr(decisions.get(site), "input_block", None))
    )
    hooked_layers.groups = [group for group in groups if len(group) > 1 and once.issuperset(group)]


class _ReadCounts:
    """How often one forward read each layer, and which layers read one input."""

    def __init__(self) -> None:
        self.modules: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self.groups: list[list[str]] = []
        self._last: LayerInput | None = None

    def by_module(self, site: str, x: Tensor, numbers: Tensor | None = None) -> None:
        """Count a read of a layer's weight by its own module."""
        self.modules[site] += 1
        self._group(LayerInput.to(site, x))

    def by_function(self, site: str, x: Tensor, numbers: Tensor | None = None) -> None:
        """Count a read by a linear function of torch, which may be that of the module just counted."""
        self.functions[site] += 1
        if not self.modules[site]:
            self._group(LayerInput.to(site, x))

    def _group(self, layer_input: LayerInput) -> None:
        if self._last is None or not layer_input.repeats(self._last):
            self.groups.append([])
        self._last = layer_input
        self.groups[-1].append(layer_input.site)


@contextmanager
def hooks_before_layers(sim: QuantSim, hooked_layers: HookedLayers, on_layer: LayerCallback) -> Iterator[None]:
    """Call back before modules and recurrent ops read a layer's input, inside the block."""
    runtime = sim.runtime

    def before(site: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_layer(site, args[0] if args else kwargs["input"], None)

    def recurrent(module: nn.RNNBase, layer: int, x: Tensor, states: list[Tensor]) -> None:
        path, directions = state_of(module).path, len(direction_suffixes(module))
        inputs, hidden = (site_name(path, f"weight_{name}_l{layer}") for name in ("ih", "hh"))
        if inputs in hooked_layers.by_site:
            on_layer(inputs, torch.cat([x] * directions, dim=-1), None)
        if hidden in hooked_layers.by_site:
            on_layer(hidden, hidden_weight_inputs(module, runtime, layer, x, states), None)

    with ExitStack() as hooks:
        for site, hooked in hooked_layers.by_site.items():
            if hooked.module is not None:
                hooks.callback(hooked.module.register_forward_pre_hook(partial(before, site), with_kwargs=True).remove)
        for module in _recurrent_modules(sim, hooked_layers):
            hooks.callback(module.register_forward_pre_hook(_run_layer_by_layer, with_kwargs=True).remove)
        hooks.callback(setattr, runtime, "recurrent_hook", None)
        runtime.recurrent_hook = recurrent
        yield


def _recurrent_modules(sim: QuantSim, hooked_layers: HookedLayers) -> list[nn.RNNBase]:
    owners = {owner_of(site) for site in hooked_layers.by_site}
    return [
        module
        for path, module in sim.model.named_modules()
        if isinstance(module, nn.RNNBase) and is_recurrent(module) and (path or "self") in owners
    ]


def _run_layer_by_layer(module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the layers of a recurrent module one by one beforehand: in float, torch runs all of them at once."""
    state = state_of(module)
    runtime, frame = state.runtime, state.runtime.frame
    if runtime.phase != "float":
        return
    runtime.frame = Frame(state.path, state.path, True)
    try:
        run_recurrent(module, runtime, *args, **kwargs)
    finally:
        runtime.frame = frame


class WeightReadMode(TorchFunctionMode):
    """The function mode that calls back before a linear function reads the weight of a layer."""

    def __init__(self, keys: Callable[[], Mapping[Key, str]], on_layer: LayerCallback) -> None:
        """Look for the tensors at these keys (see `storage_key`) of weight sites."""
        super().__init__()
        self._keys, self._on_layer = keys, on_layer
        self._experts = ExpertReads(keys, on_layer)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at the operands of a function, then run it."""
        named = kwargs or {}
        if self._experts.is_read_by(func, args, named):
            return self._experts.call(func, args, named)
        if func is F.multi_head_attention_forward:  # in float; a simulation has decomposed it already
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
        site = keys.get(storage_key(right))
        if site is not None:
            self._on_layer(site, left, None)
            return
        site = keys.get(storage_key(left))
        if site is not None:  # W @ x: the rows of data are the columns of x
            self._on_layer(site, right.mT if right.dim() > 1 else right, None)


def _read_part(name: str, packed: Tensor, part: str) -> Tensor:
    return packed_rows(packed, part) if part else packed


def _float_keys(sim: QuantSim, sites: Collection[str]) -> Callable[[], Mapping[Key, str]]:
    stored = {site: find_stored(sim.model, site) for site in sites}
    keys = {storage_key(x): site for site, x in stored.items() if x is not None}
    return lambda: keys


def weight_read_modes(
    sim: QuantSim, hooked_layers: HookedLayers, held: Callable[[], Mapping[str, Tensor]], on_layer: LayerCallback
) -> dict[bool, TorchFunctionMode] | None:
    """Return the modes that float (False) and quantized forwards enter; None if no function reads a weight.

    To be called before any weight is written. `held` returns site -> the fake-quantized weights that quantized forwards
    hold.
    """
    if not hooked_layers.functions:
        return None
    in_simulation = WeightReadMode(lambda: {storage_key(x): site for site, x in held().items()}, on_layer)
    return {False: WeightReadMode(_float_keys(sim, hooked_layers.functions), on_layer), True: in_simulation}
