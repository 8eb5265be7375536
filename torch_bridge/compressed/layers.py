"""Which layers of a sim a folder in the format compressed-tensors holds, and what of the sim it could not say."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from qsdk.core.errors import ExportError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.site import owner_of, port_of, site_name, without_calls
from torch_bridge.compressed.inputs import also_read_by, input_site, read_by_layer, readers_of_weight
from torch_bridge.compressed.scheme import Arguments, NoFieldError, format_of, input_arguments, weight_arguments
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.rotated_modules import sharing_paths
from torch_bridge.wrapping.wrapper import float_class

_REMEDY = 'quantize with config.for_dialect("compressed-tensors"), and skip what is named here'


@dataclass(frozen=True)
class CompressedLayer:
    """A layer whose weight is written as codes.

    Attributes:
        path: of the module.
        weights: what the format says of its weight.
        inputs: what it says of the activation that the layer reads; None where that is float.
        encoding: of the weight.
        input_encoding: of the activation; None where that is float, or has the range of each token.
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
    """What a folder holds of a sim.

    Attributes:
        layers: with codes.
        ignored: paths of the linear layers that are float.
    """

    layers: tuple[CompressedLayer, ...]
    ignored: tuple[str, ...]


def survey(sim: QuantSim, plan: Plan, encodings: Mapping[str, Encoding]) -> Survey:
    """Return the layers that can be written, all others being float in the sim too.

    Args:
        sim: of an nn.Module.
        plan: in force, without sites that have no encoding.
        encodings: of its quantized sites.

    Raises:
        ExportError: lists the sites that the format has no field for.
    """
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
        raise NoFieldError('its layer rounds its input to int8 in blocks; choose compute="float32"')
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
    if float_class(module).forward is not nn.Linear.forward or not _is_called(plan, path):
        raise NoFieldError("its input is quantized, but the module that has it is not called as a Linear")
    known = None if own.dynamic else encodings[source]
    return CompressedLayer(path, weights, input_arguments(own, known), encodings[site], known), source


def _is_called(plan: Plan, path: str) -> bool:
    return any(port_of(site) == "output" and without_calls(owner_of(site)) == path for site in plan.decisions)


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
