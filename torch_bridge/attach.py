"""Attaching quantizers: from a plan to the modules of a wrapped model."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from qsdk.core.errors import ModelError
from qsdk.core.planning import Decision, Plan
from qsdk.core.site import owner_of, port_of
from torch_bridge.quantizer import Quantizer
from torch_bridge.runtime import Runtime
from torch_bridge.wrapper import state_of


def attach(model: nn.Module, runtime: Runtime, plan: Plan, silent: Iterable[str]) -> None:
    """Give every quantized site its quantizer; `silent` sites exist but keep float32."""
    runtime.quantizers = dict.fromkeys(silent)
    for site, decision in plan.decisions.items():
        runtime.quantizers[site] = None if decision.spec is None else _quantizer(model, decision)
    for quantizer in runtime.quantizers.values():
        if quantizer is None:
            continue
        decision = quantizer.decision
        if decision.tied_to is not None:
            quantizer.home = _wanted(runtime, decision.tied_to)
        if decision.bias_of is not None:
            quantizer.factors = _wanted(runtime, decision.bias_of[0]), _wanted(runtime, decision.bias_of[1])
    runtime.phase = "quantize"


def _wanted(runtime: Runtime, site: str) -> Quantizer:
    found = runtime.quantizers.get(site)
    if found is None:
        raise ModelError(f"the plan points at {site}, which has no quantizer")
    return found


def _quantizer(model: nn.Module, decision: Decision) -> Quantizer:
    owner = owner_of(decision.site).partition("@")[0]
    port = port_of(decision.site)
    module_path, slash, op = owner.partition("/")
    modules = dict(model.named_modules())
    if port == "input":
        module, name = model, f"input_{owner}"
    elif owner in modules or owner == "self":
        module, name = modules.get(owner, model), port
    elif slash and module_path in modules:
        module, name = modules[module_path], f"{op}_{port}"
    else:
        module, name = model, f"{owner}_{port}"
    call = owner_of(decision.site).partition("@")[2]
    safe = "".join(letter if letter.isalnum() else "_" for letter in name) + (f"_call_{call}" if call else "")
    quantizer = Quantizer(decision, module, f"qsdk_{safe}")
    state_of(module).quantizers.append(quantizer)
    return quantizer


def compare_sites(eager: Iterable[str], traced: Iterable[str], graph: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Hold the sites of the eager pass against those of the trace and of the traced graph.

    Returns:
        The dead sites (their values reach no output) and the sites that the example did not exercise.

    Raises:
        ModelError: eager code took a path that the trace did not.
    """
    eager, traced, kept = list(eager), set(traced), set(graph)
    lost = [site for site in eager if site not in traced]
    if lost:
        raise ModelError(
            f"the eager model reaches {', '.join(lost[:5])} but the traced one does not, so an exported file would "
            "differ from the simulation; remove the branch on torch.compiler.is_compiling() or on data"
        )
    dead = [site for site in eager if site not in kept]
    reached = set(eager)
    return dead, [site for site in kept if site not in reached]
