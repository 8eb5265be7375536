"""Torch's number of threads inside and behind work on small tensors."""

from collections.abc import Iterator

import pytest
import torch
from random_problems import problem_of

from qsdk import int4
from qsdk.algorithms.solvers import seq_mse
from qsdk.algorithms.solvers.on_torch import SMALL, one_thread_for
from qsdk.core.layers.layer_problem import WeightLayout
from qsdk.core.numerics.spec import PerBlock, Spec


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == request.param


def test_only_small_tensors_of_a_processor_keep_to_one_thread(threads: int) -> None:
    with one_thread_for(torch.zeros(SMALL)):
        assert torch.get_num_threads() == 1
    for other in (torch.zeros(SMALL + 1), torch.zeros(2, device="meta")):
        with one_thread_for(other):
            assert torch.get_num_threads() == threads


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_number_is_restored_behind_an_error(threads: int, error: type[BaseException]) -> None:
    with pytest.raises(error), one_thread_for(torch.zeros(1)):
        raise error
    assert torch.get_num_threads() == threads


def test_small_blocks_are_searched_on_one_thread(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    best_of = seq_mse.best_of
    monkeypatch.setattr(seq_mse, "best_of", lambda *args: seen.append(torch.get_num_threads()) or best_of(*args))
    seq_mse.solve(problem_of(WeightLayout("linear", (8, 64)), Spec(int4, PerBlock(1, 16))))
    assert seen == [1] * 4
