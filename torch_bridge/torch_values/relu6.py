"""ReLU6 modules that become ReLU, so that their channels can be scaled."""

from collections.abc import Collection, Iterable, Mapping
from math import inf

from torch import nn

from qsdk.core.graph.graph import Graph
from qsdk.core.scaling.relu6 import as_relu, clips_at_six
from qsdk.core.site import owner_of, without_calls


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

    Args:
        model: the model.
        owners: site of each Clip at 6 -> path of the module that it would be.
        wanted: the sites where it should become a ReLU.
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
