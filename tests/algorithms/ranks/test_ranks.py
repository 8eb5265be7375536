"""Several ranks share the data and the layers: they find the bits that one finds alone, and fail together."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from started_ranks import started

from qsdk import DataError, int4
from qsdk.algorithms import ranks
from qsdk.algorithms.problems.calls import CallPlaces
from qsdk.algorithms.solve_layers import Owners, cost_of
from qsdk.core.layers.layer_problem import Layer, WeightLayout
from qsdk.core.numerics.spec import Spec

Found = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Returns, for a number of ranks, what each found, by mode; they start once."""
    folder = tmp_path_factory.mktemp("ranks")
    return functools.cache(lambda size: started("rank_worker.py", size, folder))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["good", "few", "ragged"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_find_the_bits_that_one_finds(found: Found, size: int, mode: str) -> None:
    alone, several = found(1)[0][mode], [facts[mode] for facts in found(size)]
    assert all(facts["encodings"] == alone["encodings"] for facts in several)
    together = {site: problem for facts in several for site, problem in facts["problems"].items()}
    assert together == alone["problems"]
    assert sum(len(facts["problems"]) for facts in several) == len(together) == 4  # each was solved once
    assert min(len(facts["problems"]) for facts in several) >= 1


@pytest.mark.parametrize(
    ("mode", "kind", "message"),
    [
        ("bad", "DataError", "rank 1: one:weight, batch 2: the layer's input holds NaN or an infinity"),
        ("solver", "QsdkError", "rank 1: head:weight: RuntimeError: out of luck"),
        ("config", "ConfigError", "rank 1: head:weight: an option is wrong"),
        ("walk", "QsdkError", "rank 1: MemoryError: no room for the next block"),
        ("write", "QsdkError", "rank 1: OSError: the disk is full"),
    ],
)
def test_a_rank_that_fails_fails_all(found: Found, mode: str, kind: str, message: str) -> None:
    assert [facts[mode] for facts in found(2)] == [{"error": message, "kind": kind}] * 2


def test_ranks_that_reach_different_layers_are_named(found: Found) -> None:
    assert "at head:weight where another is at the end" in found(2)[1]["short"]["error"]
    assert "at the end where another is at head:weight" in found(2)[0]["short"]["error"]


def test_one_process_is_its_own_sum() -> None:
    assert ranks.world_size() == 1
    assert ranks.all_gather("x") == ranks.gather_to([0], "x") == ["x"]
    assert ranks.broadcast("x", 0) == "x"
    with pytest.raises(DataError, match=r"^bad$"):
        ranks.require_same_layers(["a"], DataError("bad"))


def layer(name: str, outputs: int, inputs: int) -> Layer:
    return Layer(name, Spec(int4), WeightLayout("linear", (outputs, inputs)))


def test_work_is_dealt_out_evenly() -> None:
    steps = [
        [layer(f"{at}.{part}", 64, 64) for part in "qkv"] + [layer(f"{at}.up", 256, 64), layer(f"{at}.down", 64, 256)]
        for at in range(16)
    ]
    for count in (2, 4):
        owners, work = Owners(count), [0.0] * count
        for step in steps:
            for each, rank in owners.assign(step).items():
                work[rank] += next(cost_of(one) for one in step if one.site == each)
        assert max(work) <= 1.15 * min(work)


def test_batches_are_in_the_order_that_one_rank_has_them_in() -> None:
    # three batches and two; a layer that is called twice, and not by batch 2 of rank 0, which is batch 4 of all
    places = CallPlaces.of([(3, [0, 1], 4), (2, [0, 1], 4)])
    assert places.batches == 5
    assert places.places == [[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (1, 1), (3, 0), (3, 1)]]
    assert places.own == places.places[0]
    before = places.rows_before([[9, 9, 2, 9], [1, 9, 9, 9]], 3)
    assert [before[place] for place in sorted(before)] == [0, 3, 6, 7, 10, 12, 15, 18]
