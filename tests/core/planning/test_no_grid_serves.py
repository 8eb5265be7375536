"""Tensors that no grid serves stay float with the reason: guarded divisors, angles of many turns, what is counted."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from float_files import float_onnx
from onnx import NodeProto, helper
from qdq_models import make_model, run
from torch import Tensor, nn
from torch_models import calibrated, seeded

import qsdk
from onnx_backend.opening.read_graph import read_graph
from qsdk import calibrate, check_parity, export, load, quantize, save, to_integer, w8a8
from qsdk.core.planning.lower_bounds import lower_bounds
from qsdk.core.planning.unquantizable import divisors
from qsdk.core.ranges.statistics import part_axes

DIVISOR = "a divisor that is never 0"
NEAR_ZERO = "a divisor, or what a logarithm reads"
ANGLE = "an angle of Sin or Cos"
COUNTED = "it becomes an integer"


def sims(model: nn.Module, *inputs: Tensor) -> list[Any]:
    """The model at both doors, calibrated on the inputs."""
    at_torch = calibrated(model, inputs)
    at_onnx = quantize(float_onnx(model, inputs), None, w8a8())
    calibrate(at_onnx, [tuple(x.numpy() for x in inputs)], progress=False)
    return [at_torch, at_onnx]


def outputs(sim: Any, *inputs: Tensor) -> np.ndarray:
    found = (
        sim(*inputs) if isinstance(sim.plan, object) and hasattr(sim, "model") else sim(*(x.numpy() for x in inputs))
    )
    return found.detach().numpy() if isinstance(found, Tensor) else found[0]


def reasons(sim: Any, start: str) -> list[str]:
    return [d.op_type for d in sim.plan.decisions.values() if d.reason.startswith(start) and not d.quantized]


def decibels(wanted: np.ndarray, found: np.ndarray) -> float:
    return 10 * math.log10(float(np.square(wanted).sum() / max(float(np.square(found - wanted).sum()), 1e-20)))


class Shares(nn.Module):
    """Divides each row by its sum, which a guard keeps above 0."""

    def __init__(self, guard: str) -> None:
        super().__init__()
        self.l, self.guard = nn.Linear(8, 8), guard

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.l(x))
        match self.guard:
            case "sum":
                return a / (a.sum(-1, keepdim=True) + 1e-5)
            case "reciprocal":
                return a * torch.reciprocal(a.sum(-1) + 1e-5).reshape(-1, 1)
            case "root":
                return a / torch.sqrt(a.square().mean(-1) + 1e-6).unsqueeze(-1).expand(-1, 8)
            case "clip":
                return a / a.sum(-1).clamp_min(1e-6).view(-1, 1)
            case "power":
                return a * (a.sum(-1, keepdim=True) + 1e-5) ** -0.5
        return torch.log(a + 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["sum", "reciprocal", "root", "clip", "power", "log"])
def test_a_guard_against_zero_keeps_its_effect(guard: str, tmp_path):
    model = Shares(guard).eval()
    with torch.no_grad():
        model.l.weight.copy_(seeded(8, 8))
        model.l.bias.fill_(-0.5)
    x = seeded(32, 8)
    x[0] = 0.0
    wanted = model(x).detach().numpy()
    for sim in sims(model, x):
        found = outputs(sim, x)
        assert np.isfinite(found).all()
        assert decibels(wanted, found) > (15 if guard == "log" else 20)
        assert reasons(sim, "never 0" if guard == "log" else DIVISOR)
    path = tmp_path / "model.onnx"
    export(sim, path)
    assert check_parity(sim, path, [x.numpy()], progress=False).summary["passed"]
    summary = to_integer(path, tmp_path / "model.int.onnx", data=[x.numpy()]).summary
    assert summary["float_tensors"] == 0
    assert summary["operations_max_lsb"] <= 1


class Ratio(nn.Module):
    """Divides one tensor by another."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x / (y * 2.0)


@pytest.mark.slow
def test_a_divisor_that_comes_near_zero_is_left_float_by_the_calibration(tmp_path):
    x, y = seeded(64, 4), torch.linspace(1e-3, 10.0, 256).reshape(64, 4)
    wanted = Ratio()(x, y).numpy()
    for sim in sims(Ratio(), x, y):
        assert set(reasons(sim, NEAR_ZERO)) == {"Mul", "Input"}
        assert np.isfinite(outputs(sim, x, y)).all()
        assert decibels(wanted, outputs(sim, x, y)) > 30
        calibrate(sim, [(x.numpy(), y.numpy()) if not hasattr(sim, "model") else (x, y)], progress=False)
        assert set(reasons(sim, NEAR_ZERO)) == {"Mul", "Input"}
    sim = sims(Ratio(), x, y)[0]
    sim.set_precision("div.0", activation="uint16")  # plans again
    assert set(reasons(sim, NEAR_ZERO)) == {"Mul", "Input"}
    save(sim, tmp_path / "ratio.sim")
    again = load(tmp_path / "ratio.sim", Ratio())
    assert torch.equal(again(x, y), sim(x, y))


def test_a_divisor_far_from_zero_is_quantized():
    x, y = seeded(64, 4), torch.linspace(1.0, 2.0, 256).reshape(64, 4)
    for sim in sims(Ratio(), x, y):
        assert not reasons(sim, NEAR_ZERO)
        assert all(d.quantized for d in sim.plan.decisions.values() if d.op_type in ("Mul", "Input"))


@pytest.mark.parametrize(("exponents", "divided"), [([-1.0, 2.0], ["x"]), ([1.0, 2.0], [])])
def test_a_power_divides_where_one_of_its_exponents_is_negative(exponents, divided):
    power = helper.make_node("Pow", ["x", "e"], ["y"])
    graph = read_graph(make_model([power], {"x": [3, 2]}, {"y": [3, 2]}, {"e": np.array(exponents, np.float32)}))
    assert [graph.tensors[tensor].name for tensor in divisors(graph)] == divided


class Features(nn.Module):
    """Sines of a moment times frequencies, as time embeddings have them, and a layer."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.head, self.spelling = nn.Linear(16, 4), spelling
        self.register_buffer("frequencies", 10000.0 ** -torch.linspace(0, 1, 16))

    def forward(self, t: Tensor) -> Tensor:
        if self.spelling == "outer":
            return self.head(torch.sin(t @ self.frequencies[None]))
        angles = t * self.frequencies
        return self.head(torch.sin(angles.reshape(-1, 16) + 0.25))


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["product", "outer"])
def test_angles_of_many_turns_are_left_float_by_the_calibration(spelling: str, tmp_path):
    torch.manual_seed(0)
    model, t = Features(spelling).eval(), torch.linspace(0, 50000, 64).reshape(-1, 1)
    wanted = model(t).detach().numpy()
    for sim in sims(model, t):
        assert "Input" in reasons(sim, ANGLE)
        assert decibels(wanted, outputs(sim, t)) > 30
        assert all(d.quantized for d in sim.plan.decisions.values() if d.op_type in ("Sin", "Gemm"))
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", [t.numpy()], progress=False).summary["passed"]


@pytest.mark.parametrize("product", ["Mul", "MatMul"])
@pytest.mark.parametrize(("largest", "frequency", "reason"), [(50000.0, 1e-4, ""), (5.0, 1e3, ANGLE), (5.0, 1.0, "")])
def test_an_angle_turns_by_the_step_of_its_coordinate_times_the_frequency(largest, frequency, reason, product):
    nodes = [helper.make_node(product, ["t", "f"], ["a"]), helper.make_node("Sin", ["a"], ["y"])]
    model = make_model(nodes, {"t": [64, 1]}, {"y": [64, 1]}, {"f": np.full((1, 1), frequency, np.float32)})
    sim = quantize(model, None, w8a8())
    calibrate(sim, [np.linspace(0, largest, 64, dtype=np.float32).reshape(-1, 1)], progress=False)
    decision = next(d for d in sim.plan.decisions.values() if d.kind == "input")
    assert (decision.reason.startswith(ANGLE), decision.quantized) == (bool(reason), not reason)


@pytest.mark.slow
def test_angles_of_less_than_a_turn_are_quantized():
    t = torch.linspace(-1, 1, 64).reshape(-1, 1)
    for sim in sims(Features("product").eval(), t):
        assert not reasons(sim, ANGLE)
        assert all(d.quantized for d in sim.plan.decisions.values() if d.op_type in ("Mul", "Input"))


class Buckets(nn.Module):
    """Looks up the logarithm of a distance that comes as a number, as relative positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 4)

    def forward(self, distance: Tensor) -> Tensor:
        return self.table((torch.log(distance / 4.0 + 1.0) / math.log(2.0) * 5.0).to(torch.int64))


def test_what_becomes_an_index_is_computed_in_float():
    model, distance = Buckets().eval(), torch.arange(1000, dtype=torch.float32)
    wanted = model(distance).detach().numpy()
    for sim in sims(model, distance):
        assert "Input" in reasons(sim, COUNTED)
        assert decibels(wanted, outputs(sim, distance)) > 30
        assert sim.plan.decisions["table:weight" if hasattr(sim, "model") else next(iter(sim.encodings))].quantized


class Spread(nn.Module):
    """Adds the standard deviation of each row, of which a guard keeps the root's slope finite."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self.l, self.root = nn.Linear(6, 6), root

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        squares = (y - y.mean(1, keepdim=True)).pow(2).sum(1, keepdim=True)
        return y + (squares.clamp(1e-12).sqrt() if self.root == "clamp" else (squares + 1e-5).pow(0.5))


@pytest.mark.slow
@pytest.mark.parametrize("root", ["clamp", "power"])
def test_a_root_of_what_a_guard_keeps_above_0_has_finite_gradients(root: str):
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    model = Spread(root).eval()
    with torch.no_grad():
        model.l.weight[:] = model.l.weight[:1]  # all spreads are those of the biases, far below a step of 8 bits
        model.l.bias[:] = 1e-4 * torch.randn(6)
    x[1:] = 100 * x[1:]
    for sim in sims(model, x):
        assert reasons(sim, "never 0, and a root reads it")
        assert np.isfinite(outputs(sim, x)).all()
    sim = calibrated(model, (x,))
    with sim.training(learn_scales=True) as trained:
        trained(x).square().mean().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in trained.parameters())


class HiddenByInfinity(nn.Module):
    """The sums over segments of a state space model, and the maximum over what a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        decay = self.first(x).cumsum(-1)
        between = decay[..., :, None] - decay[..., None, :]
        below = torch.ones(6, 6, dtype=torch.bool).tril()
        weights = torch.exp(between.masked_fill(~below, -torch.inf).transpose(-1, -2).clamp(max=0.0))
        return self.last(weights.mean(-1) + between.masked_fill(~below, -torch.inf).amax(-1))


@pytest.mark.slow
def test_what_a_mask_of_minus_infinity_hides_is_float_and_the_rest_is_calibrated(tmp_path):
    torch.manual_seed(0)
    model, x = HiddenByInfinity().eval(), torch.randn(16, 6)
    wanted = model(x).detach().numpy()
    for sim in sims(model, x):
        assert reasons(sim, "the model writes an infinity into it")[:3] == ["Where", "Transpose", "Clip"]
        assert decibels(wanted, outputs(sim, x)) > 25
        qsdk.export(sim, tmp_path / "model.onnx")
        assert qsdk.check_parity(sim, tmp_path / "model.onnx", [(x,)], progress=False).summary["passed"]


def test_infinities_in_the_data_are_refused_as_before():
    sim = qsdk.quantize(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.randn(4, 6))
    with pytest.raises(qsdk.DataError, match="NaN or inf at the site input:input in batch 0"):
        qsdk.calibrate(sim, [torch.full((4, 6), torch.inf)], progress=False)


# --- lower bounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grids", [{}, {"below": (0.5, 255)}, {"most": (0.25, 128)}, {"powers": (0.3, 1)}])
def test_the_exponentials_of_a_softmax_add_up_to_1_as_far_as_grids_leave_it(grids):
    grids, stored = {"scores": (0.25, 128), **grids}, {"axes": np.array([1])}
    nodes: list[NodeProto] = []

    def op(op_type: str, *inputs: str, grid: str) -> str:
        nodes.append(helper.make_node(op_type, inputs, [grid]))
        if grid not in grids:
            return grid
        ends = [f"{grid}.scale", f"{grid}.zero"]
        stored.update(dict(zip(ends, (np.float32(grids[grid][0]), np.uint8(grids[grid][1])), strict=True)))
        nodes.append(helper.make_node("QuantizeLinear", [grid, *ends], [f"{grid}.codes"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{grid}.codes", *ends], [f"{grid}.values"]))
        return f"{grid}.values"

    x = op("Identity", "x", grid="scores")
    below = op("Sub", x, op("ReduceMax", x, "axes", grid="most"), grid="below")
    op("ReduceSum", op("Exp", below, grid="powers"), "axes", grid="y")
    model = make_model(nodes, {"x": [8, 6]}, {"y": [8, 1]}, stored)
    graph = read_graph(model)
    (bound,) = (low for t, low in lower_bounds(graph).items() if graph.tensors[t].name == "y")
    far = np.random.default_rng(0).normal(0, 40, (8, 6)).astype(np.float32)
    assert 0.8 < bound <= run(model, {"x": far})[0].min() * (1 + 1e-6)


# --- parts that share a grid with much larger ones -------------------------------------------------------------------


class NoMemory(nn.Module):
    """Joins memory tokens to its input, of which it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.memory = nn.Linear(4, 4), nn.Parameter(torch.zeros(1, 0, 4))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory.expand(len(x), -1, -1) * 2
        return self.last(torch.cat([memory, x], 1)) + memory.sum()


def test_a_tensor_without_elements_stays_float():
    x = seeded(2, 3, 4)
    for sim in sims(NoMemory(), x):
        calibrate(sim, [x if hasattr(sim, "model") else x.numpy()], progress=False)
        rows = [row for row in sim.coverage().rows if row["reason"] == "it has no elements"]
        assert {row["state"] for row in rows} == {"float"}


class InOneTensor(nn.Module):
    """Boxes and scores that enter as one tensor."""

    def forward(self, x: Tensor) -> Any:
        return x[..., :4] * 0.5, x[..., 4:].relu()


class JoinedInside(nn.Module):
    """Large values and a score that a Linear reads as one tensor."""

    def __init__(self, gain: float = 1000.0) -> None:
        super().__init__()
        self.boxes, self.score, self.last = nn.Linear(8, 4), nn.Linear(8, 1), nn.Linear(5, 3)
        self.boxes.weight.data *= gain

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.boxes(x), self.score(x).sigmoid()], -1))


def notes_of(sim: Any, x: Tensor) -> dict[str, str]:
    report = calibrate(sim, [x if hasattr(sim, "model") else x.numpy()], progress=False)
    found = {row["site"]: row["note"] for row in report.rows if re.search("lost|coarse", row.get("note", ""))}
    assert report.summary.get("erased_parts", 0) == len(found)
    return found


def test_calibrate_names_the_columns_of_an_input_that_a_shared_grid_erases():
    x = torch.cat([seeded(2, 6, 4).abs() * 200, seeded(2, 6, 1).sigmoid()], -1)
    for sim in sims(InOneTensor(), x):
        ((site, note),) = notes_of(sim, x).items()
        assert site == "x:input"
        assert re.match(r"what it holds at 4 of axis 2 \(up to 0\.\d+\) lies within one step of .* and is lost", note)
        assert "config.override('x', activation=\"uint16\"), or give it as an input of its own" in note
        assert sim.set_precision("x", activation="uint16").rows
        assert notes_of(sim, x) == {}


@pytest.mark.slow
def test_calibrate_names_the_part_of_a_concat_that_a_shared_grid_erases():
    x = seeded(4, 8)
    for config in (w8a8(), w8a8().override("cat*", tie=False)):
        sim = quantize(JoinedInside(), x, config)
        ((site, note),) = notes_of(sim, x).items()
        assert site == "cat.0:output"
        assert note.startswith("its part sigmoid.0:output (up to 0.")
        assert note.endswith("config.override('cat.0', activation=\"uint16\"), or config.skip('cat.0')")
    for config in (w8a8().override("cat.0", activation="uint16"), w8a8().skip("cat.0")):
        assert notes_of(quantize(JoinedInside(), x, config), x) == {}


@pytest.mark.slow
def test_calibrate_names_what_keeps_few_steps_of_a_shared_or_fixed_range():
    x = seeded(4, 8)
    ((_, note),) = notes_of(quantize(JoinedInside(40.0), x), x).items()
    assert re.match(r"its part sigmoid\.0:output \(up to 0\.\d+\) lies within [234] steps of .* and is coarse: ", note)
    assert notes_of(quantize(JoinedInside(10.0), x), x) == {}
    small = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    with torch.no_grad():
        small[0].weight.mul_(1e-3), small[0].bias.zero_()
    ((site, note),) = notes_of(quantize(small, x), x).items()
    assert site == "1:output"
    assert note.startswith("what it holds (up to 0.00")
    assert note.endswith('config.override(\'1\', activation="uint16"), or fixed_range="observed" in its place')
    assert notes_of(quantize(small, x, w8a8().override("1", fixed_range="observed")), x) == {}


class MaskedExp(nn.Module):
    """The exponential of what a mask hides by a large number."""

    def __init__(self, hidden: float) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(8, 8), hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).masked_fill(torch.eye(8, dtype=torch.bool)[:4], self.hidden).exp()


@pytest.mark.slow
def test_calibrate_names_values_that_the_constant_of_a_mask_erases():
    x = seeded(4, 8)
    ((site, note),) = notes_of(quantize(MaskedExp(-1e9), x), x).items()
    assert site == "masked_fill.0:output"
    assert re.match(r"its part first:output \(up to .*\) lies within one step of .* and is lost", note)
    assert note.endswith("or config.skip('masked_fill.0'), or minus infinity in a mask")
    for hidden in (-10.0, -torch.inf):
        assert notes_of(quantize(MaskedExp(hidden), x), x) == {}


@pytest.mark.parametrize(
    ("shape", "axes"), [((4,), []), ((4, 3), [1]), ((4, 1), []), ((2, 6, 5), [1, 2]), ((2, 3, 8, 8), [1])]
)
def test_which_axes_of_an_input_may_hold_parts(shape: tuple[int, ...], axes: list[int]):
    assert part_axes(shape) == axes
