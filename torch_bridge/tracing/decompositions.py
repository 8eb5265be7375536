"""Decomposition of ops that ONNX has no translation of into ops that it has: node by node.

`torch.onnx.export` traces the whole captured program a second time to decompose a few of its ops; that takes longer
than to capture it. Most ops are translated as they are, so only those that are not are traced here, each by itself.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torch_bridge.tracing.exporter_modules import capture, exporter_passes, operator_tables, programs
from torch_bridge.tracing.functional_graph import make_functional

Decompositions = Mapping[Any, Callable[..., Any]]

_NEEDED = (
    (exporter_passes, "decompose_with_registry"),
    (operator_tables, "get_onnx_implemented_overloads"),
    (operator_tables, "create_onnx_friendly_decomposition_table"),
    (programs, "_split_decomp_table_to_cia_and_python_decomp"),
    (programs, "_override_composite_implicit_decomp"),
    (programs, "_special_op_to_preserve_cia"),
    (capture, "_ignore_backend_decomps"),
    (capture, "_compiling_state_context"),
)


@contextmanager
def single_nodes_decomposed() -> Iterator[None]:
    """Let torch's exporter decompose single nodes inside the block.

    It takes its own way for a program with an op that changes a tensor in a manner that `make_functional` leaves or
    that has no translation by itself, and where the installed torch lacks a function that this builds on.
    """
    if not all(hasattr(module, name) for module, name in _NEEDED):
        yield
        return
    whole = exporter_passes.decompose_with_registry

    def decompose(program: ExportedProgram, registry: Any) -> Any:
        singly = make_functional(program.graph) and _decompose(program, registry)
        return program if singly else whole(program, registry)

    exporter_passes.decompose_with_registry = decompose
    try:
        yield
    finally:
        exporter_passes.decompose_with_registry = whole


def _decompose(program: ExportedProgram, registry: Any) -> bool:
    """Replace the nodes of a program that a registry of translations lacks, in the program's own graph.

    Returns:
        False, with the program as it was, where one of the nodes, or of those that it is made of, has no translation,
        is a constant, or cannot be traced by itself.
    """
    translated = set(operator_tables.get_onnx_implemented_overloads(registry))
    table = operator_tables.create_onnx_friendly_decomposition_table(translated)
    composite, others = programs._split_decomp_table_to_cia_and_python_decomp(table)
    nodes = list(program.graph.nodes)
    with (
        detect_fake_mode([node.meta.get("val") for node in nodes]) or nullcontext(),
        torch.no_grad(),
        capture._ignore_backend_decomps(),
        capture._compiling_state_context(),
        programs._override_composite_implicit_decomp(composite),
    ):
        try:
            parts = {node: _parts(node, others) for node in nodes if _is_decomposed(node.target, composite, others)}
        except Exception:  # torch's kernels raise what they like, where a node by itself lacks the values of another
            return False
    kept = [node for node in nodes if node not in parts]
    kept += [part for made_of in parts.values() for part in made_of.nodes]
    constants = any(part.op == "get_attr" for made_of in parts.values() for part in made_of.nodes)
    if constants or not all(_is_translated(node.target, translated) for node in kept):
        return False
    lengths: dict[Any, fx.Node] = {}
    with program.graph_module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for node in nodes:
            if node in parts:
                _replace(node, parts[node], lengths)
            elif (length := _length(node)) is not None:
                lengths.setdefault(length, node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return True


def _is_translated(op: Any, translated: Collection[Any]) -> bool:
    """Return whether the exporter translates an op, or drops it as it drops assertions."""
    return (
        not isinstance(op, OpOverload) or op in translated or "_assert" in op._opname or "sym_constrain" in op._opname
    )


def _is_decomposed(op: Any, composite: Decompositions, others: Decompositions) -> bool:
    """Return whether an op is made of others: of torch's composite ops, all but those that have a translation."""
    if not isinstance(op, OpOverload):
        return False
    if op in composite:
        return composite[op] is not programs._special_op_to_preserve_cia
    name = str(op._schema.name) + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    return op in others or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _length(node: fx.Node) -> Any:
    """Return the expression of the length that a node gives, None where it gives anything else."""
    value = node.meta.get("val")
    return value.node.expr if isinstance(value, torch.SymInt) else None


def _parts(node: fx.Node, decompositions: Decompositions) -> fx.Graph:
    """Return the nodes that a node is made of, as a graph whose inputs are those of the node."""
    leaves, form = pytree.tree_flatten((node.args, node.kwargs))
    inputs = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)}
    op: Any = node.target

    def run(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = pytree.tree_unflatten([given.get(place, leaf) for place, leaf in enumerate(leaves)], form)
        return op(*args, **kwargs)

    traced = make_fx(run, decomposition_table=dict(decompositions))
    return traced(*(leaf.meta["val"] for leaf in inputs.values())).graph


def _replace(node: fx.Node, parts: fx.Graph, lengths: Mapping[Any, fx.Node]) -> None:
    """Put the nodes that a node is made of in its place; a length that a node before it gives is read there."""
    given = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
    copies = dict(zip((part for part in parts.nodes if part.op == "placeholder"), given, strict=True))
    with node.graph.inserting_before(node):
        for part in parts.nodes:
            if part.op not in ("placeholder", "output"):
                copies[part] = lengths.get(_length(part)) or node.graph.node_copy(part, copies.__getitem__)
    _redirect(node, fx.node.map_arg(parts.output_node().args[0], copies.__getitem__))


def _redirect(node: fx.Node, results: Any) -> None:
    """Let the users of a node read these instead, a node or one for each of its outputs, and erase it."""
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for item in list(node.users):  # of the op `getitem`
            item.replace_all_uses_with(results[item.args[1]])
            node.graph.erase_node(item)
    node.graph.erase_node(node)
