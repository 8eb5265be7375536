"""`export(format="pt2e")`: a program of torch.export with the sim's encodings, that computes what the sim does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import calibrated, seeded

from qsdk import (
    ConfigError,
    ExportError,
    FileFormatError,
    ModelError,
    calibrate,
    check_parity,
    export,
    quantize,
    w4a8,
    w8a8,
    w8a16,
)
from torch_bridge.programs.check import check, opened
from torch_bridge.programs.write import SITES
from torch_bridge.workarounds.decomposed_ops import DEQUANTIZE, DEQUANTIZE_CHANNELS, QUANTIZE


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = (
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, groups=2),
    )
    return nn.Sequential(*layers, nn.Hardswish(), nn.Flatten(), nn.Linear(24, 5)).eval(), seeded(3, 3, 8, 8)


class Residual(nn.Module):
    """A sum, a BatchNorm that no layer takes up, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(F.relu(self.conv(x) + x))
        return self.head(y.mean((2, 3))), torch.cat([y, x], 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.table(ids)))


MODELS: dict[str, Any] = {
    "convolutions": convolutions,
    "residual": lambda: (Residual().eval(), seeded(3, 4, 6, 6)),
    "encoder": lambda: (Encoder().eval(), torch.arange(14).reshape(2, 7)),
    "perceptron": lambda: (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)).eval(), seeded(5, 8)),
}
CONFIGS = {
    "w8a8": w8a8(),
    "blocks": w4a8(block_size=8),
    "w8a16": w8a16(),
    "signed": w8a8().override("*", weight="uint8"),
}


def outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


#: every model in int8, and each other config with a model that has all of its kinds of sites
PAIRS = [
    *((model, "w8a8") for model in MODELS),
    ("perceptron", "blocks"),
    ("residual", "w8a16"),
    ("convolutions", "signed"),
]


@pytest.mark.spread(2)
@pytest.mark.parametrize(("model", "config"), PAIRS)
def test_a_loaded_program_computes_what_the_sim_does_for_other_batches_too(model: str, config: str, tmp_path: Path):
    module, x = MODELS[model]()
    sim = calibrated(module, x, CONFIGS[config])
    report = export(sim, tmp_path / "m.pt2", format="pt2e")
    assert report.summary["weights_max_lsb"] == 0
    assert report.summary["activations_max_lsb"] <= 1
    program = torch.export.load(tmp_path / "m.pt2")
    twice = torch.cat([x, x.flip(-1)])
    for got, want in zip(outputs(program.module()(twice)), outputs(sim(twice)), strict=True):
        noise, power = float((got - want).square().sum()), float(want.square().sum())
        assert noise <= power * 1e-3
    made = [node for node in program.graph.nodes if node.target in (DEQUANTIZE, DEQUANTIZE_CHANNELS)]
    assert all(len(node.users) == 1 for node in made)  # a backend takes each op with the ones before it
    assert "stack_trace" not in str([list(node.meta) for node in program.graph.nodes])


class Gated(nn.Module):
    """What backends trip over: a cast to the dtype that is there, parts of a split, and lengths of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a gated sum, with a norm that casts as those of language models do."""
        x = x + y.reshape(x.shape[0], -1)
        kept, normed = x, x.to(torch.float32)
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-6)
        gate, up = self.first(normed.to(x.dtype).type_as(x)).chunk(2, dim=-1)
        left, right = torch.stack([gate.sigmoid() * up, gate], 1).unbind(1)
        low, high = self.second(left + right).split([3, 5], -1)
        return kept + torch.cat([high, low], -1)


@pytest.mark.slow
def test_what_backends_trip_over_is_written_in_another_way(tmp_path: Path):
    sim = quantize(Gated().eval(), (seeded(3, 8), seeded(3, 2, 4)), w8a8())
    calibrate(sim, [(seeded(3, 8, seed=at), seeded(3, 2, 4, seed=at + 9)) for at in range(3)], progress=False)
    export(sim, tmp_path / "m.pt2", format="pt2e")
    program = torch.export.load(tmp_path / "m.pt2")
    given = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    assert str(given[0].meta["val"].shape[0]) == str(
        given[1].meta["val"].shape[0]
    )  # one length, not two that are equal
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    assert not [node for node in nodes if isinstance(node.meta.get("val"), list | tuple)]  # no list of tensors
    assert not [node for node in nodes if str(node.target).startswith(("aten.to.", "aten.type_as", "aten._assert"))]
    made = [node for node in nodes if node.target in (DEQUANTIZE, DEQUANTIZE_CHANNELS)]
    assert [len(node.users) for node in made] == [1] * len(made)
    other = seeded(5, 8, seed=7), seeded(5, 2, 4, seed=8)
    torch.testing.assert_close(program.module()(*other), sim(*other))


@pytest.mark.slow
def test_a_cast_to_another_dtype_stays_behind_a_site(tmp_path: Path):
    given = seeded(4, 8).half() * 300, seeded(4, 2, 4).half() * 300  # their squares are infinite in float16
    sim = quantize(Gated().eval().half(), given, w8a8())
    calibrate(sim, [given], progress=False)
    export(sim, tmp_path / "m.pt2", format="pt2e")
    program = torch.export.load(tmp_path / "m.pt2")
    assert [node for node in program.graph.nodes if str(node.target) == "aten.to.dtype" and torch.float32 in node.args]
    torch.testing.assert_close(program.module()(*given), sim(*given))


@pytest.mark.slow
def test_weights_are_integers_under_the_names_of_the_model_and_activations_are_int8(tmp_path: Path):
    module, x = convolutions()
    sim = calibrated(module, x, w8a8())
    rows = {row["site"]: row for row in export(sim, tmp_path / "m.pt2", format="pt2e").rows}
    extra = {SITES: ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    weights = {name: tensor for name, tensor in program.state_dict.items() if name.endswith(".weight")}
    assert {name: tensor.dtype for name, tensor in weights.items()} == dict.fromkeys(
        ("0.weight", "4.weight", "7.weight"), torch.int8
    )
    wanted = sim.encodings["0:weight"].quantize(sim.model[0].weight.detach().numpy())
    np.testing.assert_array_equal(weights["0.weight"].numpy(), wanted.astype(np.int8))
    assert rows["0:weight"] == {"site": "0:weight", "dtype": "int8", "form": "int8 and dequantize", "max_lsb": 0.0}
    pairs = [node for node in program.graph.nodes if node.target is QUANTIZE]
    assert {node.args[-1] for node in pairs} == {torch.int8}
    first, encoding = pairs[0], sim.encodings[json.loads(extra[SITES])["sites"][0]]
    assert encoding.dtype.name == "uint8"
    assert first.args[1:3] == (float(encoding.scale[0]), int(encoding.zero_point[0]) - 128)
    made = [node for node in program.graph.nodes if node.target in (DEQUANTIZE, DEQUANTIZE_CHANNELS)]
    assert len(made) == len(json.loads(extra[SITES])["sites"])
    assert next(node for node in program.graph.nodes if node.name == "input")


def test_a_trained_sim_is_written_with_what_it_has_learned(tmp_path: Path):
    x = seeded(32, 8)
    sim = calibrated(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), x, w4a8())
    before = sim.encodings["0:weight"]
    with sim.training(learn_scales=True):
        optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            sim.model(x).square().mean().backward()
            optimizer.step()
    assert sim.encodings["0:weight"] != before
    export(sim, tmp_path / "m.pt2", format="pt2e")
    torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(x), sim(x))


def test_a_program_that_computes_something_else_is_refused(tmp_path: Path):
    module, x = convolutions()
    sim = calibrated(module, x, w8a8())
    export(sim, tmp_path / "m.pt2", format="pt2e")
    changed = calibrated(module, x * 2, w8a8())
    for batch in (x, x * 2):  # of the first, no value of the coarser grids is more than a step off
        report = check_parity(changed, tmp_path / "m.pt2", [batch], progress=False)
        assert not report.summary["passed"]
        assert report.rows[0]["note"] == "the program's scale or zero point is not the sim's"


class ChannelsLast(nn.Module):
    """Convolves an image that a norm has left with its channels last, as ConvNeXt does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Give four channels."""
        return self.last(self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_program_takes_any_batch_whatever_the_example_has(batch: int, tmp_path: Path):
    """Of such an image, torch asks which kernel convolves it, which bounds the batch to that of the example."""
    sim = calibrated(ChannelsLast(), seeded(batch, 3, 8, 8), w8a8())
    export(sim, tmp_path / "m.pt2", format="pt2e")
    program = torch.export.load(tmp_path / "m.pt2").module()
    for size in (1, 2, 5):
        x = seeded(size, 3, 8, 8)
        torch.testing.assert_close(program(x), sim(x))


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        (
            w8a8().override("*", weight="float8e4m3fn"),
            torch.float32,
            r"no form for 0:weight: float8e4m3fn is no integer",
        ),
        (w8a8().override("*", dynamic_activations=True), torch.float32, r"its range is found while the model runs"),
        (w8a8(), torch.float64, r"no float64: .* quantize model\.float\(\)"),
    ],
)
def test_what_the_ops_cannot_say_is_refused_by_name_and_leaves_the_old_file(
    config: Any, dtype: torch.dtype, message: str, tmp_path: Path
):
    (tmp_path / "m.pt2").write_text("old")
    sim = calibrated(nn.Sequential(nn.Linear(8, 4), nn.ReLU()).to(dtype), seeded(5, 8).to(dtype), config)
    with pytest.raises(ExportError, match=message):
        export(sim, tmp_path / "m.pt2", format="pt2e")
    assert (tmp_path / "m.pt2").read_text() == "old"


class Recurrent(nn.Module):
    """A recurrent layer, its last states and a classifier."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer, width = kind(6, 8, batch_first=True, **options), 16 if options.get("bidirectional") else 8
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps, last = self.layer(x)
        return self.head(steps), last[1] if isinstance(last, tuple) else last


RECURRENT: dict[str, Any] = {
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN, nonlinearity="relu", bias=False),
}


@pytest.mark.parametrize(("kind", "weight"), [("lstm", "int8"), ("gru", "float32"), ("rnn", "int8")])
def test_a_recurrent_layer_is_torchs_own_op_with_its_weights_on_their_grids(kind: str, weight: str, tmp_path: Path):
    module, x = RECURRENT[kind]().eval(), seeded(3, 5, 6)
    sim = calibrated(module, x, w8a8().override("layer", weight=weight))
    rows = {row["site"]: row["form"] for row in export(sim, tmp_path / "m.pt2", format="pt2e").rows}
    program = torch.export.load(tmp_path / "m.pt2")
    held = {name for name in program.state_dict if name.startswith("layer.")}
    assert held == {f"layer.{name}" for name, _ in module.layer.named_parameters()}
    wanted = "float values on the grid of int8" if weight == "int8" else "float"
    assert rows["layer:weight_ih_l0"] == rows["layer:weight_hh_l0"] == wanted
    first, own = program.state_dict["layer.weight_ih_l0"], module.layer.weight_ih_l0.detach()
    scale = float(sim.encodings["layer:weight_ih_l0"].scale.max()) if weight == "int8" else 0.0
    assert float((first - own).abs().max()) <= scale / 2 * 1.0001
    assert torch.equal(first, own) == (weight == "float32")
    twice = torch.cat([x, x.flip(-1)])
    for got, expected in zip(program.module()(twice), sim(twice), strict=True):
        torch.testing.assert_close(got, expected)


class CalledTwice(nn.Module):
    """A recurrent layer that reads its own result."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(8, 4 if options.get("bidirectional") else 8, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x + self.layer(x)[0])[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"bidirectional": True}),
        pytest.param(nn.GRU, {"num_layers": 2}, marks=pytest.mark.slow),
        pytest.param(nn.RNN, {}, marks=pytest.mark.slow),
    ],
)
def test_a_recurrent_layer_that_is_called_twice_has_one_pair_of_weights_in_every_file(
    kind: Any, options: dict[str, Any], tmp_path: Path
):
    module, x = CalledTwice(kind, **options).eval(), seeded(3, 5, 8)
    sim = calibrated(module, x, w8a8())
    export(sim, tmp_path / "m.onnx")
    assert check_parity(sim, tmp_path / "m.onnx", [x], progress=False).summary["passed"]
    assert quantize(tmp_path / "m.onnx", None).encodings == sim.encodings
    export(sim, tmp_path / "m.pt2", format="pt2e")
    program = torch.export.load(tmp_path / "m.pt2")
    assert set(program.state_dict) == set(module.state_dict())
    torch.testing.assert_close(program.module()(x.flip(0)), sim(x.flip(0)))


def test_an_onnx_sim_and_options_of_onnx_are_refused(tmp_path: Path):
    linear = calibrated(nn.Linear(4, 4), seeded(2, 4), w8a8())
    export(linear, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="pt2e holds modules of PyTorch"):
        export(quantize(tmp_path / "m.onnx", None), tmp_path / "m.pt2", format="pt2e")
    with pytest.raises(ConfigError, match="opset: for ONNX alone"):
        export(linear, tmp_path / "m.pt2", format="pt2e", opset=19)


def test_an_open_axis_of_a_program_has_the_greatest_length_that_is_given(tmp_path: Path):
    sim = calibrated(nn.Linear(4, 4), seeded(8, 4), w8a8())
    with pytest.raises(ConfigError, match=r"longest=\{'rows': 64\}: the open axes are batch"):
        export(sim, tmp_path / "m.pt2", format="pt2e", longest={"rows": 64})
    with pytest.raises(ConfigError, match=r"longest=\{'batch': 7\}: the example that the sim was made with has 8"):
        export(sim, tmp_path / "m.pt2", format="pt2e", longest={"batch": 7})
    with pytest.raises(ConfigError, match=r"longest= is for format='pt2e'"):
        export(sim, tmp_path / "m.onnx", longest={"batch": 64})
    assert not list(tmp_path.iterdir())
    export(sim, tmp_path / "m.pt2", format="pt2e", longest={"batch": 64})
    (bound,) = torch.export.load(tmp_path / "m.pt2").range_constraints.values()
    assert bound.upper == 64


def test_a_program_that_lacks_a_site_of_the_sim_does_not_pass(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)), torch.randn(8, 4)
    for config in (w8a8().override("1", activation="float32"), w8a8()):
        sim = calibrated(model, x, config)
        if config.rules:
            export(sim, tmp_path / "model.pt2", format="pt2e")
    report = check_parity(sim, tmp_path / "model.pt2", [x], progress=False)
    rows = {row["site"]: row for row in report.rows}
    assert rows["1:output"]["note"] == "the program does not quantize it, which the sim does"
    assert not report.summary["passed"]


class Halves(nn.Module):
    """Turns the halves of a text of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Gives the second half in front of the first."""
        first, second = self.linear(x).chunk(2, dim=1)
        return torch.cat([second, first], 1)


def test_a_split_along_an_open_axis_stays_a_split(tmp_path):
    torch.manual_seed(0)
    batch = torch.randn(2, 6, 8)
    config = w8a8().for_dialect("xnnpack")
    sim = quantize(Halves().eval(), batch, config, dynamic_shapes={"x": {0: "batch", 1: "length"}})
    calibrate(sim, [batch], progress=False)
    export(sim, tmp_path / "model.pt2", format="pt2e")
    program = torch.export.load(tmp_path / "model.pt2").module()
    more = torch.randn(3, 10, 8)
    torch.testing.assert_close(program(more), sim(more), rtol=0, atol=0)


class Shared(nn.Module):
    """Calls two layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 8), nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.linear(self.conv(self.linear(x).relu())))


def test_each_call_of_a_layer_has_its_own_bias_and_of_conv1d_its_own_weight(tmp_path: Path):
    x = seeded(2, 3, 8)
    sim = calibrated(Shared().eval(), x, w8a8())
    export(sim, tmp_path / "m.pt2", format="pt2e")
    program = torch.export.load(tmp_path / "m.pt2")
    given = [node for node in program.graph.nodes if node.op == "placeholder"]
    biases = [node for node in given if "bias" in node.name]
    assert [len(node.users) for node in biases] == [1] * 4
    assert sorted(name for name in program.state_dict if name.endswith("weight")) == ["conv.weight", "linear.weight"]
    assert torch.equal(program.state_dict["conv.weight_1"], program.state_dict["conv.weight"])
    torch.testing.assert_close(program.module()(x), sim(x))


def test_a_program_is_compared_on_batches_of_other_lengths(tmp_path: Path):
    module, x = convolutions()
    sim = calibrated(module, x, w8a8())
    export(sim, tmp_path / "m.pt2", format="pt2e")
    report = check_parity(sim, tmp_path / "m.pt2", [x, x[:1]], progress=False)
    assert report.summary["passed"]
    rows = {row["site"]: row for row in report.rows}
    assert rows["input:input"]["elements"] == x.numel() + x[:1].numel()
    with torch.no_grad():
        sim.model[0].weight.add_(0.01)
    report = check_parity(sim, tmp_path / "m.pt2", [x], progress=False)
    rows = {row["site"]: row["max_lsb"] for row in report.rows}
    assert not report.summary["passed"]
    assert rows["0:weight"] > 0
    assert rows["4:weight"] == 0


@pytest.mark.parametrize(
    ("name", "runtime", "error", "message"),
    [
        ("m.pt2", "openvino", ConfigError, "'openvino' does not read programs of PyTorch; choose 'executorch' or None"),
        ("m.pte", None, FileFormatError, r"holds no sites to compare; give the \.pt2 file that it was made of"),
        ("m.pt2", "executorch", ConfigError, "needs the package executorch.*install it: pip install --no-deps exec"),
        ("none.pt2", None, FileFormatError, "cannot read .*none.pt2"),
        ("other.pt2", None, FileFormatError, "is no program of torch.export"),
        ("foreign.pt2", None, FileFormatError, "names no sites of qsdk"),
        ("m.onnx", "executorch", ConfigError, r"runs \.pt2 files; export\(sim, 'model.pt2', format='pt2e'\)"),
    ],
)
def test_what_cannot_be_compared_is_refused(name, runtime, error, message, tmp_path: Path):
    sim, x = calibrated(nn.Linear(4, 4), seeded(2, 4), w8a8()), seeded(2, 4)
    export(sim, tmp_path / "m.pt2", format="pt2e")
    export(sim, tmp_path / "m.onnx")
    (tmp_path / "other.pt2").write_bytes(b"PK")
    torch.export.save(torch.export.export(nn.Linear(4, 4), (x,)), tmp_path / "foreign.pt2")
    with pytest.raises(error, match=message):
        check_parity(sim, tmp_path / name, [x], runtime=runtime, progress=False)


def test_a_program_of_another_sim_is_refused(tmp_path: Path):
    x = seeded(2, 4)
    export(calibrated(nn.Linear(4, 4), x, w8a8()), tmp_path / "m.pt2", format="pt2e")
    other = calibrated(nn.Sequential(nn.Linear(4, 4)), x, w8a8())
    with pytest.raises(FileFormatError, match="the sim has not: it is of another sim"):
        check_parity(other, tmp_path / "m.pt2", [x], progress=False)
    export(other, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="holds a module of PyTorch"):
        check_parity(quantize(tmp_path / "m.onnx", None), tmp_path / "m.pt2", [{"input": x.numpy()}], progress=False)


class Padded(nn.Module):
    """An encoder of torch's own, which asks whether there is one row alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


def test_a_length_of_two_inputs_of_which_a_model_asks_more_stays_open(tmp_path: Path):
    torch.manual_seed(0)
    given = torch.randn(3, 5, 8), torch.arange(5)[None] > torch.tensor([[4], [2], [3]])
    sim = quantize(Padded().eval(), given, w8a8())
    calibrate(sim, [given], progress=False)
    export(sim, tmp_path / "m.pt2", format="pt2e")
    fewer = tuple(x[:2] for x in given)
    torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(*fewer), sim(*fewer))


class Kernels:
    """A runtime that gives the codes of the sim, but for what a test changes."""

    title = "a runtime"

    def __init__(self, sim: Any, off: float, *, runs: bool) -> None:
        self.sim, self.off, self.runs = sim, off, runs

    def codes(self, given: Any, values: Any) -> Any:
        """The codes of each site and the outputs; nothing where it does not run."""
        found = {}
        for site, encoding in self.sim.encodings.items() if self.runs else ():
            if site in values:
                found[site] = encoding.quantize(values[site]).astype(np.int64) - (not encoding.dtype.signed) * 128
        return found, [x + self.off for x in self.outputs(given)] if self.runs else []

    def outputs(self, given: Any) -> Any:
        """The outputs of the whole program."""
        return [self.sim(*given).numpy()]


@pytest.mark.parametrize(("off", "runs", "passed"), [(0.0, True, True), (0.5, True, False), (0.0, False, False)])
def test_a_runtime_that_did_not_run_or_gives_another_output_does_not_pass(off, runs, passed, tmp_path: Path):
    x = seeded(4, 8)
    config = w8a8().override("1", activation="float32")
    sim = calibrated(nn.Sequential(nn.Linear(8, 4), nn.Sigmoid()), x, config)
    export(sim, tmp_path / "m.pt2", format="pt2e")
    runs_of_sim = [({"input": x.numpy(), **sim_values(sim, x)}, [sim(x).numpy()])]
    report = check(sim, opened(tmp_path / "m.pt2"), runs_of_sim, Kernels(sim, off, runs=runs))
    assert report.summary["passed"] == passed, report


def sim_values(sim: Any, x: Tensor) -> dict[str, Any]:
    """What the sim has at its sites."""
    with sim.captured() as captured, torch.no_grad():
        sim.model(x)
    return dict(captured)
