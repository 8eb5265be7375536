"""Q/DQ written in unusual but valid ways: one small model each, by the name of what is unusual."""

import numpy as np
from integer_models import INT8, Net
from onnx import TensorProto, helper, numpy_helper

F32 = np.float32
OUT = (0.05, 120)


def started(shape=(2, 8)):
    net = Net()
    return net, net.qdq(net.input(list(shape)), 0.031, 119)


def stamped(net, opset=21, ir=10, **more):
    """The model without the checks that some of these forms do not pass."""
    graph = helper.make_graph(net.nodes, "net", net.inputs, net.outputs, net.initializers)
    imports = [helper.make_opsetid("", opset), *more.pop("imports", [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir, **more)


# --- weights --------------------------------------------------------------------------------------------------------


def of_weight(make, opset=21, shape=(8, 4)):
    """x @ weight, where `make` gives the name of the weight."""
    net, x = started((2, shape[0]))
    net.output(net.qdq(net.op("MatMul", x, make(net)), *OUT), [2, shape[1]])
    return stamped(net, opset, 13 if opset > 23 else 10)


def coded(kind, low, high, zeros=None, scale=(0.01, 0.02), **attrs):
    """Integers of a type behind a DequantizeLinear with a scale per column."""

    def make(net):
        values = net.rng.integers(low, high, (8, 4)).astype(kind)
        scales = net.const(net.rng.uniform(*scale, 4).astype(F32))
        zero = [] if zeros is None else [net.const(np.asarray(zeros, kind))]
        return net.op("DequantizeLinear", net.const(values), scales, *zero, axis=1, **attrs)

    return make


def quantized_while_running(net, strict=False):
    zeros = np.zeros(4, np.int8) if strict else np.array([120, 130, 128, 128], np.uint8)
    s, z = net.const(net.rng.uniform(0.01, 0.02, 4).astype(F32)), net.const(zeros)
    q = net.op("QuantizeLinear", net.const(net.rng.normal(0, 1, (8, 4)).astype(F32)), s, z, axis=1)
    if strict:
        q = net.op("Clip", q, net.const(np.int8(-127)), net.const(np.int8(127)))
    return net.op("DequantizeLinear", q, s, z, axis=1)


def of_two_bits(net):
    name = net.name("weight")
    net.initializers.append(helper.make_tensor(name, TensorProto.INT2, [8, 4], net.rng.integers(-2, 2, 32).tolist()))
    return net.op("DequantizeLinear", name, net.const(F32(0.1)))


def one_block(net):
    codes, scales = net.rng.integers(-9, 9, (8, 4)).astype(np.int8), net.rng.uniform(0.1, 0.2, (1, 4)).astype(F32)
    return net.op("DequantizeLinear", net.const(codes), net.const(scales), axis=0, block_size=8)


def sparse_weight():
    net, x = started()
    s, z = net.const(F32(0.01)), net.const(np.int8(0))
    codes = net.op("QuantizeLinear", "sparse", s, z)
    net.output(net.qdq(net.op("MatMul", x, net.op("DequantizeLinear", codes, s, z)), *OUT), [2, 4])
    model = stamped(net)
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [3], [0.5, -0.4, 0.3])
    places = helper.make_tensor("places", TensorProto.INT64, [3], [1, 5, 17])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [8, 4]))
    return model


def of_conv(group=1, transpose=False):
    """A convolution whose weight has a zero point per channel, far apart."""
    net = Net()
    x = net.qdq(net.input([1, 4, 6, 6]), 0.03, 100)
    shape = (4, 4 // group, 3, 3)
    codes, zeros = net.rng.integers(-128, 128, shape).astype(np.int8), np.array([-100, 5, 100, 0], np.int8)
    axis, count = (1, 4 // group) if transpose else (0, 4)
    scale = net.const(net.rng.uniform(0.01, 0.02, count).astype(F32))
    w = net.op("DequantizeLinear", net.const(codes), scale, net.const(zeros[:count]), axis=axis)
    op, side = ("ConvTranspose", 8) if transpose else ("Conv", 4)
    y = net.op(op, x, w, net.const(net.rng.normal(0, 1, 4).astype(F32)), group=group)
    net.output(net.qdq(y, 0.3, 120), [1, 4, side, side])
    return net.model()


def shared_weight():
    net, x = started()
    w, _ = net.weight((8, 8), 1)
    hidden = net.qdq(net.op("MatMul", x, w), *OUT)
    net.output(net.qdq(net.op("MatMul", hidden, w), *OUT), [2, 8])
    return net.model()


def tied_embedding():
    net = Net()
    w, _ = net.weight((10, 8))
    rows = net.qdq(net.op("Gather", w, net.input([2, 3], "ids", TensorProto.INT64)), 0.01, 100)
    net.output(net.qdq(net.op("MatMul", rows, net.op("Transpose", w, perm=[1, 0])), *OUT), [2, 3, 10])
    return net.model()


def weight_on_the_left():
    net, x = started((8, 3))
    w = net.op(
        "DequantizeLinear", net.const(net.rng.integers(-9999, 9999, (4, 8)).astype(np.int16)), net.const(F32(2e-4))
    )
    net.output(net.qdq(net.op("MatMul", w, x), *OUT), [4, 3])
    return net.model()


# --- biases ---------------------------------------------------------------------------------------------------------


def of_bias(make):
    """x @ weight + bias, where `make(net, accumulator scale)` gives the name of the bias."""
    net, x = started()
    w, scale = net.weight((8, 4), 1)
    bias = make(net, (scale * F32(0.031)).astype(F32))
    net.output(net.qdq(net.op("Gemm", x, w, bias), *OUT), [2, 4])
    return net.model()


def bias(kind, shape, scale=None, zero=False, **attrs):
    def make(net, own):
        codes = net.const(net.rng.integers(-99, 99, shape).astype(kind))
        scales = own if scale is None else F32(scale)
        zeros = [net.const(np.zeros(scales.shape, kind))] if zero else []
        return net.op("DequantizeLinear", codes, net.const(scales), *zeros, **attrs)

    return make


def bias_quantized_while_running(net, _):
    s, z = net.const(F32(0.0031)), net.const(np.int8(0))
    values = net.const(net.rng.normal(0, 0.1, 4).astype(F32))
    return net.op("DequantizeLinear", net.op("QuantizeLinear", values, s, z), s, z)


# --- activations ----------------------------------------------------------------------------------------------------


def through(op, *extra, given=(2, 8), made=(2, 8), opset=21, **attrs):
    """One op between two pairs of different scale and dtype."""
    net, x = started(given)
    y = net.op(op, x, *[net.const(e) for e in extra], **attrs)
    net.output(net.qdq(y, 0.047, -3, INT8), list(made))
    return stamped(net, opset, 13 if opset > 23 else 10)


def cast_and_back(kind):
    net, x = started()
    net.output(net.qdq(net.op("Cast", net.op("Cast", x, to=kind), to=TensorProto.FLOAT), *OUT), [2, 8])
    return net.model()


def paired_again(*encodings):
    net, x = started()
    for encoding in encodings:
        x = net.qdq(x, *encoding)
    net.output(net.qdq(net.op("MatMul", x, net.weight((8, 4))[0]), *OUT), [2, 4])
    return net.model()


def clip_bounds(quantized):
    """A Clip whose bounds are constants behind a DequantizeLinear, or behind a pair."""
    net, x = started()
    s, z = net.const(F32(0.5)), net.const(np.uint8(10))

    def bound(code):
        stored = net.const(np.uint8(code))
        if quantized:
            stored = net.op("QuantizeLinear", net.const(F32((code - 10) * 0.5)), s, z)
        return net.op("DequantizeLinear", stored, s, z)

    net.output(net.qdq(net.op("Clip", x, bound(9), bound(14)), 0.03, 100), [2, 8])
    return net.model()


def shared_reader():
    """One DequantizeLinear that a layer, a function, a sum and an output read."""
    net, x = started()
    net.output(x, [2, 8], "copy")
    net.output(net.qdq(net.op("MatMul", "copy", net.weight((8, 4), 1)[0]), *OUT), [2, 4], "layer")
    net.output(net.qdq(net.op("Sigmoid", "copy"), 0.004, 0), [2, 8], "function")
    net.output(net.qdq(net.op("Add", "copy", "copy"), 0.06, 120), [2, 8], "sum")
    return net.model()


def same_pair_twice():
    net = Net()
    x = net.input([2, 8])
    net.output(net.qdq(net.op("Add", net.qdq(x, 0.031, 119), net.qdq(x, 0.031, 119)), 0.06, 119), [2, 8])
    return net.model()


def of_codes(move, shape=(2, 8), made=(2, 8), kind=np.uint8):
    """What `move(net, codes)` makes of the codes, between QuantizeLinear and DequantizeLinear."""
    net = Net()
    s, z = net.const(F32(0.03)), net.const(kind(3))
    codes = move(net, net.op("QuantizeLinear", net.input(list(shape)), s, z))
    net.output(net.op("DequantizeLinear", codes, s, z), list(made))
    return net.model()


def turned(net, codes):
    return net.op("Transpose", net.op("Reshape", codes, net.const(np.array([4, 4]))), perm=[1, 0])


def doubled(net, codes):
    return net.op("Concat", codes, net.op("Slice", codes, *(net.const(np.array([v])) for v in (0, 1, 0))), axis=0)


def parameters(shape, nodes=False, equal_channels=False):
    """Scale and zero point of another shape, or from Constant nodes."""
    net = Net()

    def constant(array):
        if nodes:
            return net.op("Constant", value=numpy_helper.from_array(np.asarray(array), ""))
        return net.const(array)

    s, z = constant(np.full(shape, 0.03, F32)), constant(np.full(shape, 100, np.uint8))
    attrs = {"axis": 1} if equal_channels else {}
    x = net.op("DequantizeLinear", net.op("QuantizeLinear", net.input([2, 8]), s, z, **attrs), s, z, **attrs)
    net.output(net.qdq(net.op("MatMul", x, net.weight((8, 4))[0]), *OUT), [2, 4])
    return net.model()


def runtime_domain():
    net = Net()
    x, s, z = net.input([2, 8]), net.const(F32(0.0003)), net.const(np.uint16(30000))
    q = net.op("QuantizeLinear", x, s, z, domain="com.microsoft")
    net.output(net.op("DequantizeLinear", q, s, z, domain="com.microsoft"), [2, 8])
    return stamped(net, 18, 8, imports=[helper.make_opsetid("com.microsoft", 1)])


def unread_mask():
    net, x = started()
    dropped, _ = net.op("Dropout", x, outputs=2)
    net.output(net.qdq(dropped, *OUT), [2, 8])
    return net.model()


def gemm_of_an_unquantized_mean():
    net, x = started((3, 4, 6))
    mean = net.op("ReduceMean", x, net.const(np.array([1])), keepdims=0)
    w, _ = net.weight((5, 6), 0)
    y = net.op("Gemm", mean, w, net.const(net.rng.normal(0, 1, 5).astype(F32)), transB=1, alpha=1.5, beta=0.5)
    net.output(net.qdq(y, *OUT), [3, 5])
    return net.model()


def gemm_of_a_transposed_input():
    net, x = started((8, 2))
    net.output(net.qdq(net.op("Gemm", x, net.weight((8, 4), 1)[0], transA=1), *OUT), [2, 4])
    return net.model()


def attention(heads=0, **attrs):
    net = Net()
    shape = [1, 4, 16] if heads else [1, 2, 4, 8]
    parts = [net.qdq(net.input(shape, name), 0.031, 119) for name in "qkv"]
    attrs |= {"q_num_heads": heads, "kv_num_heads": heads} if heads else {}
    net.output(net.qdq(net.op("Attention", *parts, **attrs), 0.04, 120), shape)
    return stamped(net, 23)


def grouped_attention(mask=None, **attrs):
    """Four heads of queries on two of keys and values."""
    net = Net()
    parts = [net.qdq(net.input([1, heads, 4, 8], name), 0.031, 119) for name, heads in (("q", 4), ("k", 2), ("v", 2))]
    given = [] if mask is None else [net.const(mask)]
    net.output(net.qdq(net.op("Attention", *parts, *given, **attrs), 0.04, 120), [1, 4, 4, 8])
    return stamped(net, 23)


def rotary():
    angles = np.arange(16).reshape(1, 4, 4)
    cos, sin = np.cos(angles).astype(F32), np.sin(angles).astype(F32)
    return through("RotaryEmbedding", cos, sin, given=(1, 2, 4, 8), made=(1, 2, 4, 8), opset=23)


def _norm():
    return through("RMSNormalization", np.linspace(0.5, 1.5, 8, dtype=F32), opset=23, axis=-1)


#: What to build, by name.
FORMS = {
    "a weight per tensor": lambda: of_weight(lambda net: net.weight((8, 4))[0]),
    "zero points per channel": lambda: of_weight(coded("u1", 100, 156, [100, 150, 128, 90])),
    "zero points far apart": lambda: of_weight(coded("u1", 0, 256, [3, 200, 128, 90])),
    "zero points far apart in a Conv": of_conv,
    "zero points far apart in a depthwise Conv": lambda: of_conv(group=4),
    "zero points far apart in a ConvTranspose": lambda: of_conv(transpose=True),
    "a weight of int16": lambda: of_weight(coded("i2", -32768, 32768, scale=(1e-5, 2e-5))),
    "a weight of uint16": lambda: of_weight(coded("u2", 0, 65536, [0, 65535, 30000, 9], scale=(1e-5, 2e-5))),
    "a weight of int16 on the left": weight_on_the_left,
    "a weight of 2 bits": lambda: of_weight(of_two_bits, 25),
    "a weight in one block per column": lambda: of_weight(one_block),
    "a weight quantized while running": lambda: of_weight(quantized_while_running),
    "a weight clipped to a strict grid": lambda: of_weight(lambda net: quantized_while_running(net, strict=True)),
    "a weight transposed behind its pair": lambda: of_weight(
        lambda net: net.op("Transpose", net.weight((4, 8), 0)[0], perm=[1, 0])
    ),
    "a sparse weight": sparse_weight,
    "a weight that two layers share": shared_weight,
    "a weight tied to an embedding": tied_embedding,
    "a bias in another scale": lambda: of_bias(bias("i4", 4, 0.003)),
    "a bias of int8": lambda: of_bias(bias("i1", 4, 0.003)),
    "a bias of int16": lambda: of_bias(bias("i2", 4, 0.003)),
    "a bias with two axes": lambda: of_bias(bias("i4", (1, 4), axis=1)),
    "a bias with one element": lambda: of_bias(bias("i4", (1,), 0.003)),
    "a bias with one element and two axes": lambda: of_bias(bias("i4", (1, 1), 0.003)),
    "a bias with zero points of 0": lambda: of_bias(bias("i4", 4, zero=True, axis=0)),
    "a bias that is a float scalar": lambda: of_bias(lambda net, _: net.const(F32(0.31))),
    "a bias per row": lambda: of_bias(lambda net, _: net.const(net.rng.normal(0, 1, (2, 4)).astype(F32))),
    "a bias quantized while running": lambda: of_bias(bias_quantized_while_running),
    "a bias behind an Identity": lambda: of_bias(lambda net, own: net.op("Identity", bias("i4", 4, axis=0)(net, own))),
    "one DequantizeLinear with several readers": shared_reader,
    "the same pair twice on one tensor": same_pair_twice,
    "a pair behind the same pair": lambda: paired_again((0.031, 119), (0.031, 119)),
    "a pair behind another pair": lambda: paired_again((0.05, 100), (0.02, -5, INT8)),
    "a Reshape between scales": lambda: through("Reshape", np.array([4, 4]), made=(4, 4)),
    "a Transpose between scales": lambda: through("Transpose", made=(8, 2), perm=[1, 0]),
    "a MaxPool between scales": lambda: through("MaxPool", given=(1, 2, 4, 4), made=(1, 2, 3, 3), kernel_shape=[2, 2]),
    "a Slice between scales": lambda: through("Slice", *(np.array([v]) for v in (0, 2, 1)), made=(2, 2)),
    "an Identity": lambda: through("Identity"),
    "a Dropout": lambda: through("Dropout"),
    "a Dropout with its options": lambda: through("Dropout", F32(0.5), np.bool_(False)),
    "a Dropout whose mask nothing reads": unread_mask,
    "a Cast to float": lambda: through("Cast", to=TensorProto.FLOAT),
    "Casts to double and back": lambda: cast_and_back(TensorProto.DOUBLE),
    "a Clip with stored bounds behind a DequantizeLinear": lambda: clip_bounds(False),
    "a Clip with quantized bounds": lambda: clip_bounds(True),
    "codes that are moved": lambda: of_codes(turned, made=(4, 4)),
    "codes of int8 that are moved": lambda: of_codes(turned, made=(4, 4), kind=np.int8),
    "codes of int16 that are moved": lambda: of_codes(turned, made=(4, 4), kind=np.int16),
    "codes that are joined": lambda: of_codes(doubled, made=(3, 8)),
    "codes that are pooled": lambda: of_codes(
        lambda net, q: net.op("MaxPool", q, kernel_shape=[2, 2]), (1, 1, 4, 4), (1, 1, 3, 3), np.int8
    ),
    "codes of int8 that are clipped": lambda: of_codes(
        lambda net, q: net.op("Clip", q, net.const(np.int8(-127)), net.const(np.int8(127))), kind=np.int8
    ),
    "parameters of shape (1,)": lambda: parameters((1,)),
    "parameters in Constant nodes": lambda: parameters((), nodes=True),
    "equal scales per channel": lambda: parameters((8,), equal_channels=True),
    "pairs of the runtime's domain": runtime_domain,
    "a Gemm of an unquantized mean": gemm_of_an_unquantized_mean,
    "a Gemm that transposes its input": gemm_of_a_transposed_input,
    "Swish": lambda: through("Swish", opset=25),
    "Swish with a factor": lambda: through("Swish", opset=25, alpha=1.7),
    "RMSNormalization": _norm,
    "RotaryEmbedding": rotary,
    "Attention": attention,
    "Attention that is causal": lambda: attention(is_causal=1),
    "Attention on three axes": lambda: attention(heads=2),
    "Attention with shared keys": grouped_attention,
    "Attention with a mask": lambda: grouped_attention(np.tril(np.ones((4, 4), bool))),
    "Attention with a float mask": lambda: grouped_attention(np.where(np.tri(4), 0, -1e9).astype(F32)),
    "Attention with a soft cap": lambda: grouped_attention(softcap=5.0),
}
