"""float16, bfloat16 and float64 modules go the whole road: files in their own type, exact in plain ONNX Runtime."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

import qsdk
from onnx_backend.data_passes.session_parity import check_session
from onnx_backend.proto.weightless import types_of
from onnx_backend.runtimes.validate import validate

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
CODES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float64": TensorProto.DOUBLE}
CONFIGS = {
    "w8a8": qsdk.w8a8(),
    "w4a16": qsdk.w4a16(),
    "int8 activations, narrow": qsdk.w8a8().override(
        "*", weight="int6", activation="int8_strict", symmetric_activations=True
    ),
    "dynamic": qsdk.w8a8().override("*", dynamic_activations=True),
    "weights in blocks": qsdk.weight_only("int4", block_size=8),
}


class Convolutions(nn.Module):
    """Conv (folded BatchNorm), ReLU, a sum, pooling, Linear."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        x = self.pool(torch.relu(self.body(x)) + x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A transformer's layer: LayerNorm, attention, GELU."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.norm(self.layer(x)))


NETWORKS = {"convolutions": (Convolutions, (4, 3, 8, 8)), "block": (Block, (2, 6, 16))}


def made(network, dtype):
    torch.manual_seed(0)
    kind, shape = NETWORKS[network]
    model, batches = kind(), [torch.randn(shape) for _ in range(3)]
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    return model.eval().to(DTYPES[dtype]), [x.to(DTYPES[dtype]) for x in batches]


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """(network, dtype, config) -> sim, batches and the path of the exported file; each is made once."""
    known = {}

    def travelled(network, dtype, config):
        key = (network, dtype, config)
        if key not in known:
            model, batches = made(network, dtype)
            sim = qsdk.quantize(model, batches[0], CONFIGS[config])
            qsdk.calibrate(sim, batches, progress=False)
            path = tmp_path_factory.mktemp("half") / "model.onnx"
            qsdk.export(sim, path)
            known[key] = sim, batches, path
        return known[key]

    return travelled


WAYS = [
    *(("block", dtype, "w8a8") for dtype in ("float16", "bfloat16")),
    *(
        pytest.param(network, dtype, config, marks=pytest.mark.slow)
        for network, dtype, config in (
            ("block", "float64", "w8a8"),
            *(("convolutions", dtype, "w8a8") for dtype in DTYPES),
            *(("block", dtype, config) for dtype in ("float16", "bfloat16") for config in CONFIGS if config != "w8a8"),
        )
    ),
]
NETWORKS_BY_COST = ["block", pytest.param("convolutions", marks=pytest.mark.slow)]
DTYPES_BY_COST = ["float16", "bfloat16", pytest.param("float64", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "dtype", "config"), WAYS)
def test_the_file_computes_what_the_sim_does(road, network, dtype, config):
    sim, batches, path = road(network, dtype, config)
    report = qsdk.check_parity(sim, path, batches, progress=False)
    assert report.summary["passed"], str(report)
    assert report.summary["weights_max_lsb"] == 0


@pytest.mark.spread(1)
@pytest.mark.parametrize(("network", "dtype", "config"), WAYS)
def test_opened_and_exported_again_it_is_the_same_file(road, tmp_path, network, dtype, config):
    _, _, path = road(network, dtype, config)
    qsdk.export(qsdk.quantize(path, None), tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES_BY_COST)
@pytest.mark.parametrize("network", NETWORKS_BY_COST)
def test_the_default_session_is_exact_at_every_site(road, network, dtype):
    _, batches, path = road(network, dtype, "w8a8")
    given = [x.float().numpy() for x in batches]
    report = check_session(onnx.load(path), given, progress=False)
    assert report.summary["passed"], str(report)


@pytest.mark.parametrize("dtype", DTYPES_BY_COST)
def test_tensors_between_ops_are_of_the_modules_own_type(road, dtype):
    model = onnx.load(road("block", dtype, "w8a8")[2])
    types = types_of(model)
    assert {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} == {CODES[dtype]}
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    assert norms
    outside = [name for node in norms for name in node.output]
    if dtype == "float16":
        assert {types[name][0] for name in outside} == {dtype}
    else:  # cast behind the op, by name
        casts = {node.input[0]: node for node in model.graph.node if node.op_type == "Cast"}
        assert all(casts[name].attribute[0].i == CODES[dtype] for name in outside if types[name][0] == "float32")


def test_float16_files_hold_float16_scales_and_need_no_cast_at_activations(road):
    model = onnx.load(road("block", "float16", "w8a8")[2])
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    pairs = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert pairs
    assert {stored[node.input[1]].data_type for node in pairs} == {TensorProto.FLOAT16}
    casts = [node.name for node in model.graph.node if node.op_type == "Cast" and "bias" not in node.name]
    assert casts == []  # an int32 bias has scales that no float16 holds


def test_pure_bfloat16_files_hold_bfloat16_scales_and_no_cast_around_ops(road, tmp_path):
    sim, _, _ = road("block", "bfloat16", "w8a8")
    qsdk.export(sim, tmp_path / "pure.onnx", dialect="onnx")
    model = onnx.load(tmp_path / "pure.onnx")
    onnx.checker.check_model(model, full_check=True)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert {stored[node.input[1]].data_type for node in quantizers} == {TensorProto.BFLOAT16}
    assert not any("kernel_cast" in node.name for node in model.graph.node)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES_BY_COST)
@pytest.mark.parametrize("network", NETWORKS_BY_COST)
def test_the_integer_model_of_a_half_file_has_no_float(road, tmp_path, network, dtype):
    _, batches, path = road(network, dtype, "w8a8")
    summary = qsdk.to_integer(path, tmp_path / "integer.onnx").summary
    assert (summary["float_tensors"], summary["operations_max_lsb"] <= 1) == (0, True)
    whole = qsdk.quantize(path, None)
    x = batches[0].float().numpy()
    integer = onnx.load(tmp_path / "integer.onnx")
    assert {value.type.tensor_type.elem_type for value in integer.graph.input} == {TensorProto.FLOAT}
    (wanted,), (got,) = whole.run(x), _run(tmp_path / "integer.onnx", x)
    step = next(e.scale[0] for site, e in whole.encodings.items() if site.endswith("head:output"))
    assert np.abs(got - wanted).mean() <= 2 * step


class Padded(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(16, 4, batch_first=True, **options), nn.Linear(16, 5)

    def forward(self, x, padding):
        return self.head(self.attend(x, x, x, key_padding_mask=padding, need_weights=False)[0])


@pytest.mark.slow
@pytest.mark.parametrize("longer", [False, True])  # torch pads the mask for keys of its own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_padding_mask_has_an_integer_model_in_any_type(tmp_path, dtype, longer):
    torch.manual_seed(0)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])  # torch turns it into a mask of -inf
    data = [(torch.randn(2, 5, 16, dtype=dtype), padding) for _ in range(3)]
    model = Padded(add_bias_kv=longer, add_zero_attn=longer).eval().to(dtype)
    sim = qsdk.quantize(model, data[0], qsdk.w8a8())
    qsdk.calibrate(sim, data, progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    summary = qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "integer.onnx").summary
    assert summary["float_tensors"] == 0
    assert summary["reference_equal"]
    assert summary["max_lsb"] <= 1


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(16, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_states_between_steps_are_as_wide_in_the_sim_as_in_the_file(tmp_path, kind, dtype):
    torch.manual_seed(0)
    data = [torch.randn(4, 30, 16, dtype=dtype) for _ in range(3)]
    model = Recurrent(kind).eval().to(dtype)
    sim = qsdk.quantize(model, data[0], qsdk.w8a8())
    qsdk.calibrate(sim, data, progress=False)
    # the float pass is the module, bit for bit; with gradients, torch may take another kernel
    with sim.runtime.in_phase("float"), torch.no_grad():
        assert torch.equal(sim(data[0]), model(data[0]))
    qsdk.export(sim, tmp_path / "model.onnx")
    summary = qsdk.check_parity(sim, tmp_path / "model.onnx", data, progress=False).summary
    assert summary["weights_max_lsb"] == 0
    assert summary["activations_max_lsb"] <= 1


def _run(path, x):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES_BY_COST)
def test_a_changed_weight_fails_parity_and_so_does_a_changed_scale(road, tmp_path, dtype):
    sim, batches, path = road("block", dtype, "w8a8")
    model = onnx.load(path)
    codes = next(t for t in model.graph.initializer if t.name.endswith("head.weight_quantized"))
    codes.raw_data = bytes([codes.raw_data[0] ^ 1]) + codes.raw_data[1:]
    report = qsdk.check_parity(sim, model, batches[:1], progress=False)
    assert report.summary["weights_max_lsb"] == 1
    assert not report.summary["passed"]
    model = onnx.load(path)
    scale = next(t for t in model.graph.initializer if t.name == "head:output/scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 2, scale.name))
    assert not qsdk.check_parity(sim, model, batches[:1], progress=False).summary["passed"]


@pytest.mark.parametrize("dtype", DTYPES_BY_COST)
def test_validate_finds_nothing_wrong_with_a_half_file(road, dtype):
    assert [
        row for row in validate(onnx.load(road("block", dtype, "w8a8")[2])).rows if row["severity"] == "error"
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_coverage_names_the_modules_own_type_where_it_stays_float(dtype):
    model, batches = made("block", dtype)
    sim = qsdk.quantize(model, batches[0], qsdk.w8a8().override("head", weight="float32", activation=dtype))
    rows = {row["site"]: row for row in sim.coverage().rows}
    assert (rows["head:weight"]["dtype"], rows["head:weight"]["state"]) == (dtype, "float")
    assert (rows["head:output"]["dtype"], rows["head:output"]["state"]) == (dtype, "float")


@pytest.mark.slow
@pytest.mark.parametrize("later", DTYPES_BY_COST)
def test_a_sim_that_changes_its_type_after_calibration_exports_in_the_new_one(tmp_path, later):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8)
    sim = qsdk.quantize(model, x)
    qsdk.calibrate(sim, [x], progress=False)
    sim.model.to(DTYPES[later])
    qsdk.export(sim, tmp_path / "model.onnx")
    assert onnx.load(tmp_path / "model.onnx").graph.input[0].type.tensor_type.elem_type == CODES[later]
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [x.to(DTYPES[later])], progress=False)
    assert report.summary["passed"], str(report)
