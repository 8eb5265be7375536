"""Kinds of modules: what of them is quantized, which are one op, and what rotations and scaling change in them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from qsdk.core.graph.graph import Graph, as_relu, clips_at_six
from qsdk.core.site import owner_of, without_calls
from torch_bridge.torch_values.parameters import is_cell

#: name of the submodule of a layer that turns its input
ROTATION = "rotation"
#: its ops between the products with two factors, as sites name them, and the first product
BETWEEN = ("unflatten", "matmul", "transpose")


class OnlineRotation(nn.Module):
    """A product of vectors with a fixed orthogonal matrix, or with the Kronecker product of two.

    `first` turns runs of channels, and `second`, if there is one, what is in the same place of all runs.
    """

    first: Tensor
    second: Tensor | None

    def __init__(self, first: Tensor, second: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, x: Tensor) -> Tensor:
        """Return the turned vectors, in the shape of x."""
        if self.second is None:
            return x @ self.first
        runs = torch.unflatten(x, -1, (self.second.shape[0], self.first.shape[0])) @ self.first
        turned: Tensor = (runs.transpose(-1, -2) @ self.second).flatten(-2)
        return turned


def online_rotations(model: nn.Module) -> dict[str, list[int]]:
    """Return path of each layer with a rotation in front of it -> the sizes of its factors."""
    return {
        path.removesuffix(f".{ROTATION}"): [
            len(matrix) for matrix in (module.first, module.second) if matrix is not None
        ]
        for path, module in model.named_modules()
        if isinstance(module, OnlineRotation)
    }


def rotate_input(layer: nn.Module, factors: Sequence[npt.ArrayLike]) -> None:
    """Put a rotation in front of a layer, in place; its weight is to take up the inverse."""
    weight = layer.get_parameter("weight")
    own = (torch.as_tensor(matrix).to(weight.device, weight.dtype) for matrix in factors)
    layer.add_module(ROTATION, OnlineRotation(*own))
    layer.register_forward_pre_hook(_turned)


def _turned(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (layer.get_submodule(ROTATION)(args[0]), *args[1:])


def sharing_paths(model: nn.Module, path: str) -> list[str]:
    """Return the paths of the parameter at a path, that one and all under which other modules hold it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared = parameters.get(path)
    return [] if shared is None else [other for other, held in parameters.items() if held is shared]


def untie(model: nn.Module, paths: Collection[str]) -> None:
    """Give each of these modules a copy of the parameter that it shares, in place.

    A config of transformers that says that embeddings are tied says it no more: else `from_pretrained` would tie them.
    """
    for path in paths:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        shared = module.get_parameter(name)
        module.register_parameter(name, nn.Parameter(shared.detach().clone(), shared.requires_grad))
    for module in model.modules() if paths else ():
        config: Any = getattr(module, "config", None)
        if getattr(config, "tie_word_embeddings", None) is True:
            config.tie_word_embeddings = False


_WEIGHT_BIAS = ("weight", "bias")
# the packed projection is read by `torch_bridge.sites.attention`, in the parts that one op reads
_ATTENTION = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")

# The first row whose class matches decides. An empty row: a known layer whose parameters are read raw.
_PARAMETERS: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (nn.modules.conv._ConvNd, _WEIGHT_BIAS),
    (nn.Linear, _WEIGHT_BIAS),
    (nn.Bilinear, _WEIGHT_BIAS),
    (nn.Embedding, ("weight",)),
    (nn.EmbeddingBag, ("weight",)),
    (nn.PReLU, ("weight",)),
    (nn.LayerNorm, _WEIGHT_BIAS),
    (nn.RMSNorm, ("weight",)),
    (nn.GroupNorm, _WEIGHT_BIAS),
    (nn.MultiheadAttention, _ATTENTION),
    (nn.modules.instancenorm._InstanceNorm, _WEIGHT_BIAS),
    (nn.modules.batchnorm._NormBase, ()),
    (nn.RNNBase, ()),  # torch_bridge.sites.recurrent arranges its weights before they are read
    (nn.RNNCellBase, ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
)
_WITHOUT_OUTPUT = (nn.Identity, nn.modules.dropout._DropoutNd)


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is one op of torch.nn, so that only its output is a site (a recurrent cell is many)."""
    defining = next(base for base in type(module).__mro__ if "forward" in vars(base))
    alone = all(isinstance(child, OnlineRotation) for child in module.children())  # which runs before the module
    return defining.__module__.startswith("torch.nn.modules") and alone and not is_cell(module)


def has_output_site(module: nn.Module) -> bool:
    """Return whether a leaf returns a new tensor (Identity and Dropout do not)."""
    return not isinstance(module, _WITHOUT_OUTPUT)


def quantized_parameters(module: nn.Module, declared: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of a module's own stored tensors that are read through quantizers.

    The table lists them for known layers, and `declared` (class name -> names) for modules that qsdk does not know. Any
    other module has all its own floating-point parameters and buffers read so, and the traced graph decides what they
    are: the weight or bias of a linear op, a table, an operand of arithmetic, or nothing that has an integer form.
    """
    names = declared.get(type(module).__name__)
    if names is None:
        names = next((row for known, row in _PARAMETERS if isinstance(module, known)), None)
    if names is not None:
        return tuple(name for name in names if module._parameters.get(name) is not None or name in module._buffers)
    own = {**module._parameters, **module._buffers}
    return tuple(name for name, tensor in own.items() if tensor is not None and tensor.is_floating_point())


def relu6_bounds(model: nn.Module) -> dict[str, float]:
    """Return path of every ReLU6 -> its upper bound, which is infinite where it became a ReLU."""
    return {path: module.max_val for path, module in model.named_modules() if isinstance(module, nn.ReLU6)}


def set_relu6_bounds(model: nn.Module, wanted: Mapping[str, float]) -> None:
    """Set the upper bounds of ReLU6 modules, as `relu6_bounds` returns them."""
    for path, bound in wanted.items():
        module = model.get_submodule(path)
        if isinstance(module, nn.ReLU6):
            module.max_val = bound


def unbounded_paths(model: nn.Module) -> list[str]:
    """Return the paths of the ReLU6 modules that became ReLU."""
    return [path for path, bound in relu6_bounds(model).items() if bound == inf]


def graph_as_it_runs(model: nn.Module, graph: Graph) -> Graph:
    """Return the graph of a sim's model, with a Relu in the place of each ReLU6 that became one."""
    paths, clips = set(unbounded_paths(model)), clips_at_six(graph)
    return as_relu(graph, {site for site in clips if without_calls(owner_of(site)) in paths})


def remove_bounds(model: nn.Module, paths: Iterable[str]) -> None:
    """Make ReLU6 modules compute ReLU."""
    set_relu6_bounds(model, dict.fromkeys(paths, inf))


def shared_bound_reasons(model: nn.Module, owners: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """Return site -> why the ReLU6 there cannot become a ReLU, `""` where it can.

    `owners` is site of each Clip at 6 -> path of the module that it would be.
    """
    known = relu6_bounds(model)
    kept = {path for site, path in owners.items() if site not in wanted}
    result = {}
    for site in wanted:
        path = owners[site]
        result[site] = ""
        if path not in known:
            result[site] = "its ReLU6 is no module, but a function that the model's code calls"
        elif path in kept:
            result[site] = "its ReLU6 is used at another place, too, where it has to stay"
    return result
