"""Statistics of several ranks together: those of one process that has seen all the data."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing
from observed_model import module, onnx_model
from rank_group import in_process_group

import qsdk
from qsdk import DataError, uint8
from qsdk.core.numerics.spec import Spec
from qsdk.core.ranges.estimators import METHODS, estimator
from qsdk.core.ranges.histogram import sample_step
from qsdk.core.ranges.statistics import Statistics, merge_over_ranks, single_process

EXACT = sorted(set(METHODS.values()) - {"moving_average"})
SPEC = Spec(uint8, symmetric=False)


def batches(count: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [(rng.standard_t(3, size=(6, 3, 8, 8)) * 4.0 ** (i - 2)).astype(np.float32) for i in range(count)]


def statistics(method: str, arrays: list[np.ndarray]) -> Statistics:
    found = Statistics(estimator(method))
    for x in arrays:
        step = sample_step(x.size)
        sample = x.ravel()[::step] if found.chosen.reads_histogram else None
        found.add("site", float(x.min()), float(x.max()), sample, step)
    return found


@pytest.mark.parametrize("method", EXACT)
def test_merged_statistics_are_those_of_all_the_data(method: str):
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=100_000).astype(np.float32) * 3**i for i in range(4)]  # large enough to be sampled
    whole = statistics(method, arrays)
    for parts in (([0, 1], [2, 3]), ([3], [0, 2], [1])):
        first, *others = (statistics(method, [arrays[i] for i in part]) for part in parts)
        merged = first.merge(*others)
        one, many = (found.ranges_of([(["site"], SPEC)])[0] for found in (whole, merged))
        assert (one.low, one.high) == (many.low, many.high)
        if method != "min_max":
            assert np.array_equal(whole.histograms["site"].counts, merged.histograms["site"].counts)


def test_moving_averages_of_ranks_are_averaged():
    first, second = (statistics("moving_average", [np.float32([-end, end])]) for end in (1, 4))
    second.add("elsewhere", -1, 1)
    merged = first.merge(second)
    assert merged.ranges["site"].high.tolist() == [2.5]
    assert merged.ranges["elsewhere"].high.tolist() == [1]
    assert first.ranges["site"].high.tolist() == [1]


def test_a_failure_on_another_rank_is_named_and_one_on_this_rank_is_sent():
    told = []

    def failing() -> Statistics:
        raise DataError("no data")

    def gather(value):
        told.append(value)
        return [value, *told]

    with pytest.raises(DataError, match=r"^no data$"):
        merge_over_ranks(failing, gather)
    with pytest.raises(DataError, match=r"^rank 1: no data$"):
        merge_over_ranks(lambda: statistics("min_max", batches(1)), lambda value: [value, *told])
    own = statistics("min_max", batches(1))
    assert merge_over_ranks(lambda: own, single_process) is own


# --- two processes ----------------------------------------------------------------------------------------------------


def sims():
    """The same network at both doors."""
    torch_sim = qsdk.quantize(module(), torch.zeros(2, 3, 8, 8), qsdk.w8a8())
    return torch_sim, qsdk.quantize(onnx_model(), None, qsdk.w8a8())


def found_by(torch_sim, onnx_sim, arrays: list[np.ndarray]) -> dict[str, tuple[bytes, bytes]]:
    """Scale and zero point of every site, for each door and method."""
    tensors = [torch.from_numpy(x) for x in arrays]
    found = {}
    for method in (*EXACT, "moving_average"):
        for door, sim, data in (("torch", torch_sim, tensors), ("onnx", onnx_sim, arrays)):
            qsdk.calibrate(sim, data, method=method, progress=False)
            for site, encoding in sim.encodings.items():
                found[f"{door} {method} {site}"] = (encoding.scale.tobytes(), encoding.zero_point.tobytes())
    return found


def work(rank: int, folder: str) -> None:
    """Calibrate with every second batch; then with NaN on rank 1."""

    def calibrated() -> dict[str, object]:
        sim, onnx_sim = sims()
        result: dict[str, object] = {"found": found_by(sim, onnx_sim, batches()[rank::2])}
        x = torch.ones(2, 3, 8, 8) * (torch.nan if rank else 1)
        with pytest.raises(DataError) as caught:
            qsdk.calibrate(sim, [x], progress=False)
        result["error"] = str(caught.value)
        return result

    found = in_process_group(calibrated, rank=rank, size=2, store=f"{folder}/store")
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


@pytest.mark.slow
def test_two_ranks_find_the_encodings_of_one(tmp_path: Path):
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    first, second = (pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in (0, 1))
    one = found_by(*sims(), batches())
    assert first["found"] == second["found"]
    exact = {name for name in one if "moving_average" not in name}
    assert {name: first["found"][name] for name in exact} == {name: one[name] for name in exact}
    assert {name for name in one if first["found"][name] != one[name]}  # moving averages know the order
    assert first["error"].startswith("rank 1: NaN or inf at the site ")
    assert second["error"].startswith("NaN or inf at the site ")
