"""Small float networks of the usual kinds, for onnxruntime.quantization to quantize."""

import numpy as np
from onnx import helper
from qdq_models import make_model

node = helper.make_node


def _weights(seed=0, **shapes):
    """Weights of a scale that keeps activations near 1."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) / np.sqrt(max(np.prod(shape[1:]), 1))).astype(np.float32)
        for name, shape in shapes.items()
    }


def cnn(opset=21):
    """Convolutions of every kind, a residual, a Concat, all pools, Clip with stored bounds, a linear head."""
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], "stem", pads=[1] * 4, strides=[2, 2]),
        node("Relu", ["c1"], ["r1"], "relu1"),
        node("Conv", ["r1", "w2", "b2"], ["c2"], "depthwise", pads=[1] * 4, group=8),
        node("Clip", ["c2", "zero", "six"], ["r2"], "relu6"),
        node("Conv", ["r2", "w3"], ["c3"], "pointwise"),
        node("Add", ["c3", "r1"], ["sum"], "residual"),
        node("MaxPool", ["sum"], ["mp"], "max_pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("AveragePool", ["sum"], ["ap"], "average_pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Concat", ["mp", "ap"], ["cat"], "concat", axis=1),
        node("HardSwish", ["cat"], ["hs"], "hard_swish"),
        node("GlobalAveragePool", ["hs"], ["gap"], "pool"),
        node("Flatten", ["gap"], ["flat"], "flat"),
        node("Gemm", ["flat", "wg", "bg"], ["y"], "head", transB=1),
    ]
    stored = _weights(w1=(8, 3, 3, 3), w2=(8, 1, 3, 3), w3=(8, 8, 1, 1), wg=(5, 16), b1=(8,), b2=(8,), bg=(5,))
    stored |= {"zero": np.float32(0), "six": np.float32(6)}
    return make_model(nodes, {"x": [2, 3, 16, 16]}, {"y": [2, 5]}, stored, opset, 10)


def _attention(x, stored, width, heads):
    """Multi-head attention on [2, 6, width], written in MatMul, Transpose and Softmax."""
    nodes = []
    for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            node("MatMul", [x, f"w{part}"], [f"{part}m"], f"{part}_proj"),
            node("Add", [f"{part}m", f"b{part}"], [f"{part}a"], f"{part}_bias"),
            node("Reshape", [f"{part}a", "split"], [f"{part}s"], f"{part}_split"),
            node("Transpose", [f"{part}s"], [f"{part}t"], f"{part}_turn", perm=perm),
        ]
    nodes += [
        node("MatMul", ["qt", "kt"], ["scores"], "scores"),
        node("Mul", ["scores", "factor"], ["scaled"], "scale"),
        node("Softmax", ["scaled"], ["probabilities"], "softmax", axis=-1),
        node("MatMul", ["probabilities", "vt"], ["context"], "context"),
        node("Transpose", ["context"], ["turned"], "turn", perm=[0, 2, 1, 3]),
        node("Reshape", ["turned", "join"], ["joined"], "join"),
        node("MatMul", ["joined", "wo"], ["attended"], "out_proj"),
    ]
    stored |= _weights(1, wq=(width, width), wk=(width, width), wv=(width, width), wo=(width, width))
    stored |= _weights(2, bq=(width,), bk=(width,), bv=(width,))
    stored |= {"split": np.array([2, 6, heads, width // heads]), "join": np.array([2, 6, width])}
    stored["factor"] = np.float32(1 / np.sqrt(width / heads))
    return nodes


def transformer(opset=21):
    """A pre-norm block: attention and an MLP with GELU (an op from opset 20 on, before that its Erf form)."""
    width = 16
    stored = {f"{name}{i}": value for i in (1, 2) for name, value in _weights(i + 3, g=(width,), b=(width,)).items()}
    stored |= {f"g{i}": stored[f"g{i}"] + 1 for i in (1, 2)}
    stored |= _weights(3, wu=(width, 32), bu=(32,), wd=(32, width), bd=(width,))
    gelu = [node("Gelu", ["u"], ["act"], "gelu")]
    if opset < 20:
        gelu = [
            node("Div", ["u", "root"], ["e1"], "gelu_div"),
            node("Erf", ["e1"], ["e2"], "gelu_erf"),
            node("Add", ["e2", "one"], ["e3"], "gelu_add"),
            node("Mul", ["u", "e3"], ["e4"], "gelu_mul"),
            node("Mul", ["e4", "half"], ["act"], "gelu_half"),
        ]
        stored |= {"root": np.float32(np.sqrt(2)), "one": np.float32(1), "half": np.float32(0.5)}
    nodes = [
        node("LayerNormalization", ["x", "g1", "b1"], ["n1"], "norm1", axis=-1),
        *_attention("n1", stored, width, 2),
        node("Add", ["x", "attended"], ["h"], "add1"),
        node("LayerNormalization", ["h", "g2", "b2"], ["n2"], "norm2", axis=-1),
        node("MatMul", ["n2", "wu"], ["um"], "up"),
        node("Add", ["um", "bu"], ["u"], "up_bias"),
        *gelu,
        node("MatMul", ["act", "wd"], ["dm"], "down"),
        node("Add", ["dm", "bd"], ["d"], "down_bias"),
        node("Add", ["h", "d"], ["y"], "add2"),
    ]
    return make_model(nodes, {"x": [2, 6, width]}, {"y": [2, 6, width]}, stored, opset, 10)


def lstm(opset=21):
    """An LSTM and a linear layer on its last state."""
    stored = _weights(4, w=(1, 24, 5), r=(1, 24, 6), b=(1, 48), wg=(3, 6), bg=(3,))
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["all", "last", ""], "lstm", hidden_size=6),
        node("Squeeze", ["last", "axes"], ["state"], "squeeze"),
        node("Gemm", ["state", "wg", "bg"], ["y"], "head", transB=1),
    ]
    stored["axes"] = np.array([0])
    return make_model(nodes, {"x": [4, 2, 5]}, {"y": [2, 3]}, stored, opset, 10)


def detector(opset=21):
    """A neck that resizes and joins, SiLU, and a head with class scores and boxes as two outputs."""
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], "conv1", pads=[1] * 4),
        node("Sigmoid", ["c1"], ["s1"], "sigmoid1"),
        node("Mul", ["c1", "s1"], ["a1"], "silu1"),
        node("Conv", ["a1", "w2", "b2"], ["c2"], "conv2", pads=[1] * 4, strides=[2, 2]),
        node("LeakyRelu", ["c2"], ["a2"], "leaky", alpha=0.1),
        node("Resize", ["a2", "", "scales"], ["up"], "resize", mode="nearest", nearest_mode="floor",
             coordinate_transformation_mode="asymmetric"),
        node("Concat", ["a1", "up"], ["cat"], "concat", axis=1),
        node("Conv", ["cat", "w3", "b3"], ["head"], "head"),
        node("Reshape", ["head", "rows"], ["flat"], "rows"),
        node("Transpose", ["flat"], ["turned"], "turn", perm=[0, 2, 1]),
        node("Split", ["turned", "sizes"], ["box", "logits"], "split", axis=2),
        node("Softmax", ["logits"], ["scores"], "softmax", axis=-1),
        node("Sigmoid", ["box"], ["relative"], "relative"),
        node("Add", ["relative", "grid"], ["placed"], "place"),
        node("Mul", ["placed", "stride"], ["boxes"], "stride"),
    ]  # fmt: skip
    stored = _weights(5, w1=(6, 3, 3, 3), b1=(6,), w2=(8, 6, 3, 3), b2=(8,), w3=(7, 14, 1, 1), b3=(7,))
    stored |= {"scales": np.float32([1, 1, 2, 2]), "rows": np.array([1, 7, 64]), "sizes": np.array([4, 3])}
    stored |= {"stride": np.float32(8)}
    stored["grid"] = np.tile(np.stack(np.meshgrid(np.arange(8), np.arange(8)), -1).reshape(1, 64, 2), 2).astype("f4")
    outputs = {"boxes": [1, 64, 4], "scores": [1, 64, 3]}
    return make_model(nodes, {"x": [1, 3, 8, 8]}, outputs, stored, opset, 10)


#: net -> the shape of its input.
NETS = {cnn: (2, 3, 16, 16), transformer: (2, 6, 16), lstm: (4, 2, 5), detector: (1, 3, 8, 8)}
