"""Norms as other frameworks write them."""

import numpy as np
from onnx import helper
from qdq_models import make_model


def tensorflow_norm(opset=21):
    node = helper.make_node
    nodes = [
        node("ReduceMean", ["x", "axes"], ["mean"], "mean"),
        node("Sub", ["x", "mean"], ["d"], "sub"),
        node("Mul", ["d", "d"], ["sq"], "square"),
        node("ReduceMean", ["sq", "axes"], ["var"], "var"),
        node("Add", ["var", "eps"], ["ve"], "eps"),
        node("Sqrt", ["ve"], ["std"], "std"),
        node("Reciprocal", ["std"], ["inv"], "inv"),
        node("Mul", ["inv", "gamma"], ["k"], "k"),
        node("Mul", ["x", "k"], ["xk"], "xk"),
        node("Mul", ["mean", "k"], ["mk"], "mk"),
        node("Sub", ["beta", "mk"], ["shift"], "shift"),
        node("Add", ["xk", "shift"], ["y"], "out"),
    ]
    rng = np.random.default_rng(0)
    stored = {name: rng.normal(size=8).astype(np.float32) for name in ("gamma", "beta")}
    stored |= {"axes": np.array([-1]), "eps": np.float32(1e-3)}
    return make_model(nodes, {"x": [2, 6, 4, 8]}, {"y": [2, 6, 4, 8]}, stored, opset)


def group_norm(*, by_arithmetic=False, affine=True, scale=1.0, back=(2, 6, 4, 8)):
    node = helper.make_node
    stored = {"groups": np.array([0, 3, -1]), "back": np.array(back), "axes": np.array([-1])}
    stored |= {"eps": np.float32(1e-3), "ones": np.full(3, scale, np.float32), "zeros": np.zeros(3, np.float32)}
    nodes = [node("Reshape", ["x", "groups"], ["r"], "split")]
    if by_arithmetic:
        nodes += [
            node("ReduceMean", ["r", "axes"], ["m"], "mean"),
            node("Sub", ["r", "m"], ["d"], "sub"),
            node("Mul", ["d", "d"], ["sq"], "square"),
            node("ReduceMean", ["sq", "axes"], ["v"], "var"),
            node("Add", ["v", "eps"], ["ve"], "eps"),
            node("Sqrt", ["ve"], ["s"], "sqrt"),
            node("Div", ["d", "s"], ["n"], "div"),
        ]
    else:
        nodes.append(node("InstanceNormalization", ["r", "ones", "zeros"], ["n"], "norm", epsilon=1e-3))
    nodes.append(node("Reshape", ["n", "back"], ["b"], "join"))
    if affine:
        rng = np.random.default_rng(0)
        stored |= {name: rng.normal(size=(6, 1, 1)).astype(np.float32) for name in ("gamma", "beta")}
        nodes += [node("Mul", ["b", "gamma"], ["g"], "gamma"), node("Add", ["g", "beta"], ["y"], "beta")]
    else:
        nodes[-1].output[0] = "y"
    used = {name for n in nodes for name in n.input}
    return make_model(nodes, {"x": [2, 6, 4, 8]}, {"y": list(back)}, {k: v for k, v in stored.items() if k in used})
