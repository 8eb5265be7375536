"""What torch's exporter does anew, or twice, at every trace: once here. Seen on torch 2.13.

Measured in processor time of a quantize (`benchmarks/tracing.py`): without single nodes decomposed it takes 1.5 to 2.2
times as long, without operators read once 1.3 to 7.5 times, without known values taken 1.0 to 1.12 times.
"""

import typing
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


def _module(name: str) -> Any:
    """Return a module of torch, or None where another version of torch lacks it."""
    try:
        return import_module(name)
    except ImportError:
        return None


registration = _module("torch.onnx._internal.exporter._registration")
exporter_passes = _module("torch.onnx._internal.exporter._fx_passes")
operator_tables = _module("torch.onnx._internal.exporter._decomp")
composites = _module("torch._export.utils")
programs = _module("torch.export.exported_program")
capture = _module("torch.export._trace")
type_promotion = _module("torch.onnx._internal.fx.passes.type_promotion")
kernels = _module("torch._ops")


@contextmanager
def operators_read_once() -> Iterator[None]:
    """Let torch's exporter find what it has looked up before.

    Each call of `torch.onnx.export` does the following anew, which takes longer than translating a small model:

    - it parses the source of some 500 functions, its operator library, and derives the signature of each. Operators
      that somebody adds to the library itself after the first trace are not seen; translations of custom ops are none
      of them;
    - it lists the ops that torch composes of others, some 50 times: once per namespace of ops and pass. Here it lists
      them once per call;
    - it evaluates the annotation `Callable[_P, _T]` for some 10,000 kernels. `collections.abc` makes a new object of
      it each time, `typing` finds the one that it has made.
    """
    with ExitStack() as stack:
        library, signatures = (getattr(registration, name, None) for name in ("onnxscript_apis", "_schemas"))
        stack.enter_context(_replaced(library, "get_torchlib_ops", _remembered))
        stack.enter_context(_replaced(signatures, "op_signature_from_function", _remembered))
        stack.enter_context(_replaced(composites, "_materialize_cpp_cia_ops", cache))
        stack.enter_context(_replaced(kernels, "Callable", lambda _: typing.Callable))
        yield


@contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a module inside the block."""
    before = getattr(owner, name, None)
    if before is None or before is typing.Callable or hasattr(before, "cache_info"):
        yield  # there is nothing to replace, or another thread is tracing too
        return
    setattr(owner, name, replacement(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@cache
def _remembered(read: Callable[..., Any]) -> Callable[..., Any]:
    return cache(read)


_INTERPRETER = ("_set_current_node", "_maybe_promote_node", "run_node")


@contextmanager
def known_values_taken() -> Iterator[None]:
    """Let torch's exporter run those nodes alone inside the block whose types it promotes.

    It takes its own way where the installed torch lacks a function that this builds on.
    """
    interpreter = getattr(type_promotion, "_TypePromotionInterpreter", None)
    rule_of = getattr(type_promotion, "get_type_promotion_rule", None)
    if rule_of is None or not all(hasattr(interpreter, name) for name in _INTERPRETER):
        yield
        return
    assert interpreter is not None
    whole = interpreter.run_node

    def run_node(self: Any, node: fx.Node) -> Any:
        if node.op != "call_function" or node.meta.get("val") is None:
            return whole(self, node)
        with self._set_current_node(node):
            if rule := rule_of(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]  # a node that was changed has been run, and has a new one since

    interpreter.run_node = run_node
    try:
        yield
    finally:
        interpreter.run_node = whole


def make_functional(graph: fx.Graph) -> bool:
    """Let each op that changes its first input in place give a new tensor, which later nodes read instead.

    Return False, with the graph as it was, where that is not certain to be the same: the changed tensor is an input or
    has a view, the op changes anything else or has another dtype out of place, or a node holds a graph of its own.
    """
    nodes = list(graph.nodes)
    if any(node.op == "get_attr" or isinstance(node.target, HigherOrderOperator) for node in nodes):
        return False
    changing = [node for node in nodes if isinstance(node.target, OpOverload) and node.target._schema.is_mutable]
    if not changing:
        return True
    sharing: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if isinstance(node.meta.get("val"), Tensor):
            sharing[_storage(node)].append(node)
    forms = [_out_of_place(node) for node in changing]
    if None in forms or not all(_only_changed(sharing[_storage(node)], set(changing)) for node in changing):
        return False
    order = {node: place for place, node in enumerate(nodes)}
    for node, form in zip(changing, forms, strict=True):
        node.target = form
        before: Any = node.args[0]
        before.replace_all_uses_with(node, lambda user, changed=node: order[user] > order[changed])
    return True


def _storage(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def _only_changed(sharing: list[fx.Node], changing: set[fx.Node]) -> bool:
    """Return whether of the nodes that share a storage the first made it and each other changed the one before it."""
    first, *rest = sharing
    return first.op == "call_function" and first not in changing and all(node in changing for node in rest)


def _out_of_place(node: fx.Node) -> Any:
    """Return the op that gives as a new tensor what the node makes of its first input, None where there is none."""
    op: Any = node.target
    name, overload = op._opname, op._overloadname
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments]
    packet = getattr(getattr(torch.ops, op.namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    form = getattr(packet, overload, None)
    if form is None or written != [True] + [False] * (len(written) - 1) or form._schema.is_mutable:
        return None
    if [a.name for a in form._schema.arguments] != [a.name for a in op._schema.arguments]:
        return None
    given: Any = fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    args, kwargs = given
    with torch.no_grad():
        result = form(*args, **kwargs)
    before = args[0]
    return form if result.dtype == before.dtype and result.shape == before.shape else None


Decompositions = Mapping[Any, Callable[..., Any]]

_DECOMPOSING = (
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
    if not all(hasattr(module, name) for module, name in _DECOMPOSING):
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

    Return False, with the program as it was, where one of the nodes, or of those that it is made of, has no
    translation, is a constant, or cannot be traced by itself.
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
