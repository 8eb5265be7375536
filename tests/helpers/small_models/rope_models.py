"""Rotary embeddings as exporters write them."""

import numpy as np
from onnx import helper
from qdq_models import make_model

node = helper.make_node

SHAPE = [2, 3, 4, 8]


def cut(kind: str, negated_first: bool = True):
    """Nodes that make the parts `a` and `b` of x, and what they need stored."""
    bounds = {"zero": np.array([0]), "half": np.array([4]), "end": np.array([2**62]), "axes": np.array([-1])}
    if kind == "Slice":
        nodes = [
            node("Slice", ["x", "zero", "half", "axes"], ["a"]),
            node("Slice", ["x", "half", "end", "axes"], ["b"]),
        ]
        return nodes, bounds
    if kind == "Slice from the end":
        bounds["minus"] = np.array([-4])
        nodes = [
            node("Slice", ["x", "zero", "minus", "axes"], ["a"]),
            node("Slice", ["x", "minus", "end", "axes"], ["b"]),
        ]
        return nodes, bounds
    if kind == "Split":
        return [node("Split", ["x"], ["a", "b"], axis=3, num_outputs=2)], {}
    bounds |= {"one": np.array([1]), "two": np.array([2])}
    nodes = [
        node("Slice", ["x", "zero", "end", "axes", "two"], ["a"]),
        node("Slice", ["x", "one", "end", "axes", "two"], ["b"]),
    ]
    return nodes, bounds


def joined(kind: str, first: str, second: str, output: str):
    if kind != "pairs":
        return [node("Concat", [first, second], [output], axis=-1)], {}
    nodes = [
        node("Unsqueeze", [first, "last"], ["u"]),
        node("Unsqueeze", [second, "last"], ["v"]),
        node("Concat", ["u", "v"], ["uv"], axis=-1),
        node("Reshape", ["uv", "whole"], [output]),
    ]
    return nodes, {"last": np.array([-1]), "whole": np.array([2, 3, 4, 8])}


def rope(kind="Slice", form="rotate half", negate="Neg", sizes=8):
    nodes, stored = cut(kind)
    if form == "rotate half":
        minus = node("Neg", ["b"], ["nb"]) if negate == "Neg" else node("Mul", ["minus_one", "b"], ["nb"])
        put, more = joined(kind, "nb", "a", "r")
        nodes += [minus, *put, node("Mul", ["x", "cos"], ["xc"]), node("Mul", ["sin", "r"], ["rs"])]
        nodes.append(node("Add", ["rs", "xc"], ["y"]))
        width = 8
    else:
        nodes += [
            node("Mul", ["a", "cos"], ["ac"]),
            node("Mul", ["b", "sin"], ["bs"]),
            node("Sub", ["ac", "bs"], ["l"]),
        ]
        nodes += [
            node("Mul", ["cos", "b"], ["bc"]),
            node("Mul", ["a", "sin"], ["as"]),
            node("Add", ["as", "bc"], ["h"]),
        ]
        put, more = joined(kind, "l", "h", "y")
        nodes += put
        width = 4
    for index, one in enumerate(nodes):
        one.name = f"n{index}"
    stored = {**stored, **more, "minus_one": np.float32(-1)}
    used = {name for one in nodes for name in one.input}
    inputs = {"x": SHAPE, "cos": [4, width], "sin": [4, width]}
    return make_model(nodes, inputs, {"y": SHAPE}, {k: v for k, v in stored.items() if k in used})
