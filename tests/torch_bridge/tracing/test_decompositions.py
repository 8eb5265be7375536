"""A trace whose nodes are decomposed one by one is the graph that torch's own decomposition gives."""

import hashlib
from contextlib import nullcontext

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import qsdk
from torch_bridge.tracing import trace
from torch_bridge.workarounds import exporter_speed
from torch_bridge.workarounds.export_forms import export_form
from torch_bridge.workarounds.exporter_speed import make_functional


class Composed(nn.Module):
    """Ops that torch composes of others, with several outputs and with lengths that change from call to call."""

    def forward(self, x):
        first, second = torch.chunk(x.reshape(x.shape[0], -1, 2).flatten(1), 2, dim=1)
        kept = F.dropout(first, 0.5, training=False).to(torch.float32).contiguous()
        mixed = torch.einsum("bi,bj->bij", kept, second).mean(-1)
        spread, middle = torch.std_mean(x, dim=1, keepdim=True)
        return torch.narrow(mixed, 1, 0, 2) + torch.diff(x).sum(1, keepdim=True), spread + middle


class InPlace(nn.Module):
    """Tensors that the module made and changes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        before = y * 2
        y.add_(1)
        z = y.mul_(torch.tensor([2.0]))
        return before + y, F.relu(z, inplace=True)


class Written(nn.Module):
    """A view that the module writes into: torch's own way makes it functional."""

    def forward(self, x):
        y = x * 2
        y[:, 0] = 1.0
        return y + 1


class Mixed(nn.Module):
    """Operands of several dtypes, which the exporter casts, and what follows from them."""

    def forward(self, x):
        whole, half = (x * 4).to(torch.int32), x.to(torch.float16)
        mean = (whole + half).float() / whole.clamp(min=1)
        return mean * whole[:, :1] + torch.where(whole > 2, half, x), torch.pow(2, whole) * 0.5 - mean


def decoder():
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


MODELS = {
    "composed": (Composed, lambda: torch.randn(3, 8)),
    "in place": (InPlace, lambda: torch.randn(2, 3, 5, 5)),
    "mixed": (Mixed, lambda: torch.randn(3, 4)),
    "view": (Written, lambda: torch.randn(2, 3)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten()),
        lambda: torch.randn(2, 3, 6, 6),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda: torch.randn(2, 5, 8)),
    # parts without a translation: torch's own way
    "bags": (lambda: nn.EmbeddingBag(10, 6), lambda: torch.randint(0, 10, (2, 3))),
    "recurrent": (lambda: nn.LSTM(4, 6, batch_first=True), lambda: torch.randn(2, 5, 4)),
    "decoder": (decoder, lambda: {"input_ids": torch.randint(0, 32, (2, 5))}),
}


def computations(model: bytes) -> tuple[dict[str, str], list[str]]:
    """Return a digest of what computes each output, and of what computes each marked tensor, without Identity."""
    graph = onnx.load_from_string(model).graph
    digests = {value.name: f"input {value.name}" for value in graph.input}
    for stored in graph.initializer:
        named = stored.name if stored.external_data else stored.raw_data
        digests[stored.name] = repr((stored.data_type, list(stored.dims), named))
    marked = []
    for node in graph.node:
        if node.op_type == "Identity":
            digests[node.output[0]] = digests[node.input[0]]
            continue
        facts = (
            node.op_type,
            sorted(a.SerializeToString() for a in node.attribute),
            [digests.get(n, n) for n in node.input],
        )
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()
        digests.update({name: f"{digest} {place}" for place, name in enumerate(node.output)})
        marked += [digest] if node.op_type == "Quantizer" else []
    return {value.name: digests[value.name] for value in graph.output}, sorted(marked)


def traced(model, example, monkeypatch):
    """The marked graph of a model, as quantize traces it."""
    found = []
    export = trace._export

    def noted(*arguments):
        found.append(export(*arguments))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(trace, "_export", noted)
        qsdk.quantize(model, example, qsdk.w8a8())
    return found[-1].model


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_single_nodes_give_the_graph_of_torchs_own_way(name, monkeypatch):
    make, example = MODELS[name]
    torch.manual_seed(0)
    model, given = make().eval(), example()
    singly = computations(traced(model, given, monkeypatch))
    monkeypatch.setattr(trace, "single_nodes_decomposed", nullcontext)
    assert singly == computations(traced(model, given, monkeypatch))
    assert singly[1]  # marks


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_values_that_are_known_give_the_graph_of_torchs_own_way(name, monkeypatch):
    make, example = MODELS[name]
    torch.manual_seed(0)
    model, given = make().eval(), example()
    taken = traced(model, given, monkeypatch)
    monkeypatch.setattr(trace, "known_values_taken", nullcontext)
    assert taken == traced(model, given, monkeypatch)
    casts = [node for node in onnx.load_from_string(taken).graph.node if node.op_type == "Cast"]
    assert name != "mixed" or len(casts) > 4  # promoted


class SplitAt(nn.Module):
    """An op whose decomposition reads the values of a tensor."""

    def forward(self, x):
        first, second = torch.tensor_split(x, torch.tensor([2]), dim=1)
        return first, second * 2


def test_a_node_that_cannot_be_decomposed_by_itself_takes_torchs_own_way():
    x = torch.randn(3, 4)
    program = torch.export.export(SplitAt(), (x,), strict=False)
    with exporter_speed.single_nodes_decomposed(), torch.no_grad():
        made = torch.onnx.export(program, dynamo=True, opset_version=21, optimize=False, verbose=False)
    first, second = made(x)
    assert torch.equal(first, x[:, :2])
    assert torch.equal(second, x[:, 2:] * 2)


def test_a_torch_without_the_functions_takes_its_own_way(monkeypatch):
    class Lacking:
        pass

    monkeypatch.setattr(exporter_speed, "_DECOMPOSING", ((Lacking, "renamed"),))
    monkeypatch.setattr(exporter_speed, "_decompose", lambda *_: pytest.fail("the functions are not there"))
    traced(InPlace().eval(), torch.randn(2, 3, 5, 5), monkeypatch)


def captured(function, *inputs):
    class Module(nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    return torch.export.export(Module(), inputs, strict=False).graph


def changing(graph):
    return [
        str(node.target) for node in graph.nodes if getattr(node.target, "_schema", None) and "_." in str(node.target)
    ]


def relu_of_own(x):
    y = x + 1
    z = y * 3
    y.relu_()
    return y + z


def changed_input(x):
    return x.relu_() + 1


def changed_view(x):
    y = x + 1
    z = y.view(-1)
    y.add_(1)
    return z + 1


def changed_through_a_view(x):
    y = x + 1
    y.view(-1).add_(1)
    return y * 2


def another_dtype_out_of_place(x):
    y = x.half() + 1
    y.add_(x)
    return y


def test_an_op_on_a_tensor_of_the_modules_own_gives_a_new_one():
    graph = captured(relu_of_own, torch.randn(2, 3))
    assert changing(graph) == ["aten.relu_.default"]
    assert make_functional(graph)
    assert not changing(graph)
    relu = next(node for node in graph.nodes if str(node.target) == "aten.relu.default")
    assert [str(user.target) for user in relu.args[0].users] == ["aten.mul.Tensor", "aten.relu.default"]
    assert [str(user.target) for user in relu.users] == ["aten.add.Tensor"]


@pytest.mark.parametrize("function", [changed_input, changed_view, changed_through_a_view, another_dtype_out_of_place])
def test_what_may_be_something_else_out_of_place_stays(function):
    graph = captured(function, torch.randn(2, 3))
    before = str(graph)
    assert changing(graph)
    assert not make_functional(graph)
    assert str(graph) == before


class Bags(nn.Module):
    def __init__(self, mode: str, padding: int | None) -> None:
        super().__init__()
        self.table, self.last = nn.EmbeddingBag(9, 6, mode=mode, padding_idx=padding), nn.Linear(6, 3)

    def forward(self, index):
        return self.last(self.table(index))


@pytest.mark.parametrize(("mode", "padding"), [("sum", None), ("mean", -1), ("max", 0)])
def test_an_embedding_of_bags_is_a_look_up_and_a_reduction_and_becomes_integers(mode: str, padding: int, tmp_path):
    torch.manual_seed(0)
    model, index = Bags(mode, padding).eval(), torch.randint(0, 9, (5, 4))
    index[0], index[1, :2] = (8 if padding == -1 else 0), (8 if padding == -1 else 0)
    sim = qsdk.quantize(model, index)
    qsdk.calibrate(sim, [index], progress=False)
    path = tmp_path / "model.onnx"
    qsdk.export(sim, path)
    assert "Loop" not in {node.op_type for node in onnx.load(path).graph.node}
    assert qsdk.check_parity(sim, path, [index], progress=False).summary["passed"]
    torch.testing.assert_close(sim(index), model(index), atol=0.05, rtol=0.05)
    assert qsdk.to_integer(path, tmp_path / "integer.onnx", progress=False).summary["float_tensors"] == 0


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_bags_are_traced_as_what_torch_computes(mode: str, padding: int | None):
    torch.manual_seed(0)
    index, table = torch.randint(0, 9, (50, 4)), torch.randn(9, 6)
    options = {"mode": mode, "padding_idx": padding}
    traced = export_form(F.embedding_bag, (index, table), options)
    assert traced is not F.embedding_bag
    torch.testing.assert_close(traced(index, table, **options), F.embedding_bag(index, table, **options))


def test_bags_with_offsets_are_exported_and_refused_as_integers_in_the_modules_words(tmp_path):
    bags = nn.EmbeddingBag(9, 6, mode="sum")
    given = (torch.randint(0, 9, (7,)), torch.tensor([0, 3, 4]))
    sim = qsdk.quantize(bags, given, dynamic_shapes={})
    qsdk.calibrate(sim, [given], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    with pytest.raises(qsdk.IntegerError, match=r"EmbeddingBag with offsets, give it indices \[bags, length\]"):
        qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "integer.onnx", progress=False)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Bilinear(6, 5, 3)

    def forward(self, left, right):
        return self.score(left, right)


def test_the_weight_of_a_bilinear_is_quantized_and_becomes_integers(tmp_path):
    torch.manual_seed(0)
    model, given = Scored().eval(), (torch.randn(4, 2, 6), torch.randn(4, 2, 5))
    sim = qsdk.quantize(model, given)
    assert {row["site"]: row["state"] for row in sim.coverage().rows}["score:weight"] == "quantized"
    qsdk.calibrate(sim, [given], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [given], progress=False).summary["passed"]
    torch.testing.assert_close(sim(*given), model(*given), atol=0.05, rtol=0.05)
    assert (
        qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "integer.onnx", progress=False).summary["float_tensors"]
        == 0
    )
