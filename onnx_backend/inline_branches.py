"""An If whose condition is a constant: its branch takes its place."""

from onnx import GraphProto, NodeProto, TensorProto, helper

from onnx_backend.model import unique
from onnx_backend.subgraphs import bodies, rename_reads


def taken_branch(node: NodeProto, condition: bool, taken: set[str]) -> tuple[list[NodeProto], list[TensorProto]]:
    """The nodes and stored tensors of the branch that is taken; its outputs bear the names of the If's.

    Args:
        node: an If.
        condition: which branch.
        taken: every name of the model; inner names are changed where they are taken, and added.
    """
    wanted = "then_branch" if condition else "else_branch"
    branch = GraphProto()
    branch.CopyFrom(next(graph for name, graph in bodies(node) if name == wanted))
    made = dict.fromkeys(name for inner in branch.node for name in inner.output if name)
    renamed: dict[str, str] = {}
    copies = []
    for value, name in zip(branch.output, node.output, strict=True):
        if not name:
            continue
        if value.name in made and value.name not in renamed:
            renamed[value.name] = name
        else:  # stored in the branch, from outside, or given twice
            copies.append((value.name, name))
    owner = node.name or next((name for name in node.output if name), "if")
    for name in (*made, *(tensor.name for tensor in branch.initializer)):
        if name not in renamed:
            renamed[name] = unique(f"{owner}/{name}", taken)
    for inner in branch.node:
        rename_reads(inner, renamed)
        inner.output[:] = [renamed.get(name, name) for name in inner.output]
        if inner.name:
            inner.name = unique(f"{owner}/{inner.name}", taken)
    for tensor in branch.initializer:
        tensor.name = renamed[tensor.name]
    nodes = list(branch.node)
    nodes += [helper.make_node("Identity", [renamed.get(old, old)], [new]) for old, new in copies]
    return nodes, list(branch.initializer)
