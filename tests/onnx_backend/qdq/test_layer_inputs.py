"""Layers whose weights alone are quantized, and which round their input to int8 as the runtime's kernel does."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from qdq_models import make_model, weights
from torch import nn

import qsdk
from onnx_backend.qdq.layer_inputs import quantize_inputs
from onnx_backend.runtime.session import simulation_session
from onnx_backend.walk.layer_walk import walk_layers as onnx_walk
from qsdk import ConfigError, ExportError, QuantConfig, w8a8, weight_only
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import storage_type
from qsdk.core.numerics.spec import PerBlock, PerTensor, Spec
from torch_bridge.quantizers.quantizer import fake_quantize_blocks
from torch_bridge.walk.layer_walk import walk_layers as module_walk

RNG = np.random.default_rng(3)


def linears(k, n):
    """Two linear layers as torch exports them: Gemm with transB, and Transpose -> MatMul."""
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b"], ["h"], "first", transB=1),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("Transpose", ["w2"], ["t"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["r", "t"], ["y"], "second"),
    ]
    return make_model(nodes, {"x": ["n", k]}, {"y": ["n", n]}, weights(w1=(k, k), b=(k,), w2=(n, k)))


def session(model, path=None):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if path is not None:
        options.optimized_model_filepath = str(path)
    given = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def ops_that_run(path, folder):
    session(str(path), folder / "optimized.onnx")
    return [node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node]


def ones_on_the_diagonal(dtype, channels, block):
    """`x @ I` with I stored in integers: what comes out is what the kernel makes of x."""
    codes = np.eye(channels).astype(storage_type(dtype_named(dtype)))
    shape = [-(-channels // block), channels] if block else [channels]
    stored = [numpy_helper.from_array(codes, "codes"), numpy_helper.from_array(np.ones(shape, np.float32), "scale")]
    where = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], **where),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    nodes[0].metadata_props.add(key="qsdk.site", value="w")
    nodes[0].metadata_props.add(key="qsdk.input_block", value=str(block or 32))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, channels]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("dtype", "channels", "block"),
    [("uint4", 96, 32), ("uint4", 80, 64), ("uint8", 256, 128), ("uint8", 33, None), ("uint8", 64, 16)],
)
@pytest.mark.parametrize("rows", [1, 40])
def test_the_codes_are_those_of_the_runtimes_kernel(dtype, channels, block, rows):
    x = (RNG.normal(size=(rows, channels)) * np.exp(RNG.normal(size=(rows, 1)))).astype(np.float32)
    x[:, : channels // 3] = np.round(x[:, : channels // 3] * 8) / 8  # ties, and blocks with zeros alone
    if rows > 1:
        x[-1] = 0
    model = ones_on_the_diagonal(dtype, channels, block)
    kernel = session(model).run(None, {"x": x})[0]
    quantize_inputs(model)
    ours = simulation_session(model).run(None, {"x": x})[0]
    size = block or 32
    whole = np.pad(x, ((0, 0), (0, -channels % size))).reshape(rows, -1, size)
    steps = np.repeat(affine.block_scale(np.abs(whole).max(-1)), size, 1)[:, :channels]
    assert np.abs(np.rint(kernel / steps) - np.rint(ours / steps)).max() <= 1
    assert np.mean(np.abs(kernel - ours) > 1e-5 * steps) < 1e-3
    assert np.abs(ours - x).max() > 0.1 * steps.max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "block"),
    [
        (weight_only("int4", block_size=32, compute="int8"), 32),
        (weight_only("int8", block_size=16).for_dialect("onnxruntime"), 16),
        (weight_only("int3", compute="int8"), 32),
    ],
    ids=str,
)
def test_an_ordinary_session_computes_what_was_simulated_without_an_option(config, block, tmp_path):
    sim = qsdk.quantize(linears(64, 80), None, config)
    batches = [RNG.normal(size=(5, 64)).astype(np.float32)]
    qsdk.calibrate(sim, batches, progress=False)
    reasons = [row["reason"] for row in sim.coverage().rows if row["state"] == "quantized"]
    assert len(reasons) == 2
    assert all(f"per block of {block}" in reason for reason in reasons)
    report = qsdk.export(sim, tmp_path / "m.onnx")
    assert not report.summary.get("session_options")
    assert ops_that_run(tmp_path / "m.onnx", tmp_path).count("MatMulNBits") == 2
    wanted = sim.run(batches[0])[0]
    got = session(str(tmp_path / "m.onnx")).run(None, {"x": batches[0]})[0]
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    exact = qsdk.quantize(linears(64, 80), None, QuantConfig(**{**vars(config), "compute": "float32"}))
    qsdk.calibrate(exact, batches, progress=False)
    assert np.abs(exact.run(batches[0])[0] - wanted).max() > 1e-4 * np.abs(wanted).max()
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", batches, progress=False).summary["passed"]
    assert not qsdk.validate(tmp_path / "m.onnx").rows
    again = qsdk.quantize(tmp_path / "m.onnx", None)
    np.testing.assert_array_equal(again.run(batches[0])[0], wanted)
    qsdk.export(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()
    qsdk.export(sim, tmp_path / "plain.onnx", dialect="onnx")  # for any runtime: the nodes that round stand in the file
    assert "Round" in [node.op_type for node in onnx.load(tmp_path / "plain.onnx").graph.node]
    assert qsdk.check_parity(sim, tmp_path / "plain.onnx", batches, progress=False).summary["passed"]
    assert sim.run(np.zeros((0, 64), np.float32))[0].shape == (0, wanted.shape[1])


@pytest.mark.parametrize(
    ("config", "rounded"),
    [
        (weight_only("int4", block_size=32, compute="int8").override("second", compute="float32"), "first:weight"),
        (weight_only("int8").override("second", compute="int8"), "second:weight"),
        (weight_only("int8").for_dialect("onnxruntime").override("first", compute="float32"), "second:weight"),
    ],
    ids=str,
)
def test_a_rule_says_which_layers_round_their_input_and_the_others_keep_it(config, rounded, tmp_path):
    sim = qsdk.quantize(linears(64, 80), None, config)
    batches = [RNG.normal(size=(5, 64)).astype(np.float32)]
    qsdk.calibrate(sim, batches, progress=False)
    assert [site for site, decision in sim.plan.decisions.items() if decision.input_block] == [rounded]
    qsdk.export(sim, tmp_path / "m.onnx")
    assert ops_that_run(tmp_path / "m.onnx", tmp_path).count("MatMulNBits") == 1
    wanted = sim.run(batches[0])[0]
    got = session(str(tmp_path / "m.onnx")).run(None, {"x": batches[0]})[0]
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    again = qsdk.quantize(tmp_path / "m.onnx")
    qsdk.export(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()


@pytest.mark.parametrize(
    "config",
    [
        weight_only("int4", block_size=8, compute="int8"),  # the kernel has no such blocks
        weight_only("int2", compute="int8"),
        weight_only("int4", compute="int8").override("first", weight="float32").override("second", weight="int16"),
        w8a8().for_dialect("onnxruntime"),
        replace(w8a8(), compute="int8"),  # their inputs have pairs
    ],
    ids=str,
)
def test_layers_without_such_a_kernel_keep_their_input_as_it_is(config, tmp_path):
    sim = qsdk.quantize(linears(64, 48), None, config)
    batches = [RNG.normal(size=(5, 64)).astype(np.float32)]
    qsdk.calibrate(sim, batches, progress=False)
    assert not any(decision.input_block for decision in sim.plan.decisions.values())
    qsdk.export(sim, tmp_path / "m.onnx")
    wanted = sim.run(batches[0])[0]
    options = qsdk.export(sim, tmp_path / "m.onnx").summary.get("session_options", {})
    assert not options or config.weight.bits == 2
    if not options:
        got = session(str(tmp_path / "m.onnx")).run(None, {"x": batches[0]})[0]
        tolerance = 1e-5 if config.activation.kind == "float" else 0.02
        np.testing.assert_allclose(got, wanted, atol=tolerance * np.abs(wanted).max())


class Several(nn.Module):
    """Linear layers called as such, in an attention, and a weight that a function multiplies."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 40), nn.Linear(40, 32, bias=False)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.table = nn.Parameter(torch.randn(32, 8) / 6)

    def forward(self, x):
        """Read the norm's result by a layer, which rounds it, and by a sum, which does not."""
        y = self.norm(x)
        y = y + self.down(torch.relu(self.up(y)))
        return (y + self.attention(y, y, y, need_weights=False)[0]) @ self.table


def quantized_module(config):
    torch.manual_seed(0)
    model = Several().eval()
    batches = [torch.randn(2, 6, 32) for _ in range(3)]
    sim = qsdk.quantize(model, batches[0], config)
    qsdk.calibrate(sim, batches, progress=False)
    return model, sim, batches


@pytest.mark.slow
def test_a_module_rounds_the_inputs_of_its_layers_as_its_file_does(tmp_path):
    model, sim, batches = quantized_module(weight_only("int4", block_size=16, compute="int8"))
    blocks = {site: d.input_block for site, d in sim.plan.decisions.items() if d.kind == "weight" and d.quantized}
    rounded = {"up:weight", "down:weight", "attention:in_proj_weight", "attention.out_proj:weight"}
    assert {site for site, block in blocks.items() if block} == rounded
    qsdk.export(sim, tmp_path / "m.onnx")
    assert ops_that_run(tmp_path / "m.onnx", tmp_path).count("MatMulNBits") == 4
    opened = session(str(tmp_path / "m.onnx"))
    with torch.no_grad():
        wanted = sim(batches[1]).numpy()
    got = opened.run(None, {opened.get_inputs()[0].name: batches[1].numpy()})[0]
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    parity = qsdk.check_parity(sim, tmp_path / "m.onnx", batches, progress=False).summary
    assert parity["passed"]
    assert parity["sqnr_db"] > 100
    qsdk.save(sim, tmp_path / "saved")
    with torch.no_grad():
        np.testing.assert_array_equal(qsdk.load(tmp_path / "saved", model)(batches[1]).numpy(), wanted)
    x = batches[0].clone().requires_grad_()
    with sim.training():
        sim.model(x).square().sum().backward()
        assert float(x.grad.abs().min()) > 0
        assert sim.model.up.weight.grad is not None
    sim.set_precision("up", weight="int16")  # for which there is no such kernel
    assert sim.plan.decisions["up:weight"].input_block is None


class Tied(nn.Module):
    """An embedding, and an output layer with the same weight."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


@pytest.mark.parametrize("table", [{}, {"weight": "int4", "block_size": 16}], ids=["one scale", "blocks"])
def test_an_output_layer_that_is_an_embedding_rounds_its_input_and_the_look_up_does_not(table, tmp_path):
    torch.manual_seed(1)
    config = weight_only("int4", block_size=16, compute="int8")
    config = config.override("table", **table) if table else config
    ids = torch.randint(40, (3, 7))
    sim = qsdk.quantize(Tied().eval(), ids, config)
    qsdk.calibrate(sim, [ids], progress=False)
    block = 16 if table else 32
    blocks = {site: d.input_block for site, d in sim.plan.decisions.items() if d.kind == "weight" and d.quantized}
    assert blocks == {"table:weight": None, "head:weight": block}
    qsdk.export(sim, tmp_path / "m.onnx")
    ops = ops_that_run(tmp_path / "m.onnx", tmp_path)
    assert (ops.count("MatMulNBits"), ops.count("MatMul")) == (1, 0)
    opened = session(str(tmp_path / "m.onnx"))
    with torch.no_grad():
        wanted, rows = sim(ids).numpy(), torch.tanh(sim.model.table(ids))
        by_hand = fake_quantize_blocks(rows, block) @ sim.quantizers["table:weight"](sim.model.table.weight).T
    got = opened.run(None, {opened.get_inputs()[0].name: ids.numpy()})[0]
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(wanted, by_hand.numpy(), atol=1e-5)
    again = qsdk.quantize(tmp_path / "m.onnx", None)
    np.testing.assert_allclose(again.run(ids.numpy())[0], wanted, atol=1e-5 * np.abs(wanted).max())
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", [ids], progress=False).summary["passed"]


class Looked(nn.Module):
    """A Linear that reads an embedding, straight or in another shape, and an output layer with the table as weight."""

    def __init__(self, reshaped):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(40, 32), nn.Linear(32, 32), nn.Linear(32, 40, bias=False)
        self.head.weight, self.reshaped = self.table.weight, reshaped

    def forward(self, ids):
        rows = self.table(ids)
        return self.head(torch.relu(self.inner(rows.reshape(-1, 32) if self.reshaped else rows)))


@pytest.mark.slow
@pytest.mark.parametrize("reshaped", [False, True])
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("compute", ["int8", "float32"])
def test_no_table_is_dequantized_whole_for_the_layers_that_read_and_share_it(
    reshaped, bits, symmetric, compute, tmp_path
):
    """A layer behind a DequantizeLinear has no kernel, nor one whose scale is that of a look-up too."""
    torch.manual_seed(2)
    ids = torch.randint(40, (3, 7))
    config = weight_only(bits, block_size=16 if bits == "int4" else None, compute=compute)
    config = config if symmetric else replace(config, symmetric_weights=False)
    sim = qsdk.quantize(Looked(reshaped).eval(), ids, config)
    qsdk.calibrate(sim, [ids], progress=False)
    path = tmp_path / "m.onnx"
    qsdk.export(sim, path)
    ops = ops_that_run(path, tmp_path)
    assert (ops.count("MatMulNBits"), ops.count("MatMul"), ops.count("DequantizeLinear")) == (2, 0, 1)
    opened = qsdk.session(path)
    with torch.no_grad():
        wanted = sim(ids).numpy()
    got = opened.run(None, {opened.get_inputs()[0].name: ids.numpy()})[0]
    apart = np.abs(got - wanted) / np.abs(wanted).max()
    if compute == "float32":
        assert apart.max() < 1e-5
    else:  # a code in thousands is its neighbour, which moves one row of scores
        assert apart.max() < 1.0 / 127
        assert (apart.reshape(-1, apart.shape[-1]).max(1) > 1e-5).mean() < 0.2
    assert qsdk.check_parity(sim, path, [ids], progress=False).summary["passed"]
    again = qsdk.quantize(path)
    assert set(again.encodings) == set(sim.encodings)
    qsdk.export(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.head = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.head(self.shared(self.shared(x).relu()).relu())


@pytest.mark.parametrize(
    "config", [weight_only("int4", block_size=16), weight_only("int8").override("*", per_channel=False)]
)
def test_a_layer_that_is_called_twice_has_no_such_kernel_and_its_file_rounds_its_input_itself(config, tmp_path):
    torch.manual_seed(0)
    model, x = CalledTwice().eval(), torch.randn(4, 6, 32)
    sim = qsdk.quantize(model, x, config.for_dialect("onnxruntime"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    assert ops_that_run(tmp_path / "m.onnx", tmp_path).count("MatMulNBits") == 1
    (got,) = session(str(tmp_path / "m.onnx")).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(got, sim(x), atol=1e-5)


def test_a_scale_for_each_channel_that_is_not_the_one_of_the_weight_is_refused(tmp_path):
    ids = torch.randint(40, (3, 7))
    sim = qsdk.quantize(Looked(False).eval(), ids, weight_only("int8", compute="int8"))
    qsdk.calibrate(sim, [ids], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    (spread,) = [t for t in model.graph.initializer if t.name.endswith("/channel_scales")]
    values = numpy_helper.to_array(spread).copy()
    values[3] *= 2
    spread.CopyFrom(numpy_helper.from_array(values, spread.name))
    with pytest.raises(qsdk.QsdkError, match="it was changed"):
        qsdk.quantize(model)


def test_the_dialect_genai_puts_a_table_that_is_an_output_layer_in_that_layers_blocks():
    torch.manual_seed(1)
    shared, apart = Tied().eval(), Tied().eval()
    apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())
    config = replace(weight_only("int4", block_size=16).for_dialect("genai"), kv_cache=None)
    plans = [qsdk.quantize(model, torch.zeros(1, 3, dtype=torch.long), config).plan for model in (shared, apart)]
    found = [[str(plan.decisions[f"{name}:weight"].spec) for name in ("table", "head")] for plan in plans]
    assert found[0][0] == found[0][1] == str(Spec(qsdk.int8, PerBlock(1, 16)))
    assert found[1] == [str(Spec(qsdk.int8, PerTensor())), str(Spec(qsdk.int4, PerBlock(1, 16)))]
    chosen = config.override("table", weight="int4", block_size=16)
    plan = qsdk.quantize(shared, torch.zeros(1, 3, dtype=torch.long), chosen).plan
    assert plan.decisions["head:weight"].spec == Spec(qsdk.int4, PerBlock(1, 16))
    assert plan.decisions["head:weight"].input_block == 16


def test_solvers_see_the_inputs_that_the_kernel_multiplies():
    _, sim, batches = quantized_module(weight_only("int4", block_size=16, compute="int8"))
    with module_walk(sim, batches) as walk:
        for step in walk:
            if step.layers[0].site == "self:table":  # a function of the module's own multiplies it
                continue
            for exact, rounded in step.inputs():
                again = fake_quantize_blocks(rounded, 16)
                torch.testing.assert_close(rounded, again, rtol=0, atol=1e-6 * float(rounded.abs().max()))
                assert not torch.equal(exact, rounded)
        assert len(walk.layers) == 5
    onnx_sim = qsdk.quantize(linears(64, 80), None, weight_only("int4", block_size=32, compute="int8"))
    x = RNG.normal(size=(5, 64)).astype(np.float32)
    qsdk.calibrate(onnx_sim, [x], progress=False)
    with onnx_walk(onnx_sim, [x], progress=False) as walk:
        exact, rounded = next(iter(next(iter(walk)).inputs()))
    np.testing.assert_array_equal(exact, x)
    np.testing.assert_array_equal(rounded, fake_quantize_blocks(torch.from_numpy(x), 32).numpy())


def test_awq_weighs_the_error_of_inputs_rounded_in_blocks():
    rows = {}
    for compute in ("float32", "int8"):
        _, sim, batches = quantized_module(weight_only("int8", block_size=32, compute=compute))
        rows[compute] = qsdk.awq(sim, batches, progress=False).rows
    assert rows["int8"][0]["error_before"] > 1.1 * rows["float32"][0]["error_before"]


def test_what_computes_in_int8_is_said_and_refused_where_it_cannot_be_had(tmp_path):
    config = weight_only("int4", block_size=16, compute="int8")
    assert QuantConfig.from_dict(config.to_dict()) == config
    assert weight_only().for_dialect("onnxruntime").compute == "int8"
    assert weight_only(compute="float32").for_dialect("onnxruntime").compute == "float32"
    assert config.for_dialect("compressed-tensors").compute is None
    assert w8a8().for_dialect("onnxruntime").compute is None
    with pytest.raises(ConfigError, match=r"compute='int4' .* is none of float32, int8"):
        weight_only(compute="int4")
    model = nn.Sequential(nn.Linear(32, 16))
    sim = qsdk.quantize(model, torch.zeros(2, 32), config)
    qsdk.calibrate(sim, [], progress=False)
    with pytest.raises(ExportError, match=r'rounds its input to int8 in blocks; choose compute="float32"'):
        qsdk.export(sim, tmp_path / "folder", format="compressed-tensors")
    built = ones_on_the_diagonal("uint8", 32, 32)
    built.graph.node.append(helper.make_node("Relu", ["w"], ["also"]))
    with pytest.raises(ExportError, match=r"the layers of w are to round .* the Relu '' reads it too"):
        quantize_inputs(built)
