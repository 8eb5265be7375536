"""Work on several items at once, as a plain loop would do it."""

import threading

import pytest

from onnx_backend.calibration.observe import prefetch


def failing_at(last: int, read: list[int]):
    for number in range(last):
        read.append(number)
        yield number
    raise OSError("the data ends")


def test_results_come_in_order_while_two_items_are_under_way():
    both = threading.Barrier(2, timeout=30)  # one item alone would wait for the other, and fail

    def work(number: int) -> int:
        both.wait()
        return number * number

    assert list(prefetch(work, range(6), 2)) == [0, 1, 4, 9, 16, 25]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_items_are_read_than_asked_for(most: int):
    read: list[int] = []
    results = prefetch(lambda number: number, failing_at(9, read), most)
    for number in range(5):
        assert next(results) == number
        assert len(read) == number + most
    results.close()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_an_error_of_the_items_comes_after_the_results_before_it(most: int):
    seen: list[int] = []
    results = prefetch(lambda number: number, failing_at(4, []), most)
    with pytest.raises(OSError, match="the data ends"):
        seen.extend(results)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_an_error_of_the_work_comes_before_one_of_later_items(most: int):
    def work(number: int) -> int:
        if number == 1:
            raise ValueError("item 1")
        return number

    seen: list[int] = []
    results = prefetch(work, failing_at(2, []), most)
    with pytest.raises(ValueError, match="item 1"):
        seen.extend(results)
    assert seen == [0]


def test_no_thread_stays_when_the_iterator_is_closed():
    before = threading.active_count()
    results = prefetch(lambda number: number, range(9), 2)
    assert next(results) == 0
    assert threading.active_count() > before
    results.close()
    assert threading.active_count() == before
