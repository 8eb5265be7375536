"""SeqMSE and AdaRound on whole sims of an nn.Module."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsdk import CalibrationError, DataError, QuantConfig, QuantSim, Report, calibrate, float16, quantize, w4a8
from qsdk.algorithms.problems.gather import GatherOptions
from qsdk.algorithms.solvers import adaround, seq_mse
from qsdk.core.layers.layer_problem import LayerProblem, Solution, Solver
from qsdk.core.run_options import Forward, Run
from qsdk.verbs.layers import solve_each_layer as solve_layers


class Net(nn.Module):
    """One of each kind of layer, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect")
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8)
        self.twice = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.head = nn.Linear(36, 5)
        for module in self.children():
            # torch's own initialisation makes five layers nearly constant
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Give [N, 5]."""
        x = F.relu(self.depthwise(F.relu(self.conv(x))))
        x = F.relu(self.twice(F.relu(self.twice(x))))
        x = F.relu(self.up(x))
        return self.head(F.avg_pool2d(x, 4).flatten(1))


SITES = [f"{name}:weight" for name in ("conv", "depthwise", "twice", "up", "head")]


def data(seed: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, 12, 12, generator=generator).cumsum(-1) / 3 for n in [8] * (count - 1) + [5]]


def sim_of(model: nn.Module, batches: list[Any], config: QuantConfig | None = None) -> QuantSim:
    sim = quantize(model, batches[0], config or w4a8())
    assert isinstance(sim, QuantSim)
    calibrate(sim, batches, progress=False)
    return sim


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(1)
    return Net().eval()


@pytest.fixture(scope="module")
def calibrated(model: nn.Module) -> QuantSim:
    return sim_of(model, data(1))


@pytest.fixture
def sim(calibrated: QuantSim) -> QuantSim:
    return copy.deepcopy(calibrated)


def solve_each_layer(
    sim: QuantSim, batches: Any, solver: Solver, *, seed: int = 0, forward: Forward | None = None, **options: Any
) -> Report:
    run = Run(forward=forward, progress=False, seed=seed)
    return solve_layers(sim, batches, solver, "Solve", "solve", run, {}, **options)


def state(sim: QuantSim) -> dict[str, Any]:
    frozen = {site: quantizer.frozen for site, quantizer in sim.quantizers.items()}
    return {**{name: t.clone() for name, t in sim.model.state_dict().items()}, **frozen, "mode": sim.model.training}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(v, other[k]) if isinstance(v, Tensor) else v == other[k] for k, v in one.items())


def held_out_error(sim: QuantSim, model: nn.Module) -> float:
    x = torch.cat(data(9))
    with torch.no_grad():
        reference = model(x)
    return float((sim(x) - reference).square().sum() / (reference - reference.mean(0)).square().sum())


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [None, 2])
@pytest.mark.parametrize("solver", [seq_mse.solve, adaround.solve])
def test_every_layer_gets_better_in_order(model: nn.Module, solver: Solver, block_size: int | None) -> None:
    sim = sim_of(model, data(1), w4a8(block_size=block_size))
    report = solve_each_layer(sim, data(1), solver)
    assert [row["site"] for row in report.rows] == SITES
    for row in report.rows:
        assert row["error_after"] <= row["error_before"] < 1, row
        assert row["seconds"] > 0
        assert row["note"] == ""
    assert (report.summary["layers"], report.summary["left"]) == (5, 0)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [seq_mse.solve, adaround.solve])
def test_the_network_gets_better_on_unseen_data(model: nn.Module, sim: QuantSim, solver: Solver) -> None:
    before = held_out_error(sim, model)
    solve_each_layer(sim, data(1), solver)
    assert held_out_error(sim, model) < 0.8 * before


@pytest.mark.slow
def test_seq_mse_moves_ranges_and_biases_and_adaround_weights_only(sim: QuantSim) -> None:
    weights = {site: p.detach().clone() for site, p in sim.model.named_parameters()}
    ranges = dict(sim.encodings)
    solve_each_layer(sim, data(1), seq_mse.solve)
    moved = {name for name, p in sim.model.named_parameters() if not torch.equal(p, weights[name])}
    assert moved <= {site.replace(":weight", ".bias") for site in SITES}  # they take up the mean error
    changed = {site for site, encoding in sim.encodings.items() if encoding != ranges[site]}
    assert {site for site in changed if site.endswith("weight")} <= set(SITES)
    assert changed & set(SITES)
    ranges = dict(sim.encodings)
    solve_each_layer(sim, data(1), adaround.solve)
    assert sim.encodings == ranges
    for site in SITES:
        raw = sim.model.get_parameter(site.replace(":", ".")).detach().numpy()
        assert np.array_equal(ranges[site].fake_quantize(raw), raw)
        assert sim.quantizers[site].frozen


def test_rounded_weights_survive_a_second_calibration(sim: QuantSim) -> None:
    solve_each_layer(sim, data(1), adaround.solve)
    found = {site: sim.encodings[site] for site in SITES}
    calibrate(sim, data(2), progress=False)
    assert {site: sim.encodings[site] for site in SITES} == found


def test_inputs_are_the_float_models_and_the_simulations(model: nn.Module, sim: QuantSim) -> None:
    """The moments of a later layer see float inputs of the untouched model, quantized ones of the solved one."""
    seen: dict[str, LayerProblem] = {}

    def recording(problem: LayerProblem) -> Solution:
        seen[problem.site] = problem
        problem.energy  # now: its weight is the model's own, into which the rounded one is copied in the end
        return adaround.solve(problem)

    solve_each_layer(sim, data(1), recording, gathers=GatherOptions(held_back=0))

    def inputs(of: nn.Module, call: Any) -> Tensor:
        found: list[Tensor] = []
        handle = of.get_submodule("head").register_forward_pre_hook(lambda _, args: found.append(args[0]))
        for batch in data(1):
            call(batch)
        handle.remove()
        return torch.cat(found)

    with torch.no_grad():
        x, x_quantized = inputs(model, model), inputs(sim.model, sim)
    head = seen["head:weight"]
    weight = model.get_parameter("head.weight").detach()
    torch.testing.assert_close(head.energy[0], (x @ weight.T).square().sum(0))
    torch.testing.assert_close(head.drift[0], ((x - x_quantized) @ weight.T).square().sum(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(head.g_quantized[0], x_quantized.T @ x_quantized)
    assert seen["twice:weight"].rows > seen["up:weight"].rows / 2


@pytest.mark.slow
def test_the_same_seed_gives_the_same_sim(calibrated: QuantSim) -> None:
    sims = [copy.deepcopy(calibrated) for _ in range(3)]
    for sim, seed in zip(sims, (1, 1, 2), strict=True):
        solve_each_layer(sim, data(1), adaround.solve, seed=seed)
    assert_same(state(sims[0]), state(sims[1]))
    assert any(
        not torch.equal(a, b) for a, b in zip(sims[0].model.parameters(), sims[2].model.parameters(), strict=True)
    )


def test_the_callers_model_and_the_parameters_identity_stay(model: nn.Module, sim: QuantSim) -> None:
    before = copy.deepcopy(model.state_dict())
    parameters = [(p, p.data_ptr()) for p in sim.model.parameters()]
    solve_each_layer(sim, data(1), adaround.solve)
    assert [(p, p.data_ptr()) for p in sim.model.parameters()] == parameters
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.slow
def test_a_failure_leaves_the_sim_as_it_was(sim: QuantSim) -> None:
    sim.model.train()
    before, output = state(sim), sim(data(1)[0])
    solver_calls: list[str] = []

    def failing(problem: LayerProblem) -> Solution:
        solver_calls.append(problem.site)
        if len(solver_calls) == 4:
            raise KeyboardInterrupt
        return adaround.solve(problem)

    with pytest.raises(KeyboardInterrupt):
        solve_each_layer(sim, data(1), failing)
    assert_same(before, state(sim))
    assert torch.equal(sim(data(1)[0]), output)
    solve_each_layer(sim, data(1), seq_mse.solve)
    assert sim.model.training


def test_bad_data_is_named_and_changes_nothing(sim: QuantSim) -> None:
    before = state(sim)
    bad = data(1)
    bad[1][0, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="conv:weight, batch 1: the layer's input holds NaN"):
        solve_each_layer(sim, bad, adaround.solve)
    with pytest.raises(DataError, match="holds no batch"):
        solve_each_layer(sim, [], adaround.solve)
    assert_same(before, state(sim))


@pytest.mark.spread(1)
@pytest.mark.parametrize("solver", [seq_mse.solve, adaround.solve])
def test_inputs_whose_squares_are_beyond_float32_are_an_error(solver: Solver) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3) * 1e20,)]
    sim = sim_of(nn.Linear(3, 2), batches)
    with pytest.raises(DataError, match=r"weight: its inputs reach .*e\+20, and float32 cannot add up"):
        solve_each_layer(sim, batches, solver)


@pytest.mark.slow
def test_an_uncalibrated_sim_is_refused(model: nn.Module) -> None:
    sim = quantize(model, data(1)[0], w4a8())
    with pytest.raises(CalibrationError, match="call qsdk"):
        solve_each_layer(sim, data(1), seq_mse.solve)  # type: ignore[arg-type]


def test_labels_go_through_forward(sim: QuantSim) -> None:
    labelled = [(batch, torch.zeros(len(batch))) for batch in data(1)]
    report = solve_each_layer(sim, labelled, seq_mse.solve, forward=lambda m, b: m(b[0]))
    assert report.summary["layers"] == 5


class OddLinear(nn.Linear):
    """What it multiplies its weight with is not its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Give [..., out]."""
        return F.linear(input.abs(), self.weight, self.bias)


class Odd(nn.Module):
    """Weights that no solver can take, each for its own reason."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.narrow = nn.Linear(6, 6)
        self.odd = OddLinear(6, 6)
        self.plain = nn.Linear(6, 6)
        self.loose = nn.Parameter(torch.randn(6, 6) / 3)
        self.output = nn.Linear(6, 7, bias=False)
        self.output.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Give [N, T, 7]."""
        x = self.narrow(self.table(tokens))
        x = self.plain(self.odd(x))
        return self.output(F.linear(x, self.loose))


@pytest.mark.slow
def test_layers_that_cannot_be_solved_are_listed_with_the_reason() -> None:
    torch.manual_seed(0)
    batches = [(torch.randint(7, (4, 5)),) for _ in range(3)]
    sim = sim_of(Odd().eval(), batches, w4a8().skip("narrow", dtype=float16))
    report = solve_each_layer(sim, batches, adaround.solve)
    notes = {row["site"]: row["note"] for row in report.rows}
    weights = {site for site, decision in sim.plan.decisions.items() if decision.kind == "weight"}
    assert notes.keys() == weights
    assert notes["plain:weight"] == ""
    assert notes["narrow:weight"] == "float: kept float16 by a rule"
    assert notes["self:loose"] == notes["odd:weight"] == ""
    assert notes["table:weight"] == "its encoding is shared by output:weight"
    assert notes["output:weight"] == "shares the encoding of table:weight"
    assert (report.summary["layers"], report.summary["left"]) == (3, len(weights) - 3)


def test_a_layer_that_is_called_again_needs_the_data_again(sim: QuantSim) -> None:
    with pytest.raises(DataError, match="twice:weight, which a batch calls several times, reads the data several"):
        solve_each_layer(sim, iter(data(1)), seq_mse.solve)
