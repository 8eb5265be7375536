"""The wrapped module as an ordinary nn.Module: parameters, state_dict, copies, checkpointing, compilers, unwrapping."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_models import (
    BatchNormNet,
    CheckpointedTwice,
    ConvNet,
    EncoderModel,
    OwnTensors,
    SharedActivation,
    TiedLanguageModel,
    Twice,
    calibrated,
    randomized,
    same_encodings,
    seeded,
    sim_of,
)

from qsdk import CalibrationError, ConfigError, ExportError, ModelError, QuantSim, calibrate, quantize, w8a8, w8a16
from torch_bridge.wrapping.wrapped_state import is_wrapped

X = seeded(2, 3, 6, 6)


@pytest.fixture(scope="module")
def conv_sim() -> QuantSim:
    return calibrated(ConvNet(), X)


@pytest.fixture(scope="module")
def encoder_sim() -> QuantSim:
    return calibrated(EncoderModel(), seeded(3, 6))


@pytest.fixture(scope="module")
def folded() -> tuple[nn.Module, QuantSim]:
    model = randomized(BatchNormNet())
    return model, calibrated(model, seeded(2, 2, 6, 6))


# raw parameters outside a forward


def test_a_wrapped_module_is_an_instance_of_its_class(conv_sim: QuantSim):
    model = conv_sim.model
    assert isinstance(model, ConvNet)
    assert isinstance(model.conv1, nn.Conv2d)
    assert type(model.conv1).__name__ == "QuantizedConv2d"
    assert [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)] == ["conv1", "conv2"]
    assert isinstance(model.fc.weight, nn.Parameter)
    assert list(dict(model.named_parameters())) == list(dict(ConvNet().named_parameters()))


def test_a_parameter_is_raw_outside_a_running_forward_and_quantized_inside(conv_sim: QuantSim):
    weight = conv_sim.model.conv1.weight
    assert weight is conv_sim.model.conv1._parameters["weight"]
    inside = []
    handle = conv_sim.model.conv1.register_forward_hook(lambda module, *_: inside.append(module.weight))
    conv_sim(X)
    handle.remove()
    assert (
        inside[0].detach().numpy() == conv_sim.encodings["conv1:weight"].fake_quantize(weight.detach().numpy())
    ).all()


def test_a_weight_read_by_another_module_is_quantized_too():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.fc.weight)

    sim = calibrated(Reader(), seeded(2, 4))
    assert sim.plan.decisions["fc:weight"].quantized
    raw = sim.model.fc.weight.detach().clone()
    sim.model.fc.weight.data.copy_(torch.from_numpy(sim.encodings["fc:weight"].fake_quantize(raw.numpy())))
    on_grid = sim(seeded(2, 4))
    sim.model.fc.weight.data.copy_(raw)
    assert torch.equal(sim(seeded(2, 4)), on_grid)


def test_data_and_init_and_assignment_reach_the_raw_parameter():
    sim = calibrated(ConvNet(), X)
    weight = sim.model.fc.weight
    before = sim(X)
    sim.model.fc.weight.data.zero_()
    assert not weight.any()
    nn.init.constant_(sim.model.fc.weight, 0.25)
    assert (weight == 0.25).all()
    assert not torch.equal(sim(X), before)
    fresh = nn.Parameter(torch.ones(10, 80))
    sim.model.fc.weight = fresh
    assert sim.model.fc.weight is fresh
    assert dict(sim.model.named_parameters())["fc.weight"] is fresh
    with pytest.raises(TypeError, match="cannot assign"):
        sim.model.fc.weight = torch.ones(10, 80)
    del sim.model.fc.weight
    assert not hasattr(sim.model.fc, "weight")


def test_gradients_land_in_the_raw_parameters():
    sim = calibrated(ConvNet(), X)
    with sim.training() as model:
        model(X).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        optimizer = torch.optim.SGD(
            [{"params": model.conv1.parameters()}, {"params": model.fc.parameters(), "lr": 1.0}], lr=0.1
        )
        kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
        moved = {n for n, p in model.named_parameters() if not torch.equal(p, kept[n])}
        assert moved == {"conv1.weight", "conv1.bias", "fc.weight", "fc.bias"}
        optimizer.zero_grad()
        assert model.fc.weight.grad is None


@pytest.mark.slow
def test_weights_can_be_tied_in_a_sim():
    sim = calibrated(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seeded(2, 4))
    sim.model[1].weight = sim.model[0].weight
    assert len(list(sim.model.parameters())) == 3
    sim.model[0].weight.data.fill_(0.5)
    assert (sim.model[1].weight == 0.5).all()


# state_dict


def test_state_dict_has_the_float_keys_and_the_encodings(conv_sim: QuantSim):
    keys, float_keys = list(conv_sim.model.state_dict()), list(ConvNet().state_dict())
    assert [key for key in keys if "qsdk_" not in key] == float_keys
    encodings = [key for key in keys if "qsdk_" in key]
    assert all(key.endswith(("_scale", "_zero_point")) for key in encodings)
    assert len(encodings) == 2 * sum(q.owns_encoding for q in conv_sim.quantizers.values())
    assert list(sim_of(ConvNet(), X).model.state_dict()) == float_keys


def test_a_float_checkpoint_loads_strictly_and_leaves_the_encodings(conv_sim: QuantSim):
    sim = copy.deepcopy(conv_sim)
    other = ConvNet()
    result = sim.model.load_state_dict(other.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert all(torch.equal(p, dict(other.named_parameters())[n]) for n, p in sim.model.named_parameters())
    owning = [site for site, q in sim.quantizers.items() if q.owns_encoding]
    assert [sim.encodings[s] for s in owning] == [conv_sim.encodings[s] for s in owning]
    with pytest.raises(RuntimeError, match=r"Missing key.*fc\.bias"):
        sim.model.load_state_dict({k: v for k, v in other.state_dict().items() if k != "fc.bias"})


@pytest.mark.slow
def test_a_float_checkpoint_is_folded_on_the_way_in(folded: tuple[nn.Module, QuantSim]):
    _, sim = folded
    loaded, other = copy.deepcopy(sim), randomized(BatchNormNet(), seed=7)
    given = other.state_dict()
    kept = {name: tensor.clone() for name, tensor in given.items()}
    assert not any(loaded.model.load_state_dict(given, strict=True))
    assert list(given) == list(kept), "the caller's dict has changed"
    assert all(torch.equal(given[name], tensor) for name, tensor in kept.items())
    quantized = sim_of(other, seeded(2, 2, 6, 6))
    for name, parameter in quantized.model.named_parameters():
        assert torch.equal(parameter, dict(loaded.model.named_parameters())[name]), name
    for one in (loaded, quantized):
        calibrate(one, [seeded(4, 2, 6, 6)], progress=False)
    assert same_encodings(loaded, quantized)
    assert torch.equal(loaded(seeded(3, 2, 6, 6)), quantized(seeded(3, 2, 6, 6)))


def test_a_float_checkpoint_folds_under_every_name_of_a_module():
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)
            self.features = nn.Sequential(self.conv, self.bn)

        def forward(self, x: Tensor) -> Tensor:
            return self.features(x)

    sim = sim_of(randomized(Aliased()), seeded(2, 2, 5))
    other = randomized(Aliased(), seed=4)
    nn.init.normal_(other.conv.weight)
    assert not any(sim.model.load_state_dict(other.state_dict(), strict=True))
    with sim.float_phase() as model:
        torch.testing.assert_close(model(seeded(2, 2, 5)), other(seeded(2, 2, 5)))


def test_a_folded_checkpoint_loads_as_it_is(folded: tuple[nn.Module, QuantSim]):
    _, sim = folded
    other = copy.deepcopy(sim)
    for parameter in other.model.parameters():
        parameter.data.zero_()
    other.model.load_state_dict(sim.model.state_dict(), strict=True)
    assert torch.equal(other(seeded(3, 2, 6, 6)), sim(seeded(3, 2, 6, 6)))


CHECKPOINTED: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "conv": lambda: (ConvNet(), X),
    "batch norm": lambda: (randomized(BatchNormNet()), seeded(2, 2, 6, 6)),
    "twice": lambda: (Twice(), seeded(3, 4)),
    "shared": lambda: (SharedActivation(), seeded(3, 4)),
    "tied": lambda: (TiedLanguageModel(), torch.tensor([[1, 2, 3], [4, 5, 10]])),
    "own tensors": lambda: (OwnTensors(), seeded(2, 5, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpoint_of_a_sim_loads_into_a_fresh_one(name: str):
    model, example = CHECKPOINTED[name]()
    sim = calibrated(model, example, w8a16())
    fresh = sim_of(CHECKPOINTED[name]()[0], example, w8a16())
    stream = io.BytesIO()
    torch.save(sim.model.state_dict(), stream)
    stream.seek(0)
    assert not any(fresh.model.load_state_dict(torch.load(stream, weights_only=True), strict=True))
    assert same_encodings(fresh, sim)
    assert len(fresh.encodings) == len(sim.encodings)
    assert torch.equal(fresh.run(example), sim.run(example))
    before = sim.encodings
    for buffer in fresh.model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(2)
    assert sim.encodings == before, "the two sims share memory"


@pytest.mark.parametrize(("kept", "absent"), [("scale", "zero_point"), ("zero_point", "scale")])
@pytest.mark.parametrize("strict", [True, False])
def test_half_an_encoding_is_an_error_that_names_the_site(conv_sim: QuantSim, kept: str, absent: str, strict: bool):
    state = dict(conv_sim.model.state_dict())
    del state[f"relu.qsdk_output_{absent}"]
    assert f"relu.qsdk_output_{kept}" in state
    fresh = sim_of(ConvNet(), X)
    message = rf"encoding of relu:output is uninitialised: relu\.qsdk_output_{absent} is missing"
    with pytest.raises(RuntimeError, match=message):
        fresh.model.load_state_dict(state, strict=strict)
    assert not fresh.ready()["relu:output"]
    with pytest.raises(CalibrationError, match=r"relu:output has no encoding yet"):
        fresh(X)


def test_an_encoding_of_another_shape_is_an_error_that_names_the_site(conv_sim: QuantSim):
    sim = copy.deepcopy(conv_sim)
    state = dict(conv_sim.model.state_dict())
    for name in ("scale", "zero_point"):
        state[f"conv2.qsdk_weight_{name}"] = torch.ones(3)
    before = sim.encodings
    with pytest.raises(RuntimeError, match=r"conv2:weight does not fit: a scale of shape \(3,\).*5 channels"):
        sim.model.load_state_dict(state)
    assert sim.encodings == before


# copies


@pytest.mark.spread(7)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["conv", "batch norm", "shared", "tied"])
def test_copies_simulate_and_are_independent(name: str, copier: Callable[[Any], Any], sims: Any):
    sim, example = sims[name]
    expected = sim.run(example)
    model, whole = copier(sim.model), copier(sim)
    with torch.no_grad():
        assert torch.equal(model(example), expected)
    assert torch.equal(whole.run(example), expected)
    assert whole.encodings == sim.encodings
    assert repr(whole) == repr(sim)
    for parameter in (*model.parameters(), *whole.model.parameters()):
        parameter.data.mul_(-3)
    calibrate(whole, [example], progress=False)
    assert torch.equal(sim.run(example), expected)
    assert not torch.equal(whole.run(example), expected)
    del sim
    whole.freeze()
    with whole.training(learn_scales=True) as trained:
        trained(example).sum().backward()
    assert is_wrapped(whole.model)
    assert not is_wrapped(whole.unwrap())


@pytest.fixture(scope="module")
def sims() -> dict[str, tuple[QuantSim, Any]]:
    made = {name: CHECKPOINTED[name]() for name in ("conv", "batch norm", "shared", "tied")}
    return {name: (calibrated(model, example), example) for name, (model, example) in made.items()}


def test_a_copy_of_an_uncalibrated_sim_can_be_calibrated():
    sim = sim_of(ConvNet(), X)
    other = copy.deepcopy(sim)
    calibrate(other, [X], progress=False)
    assert all(other.ready().values())
    assert not any(sim.ready().values())


def test_the_whole_wrapped_model_can_be_saved(conv_sim: QuantSim):
    stream = io.BytesIO()
    torch.save(conv_sim.model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    with torch.no_grad():
        assert torch.equal(loaded(X), conv_sim(X))


# unwrapping


def assert_plain_copy(plain: nn.Module, model: nn.Module) -> None:
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]
    assert not any(is_wrapped(m) for m in plain.modules())
    assert list(plain.state_dict()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    assert not any(id(t) in own for t in (*plain.parameters(), *plain.buffers()))
    assert sorted(plain.__dict__) == sorted(model.__dict__)


@pytest.mark.parametrize("name", ["conv", "twice", "tied", "own tensors"])
def test_unwrap_gives_the_callers_model_back_bit_for_bit(name: str):
    model, example = CHECKPOINTED[name]()
    sim = calibrated(model, example)
    plain = sim.unwrap()
    assert_plain_copy(plain, model)
    model.eval()
    assert torch.equal(plain(example), model(example))
    assert is_wrapped(sim.model)
    if name == "tied":
        assert plain.head.weight is plain.emb.weight


@pytest.mark.slow
def test_unwrap_without_folding_has_the_callers_batch_norms():
    model = randomized(BatchNormNet())
    sim = calibrated(model, seeded(2, 2, 6, 6), fold_batch_norm=False)
    assert_plain_copy(sim.unwrap(), model)


def test_unwrap_after_training_gives_the_trained_weights():
    sim = calibrated(ConvNet(), X)
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.01))
        model(X).square().sum().backward()
        optimizer.step()
    plain = sim.unwrap()
    assert not any("qsdk" in name for name in plain.state_dict())
    trained = dict(sim.model.named_parameters())
    assert all(torch.equal(p, trained[n]) for n, p in plain.named_parameters())


# in place


@pytest.mark.slow
def test_in_place_wraps_the_callers_module():
    model = ConvNet()
    before = dict(model.named_parameters())
    sim = quantize(model, X, w8a8(), in_place=True)
    assert sim.model is model
    assert is_wrapped(model)
    assert all(p is before[n] for n, p in model.named_parameters())
    calibrate(sim, [X], progress=False)
    assert torch.equal(sim(X), calibrated(sim.unwrap(), X)(X))


class Untraceable(BatchNormNet):
    """Runs, but takes a path that depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) != 0.125 else x


class FailsAlways(BatchNormNet):
    """Does not run."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("make", "config", "error"),
    [
        (Untraceable, w8a8(), ExportError),
        (FailsAlways, w8a8(), ModelError),
        (BatchNormNet, w8a8().skip("nothing"), ConfigError),
    ],
    ids=["untraceable", "does not run", "bad rule"],
)
def test_a_failing_in_place_quantize_gives_the_module_back(make: Any, config: Any, error: type[Exception]):
    model = randomized(make())
    model.train()
    model.bn2.eval()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = dict(model.named_parameters())
    types = [type(m) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    attributes = [sorted(m.__dict__) for m in model.modules()]
    with pytest.raises(error):
        quantize(model, seeded(2, 2, 6, 6), config, in_place=True)
    assert [type(m) for m in model.modules()] == types
    assert [m.training for m in model.modules()] == modes
    assert [sorted(m.__dict__) for m in model.modules()] == attributes
    assert list(model.state_dict()) == list(kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert all(p is held[n] for n, p in model.named_parameters())
    assert model.conv1.bias is None


# other ways to call the model


@pytest.mark.slow
def test_a_submodule_called_alone_sees_the_same_sites(encoder_sim: QuantSim):
    seen: list[Tensor] = []
    hooks = [
        encoder_sim.model.encoder.register_forward_pre_hook(lambda m, args: seen.append(args[0])),
        encoder_sim.model.encoder.register_forward_hook(lambda m, args, out: seen.append(out)),
    ]
    encoder_sim(seeded(3, 6))
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        assert torch.equal(encoder_sim.model.encoder(seen[0]), seen[1])
        alone = encoder_sim.model.encoder.fc1(seen[0])
    with encoder_sim.captured() as found:
        encoder_sim(seeded(3, 6))
    inside = torch.relu(alone)  # the site of the Linear before ReLU is inside the supergroup
    expected = encoder_sim.encodings["encoder.act:output"].fake_quantize(inside.numpy())
    assert (found["encoder.act:output"] == expected).all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_neither_output_nor_gradients(use_reentrant: bool, encoder_sim: QuantSim):
    plain = copy.deepcopy(encoder_sim)
    saving = copy.deepcopy(encoder_sim)
    saving.model.use_reentrant = use_reentrant
    results = []
    for sim in (plain, saving):
        with sim.training(learn_scales=True) as model:
            x = seeded(4, 6, seed=1).requires_grad_()
            out = model(x)
            out.square().sum().backward()
            gradients = {n: p.grad for n, p in model.named_parameters()}
        results.append((out.detach(), x.grad, gradients))
    (out, grad, gradients), (out_saving, grad_saving, gradients_saving) = results
    assert torch.equal(out, out_saving)
    assert torch.equal(grad, grad_saving)
    assert gradients.keys() == gradients_saving.keys()
    assert any("log2" in name for name in gradients)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert torch.equal(gradient, gradients_saving[name]), name


def test_checkpointing_a_block_that_is_called_twice_is_refused_by_name():
    sim = calibrated(CheckpointedTwice(), seeded(3, 4))
    with sim.training() as model:
        loss = model(seeded(3, 4).requires_grad_()).sum()
        with pytest.raises(
            ModelError, match=r"block is called several times in one forward pass.*checkpoint the module"
        ):
            loss.backward()
    assert sim(seeded(3, 4)).shape == (3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "shared"])
def test_torch_compile_gives_the_same_output_in_one_graph(name: str, sims: Any):
    sim, example = sims[name]
    torch.compiler.reset()
    compiled = torch.compile(sim.model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(example), sim(example))
    torch.compiler.reset()


@pytest.mark.slow
def test_torch_export_gives_the_same_output(sims: Any):
    sim, example = sims["conv"]
    program = torch.export.export(sim.model, (example,))
    with torch.no_grad():
        assert torch.equal(program.module()(example), sim(example))
    assert torch.equal(sim(example), sim(example))


def test_double_precision_simulates(conv_sim: QuantSim):
    sim = copy.deepcopy(conv_sim)
    sim.model.to(torch.float64)
    out = sim(X.double())
    assert out.dtype == torch.float64
    assert (out - conv_sim(X)).abs().max() <= 2 * conv_sim.encodings["fc:output"].scale[0]
    assert sim.encodings == conv_sim.encodings


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_scales_and_zero_points(dtype: torch.dtype):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    sim = calibrated(model, seeded(5, 6, scale=1e-3), w8a16())
    before, expected = sim.encodings, sim(seeded(5, 6, scale=1e-3))
    sim.model.to(dtype)
    out = sim(seeded(5, 6, scale=1e-3).to(dtype))
    assert out.dtype == dtype
    assert sim.encodings == before, "16-bit zero points and small scales do not fit a half"
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.02)
    assert dict(sim.model.named_parameters())["0.weight"].dtype == dtype


def test_a_sim_computes_no_gradients_and_its_model_does(conv_sim: QuantSim):
    assert not conv_sim(X).requires_grad
    assert conv_sim.model(X).requires_grad
