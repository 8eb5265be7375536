"""The layer table: which parameters of a module are read through quantizers, and which modules are one op."""

from collections.abc import Mapping

from torch import nn

from torch_bridge.torch_values.gate_order import is_cell
from torch_bridge.torch_values.rotated_modules import OnlineRotation

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
