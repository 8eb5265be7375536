"""Float16 and bfloat16 islands: ops that a rule keeps in a narrow type compute in it, in the sim and in the file."""

import copy
import itertools
import re

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from float_files import float_onnx
from onnx import TensorProto
from torch import nn

import qsdk
from onnx_backend.data_passes.session_parity import check_session
from onnx_backend.proto.weightless import types_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
CODES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
both_types = pytest.mark.parametrize("dtype", DTYPES)


class Convolutions(nn.Module):
    """Convolutions with a BatchNorm, ReLUs (one in place), a sum, pooling, Linear."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.conv2, self.relu2 = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8, 4)

    def forward(self, x):
        x = self.act(self.bn(self.conv1(x)))
        x = self.pool(self.relu2(self.conv2(x)) + x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A transformer's block as ViT and BERT have it."""

    def __init__(self, width=16):
        super().__init__()
        self.ln1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln2, self.fc1, self.act = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()
        self.fc2, self.head = nn.Linear(2 * width, width), nn.Linear(width, 5)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.proj(attended)
        x = x + self.fc2(self.act(self.fc1(self.ln2(x))))
        return self.head(x.mean(1))


def made(kind):
    """A network with parameters that are no float16 numbers, and batches."""
    torch.manual_seed(0)
    model, shape = kind().eval(), (4, 3, 8, 8) if kind is Convolutions else (2, 6, 16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("mean", "var")):
                buffer.uniform_(0.2, 1.2)
    return model, [torch.randn(shape) for _ in range(3)]


#: rules -> the network, and what is an island: the site of its input, the modules it consists of, its output site
ISLANDS = {
    "bn": (Convolutions, ["conv1:output", ["bn", "act"], "act:output"]),
    "conv2": (Convolutions, ["act:output", ["conv2", "relu2"], "relu2:output"]),
    "ln1": (Block, ["x:input", ["ln1"], "ln1:output"]),
    "fc1": (Block, ["ln2:output", ["fc1"], "fc1:output"]),
    "act": (Block, ["fc1:output", ["act"], "act:output"]),
}


QUICK = [("bn", "float16"), ("ln1", "bfloat16"), ("fc1", "float16")]
SLOW = [way for way in itertools.product(ISLANDS, DTYPES) if way not in QUICK]
WAYS = [*QUICK, *(pytest.param(*way, marks=pytest.mark.slow) for way in SLOW)]
alone = pytest.mark.parametrize(("rule", "dtype"), WAYS)
also_in_a_row = pytest.mark.parametrize(
    ("rule", "dtype"), [*WAYS, ("*", "float16"), pytest.param("*", "bfloat16", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """(rule, dtype) -> model, sim, batches and the path of the exported file; each is made once."""
    known = {}

    def travelled(rule, dtype):
        if (rule, dtype) not in known:
            model, batches = made(ISLANDS[rule][0] if rule in ISLANDS else Block)
            sim = qsdk.quantize(model, batches[0], qsdk.w8a8().skip(rule, dtype=dtype))
            qsdk.calibrate(sim, batches, progress=False)
            path = tmp_path_factory.mktemp("island") / "model.onnx"
            qsdk.export(sim, path)
            known[rule, dtype] = model, sim, batches, path
        return known[rule, dtype]

    return travelled


def captured(sim, x):
    with sim.captured() as values, torch.no_grad():
        sim.model(x)
    return {site: torch.from_numpy(value) for site, value in values.items()}


@pytest.mark.slow
@alone
def test_the_sim_computes_what_the_submodule_computes_in_that_type(road, rule, dtype):
    model, sim, batches, _ = road(rule, dtype)
    source, modules, result = ISLANDS[rule][1]
    part = copy.deepcopy(nn.Sequential(*(model.get_submodule(name) for name in modules))).to(DTYPES[dtype])
    for batch in batches:
        values = captured(sim, batch)
        with torch.no_grad():
            wanted = part(values[source].to(DTYPES[dtype])).float()
        assert torch.equal(values[result], wanted)


@pytest.mark.slow
@also_in_a_row
def test_the_file_is_within_a_unit_of_the_sim_at_every_site(road, rule, dtype):
    _, sim, batches, path = road(rule, dtype)
    report = qsdk.check_parity(sim, path, batches, progress=False)
    assert report.summary["passed"], str(report)
    assert report.summary["weights_max_lsb"] == 0
    assert not [row for row in qsdk.validate(path).rows if row["severity"] == "error"]


@pytest.mark.spread(2)
@also_in_a_row
def test_opened_and_exported_again_it_is_the_same_file_and_gives_the_same(road, tmp_path, rule, dtype):
    _, sim, batches, path = road(rule, dtype)
    back = qsdk.quantize(path, None)
    qsdk.export(back, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()
    report = qsdk.check_parity(back, path, [x.numpy() for x in batches], progress=False)
    assert report.summary["activations_max_lsb"] == report.summary["weights_max_lsb"] == 0
    wanted = sim(batches[0]).detach().numpy()
    np.testing.assert_allclose(back.run(batches[0].numpy())[0], wanted, atol=0.02 * np.abs(wanted).max())


@pytest.mark.spread(1)
@pytest.mark.parametrize(("rule", "dtype"), [("bn", "float16"), ("ln1", "bfloat16")])
def test_a_plain_session_agrees_with_the_sim(road, rule, dtype):
    _, _, batches, path = road(rule, dtype)
    report = check_session(onnx.load(path), [x.numpy() for x in batches], level="basic", progress=False)
    assert report.summary["passed"], str(report)


OPS = {"bn": {"BatchNormalization", "Relu"}, "conv2": {"Conv", "Relu"}, "ln1": {"LayerNormalization"}} | {
    "fc1": {"Transpose", "MatMul", "Add"},
    "act": {"Gelu"},
}


@pytest.mark.parametrize("rule", [*("bn", "fc1"), *(pytest.param(rule, marks=pytest.mark.slow) for rule in OPS)])
def test_a_float16_island_holds_float16_parameters_and_no_cast(road, rule):
    model = onnx.load(road(rule, "float16")[3])
    types = {name: dtype for name, (dtype, _) in types_of(model).items()}
    types |= {tensor.name: TensorProto.DataType.Name(tensor.data_type).lower() for tensor in model.graph.initializer}
    island = [node for node in model.graph.node if {types[name] for name in node.output} == {"float16"}]
    assert {node.op_type for node in island} == {*OPS[rule], "Cast"}
    assert [node.op_type for node in island].count("Cast") == 1  # what it reads from outside
    assert {types[name] for node in island if node.op_type != "Cast" for name in node.input} == {"float16"}
    assert not any(
        name.endswith("_float16") for name in {tensor.name for tensor in model.graph.initializer} - _read(island)
    )


def _read(nodes):
    return {name for node in nodes for name in node.input}


def test_a_region_of_islands_has_casts_at_its_edges_and_around_numbers_that_float16_lacks(road):
    model = onnx.load(road("*", "float16")[3])
    makers = {name: node for node in model.graph.node for name in node.output}
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    ups = [node for node in casts if node.attribute[0].i == TensorProto.FLOAT]
    read = {name for node in ups for name in node.output}
    readers = [node.op_type for node in model.graph.node if read.intersection(node.input)]
    # half of the scale of attention, for queries and for keys, is a factor that float16 does not hold
    assert readers == ["Mul", "Mul"]
    assert {makers[node.input[0]].op_type for node in casts if node not in ups and node.input[0] in makers} == {"Mul"}


@pytest.mark.slow
def test_bfloat16_islands_in_the_pure_dialect_have_no_cast_either(road, tmp_path):
    _, sim, batches, _ = road("ln1", "bfloat16")
    qsdk.export(sim, tmp_path / "pure.onnx", dialect="onnx")
    model = onnx.load(tmp_path / "pure.onnx")
    (norm,) = (
        node for node in model.graph.node if node.op_type == "LayerNormalization" and "bfloat16" in node.input[0]
    )
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert [stored[name] for name in norm.input[1:]] == [TensorProto.BFLOAT16] * 2
    assert qsdk.check_parity(sim, tmp_path / "pure.onnx", batches, progress=False).summary["passed"]


def test_coverage_names_the_type_also_for_the_parameters_of_a_batch_norm(road):
    rows = {row["site"]: row for row in road("bn", "float16")[1].coverage().rows}
    named = ["bn:output", "act:output", "(bn.weight)", "(bn.bias)", "(bn.running_mean)", "(bn.running_var)"]
    assert [rows[site]["dtype"] for site in named[1:]] == ["float16"] * 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("bn", "float16"),
        ("ln1", "bfloat16"),
        *(pytest.param(r, d, marks=pytest.mark.slow) for r in ("conv2", "*") for d in DTYPES),
    ],
)
def test_an_island_trains_and_its_weights_follow(rule, dtype):
    model, batches = made(ISLANDS[rule][0] if rule in ISLANDS else Block)
    sim = qsdk.quantize(model, batches[0], qsdk.w8a8().skip(rule, dtype=dtype))
    qsdk.calibrate(sim, batches, progress=False)
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=1e-3)
    before = {name: value.clone() for name, value in sim.model.state_dict().items()}
    losses = []
    with sim.training():
        for _ in range(6):
            loss = sim.model(batches[0]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    trained = [name for name, parameter in sim.model.named_parameters() if "qsdk" not in name]
    after = sim.model.state_dict()
    assert [name for name in trained if torch.equal(before[name], after[name])] in ([], ["conv1.bias"])
    assert all(value.dtype == torch.float32 for name, value in after.items() if name in trained)
    if rule == "bn":
        assert not torch.equal(before["bn.running_mean"], after["bn.running_mean"])


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "dtype"), [("bn", "float16"), ("ln1", "bfloat16")])
def test_a_saved_sim_computes_the_same_islands(road, tmp_path, rule, dtype):
    model, sim, batches, path = road(rule, dtype)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    loaded = qsdk.load(tmp_path / "sim.qsdk", model)
    assert torch.equal(loaded(batches[0]), sim(batches[0]))
    qsdk.export(loaded, tmp_path / "again.onnx")
    first, again = onnx.load(path), onnx.load(tmp_path / "again.onnx")
    assert [node.SerializeToString() for node in again.graph.node] == [
        node.SerializeToString() for node in first.graph.node
    ]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does that
@pytest.mark.slow
@pytest.mark.parametrize(("rule", "dtype"), [("bn", "float16"), ("ln1", "bfloat16")])
def test_a_compiled_island_computes_the_same(road, rule, dtype):
    _, sim, batches, _ = road(rule, dtype)
    with torch.no_grad():
        got, wanted = torch.compile(sim.model, fullgraph=True, backend="aot_eager")(batches[0]), sim(batches[0])
    assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()


def test_an_integer_model_names_the_island_and_not_what_it_reads(road, tmp_path):
    path = road("fc1", "float16")[3]
    with pytest.raises(qsdk.IntegerError, match=r"\w+ 'node_\w+': it keeps its tensor in float16") as refused:
        qsdk.to_integer(path, tmp_path / "i.onnx")
    assert "enter" not in str(refused.value)
    named = re.findall(r"^  \w+ '(.+?)'", str(refused.value), re.MULTILINE)
    assert set(named) <= {node.name for node in onnx.load(path).graph.node}  # and no cast that is not in the file


@pytest.mark.slow
@both_types
def test_an_onnx_file_gets_islands_too(dtype, tmp_path):
    model, batches = made(Block)
    data = [x.numpy() for x in batches]
    sim = qsdk.quantize(
        float_onnx(model, (batches[0],)), None, qsdk.w8a8().skip("*", dtype=dtype, op_type="LayerNormalization")
    )
    qsdk.calibrate(sim, data, progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    written = onnx.load(tmp_path / "m.onnx")
    norms = [node for node in written.graph.node if node.op_type == "LayerNormalization"]
    stored = {tensor.name: tensor.data_type for tensor in written.graph.initializer}
    if dtype == "float16":
        assert [stored[name] for node in norms for name in node.input[1:]] == [CODES[dtype]] * 4
    report = qsdk.check_parity(sim, tmp_path / "m.onnx", data, progress=False)
    assert report.summary["activations_max_lsb"] == report.summary["weights_max_lsb"] == 0
    qsdk.export(qsdk.quantize(tmp_path / "m.onnx", None), tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()
