"""Attaching quantizers: from a plan to the modules of a wrapped model."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qsdk.core.errors import ModelError
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import RECURRENT
from qsdk.core.numerics.spec import OF_WHOLE
from qsdk.core.planning.plan import WHOLE, Decision, Plan
from qsdk.core.site import owner_of, port_of, without_calls
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.parameters import PREFIX, is_recurrent
from torch_bridge.wrapping.wrapped_state import state_of
from torch_bridge.wrapping.wrapper import drop_quantizers


def attach(model: nn.Module, runtime: Runtime, plan: Plan, silent: Iterable[str]) -> None:
    """Attach a quantizer to every quantized site, in place of present ones; `silent` sites stay float32."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for module in modules.values():
        drop_quantizers(module)
    runtime.quantizers = dict.fromkeys((*silent, *runtime.only_training))
    for site, decision in plan.decisions.items():
        runtime.quantizers[site] = None if decision.spec is None else _quantizer(modules, decision)
    for quantizer in runtime.quantizers.values():
        if quantizer is None:
            continue
        decision = quantizer.decision
        quantizer.keeps_result = decision.site not in runtime.written.overwritten
        quantizer.copies_input = decision.site in runtime.written.aliased
        if decision.tied_to is not None:
            quantizer.tied_to = _required_quantizer(runtime, decision.tied_to)
        if decision.bias_of is not None:
            quantizer.factors = (
                _required_quantizer(runtime, decision.bias_of[0]),
                _required_quantizer(runtime, decision.bias_of[1]),
            )
    runtime.narrow_regions = {
        site: getattr(torch, decision.computes_in)
        for site, decision in plan.decisions.items()
        # what a recurrent layer does last is to move its values, which come rounded either way
        if decision.computes_in and not isinstance(modules.get(without_calls(owner_of(site))), nn.RNNBase)
    }
    runtime.reused_modules = frozenset(_reused_modules(modules, plan.decisions))
    runtime.phase = "quantize"


def without_other_callers(plan: Plan, graph: Graph, model: nn.Module) -> Plan:
    """Return the plan in which layers round their input to int8 where the sim does it for them, and nowhere else.

    It does so where an nn.Linear calls its own weight, and in nn.MultiheadAttention; not for other functions, whose
    input is a dynamic site as a whole then.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    kept, shared = {}, set[int]()
    for site, decision in plan.decisions.items():
        if decision.input_block is not None and not all(
            _rounds_input(modules, without_calls(owner_of(site)), without_calls(caller))
            for caller in _callers(graph, graph.sites[site])
        ):
            if decision.input_block == WHOLE and decision.op_type not in RECURRENT:
                shared.update(_multiplied_with(graph, graph.sites[site]))
            decision = replace(decision, input_block=None)
        kept[site] = decision
    for site, decision in kept.items():
        if graph.sites[site] in shared:
            kept[site] = replace(decision, spec=OF_WHOLE, reason=decision.op_type)
        elif decision.input_block == WHOLE and not shared.isdisjoint(_multiplied_with(graph, graph.sites[site])):
            kept[site] = replace(decision, input_block=None)
    return replace(plan, decisions=kept)


def _multiplied_with(graph: Graph, weight: int) -> Iterator[int]:
    """Yield the tensors that layers multiply with a weight."""
    for reader in graph.consumers[weight]:
        op = graph.ops[reader]
        if op.type in ("MatMul", "Gemm") and op.inputs[0] is not None:
            yield op.inputs[0]
        for result in op.outputs if op.type == "Transpose" else ():
            yield from _multiplied_with(graph, result)


def _callers(graph: Graph, tensor: int) -> Iterator[str]:
    """Yield the owners of the first sites behind a tensor; another name of a shared parameter is a site of its own."""
    for reader in graph.consumers[tensor]:
        for result in graph.ops[reader].outputs:
            site = graph.tensors[result].site
            if site is None:
                yield from _callers(graph, result)
            elif graph.constant_root(result) is None:
                yield owner_of(site)


def _rounds_input(modules: Mapping[str, nn.Module], owner: str, caller: str) -> bool:
    own, caller = ("" if name == "self" else name for name in (owner, caller))
    path, functional, _ = caller.rpartition("/") if "/" in caller else (caller, "", "")
    path = "" if path == "self" else path
    module = modules.get(path)
    if not functional:
        leaf = isinstance(module, nn.Linear) and state_of(module).leaf
        return own == path and (leaf or (module is not None and is_recurrent(module)))
    return isinstance(module, nn.MultiheadAttention) and own in (path, f"{path}.out_proj".removeprefix("."))


def _required_quantizer(runtime: Runtime, site: str) -> Quantizer:
    quantizer = runtime.quantizers.get(site)
    if quantizer is None:
        raise ModelError(f"the plan points at {site}, which has no quantizer")
    return quantizer


def _quantizer(modules: Mapping[str, nn.Module], decision: Decision) -> Quantizer:
    """Return a new quantizer of a site, attached to the module whose call the site belongs to."""
    called, port = owner_of(decision.site), port_of(decision.site)
    called_module, slash, op = called.partition("/")
    module = modules.get(without_calls(called_module))
    if port == "input":
        module, name = modules[""], f"input_{called}"
    elif called == "self":
        module, name = modules[""], port
    elif module is None:
        module, name = modules[""], f"{called}_{port}"
    else:
        name = f"{op}_{port}" if slash else port
        if called_module != state_of(module).path:
            name = f"{name}_of_{called_module}"
    taken = {prefix for quantizer in state_of(module).quantizers for prefix in quantizer.buffer_names}
    prefix = PREFIX + "".join(letter if letter.isalnum() else "_" for letter in name)
    while f"{prefix}_scale" in taken:
        prefix += "_"
    quantizer = Quantizer(decision, module, prefix, modules[""])
    state_of(module).quantizers.append(quantizer)
    return quantizer


def _reused_modules(modules: Mapping[str, nn.Module], sites: Iterable[str]) -> Iterator[str]:
    """Yield the modules that one forward pass calls several times: by marked calls, or under several paths."""
    for site in sites:
        for marked in re.finditer(r"@\d+(?=[./:])", site):
            module = modules.get(without_calls(site[: marked.start()]))
            if module is not None:
                yield state_of(module).path
    for module in modules.values():
        if len(state_of(module).paths) > 1:
            yield state_of(module).path


def compare_sites(eager: Iterable[str], traced: Iterable[str], graph: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Compare the sites of the eager pass, the trace and its graph; return the dead sites and those not exercised."""
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
