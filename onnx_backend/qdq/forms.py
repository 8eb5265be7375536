"""Forms of nodes in a file: a node says in its metadata which nodes it stands for."""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence

from onnx import NodeProto

from onnx_backend.proto.nodes import metadata, retain, set_metadata

FORM_KEY = "qsdk.stands_for"  # metadata of the last node of a form: the nodes that it stands for, serialized
PART_OF_FORM = "qsdk.part_of"  # metadata of its other nodes: what the last one makes


def note_form(node: NodeProto, meant: Sequence[NodeProto]) -> None:
    """Note on the last node of a form the nodes that it stands for."""
    text = json.dumps([b64encode(one.SerializeToString(deterministic=True)).decode() for one in meant])
    set_metadata(node, **{FORM_KEY.removeprefix("qsdk."): text})


def note_part(node: NodeProto, last: str) -> None:
    """Note on another node of a form what the last one makes."""
    set_metadata(node, **{PART_OF_FORM.removeprefix("qsdk."): last})


def meant_by(node: NodeProto) -> list[NodeProto]:
    """Return the nodes that the last node of a form stands for; none for any other node."""
    return [NodeProto.FromString(b64decode(text)) for text in json.loads(metadata(node).get(FORM_KEY, "[]"))]


def drop_notes(node: NodeProto) -> None:
    """Remove what a node of a form notes, in place."""
    retain(node.metadata_props, lambda fact: fact.key not in (FORM_KEY, PART_OF_FORM))


def in_order(nodes: Iterable[NodeProto], behind: dict[str, list[NodeProto]]) -> list[NodeProto]:
    """Return nodes, each followed by those that stand behind its results."""
    waiting, found = [*nodes][::-1], list[NodeProto]()
    while waiting:
        found.append(waiting.pop())
        for name in found[-1].output[::-1]:
            waiting += behind.pop(name, [])[::-1]
    return found
