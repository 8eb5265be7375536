"""What the format compressed-tensors can say of a sim: its fields, the layers that it holds, and what has no field."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import nn

from qsdk.core.errors import ExportError
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import SHAPE_OPS
from qsdk.core.numerics.dtypes import BLOCK_FORMATS, BlockFormat, DType, nvfp4
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerBlock, PerTensor, Spec, axis_of, block_size_of, whole_blocks
from qsdk.core.planning.plan import WHOLE, Decision, Plan
from qsdk.core.planning.ties import JOINS, keeps_grid
from qsdk.core.site import owner_of, port_of, site_name, without_calls
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.layers import sharing_paths
from torch_bridge.wrapping.wrapper import float_class

#: significant parts of a `QuantizationArgs`
Arguments = dict[str, Any]

_FLOAT8 = "float8e4m3fn"


class NoFieldError(Exception):
    """The format has no field for something; the text says for what."""


#: format of blocks -> the name of its layout
_LAYOUTS = MappingProxyType(
    {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}
)


def block_format_of(spec: Spec) -> BlockFormat | None:
    """Return the format of blocks that the scales of a weight or an activation are in, else None."""
    if spec.blocks is not None:
        return spec.blocks
    wanted = (spec.dtype, spec.scale_dtype, block_size_of(spec.granularity))
    return next((one for one in BLOCK_FORMATS.values() if (one.dtype, one.scale_dtype, one.block_size) == wanted), None)


def _block_arguments(form: BlockFormat, dynamic: bool | str) -> Arguments:
    if form.name not in _LAYOUTS:
        raise NoFieldError(f"blocks of {form} have no layout; {', '.join(_LAYOUTS)} have")
    nv = form == nvfp4
    scale = "torch.float8_e4m3fn" if nv else "torch.uint8"
    return {
        "num_bits": form.bits,
        "type": "float",
        "symmetric": True,
        "dynamic": dynamic,
        "strategy": "tensor_group" if nv else "group",
        "group_size": form.block_size,
        "scale_dtype": scale,
        "zp_dtype": scale,
    }


def weight_arguments(spec: Spec, encoding: Encoding, shape: tuple[int, ...]) -> Arguments:
    """Return what the format says of a weight [output channels, input channels]."""
    dtype, granularity = spec.dtype, spec.granularity
    if (form := block_format_of(spec)) is not None:
        if axis_of(granularity) != 1 or shape[1] % form.block_size:
            sizes = whole_blocks([shape[1]], form.block_size)
            raise NoFieldError(f"blocks of {form.block_size} do not divide its {shape[1]} input channels; {sizes}")
        return _block_arguments(form, False)
    if dtype.name != _FLOAT8 and not (dtype.is_integer and dtype.bits in (4, 8)):
        raise NoFieldError(f"a weight of {dtype} has no field; int4, int8, float8e4m3fn, {', '.join(_LAYOUTS)} have")
    axis = axis_of(granularity)
    if isinstance(granularity, PerBlock):
        if dtype.name == _FLOAT8:
            raise NoFieldError("blocks of float8 have no field; leave block_size out")
        if axis != 1 or shape[1] % granularity.size:
            sizes = whole_blocks([shape[1]], granularity.size)
            raise NoFieldError(f"blocks of {granularity.size} do not divide its {shape[1]} input channels; {sizes}")
        return {**_number(dtype, encoding), "strategy": "group", "group_size": granularity.size}
    if axis not in (0, None):
        raise NoFieldError(f"scales along axis {axis} have no field; those of output channels (axis 0) have")
    return {**_number(dtype, encoding), "strategy": "tensor" if axis is None else "channel"}


def input_arguments(spec: Spec, encoding: Encoding | None) -> Arguments:
    """Return what the format says of the activation that a layer reads; one with a range per token has no encoding."""
    dtype = spec.dtype
    if spec.blocks is not None:
        return _block_arguments(spec.blocks, "local" if encoding is not None else True)
    if encoding is None:
        return {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    if dtype.name not in (_FLOAT8, "int8", "uint8"):
        raise NoFieldError(f"an activation of {dtype} has no field; int8 and float8e4m3fn have")
    if not isinstance(spec.granularity, PerTensor):
        raise NoFieldError(f"an activation with scales {spec.granularity} has no field; one scale per tensor has")
    return {**_number(dtype, encoding), "strategy": "tensor"}


def format_of(weights: Arguments, inputs: Arguments | None) -> str:
    """Return the name of the layout of a layer's tensors, as compressed-tensors itself derives it."""
    if "scale_dtype" in weights:
        mx = "mxfp4" if weights["num_bits"] == 4 else "mxfp8"
        return _LAYOUTS["nvfp4" if weights["strategy"] == "tensor_group" else mx]
    if weights["type"] == "float":
        return "float-quantized"
    return "pack-quantized" if inputs is None else "int-quantized"


def signed_zero_points(encoding: Encoding) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the zero points on the signed grid, which is the only one that the format has."""
    return encoding.zero_point - shift_of(encoding.dtype)


def shift_of(dtype: DType) -> int:
    """Return what is subtracted from a code of a dtype for that of the signed one: 8 for uint4, 0 for int4."""
    return 1 << (dtype.bits - 1) if dtype.is_integer and not dtype.signed else 0


def _number(dtype: DType, encoding: Encoding) -> Arguments:
    symmetric = not signed_zero_points(encoding).any()
    kind = "int" if dtype.is_integer else "float"
    return {"num_bits": dtype.bits, "type": kind, "symmetric": symmetric, "dynamic": False}


_PRODUCTS = ("Gemm", "MatMul")


def readers_of_weight(graph: Graph, root: int) -> list[int]:
    """Return the ops that read a stored tensor's values, behind Transpose, Identity and Casts."""
    views = [tensor for tensor in range(len(graph.tensors)) if graph.constant_root(tensor) == root]
    reading = [op for tensor in views for op in graph.consumers[tensor] if graph.ops[op].type not in SHAPE_OPS]
    return [op for op in reading if not all(graph.constant_root(t) == root for t in graph.ops[op].outputs)]


def read_by_layer(graph: Graph, root: int) -> list[int]:
    """Return the tensors that linear ops multiply a stored weight with, one for each op."""
    result = []
    for index in readers_of_weight(graph, root):
        op = graph.ops[index]
        data, weight = (*op.inputs, None, None)[:2]
        if op.type not in _PRODUCTS or data is None or weight is None or graph.constant_root(weight) != root:
            raise NoFieldError(f"{op.type} reads it as well, which is no linear layer")
        result.append(data)
    return result


def input_site(graph: Graph, plan: Plan, read: Collection[int]) -> str | None:
    """Return the site whose encoding everything that a layer reads has; None where all of it is float."""
    sites = {_encoding_site(graph, plan, tensor) for tensor in read}
    if len(sites) > 1:
        raise NoFieldError("it is called with inputs of several scales")
    return next(iter(sites), None)


def also_read_by(graph: Graph, plan: Plan, tensor: int, layers: Mapping[int, str]) -> str:
    """Return what reads a quantized activation besides linear layers that quantize it; "" where nothing does.

    `layers` is op of a linear layer -> the site whose encoding its input has in the file.
    """
    if tensor in graph.output_set:
        return "it leaves the model"
    home = _encoding_site(graph, plan, tensor)
    for index in graph.consumers[tensor]:
        op = graph.ops[index]
        if op.type in SHAPE_OPS or (layers.get(index) == home and tensor not in op.inputs[1:]):
            continue
        if not keeps_grid(graph, op) or any(_encoding_site(graph, plan, t) != home for t in op.outputs):
            return f"{op.type} reads it"
        for made in op.outputs:
            if further := also_read_by(graph, plan, made, layers):
                return further
    return ""


def _encoding_site(graph: Graph, plan: Plan, tensor: int) -> str | None:
    """Return the site whose encoding a tensor's values have; one without a site has that of what it is a view of."""
    current = tensor
    while graph.tensors[current].site is None and current in graph.producer:
        op = graph.ops[graph.producer[current]]
        if op.type in JOINS or not keeps_grid(graph, op) or op.inputs[0] is None:
            return None
        current = op.inputs[0]
    decision = plan.decisions.get(graph.tensors[current].site or "")
    if decision is not None and (decision.dynamic or decision.tied_dynamically):
        home = plan.decisions[decision.encoding_site]
        if home.spec is not None and (home.spec.dynamic == "token" or home.spec.blocks is not None):
            return home.site
        raise NoFieldError(f"{decision.site} has a range found while the model runs, as uint8 with a zero point")
    return decision.encoding_site if decision is not None and decision.quantized else None


_REMEDY = 'quantize with config.for_dialect("compressed-tensors"), and skip what is named here'


@dataclass(frozen=True)
class CompressedLayer:
    """A layer whose weight is written as codes.

    What it says of its input is None where that is float; `input_encoding` also where each token has its own range.
    """

    path: str
    weights: Arguments
    inputs: Arguments | None
    encoding: Encoding
    input_encoding: Encoding | None

    @property
    def format(self) -> str:
        """Return the name of the layout of its tensors."""
        return format_of(self.weights, self.inputs)


@dataclass(frozen=True)
class Survey:
    """What a folder holds of a sim."""

    layers: tuple[CompressedLayer, ...]
    ignored: tuple[str, ...]


def survey(sim: QuantSim, plan: Plan, encodings: Mapping[str, Encoding]) -> Survey:
    """Return the layers that can be written, all others being float in the sim too."""
    refused: dict[str, str] = {}
    layers, ignored, ops = [], [], dict[int, str]()
    for path, module in sim.model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        site = site_name(path, "weight")
        decision = plan.decisions.get(site)
        if decision is None or decision.state == "float":
            if isinstance(module, nn.Linear):
                ignored.append(path)
            continue
        try:
            layer, source = _layer(sim, plan, encodings, path, decision)
        except NoFieldError as reason:
            refused[site] = str(reason)
            continue
        layers.append(layer)
        if source is not None:
            ops |= dict.fromkeys(readers_of_weight(sim.graph, sim.graph.sites[site]), source)
    refused |= dict(_without_field(sim, plan, {layer.path for layer in layers}, ops, refused))
    if refused:
        shown = [f"{site} ({reason})" for site, reason in refused.items()]
        more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
        raise ExportError(f"compressed-tensors has no field for {'; '.join(shown[:6])}{more}: {_REMEDY}")
    return Survey(tuple(layers), tuple(ignored))


def _layer(
    sim: QuantSim, plan: Plan, encodings: Mapping[str, Encoding], path: str, decision: Decision
) -> tuple[CompressedLayer, str | None]:
    """Return a layer, and the site whose encoding its input has."""
    module, site, spec = sim.model.get_submodule(path), decision.site, decision.spec
    name = f"{path}.weight".lstrip(".")
    shared = [other for other in sharing_paths(sim.model, name) if other != name]
    if shared or decision.tied_to is not None:
        raise NoFieldError(f"{', '.join(shared) or decision.tied_to} shares it, and has no codes of its own")
    if decision.input_block is not None:
        whole = decision.input_block == WHOLE
        how = 'as a whole; choose dynamic_activations="token"' if whole else 'in blocks; choose compute="float32"'
        raise NoFieldError(f"its layer rounds its input to {'u' * whole}int8 {how}")
    assert spec is not None
    shape, root = tuple(module.get_parameter("weight").shape), sim.graph.sites[site]
    weights = weight_arguments(spec, encodings[site], (shape[0], shape[1]))
    if isinstance(module, nn.Embedding):
        if any(sim.graph.ops[op].type != "Gather" for op in readers_of_weight(sim.graph, root)):
            raise NoFieldError("more than an embedding reads it")
        return CompressedLayer(path, weights, None, encodings[site], None), None
    source = input_site(sim.graph, plan, read_by_layer(sim.graph, root))
    if source is None:
        return CompressedLayer(path, weights, None, encodings[site], None), None
    own = plan.decisions[source].spec
    assert own is not None
    called = any(port_of(site) == "output" and without_calls(owner_of(site)) == path for site in plan.decisions)
    if float_class(module).forward is not nn.Linear.forward or not called:
        raise NoFieldError("its input is quantized, but the module that has it is not called as a Linear")
    known = encodings[source] if own.has_encoding else None
    return CompressedLayer(path, weights, input_arguments(own, known), encodings[site], known), source


def _without_field(
    sim: QuantSim, plan: Plan, paths: set[str], ops: Mapping[int, str], refused: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the other sites that are not float in the sim and would be in the file, and why."""
    for site, decision in plan.decisions.items():
        path = "" if owner_of(site) == "self" else owner_of(site)
        if site in refused or decision.spec is None or (path in paths and port_of(site) in ("weight", "bias")):
            continue
        if decision.kind in ("weight", "bias"):
            yield site, f"{decision.spec.dtype} in {decision.op_type}; linear layers alone are quantized"
        elif not decision.spec.dtype.is_quantized:
            yield site, f"rounded to {decision.spec.dtype}"
        else:
            try:
                reason = also_read_by(sim.graph, plan, sim.graph.sites[site], ops)
            except NoFieldError as error:
                reason = str(error)
            if reason:
                yield site, f"{decision.spec.dtype}, and {reason}"
