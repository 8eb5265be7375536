"""The sim of an nn.Module: which sites it has, what the plan says of each, and what calibration may change."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_models import (
    BatchNormNet,
    Block,
    Containers,
    ConvNet,
    Dead,
    DictOut,
    EagerOnly,
    FunctionalForm,
    Keywords,
    Lender,
    ModuleForm,
    OwnTensors,
    Pair,
    SharedActivation,
    TiedLanguageModel,
    TracedOnly,
    Twice,
    calibrated,
    same_encodings,
    seeded,
    sim_of,
    states,
)

import qsdk
from onnx_backend.opening.from_trace import open_traced
from qsdk import CalibrationError, ConfigError, DataError, ModelError, QuantSim, calibrate, export, quantize, w4a8, w8a8
from qsdk.core.numerics.spec import PerChannel, PerTensor, Spec


@pytest.fixture(scope="module")
def conv_sim() -> QuantSim:
    return calibrated(ConvNet(), seeded(2, 3, 6, 6))


@pytest.fixture(scope="module")
def twice_sim() -> QuantSim:
    return calibrated(Twice(), seeded(3, 4))


# behaviours of the reference


@pytest.mark.slow
def test_each_tensor_of_a_small_network_has_the_expected_spec(conv_sim: QuantSim):
    decisions = conv_sim.plan.decisions
    assert [d.site for d in decisions.values() if d.kind == "input"] == ["x:input"]
    inner = decisions["conv1:output"]
    assert (inner.spec, inner.reason) == (None, "inside Conv+Relu")
    assert decisions["relu:output"].spec == Spec(qsdk.uint8, PerTensor(), symmetric=False)
    assert decisions["flatten:output"].tied_to == "conv2:output"
    for name, channels in (("conv1", 4), ("conv2", 5), ("fc", 10)):
        assert decisions[f"{name}:weight"].spec == Spec(qsdk.int8, PerChannel(0))
        assert conv_sim.encodings[f"{name}:weight"].scale.shape == (channels,)
        bias = decisions[f"{name}:bias"]
        assert bias.spec == Spec(qsdk.int32, PerChannel(0))
        scales = (conv_sim.encodings[site].scale for site in bias.bias_of)
        assert np.array_equal(conv_sim.encodings[f"{name}:bias"].scale, np.multiply(*scales))


def test_only_sites_that_own_an_encoding_have_buffers(conv_sim: QuantSim):
    held = sorted(name for name, _ in conv_sim.model.named_buffers() if name.endswith("_scale"))
    assert held == sorted(
        [
            *("qsdk_input_x_scale", "conv1.qsdk_weight_scale", "conv2.qsdk_weight_scale", "fc.qsdk_weight_scale"),
            *("relu.qsdk_output_scale", "conv2.qsdk_output_scale", "fc.qsdk_output_scale"),
        ]
    )


def test_the_input_is_on_its_grid_when_the_first_convolution_reads_it(conv_sim: QuantSim):
    seen = []
    handle = conv_sim.model.conv1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = seeded(2, 3, 6, 6, seed=1)
    conv_sim(x)
    handle.remove()
    assert np.array_equal(seen[0].numpy(), conv_sim.encodings["x:input"].fake_quantize(x.numpy()))
    assert not torch.equal(seen[0], x)


RENAMED = {
    "relu:output": "relu.0:output",
    "add/add.0:output": "add.0:output",
    "concat/cat.0:output": "cat.0:output",
    "matmul/matmul.0:output": "matmul.0:output",
}


@pytest.mark.slow
def test_functions_are_quantized_like_modules():
    module = ModuleForm()
    functional = FunctionalForm()
    functional.load_state_dict(module.state_dict())
    x = seeded(5, 6)
    one, other = calibrated(module, x), calibrated(functional, x)

    def facts(sim: QuantSim, names: dict[str, str]) -> dict[str, Any]:
        return {
            names.get(site, site): (d.kind, d.spec, names.get(d.tied_to, d.tied_to), d.op_type)
            for site, d in sim.plan.decisions.items()
        }

    assert facts(one, RENAMED) == facts(other, {})
    assert {RENAMED.get(s, s): e for s, e in one.encodings.items()} == other.encodings
    for seed in (0, 1):
        batch = seeded(5, 6, seed=seed)
        assert torch.equal(one(batch), other(batch))
        assert not torch.equal(one(batch), module(batch)), "nothing was simulated"


def test_every_functional_site_really_quantizes():
    model = FunctionalForm()
    x = seeded(5, 6)
    sim = calibrated(model, x)
    before = sim(x)
    for site in ("relu.0:output", "add.0:output", "cat.0:output", "matmul.0:output"):
        home = sim.quantizers[sim.plan.decisions[site].encoding_site]
        scale = home.owner._buffers[home.buffer_names[0]]
        kept = scale.clone()
        scale.mul_(40)
        assert not torch.equal(sim(x), before), f"{site} does nothing"
        scale.copy_(kept)
    assert torch.equal(sim(x), before)


def test_a_module_called_twice_has_two_independent_quantizers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.fc = nn.ReLU(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.fc(self.relu(x) * 10))

    sim = calibrated(Model(), seeded(3, 4))
    first, second = sim.encodings["relu:output"], sim.encodings["relu@1:output"]
    assert first != second
    sim.quantizers["relu@1:output"].set_encoding(first)
    assert sim.encodings["relu@1:output"] == first
    calibrate(sim, [seeded(3, 4)], progress=False)
    assert (sim.encodings["relu:output"], sim.encodings["relu@1:output"]) == (first, second)


@pytest.mark.slow
def test_an_output_before_relu_keeps_its_quantizer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv1d(2, 3, 1), nn.Conv1d(3, 3, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.conv1(x)
            return hidden, F.relu(self.conv2(F.relu(hidden)))

    sim = calibrated(Model(), seeded(2, 2, 5))
    decisions = sim.plan.decisions
    assert decisions["conv1:output"].kind == "output"
    assert decisions["conv1:output"].state == "quantized"
    assert "relu.0:output" in decisions
    assert decisions["conv2:output"].reason == "inside Conv+Relu"
    hidden = sim(seeded(2, 2, 5))[0].numpy()
    assert np.array_equal(hidden, sim.encodings["conv1:output"].fake_quantize(hidden))


def snapshot(model: nn.Module) -> dict[str, Any]:
    tensors = {n: (t, t.clone(), t.grad, t.requires_grad) for n, t in model.named_parameters()}
    buffers = {n: (t, t.clone()) for n, t in model.named_buffers()}
    modules = {n: (type(m), m.training, dict(m.__dict__["_forward_hooks"])) for n, m in model.named_modules()}
    attributes = {n: sorted(m.__dict__) for n, m in model.named_modules()}
    return {"tensors": tensors, "buffers": buffers, "modules": modules, "attributes": attributes}


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    assert after["modules"] == before["modules"]
    assert after["attributes"] == before["attributes"]
    for kind in ("tensors", "buffers"):
        assert after[kind].keys() == before[kind].keys()
        for name, (tensor, *rest) in after[kind].items():
            assert tensor is before[kind][name][0], name
            assert torch.equal(rest[0], before[kind][name][1]), name
            assert rest[1:] == list(before[kind][name])[2:], name


@pytest.mark.slow
def test_the_original_is_bit_identical_after_quantize_calibrate_and_export(tmp_path: Path):
    model = BatchNormNet()
    model.bn1.eval()  # a mixed mode is a mode too
    calls = []
    model.fc.register_forward_hook(lambda *args: calls.append(1))
    before = snapshot(model)
    x = seeded(2, 2, 6, 6)
    sim = sim_of(model, x)
    assert_untouched(model, before)
    calibrate(sim, [x, seeded(3, 2, 6, 6)], progress=False)
    assert_untouched(model, before)
    with sim.training(learn_scales=True) as trained:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.1))
        trained(x).square().sum().backward()
        optimizer.step()
    assert_untouched(model, before)
    export(sim, tmp_path / "model.onnx")
    assert_untouched(model, before)


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


@pytest.mark.parametrize("error", [RuntimeError("disk"), Interrupted("ctrl-c")], ids=["exception", "interrupt"])
@pytest.mark.parametrize("where", ["data", "forward"])
def test_an_error_in_the_middle_of_calibration_changes_nothing(conv_sim: QuantSim, error: BaseException, where: str):
    before, output = conv_sim.encodings, conv_sim(seeded(2, 3, 6, 6))
    kept = {n: t.clone() for n, t in conv_sim.model.state_dict().items()}
    conv_sim.model.train()
    conv_sim.model.conv2.eval()

    def data():
        yield seeded(2, 3, 6, 6, scale=50)
        if where == "data":
            raise error
        yield seeded(2, 3, 6, 6, scale=90)

    calls = []

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(1)
        result = model(batch)
        if where == "forward" and len(calls) == 2:
            raise error
        return result

    with pytest.raises(type(error)):
        calibrate(conv_sim, data(), forward=forward, progress=False)
    assert calls
    assert (conv_sim.model.training, conv_sim.model.conv2.training, conv_sim.model.fc.training) == (True, False, True)
    conv_sim.model.eval()
    assert conv_sim.encodings == before
    assert all(torch.equal(t, kept[n]) for n, t in conv_sim.model.state_dict().items())
    assert torch.equal(conv_sim(seeded(2, 3, 6, 6)), output), "the sim no longer simulates"


def test_an_error_inside_a_leaf_leaves_the_next_pass_intact(conv_sim: QuantSim):
    output = conv_sim(seeded(2, 3, 6, 6))
    handle = conv_sim.model.conv2.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        conv_sim(seeded(2, 3, 6, 6))
    handle.remove()
    assert torch.equal(conv_sim(seeded(2, 3, 6, 6)), output)


def test_a_tied_weight_has_one_encoding():
    tokens = torch.tensor([[1, 2, 3], [4, 5, 10]])
    sim = calibrated(TiedLanguageModel(), tokens, w4a8())
    tied = [d for d in sim.plan.decisions.values() if d.site in ("emb:weight", "head:weight")]
    assert len(tied) == 2
    assert [d.tied_to for d in tied].count(None) == 1
    encodings = sim.encodings
    assert encodings["emb:weight"] == encodings["head:weight"]
    home, other = sorted(tied, key=lambda d: d.tied_to is not None)
    before = sim(tokens)
    owner = sim.quantizers[home.site]
    owner.owner._buffers[owner.buffer_names[0]].mul_(2)
    assert sim.encodings[other.site] == sim.encodings[home.site] != encodings[home.site]
    assert not torch.equal(sim(tokens), before)
    assert sim.model.head.weight is sim.model.emb.weight


def test_nan_names_the_site_and_the_batch():
    sim = calibrated(ConvNet(), seeded(2, 3, 6, 6))
    before = sim.encodings
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = seeded(2, 3, 6, 6)
        broken[1, 2, 3, 3] = bad
        with pytest.raises(DataError, match=r"x:input in batch 1; clean the data"):
            calibrate(sim, [seeded(2, 3, 6, 6), broken], progress=False)
    assert sim.encodings == before


@pytest.mark.slow
def test_nan_that_arises_inside_the_model_names_the_site_where_it_arises():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.log(x))

    sim = sim_of(Model(), seeded(2, 4).abs() + 1)
    with pytest.raises(DataError, match=r"the site log\.0:output in batch 2"):
        calibrate(sim, [torch.ones(2, 4), torch.ones(2, 4), -torch.ones(2, 4)], progress=False)
    assert not any(ready for site, ready in sim.ready().items())


def test_nan_in_a_weight_names_its_site():
    model = ConvNet()
    model.conv2.weight.data[0, 0, 0, 0] = float("nan")
    sim = sim_of(model, seeded(2, 3, 6, 6))
    with pytest.raises(DataError, match="conv2"):
        calibrate(sim, [seeded(2, 3, 6, 6)], progress=False)
    assert not sim.encodings_where_ready()


def test_an_uncalibrated_forward_names_the_site():
    sim = sim_of(ConvNet(), seeded(2, 3, 6, 6))
    with pytest.raises(CalibrationError, match=r"x:input has no encoding yet; call qsdk\.calibrate"):
        sim(seeded(2, 3, 6, 6))
    with pytest.raises(CalibrationError, match=r"conv1:weight.*qsdk\.calibrate"):
        _ = sim.encodings
    assert not any(sim.ready().values())
    assert "0 of " in repr(sim)


def test_an_export_before_calibration_names_the_first_sites_and_counts_the_others(tmp_path):
    for depth, named in (
        (1, r"no encoding: \S+, [^;]*[^0-9]; call"),
        (6, r"no encoding: (\S+, ){7}\S+ and \d+ more; call"),
    ):
        sim = sim_of(nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))), seeded(2, 4))
        with pytest.raises(CalibrationError, match=named):
            qsdk.export(sim, tmp_path / "model.onnx")


def test_sites_that_the_example_reached_and_no_batch_are_named():
    sim = sim_of(TracedOnly(), seeded(2, 4))
    with pytest.raises(CalibrationError, match=r"no batch reached x:input.*; calibrate with data that takes"):
        calibrate(sim, [seeded(2, 4)], forward=lambda model, x: None, progress=False)
    assert not sim.encodings_where_ready()


# coverage: total, with reasons


def containers_example() -> tuple[Any, ...]:
    a, b, c, d, e, f, g = (seeded(3, 4, seed=i, scale=1 + i) for i in range(7))
    return (a, b), {"a": c, "b": [d]}, Pair(e, f), g


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "conv": lambda: (ConvNet(), seeded(2, 3, 6, 6)),
    "batch norm": lambda: (BatchNormNet(), seeded(2, 2, 6, 6)),
    "functional": lambda: (FunctionalForm(), seeded(5, 6)),
    "twice": lambda: (Twice(), seeded(3, 4)),
    "shared activation": lambda: (SharedActivation(), seeded(3, 4)),
    "lent module": lambda: (Lender(), seeded(3, 4)),
    "tied": lambda: (TiedLanguageModel(), torch.tensor([[1, 2, 3], [4, 5, 10]])),
    "own tensors": lambda: (OwnTensors(), seeded(2, 5, 4)),
    "containers": lambda: (Containers(), containers_example()),
    "dict out": lambda: (DictOut(), seeded(2, 4)),
    "keywords": lambda: (
        Keywords(),
        {"x": seeded(3, 4), "bias": seeded(3, 4, seed=1), "tokens": torch.tensor([0, 3, 6])},
    ),
    "dead": lambda: (Dead(), seeded(2, 4)),
    "root leaf": lambda: (nn.Linear(4, 2), seeded(2, 4)),
    "root activation": lambda: (nn.ReLU(), seeded(2, 4)),
    "sequential": lambda: (
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Hardswish(), nn.LayerNorm(4)),
        seeded(2, 4),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def named(request: pytest.FixtureRequest) -> tuple[str, nn.Module, Any, QuantSim]:
    torch.manual_seed(3)
    model, example = MODELS[request.param]()
    return request.param, model.eval(), example, calibrated(model, example)


@pytest.mark.spread(4)
def test_every_float_tensor_of_the_traced_graph_is_a_row_with_a_reason(named: tuple[str, nn.Module, Any, QuantSim]):
    _, _, _, sim = named
    graph = open_traced(*sim.traced()).graph
    floats = [t for t in graph.tensors if t.is_float]
    rows = sim.coverage().rows
    assert all(row["reason"] for row in rows)
    assert all(row["state"] in ("quantized", "tied", "float", "not exercised") for row in rows)
    live = [row["site"] for row in rows if not row["reason"].startswith("dead")]
    assert len(live) == len(set(live)) == len(floats)
    assert {t.site or f"({t.name})" for t in floats} == set(live)
    assert set(graph.sites) == set(sim.plan.decisions)


KNOWN_REASONS = (
    "Expand hands it on to a site",
    "inside ",
    "dead",
    "a scalar constant",
    "a view of",
    "its input is",
    "its weight",
    "a parameter",
    "a divisor that is never 0",
    "a part of a divisor that is never 0",
)
#: What torch writes around an op: steps of one slice or broadcast, and the copy that Dropout is.
INNER_OPS = {"Slice", "Identity", "Unsqueeze", "Expand"}


@pytest.mark.spread(12)
def test_no_computed_tensor_stays_float_by_accident(named: tuple[str, nn.Module, Any, QuantSim]):
    _, _, _, sim = named
    for row in sim.coverage().rows:
        if row["state"] == "float":
            assert row["reason"].startswith(KNOWN_REASONS), row
            assert row["kind"] != "input", row
            if row["reason"].startswith("inside a module"):
                assert row["op_type"] in INNER_OPS, row


def test_the_sim_computes_the_formula_of_its_encodings(named: tuple[str, nn.Module, Any, QuantSim]):
    """Everything that leaves the model lies on the grid of its site."""
    _, _, example, sim = named
    with sim.captured() as found:
        sim.run(example)
    outputs = {d.site for d in sim.plan.decisions.values() if d.kind in ("output", "input")}
    assert outputs <= set(found) | set(sim.not_exercised)
    for site in outputs & set(found):
        if sim.plan.decisions[site].quantized:
            assert np.array_equal(found[site], sim.encodings[site].fake_quantize(found[site])), site


def test_the_float_phase_is_the_float_model(named: tuple[str, nn.Module, Any, QuantSim]):
    _, model, example, sim = named
    args, kwargs = ((), example) if isinstance(example, dict) else (as_tuple(example), {})
    with sim.float_phase() as inner, torch.no_grad():
        simulated = tensors_of(inner(*args, **kwargs))
    for one, other in zip(tensors_of(model(*args, **kwargs)), simulated, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-5, atol=1e-5)


def as_tuple(example: Any) -> tuple[Any, ...]:
    return example if isinstance(example, tuple) else (example,)


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def test_a_sim_prints_its_coverage_and_explains_every_site(named: tuple[str, nn.Module, Any, QuantSim]):
    name, model, _, sim = named
    assert f"QuantSim({type(model).__name__}: " in repr(sim), name
    assert str(sim) == repr(sim)
    report = sim.coverage()
    assert all(site in report.full() for site in sim.plan.decisions)
    counts = report.summary
    assert counts["quantized"] + counts["tied"] + counts["float"] + counts["not_exercised"] == len(report.rows)
    for site, decision in sim.plan.decisions.items():
        said = sim.explain(site)
        assert said.startswith(f"{site} is {decision.state} (")
        assert said.endswith("decided by default")


def test_explain_names_the_rule_and_refuses_an_unknown_site(conv_sim: QuantSim):
    sim = sim_of(ConvNet(), seeded(2, 3, 6, 6), w8a8().skip("conv2", dtype=qsdk.float16))
    assert sim.explain("conv2:weight").endswith(
        "decided by 'conv2' -> weight=float16, activation=float16, bias=float16"
    )
    assert "float16" in sim.explain("conv2:output")
    with pytest.raises(ConfigError, match=r"no site conv9:weight; the nearest owners are: conv"):
        conv_sim.explain("conv9:weight")


# names


def test_a_block_called_twice_is_numbered_where_it_is_called(twice_sim: QuantSim):
    activations = [d.site for d in twice_sim.plan.decisions.values() if d.kind in ("activation", "output")]
    assert activations == [
        *("block.act:output", "block.fc:output", "block.act@1:output", "block/add.0:output", "mul.0:output"),
        *("block@1.act:output", "block@1.fc:output", "block@1.act@1:output", "block@1/add.0:output"),
    ]
    assert [d.site for d in twice_sim.plan.decisions.values() if d.kind == "weight"] == ["block.fc:weight"]


@pytest.mark.slow
def test_a_module_shared_by_two_parents_goes_by_the_path_of_its_caller():
    sim = calibrated(SharedActivation(), seeded(3, 4))
    assert {"a.act:output", "b.act:output", "a.act@1:output", "b.act@1:output"} <= set(sim.plan.decisions)
    assert sim.encodings["a.act:output"] != sim.encodings["b.act:output"]
    rule = sim_of(SharedActivation(), seeded(3, 4), w8a8().override("b.act", activation="uint16"))
    assert rule.plan.decisions["b.act:output"].spec.dtype.bits == 16
    assert rule.plan.decisions["a.act:output"].spec.dtype.bits == 8


def test_a_module_that_its_caller_does_not_own_is_named_behind_the_caller():
    sim = calibrated(Lender(), seeded(3, 4))
    assert {"a/act:output", "b/act:output", "act:output"} <= set(sim.plan.decisions)


@pytest.mark.slow
def test_functional_ops_are_numbered_per_module_call():
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x + x) + torch.tanh(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Inner(), Inner()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x * 2 + x.mul(3)

    sim = sim_of(Model(), seeded(3, 4))
    activations = {d.site for d in sim.plan.decisions.values() if d.kind != "input"}
    inner = ("add.0", "sigmoid.0", "tanh.0", "add.1")
    assert activations == {f"layers.{i}/{op}:output" for i in (0, 1) for op in inner} | {
        *("mul.0:output", "mul.1:output", "add.0:output"),
    }


def test_tensors_of_a_container_are_sites_under_their_own_names():
    sim = calibrated(OwnTensors(), seeded(2, 5, 4))
    decisions = sim.plan.decisions
    assert {"self:token", "self:table", "fc:weight"} <= {s for s, d in decisions.items() if d.kind == "weight"}
    assert all("symbolic" not in site for site in decisions)
    assert set(decisions) == set(sim.plan.decisions)
    before = sim(seeded(2, 5, 4))
    quantizer = sim.quantizers["self:table"]
    quantizer.owner._buffers[quantizer.buffer_names[0]].mul_(20)
    assert not torch.equal(sim(seeded(2, 5, 4)), before)


def test_similar_names_do_not_share_buffers():
    class Model(nn.Module):
        def forward(self, x: tuple[Tensor, ...], x_0: Tensor) -> Tensor:
            return x[0] + x_0

    sim = calibrated(Model(), ((seeded(3, 4),), seeded(3, 4, seed=1, scale=9)))
    assert sim.encodings["x.0:input"] != sim.encodings["x_0:input"]
    assert len([name for name in sim.model.state_dict() if name.endswith("_scale")]) == 3


@pytest.mark.parametrize(
    ("model", "sites"),
    [
        (nn.Linear(4, 2), ["self:weight", "self:bias", "input:input", "self:output"]),
        (
            nn.Sequential(nn.Linear(4, 2), nn.Sigmoid()),
            ["0:weight", "0:bias", "input:input", "0:output", "1:output"],
        ),
    ],
    ids=["leaf", "sequential"],
)
def test_any_module_can_be_the_root(model: nn.Module, sites: list[str]):
    sim = calibrated(model, seeded(3, 4))
    assert list(sim.plan.decisions) == sites
    expected = sim.encodings[sites[-1]].fake_quantize(sim(seeded(3, 4)).numpy())
    assert np.array_equal(sim(seeded(3, 4)).numpy(), expected)


# inputs and outputs of every form


def test_outputs_keep_their_containers():
    model = DictOut()
    sim = calibrated(model, seeded(2, 4))
    out = sim(seeded(2, 4))
    assert type(out) is type(model(seeded(2, 4)))
    assert list(out) == ["hidden", "parts"]
    kinds = {d.site: d.kind for d in sim.plan.decisions.values()}
    assert [kinds[s] for s in ("fc:output", "relu.0:output", "sum.0:output")] == ["output"] * 3


def test_inputs_inside_containers_are_sites_of_their_own():
    example = containers_example()
    sim = calibrated(Containers(), example)
    names = ["pair.0", "pair.1", "nested.a", "nested.b.0", "named.left", "named.right", "scale"]
    assert [d.site for d in sim.plan.decisions.values() if d.kind == "input"] == [f"{name}:input" for name in names]
    scales = [float(sim.encodings[f"{name}:input"].scale[0]) for name in names]
    assert len(set(scales)) == 7
    assert sim.run(example).shape == (3, 4)


def test_a_mapping_example_calls_by_keyword():
    model = Keywords()
    example = {"x": seeded(3, 4), "bias": seeded(3, 4, seed=1), "tokens": torch.tensor([0, 3, 6])}
    sim = calibrated(model, example)
    inputs = [d.site for d in sim.plan.decisions.values() if d.kind == "input"]
    assert inputs == ["x:input", "bias:input"], "integers are no sites"
    assert torch.equal(sim.run(example), sim(**example))
    assert torch.equal(sim(example["x"], bias=example["bias"], tokens=example["tokens"]), sim(**example))
    assert (sim(**example) - model(**example)).abs().max() < 0.1
    assert {"fc:output", "fc@1:output"} <= set(sim.plan.decisions)


# dead and unexercised sites


def test_a_site_that_reaches_no_output_is_dead_and_stays_float():
    sim = calibrated(Dead(), seeded(2, 4))
    rows = {row["site"]: row for row in sim.coverage().rows}
    for site in ("sigmoid.0:output", "mul.0:output"):
        assert rows[site]["state"] == "float"
        assert rows[site]["reason"] == "dead: its value reaches no output"
    assert sim(seeded(2, 4)).shape == (2, 4)


def test_a_site_that_only_tracing_reaches_is_not_exercised():
    sim = sim_of(TracedOnly(), seeded(2, 4))
    assert sim.not_exercised == ("mul.0:output",)
    assert states(sim)["mul.0:output"] == "not exercised"
    assert sim.coverage().summary["not_exercised"] == 1


def test_a_site_that_only_eager_code_reaches_is_an_error():
    with pytest.raises(ModelError, match=r"the eager model reaches sigmoid\.0:output but the traced one does not"):
        quantize(EagerOnly(), seeded(2, 4), w8a8())


def test_a_path_that_the_example_did_not_take_is_named():
    class Model(nn.Module):
        def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
            return x * 2 if extra is None else torch.sigmoid(x * 2) + extra

    sim = calibrated(Model(), (seeded(2, 4),))
    with pytest.raises(ModelError, match=r"sigmoid.0:output was not reached when .* and has extra"):
        sim(seeded(2, 4), extra=seeded(2, 4))


# freezing


def test_calibration_leaves_encodings_that_were_frozen():
    sim = calibrated(ConvNet(), seeded(2, 3, 6, 6))
    before = sim.encodings
    assert sim.freeze("conv1") == 1
    assert sim.freeze("relu") == 1
    calibrate(sim, [seeded(2, 3, 6, 6, scale=5)], progress=False)
    after = sim.encodings
    kept = [site for site, q in sim.quantizers.items() if q.owns_encoding and before[site] == after[site]]
    assert kept == ["conv1:weight", "conv2:weight", "fc:weight", "relu:output"]
    sim.model.conv1.weight.data.mul_(3)
    sim.model.conv2.weight.data.mul_(3)
    calibrate(sim, [seeded(2, 3, 6, 6)], progress=False)
    assert sim.encodings["conv1:weight"] == before["conv1:weight"]
    assert sim.encodings["conv2:weight"] != before["conv2:weight"]
    assert sim.encodings["relu:output"].frozen
    with pytest.raises(ConfigError, match=r"freeze\('convv'\) matches no owner.*nearest are: conv"):
        sim.freeze("convv")


def test_freeze_everything():
    sim = calibrated(ConvNet(), seeded(2, 3, 6, 6))
    other = copy.deepcopy(sim)
    assert sim.freeze() == sum(q.owns_encoding for q in sim.quantizers.values())
    calibrate(sim, [seeded(2, 3, 6, 6, scale=5)], progress=False)
    assert same_encodings(sim, other)


@pytest.mark.slow
def test_a_block_can_be_quantized_alone_and_inside():
    """The sites of a block are those of the block inside a model, but for the prefix."""
    alone = sim_of(Block(), seeded(3, 4))
    inside = sim_of(nn.Sequential(Block()), seeded(3, 4))
    prefixed = {site.replace("x:", "input:") if ":input" in site else f"0.{site}" for site in alone.plan.decisions}
    prefixed = {site.replace("0.add", "0/add") for site in prefixed}
    assert prefixed == set(inside.plan.decisions)
