"""The blocks of a module: residual blocks, decoder layers, and single layers where there are none."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from qsdk.core.errors import ConfigError
from qsdk.core.site import matches, nearest_owners, owner_of, without_calls
from torch_bridge.sim import QuantSim
from torch_bridge.wrapping.wrapper import float_class

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MULTIPLY = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN")
#: a single layer with more outputs per input than this (the head of a language model) would need too much memory
WIDE = 8


@dataclass(frozen=True)
class ModuleBlocks:
    """The blocks of a model.

    `left` is path of a module with quantized weights that is in no block -> why.
    """

    modules: Mapping[str, nn.Module]
    left: Mapping[str, str]


def find_blocks(sim: QuantSim, patterns: Sequence[str] | None) -> ModuleBlocks:
    """Return the modules that are tuned as one.

    Without patterns: the members of lists and sequences whose class occurs several times (decoder layers, the residual
    blocks of a stage), else modules with branches of their own (two weights or more, none of their parts repeated),
    else single layers.
    """
    modules = dict(sim.model.named_modules())
    matrices = [path for path, multiplies in _owners(sim, modules).items() if multiplies]
    if patterns is None:
        chosen = list(_find_by_structure(modules, matrices))
    else:
        chosen = [path for path in modules if any(matches(pattern, path or "self") for pattern in patterns)]
        chosen = [path for path in chosen if _weights_in(path, matrices)]
        _require_matches(patterns, chosen, modules)
        _require_disjoint(chosen)
    left = {
        owner: "in no block" if patterns is not None else _reason_left_out(owner, matrices)
        for owner in _owners(sim, modules)
        if not any(_inside(owner, path) for path in chosen)
    }
    return ModuleBlocks({path: modules[path] for path in chosen}, left)


def _owners(sim: QuantSim, modules: Mapping[str, nn.Module]) -> dict[str, bool]:
    """Return path of a module with quantized weights -> whether it multiplies by a matrix of them."""
    result: dict[str, bool] = {}
    for decision in sim.plan.decisions.values():
        owner = without_calls(owner_of(decision.site)).partition("/")[0]
        path = "" if owner == "self" else owner
        if decision.kind == "weight" and decision.quantized and path in modules:
            result[path] = result.get(path, False) or decision.op_type in _MULTIPLY
    return result


def _reason_left_out(owner: str, matrices: Sequence[str]) -> str:
    if owner in matrices:
        return "its output is much larger than its input; name it in blocks="
    return "by itself it is no block: it multiplies by no matrix"


def _find_by_structure(modules: Mapping[str, nn.Module], matrices: Sequence[str]) -> Iterator[str]:
    classes = {path: float_class(module) for path, module in modules.items()}
    composite = {
        path
        for path, cls in classes.items()
        if path and not issubclass(cls, _CONTAINERS) and len(_weights_in(path, matrices)) > 1
    }
    listed = {path for path in composite if issubclass(classes[path.rpartition(".")[0]], _CONTAINERS)}
    counts = Counter(classes[path] for path in listed)
    repeated = {path for path in listed if counts[classes[path]] > 1}

    def visit(path: str) -> Iterator[str]:
        """Yield the blocks at and below a path, the outermost that hold no repeated ones."""
        inside = [other for other in composite if other != path and _inside(other, path)]
        twice = Counter(classes[other] for other in inside).most_common(1)
        holds_blocks = any(other in repeated for other in inside)
        alone = path in composite and (not twice or twice[0][1] == 1)
        if (path in repeated or alone) and not holds_blocks:
            yield path
        else:
            module = modules[path]
            wide = isinstance(module, nn.Linear) and module.out_features > WIDE * module.in_features
            if path in matrices and not wide:
                yield path
            for name in modules[path]._modules:
                child = f"{path}.{name}" if path else name
                if child in modules and _weights_in(child, matrices):
                    yield from visit(child)

    yield from visit("")


def _weights_in(path: str, matrices: Sequence[str]) -> list[str]:
    return [owner for owner in matrices if _inside(owner, path)]


def _inside(path: str, outer: str) -> bool:
    return outer == "" or path == outer or path.startswith(f"{outer}.")


def _require_matches(patterns: Sequence[str], chosen: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
    for pattern in patterns:
        if not any(matches(pattern, path or "self") for path in chosen):
            near = ", ".join(nearest_owners(pattern, [path or "self" for path in modules]))
            raise ConfigError(f"no module with a quantized weight matches blocks={pattern!r}; the nearest are {near}")


def _require_disjoint(chosen: Sequence[str]) -> None:
    for path in chosen:
        outer = next((other for other in chosen if other != path and _inside(path, other)), None)
        if outer is not None:
            raise ConfigError(
                f"the block {path} is inside the block {outer or 'self'}; give patterns that match only one"
            )
