"""The driver of layer solvers, on a walk that needs no model: what it gathers, writes, reports and takes up again."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_walk import FakeWalk
from layer_walks import WIDTH, plain_walk
from torch import Tensor

from qsdk import ConfigError, DataError
from qsdk.algorithms.problems.gather import GatherOptions
from qsdk.algorithms.solve_layers import solve_layers
from qsdk.algorithms.solvers import seq_mse
from qsdk.core.layers.layer_problem import LayerProblem, Solution


def run(walk: FakeWalk, solver: Callable[[LayerProblem], Solution] = seq_mse.solve, **options: Any) -> Any:
    return solve_layers(walk, solver, title="Solve", progress=False, **options)


def nothing(problem: LayerProblem) -> Solution:
    return Solution(problem.encoding, None, 1.0, 1.0)


def recorded(walk: FakeWalk, gathers: GatherOptions) -> dict[str, LayerProblem]:
    seen: dict[str, LayerProblem] = {}

    def recording(problem: LayerProblem) -> Solution:
        seen[problem.site] = problem
        return nothing(problem)

    run(walk, recording, gathers=gathers)
    return seen


def inputs_of(walk: FakeWalk, stage: int) -> tuple[list[Tensor], list[Tensor]]:
    steps = [step.inputs() for step in walk]
    exact, now = zip(*steps[stage], strict=True)
    return list(exact), list(now)


def test_it_solves_in_order_and_reports() -> None:
    walk = plain_walk(left={"embedding:weight": "float: a rule"})
    report = run(walk)
    assert [row["site"] for row in report.rows] == [*(each.site for each in walk.layers), "embedding:weight"]
    assert all(row["error_after"] <= row["error_before"] for row in report.rows[:4])
    assert report.rows[-1]["note"] == "float: a rule"
    assert report.summary["layers"] == 4
    assert report.summary["left"] == 1
    assert report.summary["passes"] == pytest.approx(report.summary["seconds"] / 1e-3)
    changed = [row["site"] for row in report.rows[:4] if row["error_after"] < row["error_before"]]
    assert walk.written == changed
    assert len(changed) >= 3


def test_a_later_layer_sees_what_was_written_before_it() -> None:
    walk = plain_walk()
    run(walk)
    seen = recorded(walk, GatherOptions(held_back=0))["head:weight"]
    exact, now = (torch.cat(parts) for parts in inputs_of(walk, 2))
    torch.testing.assert_close(seen.g_quantized[0], now.T @ now, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen.drift[0], ((exact - now) @ seen.weight[0].T).square().sum(0))
    torch.testing.assert_close(seen.energy[0], (exact @ seen.weight[0].T).square().sum(0))
    torch.testing.assert_close(seen.linear_term[0], seen.weight[0] @ ((now - exact).T @ now))
    torch.testing.assert_close(seen.mean[0], exact.mean(0))
    torch.testing.assert_close(seen.mean_quantized[0], now.mean(0))
    assert seen.rows == seen.count == 7 * 16 + 5


def test_layers_of_a_step_share_their_second_moments() -> None:
    seen = recorded(plain_walk(), GatherOptions())
    assert seen["left:weight"].g_quantized is seen["right:weight"].g_quantized
    assert seen["one:weight"].bias is not None
    assert seen["head:weight"].bias is None


@pytest.mark.parametrize(("batches", "held_back"), [(8, [3, 7]), (2, None)])
def test_every_fourth_batch_is_held_back_and_every_fourth_row_of_few_batches(
    batches: int, held_back: list[int] | None
) -> None:
    walk = plain_walk(batches=batches)
    problem = recorded(walk, GatherOptions(held_back=4))["one:weight"]
    if held_back is None:
        every = torch.cat(list(walk.data))
        kept = torch.arange(len(every)) % 4 == 3
        mine, others = every[~kept], every[kept]
    else:
        mine = torch.cat([x for number, x in enumerate(walk.data) if number not in held_back])
        others = torch.cat([walk.data[number] for number in held_back])
    assert problem.held_back is not None
    torch.testing.assert_close(problem.g_quantized[0], mine.T @ mine)
    torch.testing.assert_close(problem.held_back.g_quantized[0], others.T @ others)
    assert (problem.rows, problem.held_back.rows) == (len(mine), len(others))


def test_means_alone_and_samples_where_a_solver_wants_them() -> None:
    walk = plain_walk()
    problem = recorded(walk, GatherOptions(second_moments=False, samples=20, held_back=0))["head:weight"]
    exact, now = (torch.cat(parts) for parts in inputs_of(walk, 2))
    assert problem.samples is not None
    assert [tuple(part.shape) for part in problem.samples] == [(1, 20, WIDTH)] * 2
    for part, whole in zip(problem.samples, (exact, now), strict=True):
        assert all(bool((whole == row).all(1).any()) for row in part[0])
    torch.testing.assert_close(problem.mean[0], exact.mean(0))
    with pytest.raises(Exception, match="head:weight: the second moments of its inputs were not gathered"):
        problem.errors(problem.weight)


def test_a_shift_and_a_weight_are_written_in_their_stored_shape() -> None:
    walk = plain_walk(numpy=True)

    def solver(problem: LayerProblem) -> Solution:
        rounded = torch.from_numpy(problem.encoding.fake_quantize(problem.weight[0].numpy()))[None]
        return Solution(problem.encoding, rounded, 1, 0.5, bias_shift=torch.full((1, WIDTH), 2.0))

    run(walk, solver)
    assert isinstance(walk.quantized["one:weight"], np.ndarray)
    assert walk.quantized["one:weight"].shape == (WIDTH, WIDTH)
    assert walk.shifts["head:weight"].tolist() == [2.0] * WIDTH
    assert walk.encodings["one:weight"].frozen


def test_numpy_and_torch_inputs_give_the_same() -> None:
    one, other = plain_walk(), plain_walk(numpy=True)
    assert run(one).rows[3]["error_after"] == run(other).rows[3]["error_after"]
    assert one.encodings == other.encodings


def test_what_a_solver_leaves_is_not_written() -> None:
    walk = plain_walk()
    report = run(walk, lambda problem: replace(nothing(problem), note="frozen" if problem.site == "one:weight" else ""))
    assert walk.written == []
    assert (report.summary["layers"], report.summary["left"]) == (3, 1)


def test_a_layer_without_inputs_is_left() -> None:
    walk = plain_walk()
    walk.data = []
    report = run(walk)
    assert {row["note"] for row in report.rows} == {"no batch reaches it"}
    assert report.summary["layers"] == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinities_are_named_with_the_layer_and_the_batch(value: float) -> None:
    walk = plain_walk()
    walk.data[3][2, 1] = value
    with pytest.raises(DataError, match="one:weight, batch 3: the layer's input holds NaN or an infinity"):
        run(walk)
    assert walk.written == []


def test_an_input_of_another_width_is_refused() -> None:
    walk = plain_walk()
    walk.data = [torch.zeros(2, WIDTH + 1)]
    with pytest.raises(DataError, match=r"one:weight, batch 0: an input of \(2, 7\) does not fit a weight with 6"):
        run(walk)


class Stop:
    """A solver that stops at its n-th call, and counts them."""

    def __init__(self, at: int = 99) -> None:
        self.at, self.calls = at, 0

    def __call__(self, problem: LayerProblem) -> Solution:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return seq_mse.solve(problem)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = plain_walk()
    wanted = run(whole, Stop())
    with pytest.raises(KeyboardInterrupt):
        run(plain_walk(), Stop(at=4), checkpoint=tmp_path / "run")
    solver, walk = Stop(), plain_walk()
    report = run(walk, solver, checkpoint=tmp_path / "run")
    assert solver.calls == 1  # the head alone
    assert walk.encodings == whole.encodings
    assert [row["error_after"] for row in report.rows] == [row["error_after"] for row in wanted.rows]
    again = Stop()
    run(plain_walk(), again, checkpoint=tmp_path / "run")
    assert again.calls == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"candidates": 10}}, "candidates: 20 there, 10 here"),
        ({"seed": 5}, "seed: 0 there, 5 here"),
        ({"weights": True}, "left:weight: .* weight .* there, .* here"),
        ({"data": True}, "the float input of one:weight is not the same: other data"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    options = {"candidates": 20}
    run(plain_walk(), checkpoint=tmp_path, options=options)
    walk = plain_walk(seed=1 if "data" in change else 0)
    if "weights" in change:
        walk.weights["left:weight"] = walk.weights["left:weight"] * 2
    given = {"options": options, **{name: value for name, value in change.items() if name in ("options", "seed")}}
    with pytest.raises(ConfigError, match=message):
        run(walk, checkpoint=tmp_path, **given)
    assert walk.written == []


def test_a_checkpoint_keeps_weights_and_shifts(tmp_path: Path) -> None:
    def solver(problem: LayerProblem) -> Solution:
        rounded = torch.from_numpy(problem.encoding.fake_quantize(problem.weight[0].numpy()))[None]
        return Solution(problem.encoding, rounded, 1, 0.5, bias_shift=torch.full((1, WIDTH), 0.5))

    one, other = plain_walk(), plain_walk()
    run(one, solver, checkpoint=tmp_path)
    run(other, partial(pytest.fail, "nothing is left to solve"), checkpoint=tmp_path)
    assert one.encodings == other.encodings
    assert all(torch.equal(one.quantized[site], other.quantized[site]) for site in one.quantized)
    assert all(torch.equal(one.shifts[site], other.shifts[site]) for site in one.shifts)
