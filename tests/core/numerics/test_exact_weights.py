"""Weights of `int8_exact`: no two products that a kernel adds in 16 bits saturate, whatever chose their codes."""

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

import qsdk
from qsdk.core.numerics.dtypes import DTYPES, int8_exact
from qsdk.core.numerics.exact_sums import are_exact, made_exact, with_exact_sums
from qsdk.core.numerics.spec import PerChannel, PerTensor, Spec
from qsdk.core.ranges.ranges import encoding_from_range, range_of

SHAPES = st.sampled_from([((7, 3), 1), ((3, 7), 0), ((4, 3, 2, 2), 0), ((4, 5, 3), 0), ((2, 1, 3, 3), 0)])


def vpmaddubsw(activations, codes):
    """The instruction: products of neighbours, uint8 times int8, are added in 16 bits, and the sums saturate."""
    products = activations.astype(np.int64) * codes.astype(np.int64)
    return products.reshape(*products.shape[:-1], -1, 2).sum(-1).clip(-(2**15), 2**15 - 1)


def rows_of_kernels(codes, axis):
    """The codes of each output as ONNX Runtime packs them, [outputs, K]: of a convolution, K is [*kernel, in]."""
    if codes.ndim > 2:
        rows = np.stack([output.reshape(len(output), -1).T.reshape(-1) for output in codes])
    else:
        rows = codes if axis == 0 else codes.T
    return np.pad(rows, ((0, 0), (0, rows.shape[1] % 2)))


def saturates(codes, axis):
    """Whether some activations of uint8 saturate a sum; each sum is largest at 255 for the codes of one sign."""
    rows = rows_of_kernels(codes, axis)
    worst = [np.where(rows > 0, 255, 0), np.where(rows < 0, 255, 0), np.full(rows.shape, 255)]
    exact = [(x * rows.astype(np.int64)).reshape(len(rows), -1, 2).sum(-1) for x in worst]
    return any((vpmaddubsw(x, rows) != wanted).any() for x, wanted in zip(worst, exact, strict=True))


@st.composite
def weights(draw):
    shape, axis = draw(SHAPES)
    values = st.floats(-8, 8, width=32, allow_subnormal=False) | st.sampled_from([1.0, -1.0, 0.0])
    return draw(arrays(np.float32, shape, elements=values)), axis


@given(weights(), st.booleans(), st.sampled_from([np.rint, np.floor, np.ceil]))
def test_no_sum_saturates_whichever_way_weights_are_rounded(drawn, per_channel, rounded):
    values, axis = drawn
    spec = Spec(int8_exact, PerChannel(axis) if per_channel else PerTensor())
    encoding = encoding_from_range(range_of(values, spec), spec)
    assert with_exact_sums(encoding, values) == encoding
    assert are_exact(encoding.quantize(values), encoding.axis)
    scale = encoding.scale.reshape([-1 if at == axis else 1 for at in range(values.ndim)] if per_channel else ())
    for codes in (encoding.quantize(values), rounded(values / scale).clip(-128, 127).astype(np.int8)):
        assert not saturates(codes, axis)
    seven = encoding_from_range(range_of(values, spec), Spec(DTYPES["int7"], spec.granularity))
    assert (encoding.scale <= seven.scale).all()


@given(weights(), st.data())
def test_codes_move_only_where_a_sum_would_saturate(drawn, data):
    values, axis = drawn
    codes = data.draw(arrays(np.int8, values.shape))
    assert are_exact(codes, axis) != saturates(codes, axis)
    exact = made_exact(codes, axis)
    assert not saturates(exact, axis)
    assert not saturates(made_exact(codes, None), axis)
    assert (np.abs(exact.astype(int)) <= np.abs(codes.astype(int))).all()
    assert (exact == codes).all() == are_exact(codes, axis)


class Both(nn.Module):
    """A convolution and two products, with weights that fill their grids."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(32, 6)
        with torch.no_grad():
            for weight in (self.conv.weight, self.head.weight):
                weight.copy_(weight.sign() * (0.2 + weight.abs()))

    def forward(self, x):
        """A product of activations and the layers in front of it."""
        return self.head(torch.relu(self.conv(x)).flatten(1))


def solved(verb, sim, batches):
    if "train" in verb:
        if verb == "adaround and train":  # whose scales are frozen
            qsdk.adaround(sim, batches, progress=False)
        with sim.training(learn_scales=True) as model:
            optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.5, scale_lr=0.5))
            for batch in batches * 3:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    elif verb in ("mse", "percentile"):
        qsdk.calibrate(sim, batches, weight_method=verb, progress=False)
    elif verb:
        getattr(qsdk, verb)(sim, batches, progress=False)


@pytest.mark.parametrize(
    "verb", ["", "mse", "percentile", "seq_mse", "gptq", "adaround", "train", "adaround and train"]
)
def test_the_codes_of_a_file_for_every_processor_never_saturate(verb, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(8, 3, 4, 4) for _ in range(2)]
    sim = qsdk.quantize(Both(), batches[0], qsdk.w8a8().for_dialect("onnxruntime"))
    qsdk.calibrate(sim, batches, progress=False)
    solved(verb, sim, batches)
    qsdk.export(sim, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    pairs = {node.output[0]: node for node in model.graph.node if node.op_type == "DequantizeLinear"}
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    for node in layers:
        codes = stored[pairs[node.input[1]].input[0]]
        assert codes.dtype == np.int8
        turned = any(entry.name == "transB" and entry.i for entry in node.attribute)
        assert not saturates(codes, 0 if node.op_type == "Conv" or turned else 1)
        assert np.abs(codes.astype(int)).max() > 64  # not just 7 bits
    assert len(layers) == 2
    rows = [row for row in sim.coverage().rows if row["kind"] == "weight"]
    assert {row["dtype"] for row in rows} == {"int8_exact"}
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", batches, progress=False).summary["passed"]


@pytest.mark.parametrize(
    "verb",
    [qsdk.gptq, qsdk.adaround, partial(qsdk.adaround, method="relaxed"), qsdk.seq_mse],
    ids=["gptq", "adaround", "relaxed", "seq_mse"],
)
def test_a_verb_comes_nearer_to_the_float_layer_within_the_pairs(verb):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 16), torch.randn(512, 64).relu()
    config = qsdk.QuantConfig(weight="int8_exact", activation="uint8").override("*", output="float32")
    qsdk.calibrate(sim := qsdk.quantize(layer, x, config), [x], progress=False)

    def error():
        return float((sim(x) - layer(x).detach()).square().mean())

    nearest = error()
    report = verb(sim, [x], progress=False)
    assert error() < 0.8 * nearest
    assert error() / float(layer(x).detach().square().mean()) < 2 * report.rows[0]["error_after"]
    stored = sim.stored_floats(["self:weight"])["self:weight"]
    assert not saturates(sim.encodings["self:weight"].quantize(stored), 0)


@pytest.mark.slow
def test_adaround_on_ranges_that_it_searches_stays_within_the_pairs():
    torch.manual_seed(0)
    layers = [layer for at in (3, 16, 16) for layer in (nn.Conv2d(at, 16, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()
    batches, test = [torch.rand(16, 3, 12, 12) for _ in range(6)], torch.rand(64, 3, 12, 12)
    sim = qsdk.quantize(model, batches[0], qsdk.w8a8().for_dialect("onnxruntime"))
    qsdk.calibrate(sim, batches, progress=False)

    def error():
        return float((sim(test) - model(test).detach()).square().mean())

    nearest = error()
    qsdk.adaround(sim, batches, progress=False)
    assert (
        error() < nearest / 2
    )  # the head's nearly constant inputs make its ranges small: pairs cut afterwards doubled it


@pytest.mark.parametrize(
    "verb",
    [
        qsdk.seq_mse,
        partial(qsdk.tune_blocks, iterations=20, lr=0.2, learn=["scales"]),
        partial(qsdk.tune_blocks, iterations=40, learn="all"),
    ],
    ids=["seq_mse", "scales of blocks", "all of blocks"],
)
def test_ranges_that_a_verb_chooses_leave_room_for_the_pairs(verb):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()).eval()
    batches = [torch.randn(24, 16) for _ in range(4)]
    sim = qsdk.quantize(model, batches[0], qsdk.w8a8().for_dialect("onnxruntime"))
    qsdk.calibrate(sim, batches, progress=False)
    verb(sim, batches, progress=False)
    sites = [
        site for site, decision in sim.plan.decisions.items() if getattr(decision.spec, "dtype", None) == int8_exact
    ]
    assert len(sites) == 2
    for site, stored in sim.stored_floats(sites).items():
        assert not saturates(sim.encodings[site].quantize(stored), 0), site


class Tied(torch.nn.Module):
    """An output layer that multiplies with the table of words."""

    def __init__(self):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(60, 16), torch.nn.Linear(16, 60, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        """Give a score for each word."""
        return self.head(self.words(ids).relu())


@pytest.mark.parametrize(
    ("config", "processor", "dtype"),
    [
        (qsdk.w8a8(), "any", "int8_exact"),
        (qsdk.w4a8(), "any", "int8_exact"),  # the layer's own 4 bits are exact, those of the table are 8
        (qsdk.QuantConfig(dynamic_activations=True), "any", "int8_exact"),
        (replace(qsdk.w8a8(), symmetric_weights=False), "any", "int7"),
        (qsdk.w8a8(), "avx2", "uint8"),
        (qsdk.w8a8(), "vnni", "int8"),
        (qsdk.w8a8().override("words", weight="int8"), "any", "int8_exact"),
        (qsdk.w8a8().override("words", weight="int8_strict"), "any", "int8_exact_strict"),
        (qsdk.w4a8(), "vnni", "int8"),
        (qsdk.w8a16(), "any", "int8"),  # multiplied in floats
    ],
)
def test_a_table_that_a_layer_multiplies_with_is_as_exact_as_the_layer(config, processor, dtype, tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(0, 60, (4, 8))
    sim = qsdk.quantize(Tied(), ids, config.for_dialect("onnxruntime", processor=processor))
    qsdk.calibrate(sim, [ids], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert sim.encodings["words:weight"].dtype.name == dtype
    stored = [onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "model.onnx").graph.initializer]
    tables = [codes for codes in stored if codes.size == 60 * 16 and codes.dtype == np.int8]
    saturating = [saturates(codes, at) for codes in tables for at in (0, 1)]
    assert any(saturating) == (dtype == "int8")


class Everything(torch.nn.Module):
    """Each layer that ONNX Runtime has 8-bit kernels for, a product of two activations, and a tied table."""

    def __init__(self):
        super().__init__()
        self.words, self.conv = torch.nn.Embedding(40, 16), torch.nn.Conv1d(16, 16, 3, padding=1)
        self.cells, self.gates = torch.nn.LSTM(16, 16, batch_first=True), torch.nn.GRU(16, 16, batch_first=True)
        self.middle, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 40, bias=False)
        self.head.weight = self.words.weight
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(weight.sign() * (0.2 + weight.abs()))

    def forward(self, ids):
        """Give a score for each word."""
        x = torch.relu(self.conv(self.words(ids).transpose(1, 2))).transpose(1, 2)
        x = self.gates(self.cells(x)[0])[0]
        x = x + (x @ x.transpose(1, 2)).softmax(-1) @ x
        return self.head(self.middle(x).relu())


def kernels_of(path):
    """What an ordinary session makes of a file: the nodes, the stored tensors, and the dtype of each zero point."""
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path.with_suffix(".optimized.onnx")), 3
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath).graph
    return graph.node, {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


#: kernel -> (inputs that are second operands, output channels' axis)
SECOND = {
    "QLinearConv": ((3,), 0),
    "ConvInteger": ((1,), 0),
    "QLinearMatMul": ((3,), -1),
    "MatMulInteger": ((1,), -1),
    "MatMulIntegerToFloat": ((1,), -1),
    "DynamicQuantizeMatMul": ((1,), -1),
    "QGemm": ((3,), -1),
    "DynamicQuantizeLSTM": ((1, 2), -1),
}
POINT = {"QLinearMatMul": 5, "MatMulInteger": 3, "MatMulIntegerToFloat": 5, "DynamicQuantizeMatMul": 3}


def second_operands(nodes, stored):
    """Yield (kernel, whether some codes of its second operand saturate a sum of two products on x86 without VNNI).

    Codes that are found while the model runs may be any: they are exact where they are unsigned.
    """
    for node in nodes:
        at, axis = SECOND.get(node.op_type, ((), 0))
        for name in (node.input[index] for index in at):
            turned = any(entry.name == "transB" and entry.i for entry in node.attribute)
            if name not in stored:
                point = stored.get(node.input[POINT[node.op_type]])  # that of DynamicQuantizeLinear is unsigned
                yield node.op_type, point is not None and point.dtype == np.int8
            elif stored[name].dtype == np.int8:
                matrices = stored[name].reshape(-1, *stored[name].shape[-2:]) if axis else [stored[name]]
                yield node.op_type, any(saturates(codes, 0 if turned or not axis else 1) for codes in matrices)
            else:
                yield node.op_type, False


CONFIGS = {
    "w8a8": qsdk.w8a8(),
    "w4a8": qsdk.w4a8(),
    "raised": qsdk.w4a8().override("middle", weight="int8").override("head", weight="int8"),
    "lowered": qsdk.w8a16().override("*", activation="uint8"),
    "asymmetric": replace(qsdk.w8a8(), symmetric_weights=False),
    "strict": replace(qsdk.w8a8(), weight="int8_strict"),
    "signed": qsdk.QuantConfig(activation="int8"),
    "mixed operands": qsdk.w8a8().override("*", op_type="Transpose", activation="int8"),
    "per tensor": replace(qsdk.w8a8(), per_channel=False),
    "dynamic": qsdk.QuantConfig(dynamic_activations=True),
    "dynamic int4": qsdk.QuantConfig(weight="int4", dynamic_activations=True),
    "weights alone": qsdk.weight_only("int8", compute="int8"),
}


@pytest.mark.spread(8)
@pytest.mark.parametrize("placement", ["kernels", "all"])
@pytest.mark.parametrize("processor", ["any", "avx2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_file_for_a_processor_without_vnni_can_saturate_there(name, processor, placement, tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(0, 40, (2, 6))
    config = CONFIGS[name].for_dialect("onnxruntime", processor=processor, placement=placement)
    sim = qsdk.quantize(Everything(), ids, config)
    qsdk.calibrate(sim, [ids], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    found = list(second_operands(*kernels_of(tmp_path / "model.onnx")))
    assert len({kernel for kernel, _ in found}) >= (1 if name == "weights alone" else 2)
    assert [kernel for kernel, wrong in found if wrong] == []


@pytest.mark.slow
def test_the_check_for_saturation_sees_the_kernels_of_int8(tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(0, 40, (2, 6))
    seen = {}
    for name, placement in (("w8a8", "kernels"), ("dynamic", "kernels"), ("signed", "all")):
        config = CONFIGS[name].for_dialect("onnxruntime", processor="vnni", placement=placement)
        sim = qsdk.quantize(Everything(), ids, config)
        qsdk.calibrate(sim, [ids], progress=False)
        qsdk.export(sim, tmp_path / "model.onnx")
        for kernel, wrong in second_operands(*kernels_of(tmp_path / "model.onnx")):
            seen[kernel] = seen.get(kernel, False) or wrong
    assert all(seen.values())


def test_weights_that_were_changed_under_frozen_scales_are_refused(tmp_path):
    batch = torch.randn(8, 3, 4, 4)
    sim = qsdk.quantize(Both(), batch, qsdk.w8a8().for_dialect("onnxruntime"))
    qsdk.calibrate(sim, [batch], progress=False)
    with torch.no_grad():
        sim.model.head.weight.fill_(2.0)
    with pytest.raises(qsdk.ExportError, match=r"head:weight do not add up .* int8_exact says.*calibrate them"):
        qsdk.export(sim, tmp_path / "model.onnx")
    qsdk.calibrate(sim, [batch], progress=False)
    assert qsdk.export(sim, tmp_path / "model.onnx").rows
