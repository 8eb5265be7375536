"""`sim.unwrap()`: the float model that is simulated, whatever has been rounded or shifted for the grid since."""

import copy
import math
from pathlib import Path

import pytest
import torch
from every_verb import BIASES, GRADIENTS, LAYERS, SCALINGS, VERBS
from rotated_models import exact, model_and_input, off
from torch import Tensor, nn

import qsdk
from qsdk import QuantSim

#: they write values for the grid alone
FOR_THE_GRID = sorted({*LAYERS, *BIASES, *GRADIENTS, "reestimate_batch_norm"})


class Block(nn.Module):
    """Pairs of layers that can be scaled, a BatchNorm that is not folded, and a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.ln, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.relu(self.norm(self.first(x))))
        return x + self.down(torch.relu(self.up(self.ln(x))))


def calibrated(seed: int = 0, *, fold: bool = False) -> tuple[QuantSim, Block, list[Tensor]]:
    torch.manual_seed(seed)
    model = Block()
    with torch.no_grad():
        for parameter in model.parameters():  # unlike channels, and biases that rounding moves
            parameter.mul_(torch.rand_like(parameter[..., :1]) * 4 + 0.1)
        model(torch.randn(64, 8))  # statistics
    batches = [torch.randn(32, 8) for _ in range(3)]
    sim = qsdk.quantize(model.eval(), batches[0], qsdk.w4a8(), fold_batch_norm=fold)
    qsdk.calibrate(sim, batches, progress=False)
    return sim, model, batches


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stored(sim: QuantSim) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in sim.model.named_parameters()}


def train(sim: QuantSim, x: Tensor) -> None:
    with sim.training() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", FOR_THE_GRID)
def test_after_a_verb_that_writes_for_the_grid_it_is_the_users_model_bit_for_bit(name: str):
    sim, model, batches = calibrated()
    before = stored(sim)
    VERBS[name](sim, batches, progress=False)
    if name in LAYERS or name in BIASES:
        assert not same(before, stored(sim)), "the verb has written nothing"
    assert same(state(sim.unwrap()), state(model))


@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_after_a_verb_that_changes_the_float_model_it_is_the_changed_one(name: str):
    sim, model, batches = calibrated()
    SCALINGS[name](sim, batches, progress=False)
    assert same(dict(sim.unwrap().named_parameters()), stored(sim))
    assert not same(state(sim.unwrap()), state(model))
    torch.testing.assert_close(sim.unwrap()(batches[0]), model(batches[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rounding", ["adaround", "gptq", "seq_mse", "correct_bias", "tune_blocks"])
def test_a_rounding_behind_a_scaling_leaves_the_scaled_model(rounding: str):
    sim, model, batches = calibrated()
    qsdk.smooth_quant(sim, batches, progress=False)
    scaled = state(sim.unwrap())
    VERBS[rounding](sim, batches, progress=False)
    assert same(state(sim.unwrap()), scaled)
    torch.testing.assert_close(sim.unwrap()(batches[0]), model(batches[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("online", [False, True])
def test_a_rotation_of_a_rounded_model_is_that_of_the_users(online: bool):
    model, x = model_and_input("llama")
    sim = qsdk.quantize(model, (x,), qsdk.w4a8())
    qsdk.calibrate(sim, [(x,)], progress=False)
    qsdk.correct_bias(sim, [(x,)], progress=False)
    qsdk.rotate(sim, [(x,)], online=online, progress=False)
    rotated = state(sim.unwrap())
    qsdk.gptq(sim, [(x,)], progress=False)
    assert same(state(sim.unwrap()), rotated)
    assert off(exact(sim.unwrap(), x), exact(model, x)) < 1e-5


def test_a_scaling_behind_shifts_of_biases_scales_the_users_biases():
    sim, model, batches = calibrated()
    qsdk.correct_bias(sim, batches, progress=False)
    qsdk.equalize(sim, batches, progress=False)
    torch.testing.assert_close(sim.unwrap()(batches[0]), model(batches[0]), rtol=1e-4, atol=1e-5)


def test_after_training_it_has_the_trained_values_and_roundings_behind_it_do_not_show():
    sim, _, batches = calibrated()
    qsdk.seq_mse(sim, batches, progress=False)
    train(sim, batches[0])
    trained = stored(sim)
    assert same(dict(sim.unwrap().named_parameters()), trained)
    qsdk.adaround(sim, batches, iterations=1, starts=1, progress=False)
    assert not same(stored(sim), trained)
    assert same(dict(sim.unwrap().named_parameters()), trained)


def test_weights_that_were_rounded_before_training_are_those_that_it_was_trained_with():
    sim, model, batches = calibrated()
    qsdk.adaround(sim, batches, iterations=1, starts=1, progress=False)
    with sim.training():
        pass  # nothing is trained
    assert same(state(sim.unwrap()), state(model))
    train(sim, batches[0])
    assert same(dict(sim.unwrap().named_parameters()), stored(sim))


def test_two_roundings_one_after_the_other_leave_the_users_model():
    sim, model, batches = calibrated()
    for verb in (qsdk.correct_bias, qsdk.gptq, qsdk.correct_bias, qsdk.seq_mse):
        verb(sim, batches, progress=False)
        assert same(state(sim.unwrap()), state(model))


def test_a_folded_batch_norm_is_in_it_and_a_shifted_bias_is_not():
    sim, model, batches = calibrated(fold=True)
    folded = state(sim.unwrap())
    qsdk.correct_bias(sim, batches, progress=False)
    assert same(state(sim.unwrap()), folded)
    torch.testing.assert_close(sim.unwrap()(batches[0]), model(batches[0]), rtol=1e-4, atol=1e-5)


def test_a_snapshot_a_copy_and_a_file_keep_what_it_is(tmp_path: Path):
    sim, model, batches = calibrated()
    qsdk.smooth_quant(sim, batches, progress=False)
    scaled, snapshot = state(sim.unwrap()), sim.snapshot(weights=True)
    qsdk.adaround(sim, batches, iterations=1, starts=1, progress=False)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    for other in (copy.deepcopy(sim), qsdk.load(tmp_path / "sim.qsdk", copy.deepcopy(model))):
        assert isinstance(other, QuantSim)
        assert same(stored(other), stored(sim))
        assert same(state(other.unwrap()), scaled)
    sim.restore(snapshot)
    assert same(state(sim.unwrap()), scaled)
    assert same(stored(sim), dict(sim.unwrap().named_parameters()))


def test_a_checkpoint_that_the_user_loads_over_rounded_weights_is_the_users():
    sim, model, batches = calibrated()
    qsdk.adaround(sim, batches, iterations=1, starts=1, progress=False)
    other = {name: value * 0.5 for name, value in model.state_dict().items() if value.is_floating_point()}
    sim.model.load_state_dict(other, strict=False)
    assert all(torch.equal(sim.unwrap().state_dict()[name], value) for name, value in other.items())


def test_a_verb_that_fails_leaves_what_it_is():
    sim, model, batches = calibrated()
    qsdk.correct_bias(sim, batches, progress=False)
    with pytest.raises(qsdk.DataError):
        qsdk.adaround(sim, [*batches, torch.full((32, 8), math.nan)], progress=False)
    assert same(state(sim.unwrap()), state(model))
