"""Everything that an ordinary training loop does besides steps, with a simulated model."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from torch_models import ConvNet, calibrated, same_encodings, seeded
from training_models import loss_of, same_gradients

from qsdk import ExportError, ModelError, QuantSim, calibrate, w8a16

X = seeded(8, 3, 6, 6)


@pytest.fixture(scope="module")
def made() -> QuantSim:
    torch.manual_seed(0)
    return calibrated(ConvNet(), X)


@pytest.fixture
def sim(made: QuantSim) -> QuantSim:
    return copy.deepcopy(made)


def scales(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of encodings in a model, learned parts too."""
    return {name: tensor for name, tensor in model.state_dict().items() if "qsdk_" in name and "steps" not in name}


def one_step(sim: QuantSim, model: nn.Module, x: Tensor = X) -> Tensor:
    optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.05, scale_lr=5.0))
    loss = loss_of(model(x).float())
    loss.backward()
    optimizer.step()
    return loss.detach()


# precision


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_half_and_keeps_scales_and_gradients_in_float32(sim: QuantSim, dtype: torch.dtype):
    found = []
    with sim.training(learn_scales=True) as model:
        for enabled in (False, True):
            model.zero_grad()
            with torch.autocast("cpu", dtype, enabled=enabled):
                out = model(X)
            assert out.dtype == (dtype if enabled else torch.float32)
            loss_of(out.float()).backward()
            found.append({"out": out.float().detach(), **{n: p.grad for n, p in model.named_parameters()}})
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    plain, half = found
    step = sim.encodings["fc:output"].scale[0]
    assert (half["out"] - plain["out"]).abs().max() <= 3 * step
    for name in ("conv1.weight", "conv2.weight", "fc.weight", "fc.bias"):
        cosine = torch.cosine_similarity(half[name].flatten(), plain[name].flatten(), dim=0)
        assert cosine > 0.98, name


def test_a_grad_scaler_skips_a_step_that_overflows_and_the_clock_does_not_count_it(sim: QuantSim):
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.01))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        losses, scales_of = [], []
        for _ in range(30):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model(X).float())
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
            scales_of.append(scaler.get_scale())
        skipped = sum(after < before for before, after in zip([2.0**30, *scales_of], scales_of, strict=False))
        assert 0 < skipped < 30
        assert int(model.qsdk_steps) == 30 - skipped
        assert losses[-1] < losses[0]
        assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_type_of_a_model_changes_and_its_encodings_stay_float32(dtype: torch.dtype):
    torch.manual_seed(0)
    sim = calibrated(ConvNet(), X, w8a16())  # zero points that no half holds
    with sim.training(learn_scales=True, learn_zero_points=True) as model:
        one_step(sim, model)
        before = {name: tensor.clone() for name, tensor in scales(model).items()}
        learned = {id(p) for n, p in model.named_parameters() if "qsdk_" in n}
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if "qsdk_" in n}
        model.to(dtype)
        assert model.conv1.weight.dtype == dtype
        assert {id(p) for n, p in model.named_parameters() if "qsdk_" in n} == learned, "the optimizer lost them"
        for name, tensor in scales(model).items():
            assert tensor.dtype == torch.float32, name
            assert torch.equal(tensor, before[name]), name
        for name, gradient in gradients.items():
            assert torch.equal(dict(model.named_parameters())[name].grad, gradient), name
        assert any(gradient.any() for gradient in gradients.values())
        loss = loss_of(model(X.to(dtype)).float())
        loss.backward()
        assert all(p.grad.dtype == p.dtype for p in model.parameters())
    encodings = sim.encodings
    sim.model.float()
    assert sim.encodings == encodings


def test_a_model_moves_to_another_device_with_its_encodings(sim: QuantSim):
    with sim.training(learn_scales=True) as model:
        assert {t.device.type for t in (*model.to("meta").parameters(), *model.buffers())} == {"meta"}
        assert model(X.to("meta")).device.type == "meta"


# optimizers and averages


def test_accumulated_gradients_are_those_of_the_large_batch(sim: QuantSim):
    """The gradient of a scale does not know the size of a batch: that factor would be 2 for four parts."""
    found = []
    for parts in (1, 4):
        own = copy.deepcopy(sim)
        with own.training(learn_scales=True, learn_zero_points=True) as model:
            optimizer = torch.optim.SGD(own.parameter_groups(lr=0.1))
            for x in X.chunk(parts):
                (loss_of(model(x)) / parts).backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            assert int(model.qsdk_steps) == 1
            optimizer.zero_grad(set_to_none=True)
            assert all(p.grad is None for p in model.parameters())
    same_gradients(*found, tolerance=1e-3)


def test_clipping_counts_the_gradients_of_scales(sim: QuantSim):
    with sim.training(learn_scales=True) as model:
        loss_of(model(X)).backward()
        norms = torch.stack([p.grad.norm() for p in model.parameters()])
        total = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert float(total) == pytest.approx(float(norms.norm()), rel=1e-5)
        after = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert float(after) == pytest.approx(1e-3, rel=1e-3)


def test_an_average_of_models_loads_into_the_sim(sim: QuantSim):
    seen: dict[str, list[Tensor]] = {}
    with sim.training(learn_scales=True) as model:
        average = AveragedModel(model)
        for _ in range(3):
            one_step(sim, model)
            average.update_parameters(model)
            for site, quantizer in sim.quantizers.items():
                if quantizer.learned_names:
                    seen.setdefault(site, []).append(quantizer.scale_and_zero_point()[0].detach().clone())
        out = average.module.eval()(X).detach()
        model.load_state_dict(average.module.state_dict())
    assert torch.equal(sim(X), out)
    assert any(not torch.equal(one[0], one[-1]) for one in seen.values())
    for site, values in seen.items():
        mean = torch.stack(values).log().mean(0).exp()  # scales are averaged by their logarithms, so they stay positive
        torch.testing.assert_close(torch.from_numpy(sim.encodings[site].scale), mean, rtol=1e-5, atol=0.0)


def test_an_exponential_average_loads_into_the_sim_after_training_too(sim: QuantSim):
    with sim.training(learn_scales=True, learn_zero_points=True) as model:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            one_step(sim, model)
            average.update_parameters(model)
    out = average.module.eval()(X).detach()
    assert not torch.equal(sim(X), out)
    given = average.module.state_dict()
    sim.model.load_state_dict(given)
    assert torch.equal(sim(X), out)
    assert any("log2" in name for name in given), "the caller's dict has changed"


# checkpoints, copies, other processes


def test_a_checkpoint_from_inside_of_the_block_loads_outside_and_back(sim: QuantSim):
    fresh = copy.deepcopy(sim)
    with sim.training(learn_scales=True, learn_zero_points=True) as model:
        one_step(sim, model)
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
    assert not same_encodings(sim, fresh)
    stream.seek(0)
    fresh.model.load_state_dict(torch.load(stream, weights_only=True))
    assert same_encodings(sim, fresh)
    assert torch.equal(fresh(X), sim(X))
    assert not any("log2" in name or "steps" in name for name in fresh.model.state_dict())
    settled = sim.model.state_dict()
    with fresh.training(learn_scales=True, learn_zero_points=True) as model:
        one_step(fresh, model)
        model.load_state_dict(settled)
        assert torch.equal(fresh(X), model.eval()(X))
    assert same_encodings(sim, fresh)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_that_are_made_inside_of_the_block(sim: QuantSim, copier: Callable[[Any], Any]):
    told: list[int] = []
    with sim.training(learn_scales=True, schedules=[lambda _, step: told.append(step)]) as model:
        one_step(sim, model)
        model.eval()
        out = model(X).detach()
        other, whole, state = copier(model), copier(sim), model.state_dict()
        assert torch.equal(other(X), out)
        loss_of(other(X)).backward()
        assert [n for n, p in other.named_parameters() if p.grad is None] == []
        assert all(p.grad is None or p.grad is not other.get_parameter(n).grad for n, p in model.named_parameters())
        count = len(told)
        other.load_state_dict(state)
        assert len(told) == count, "the schedules of the original were called for its copy"
        assert torch.equal(whole(X), out)
        assert not whole.model.training
        one_step(sim, model.train())
    assert not any("log2" in name or "steps" in name for name in whole.model.state_dict())
    assert torch.equal(whole(X), out), "a copy follows its original"
    assert not torch.equal(sim(X), out)
    calibrate(whole, [X], progress=False)
    with whole.training(learn_scales=True) as model:
        one_step(whole, model)


def test_unwrap_inside_of_the_block_gives_a_plain_module(sim: QuantSim):
    with sim.training(learn_scales=True) as model:
        one_step(sim, model)
        plain = sim.unwrap()
    assert list(plain.state_dict()) == list(ConvNet().state_dict())
    assert torch.equal(plain.fc.weight, sim.model.fc.weight)


class Teaching(Dataset[Tensor]):
    """Examples with what a model makes of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.model(X[index : index + 1])[0]


@pytest.mark.slow
def test_a_model_can_be_sent_to_the_workers_of_a_data_loader(sim: QuantSim):
    with sim.training(learn_scales=True) as model:
        one_step(sim, model)
        model.eval()
        expected = torch.stack([model(X[i : i + 1])[0] for i in range(4)])
        loader = DataLoader(Teaching(model), batch_size=4, num_workers=1, multiprocessing_context="spawn")
        assert torch.equal(next(iter(loader)), expected.detach())


# calls of other kinds


def test_functional_call_takes_parameters_of_its_own(sim: QuantSim):
    with sim.training(learn_scales=True) as model:
        given = {n: p.detach() + 0.1 for n, p in model.named_parameters()}
        found = torch.func.functional_call(model, given, (X,))
        assert not torch.equal(found, model(X))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(given[name])
        assert torch.equal(found, model(X))


def test_data_parallel_is_refused_with_the_remedy(sim: QuantSim):
    """What it calls in each module when it is called with several GPUs."""
    with pytest.raises(ModelError, match=r"nn.DataParallel copies.*DistributedDataParallel"):
        nn.DataParallel(sim.model).module._replicate_for_data_parallel()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torch_jit_script_is_refused_with_the_remedy(sim: QuantSim):
    with pytest.raises(ModelError, match=r"torch.jit.script cannot compile.*torch.compile"):
        torch.jit.script(sim.model)


def test_a_module_that_is_put_in_later_computes_in_float_and_is_not_exported(sim: QuantSim):
    sim.model.fc = nn.Linear(80, 10)
    hidden = []
    sim.model.fc.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    out = sim(X)
    assert torch.equal(out, nn.functional.linear(hidden[0], sim.model.fc.weight, sim.model.fc.bias))
    assert "came into the model" in sim.coverage().summary["fc (Linear)"]
    with pytest.raises(ExportError, match=r"fc \(Linear\) came into the model after"):
        sim.traced()


def test_neither_a_second_optimizer_nor_that_of_another_model_is_counted(sim: QuantSim):
    other, told = nn.Linear(2, 2), []
    with sim.training(learn_scales=True, schedules=[lambda _, step: told.append(step)]) as model:
        optimizers = [torch.optim.SGD([group], lr=1e-3) for group in sim.parameter_groups(lr=1e-3)]
        optimizers.insert(0, torch.optim.SGD(other.parameters(), lr=1e-3))
        assert len(optimizers) == 3
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.step()
        assert int(model.qsdk_steps) == 4
    assert told == [0, 1, 2, 3, 4]
