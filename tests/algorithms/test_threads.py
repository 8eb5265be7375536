"""Independent work on threads of its own: results, errors, and torch's number of threads afterwards."""

import threading
from collections.abc import Iterator

import pytest
import torch

from qsdk.algorithms.problems.moments import Bounds, Moments, Sums
from qsdk.algorithms.threads import SMALL, one_thread_for, side_by_side

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def test_tasks_run_on_threads_of_their_own_with_one_of_torch_each(threads: int) -> None:
    begun = threading.Barrier(threads, timeout=30)

    def task(number: int) -> tuple[int, int, bool, int]:
        begun.wait()  # all of them at the same time, or the barrier breaks
        return number, torch.get_num_threads(), torch.is_inference_mode_enabled(), threading.get_ident()

    with torch.inference_mode():
        found = side_by_side([lambda at=at: task(at) for at in range(threads)], CPU)  # type: ignore[misc]
    assert [each[:3] for each in found] == [(at, 1, True) for at in range(threads)]
    assert len({each[3] for each in found}) == threads
    assert side_by_side([], CPU) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_ends_all_tasks(threads: int, error: type[BaseException]) -> None:
    ended: list[int] = []

    def fail() -> None:
        raise error

    with pytest.raises(error):
        side_by_side([fail, *(lambda: ended.append(1) for _ in range(3))], CPU)
    assert threading.active_count() == len(threading.enumerate())
    assert not [one for one in threading.enumerate() if "ThreadPool" in one.name]


def test_only_small_tensors_keep_to_one_thread(threads: int) -> None:
    with one_thread_for(torch.zeros(SMALL)):
        assert torch.get_num_threads() == 1
    with one_thread_for(torch.zeros(SMALL + 1)):
        assert torch.get_num_threads() == threads
    with pytest.raises(ZeroDivisionError), one_thread_for(torch.zeros(1)):
        _ = 1 / 0


def sums_of(rows: torch.Tensor, changed: torch.Tensor, weight: torch.Tensor, threads: int) -> Sums:
    torch.set_num_threads(threads)
    moments = Moments(weight, Bounds.of(rows, changed, rows.shape[1]))
    for place, pair in enumerate(zip(torch.split(rows, 256, 1), torch.split(changed, 256, 1), strict=True)):
        assert moments.add(*pair, place=(place, 0))
    return moments.finish()


@pytest.mark.parametrize("outputs", [300, 700])
def test_sums_have_the_same_bits_on_any_number_of_threads(threads: int, outputs: int) -> None:
    rows = torch.randn(1, 256 * 9, 520, generator=torch.Generator().manual_seed(0))
    changed = rows + 0.1 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(1, outputs, 520, generator=torch.Generator().manual_seed(2))
    one, several = (sums_of(rows, changed, weight, count) for count in (1, 4))
    torch.set_num_threads(threads)
    for name in ("h", "linear", "drifts", "mean"):
        assert torch.equal(getattr(one, name), getattr(several, name)), name
