"""What calibration shares between sites, and batches that it runs side by side."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from onnx import helper
from qdq_models import convnet

from onnx_backend.calibration import observe as observing
from qsdk import DataError, quantize, w8a8

node = helper.make_node
RNG = np.random.default_rng(5)
IMAGES = [RNG.normal(size=(4, 3, 8, 8)).astype(np.float32) * 2**number for number in range(5)]


def encodings(data, method: str) -> dict:
    sim = quantize(convnet(), None, w8a8())
    sim.calibrate(data, method, progress=False)
    return sim.encodings


@pytest.fixture(params=[1, 2])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(observing, "cores", lambda: request.param)
    return request.param


@pytest.mark.parametrize("method", ["min_max", "moving_average", "tf_enhanced"])
def test_batches_side_by_side_have_the_encodings_of_one_after_the_other(method: str, monkeypatch: pytest.MonkeyPatch):
    found = []
    for number in (1, 2):
        monkeypatch.setattr(observing, "cores", lambda number=number: number)
        found.append(encodings(IMAGES, method))
    assert found[0] == found[1]


def test_two_runs_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(observing, "cores", lambda: 2)
    both, original = threading.Barrier(2, timeout=30), observing.run_session

    def run(*args):
        both.wait()  # a run alone would wait for the other, and fail
        return original(*args)

    monkeypatch.setattr(observing, "run_session", run)
    assert encodings(IMAGES[:4], "min_max")


class OneBuffer:
    """Batches that are written one over the other, as those of some loaders."""

    def __len__(self) -> int:
        return len(IMAGES)

    def __iter__(self) -> Iterator[np.ndarray]:
        buffer = np.empty_like(IMAGES[0])
        for image in IMAGES:
            buffer[:] = image
            yield buffer
        buffer[:] = 1e6


def test_data_may_write_a_batch_over_the_one_before(cores: int):
    assert encodings(OneBuffer(), "min_max") == encodings(IMAGES, "min_max")


def test_the_first_batch_that_is_not_finite_is_named_and_the_sim_stays(cores: int):
    sim = quantize(convnet(), None, w8a8())
    sim.calibrate(IMAGES, progress=False)
    before, threads = sim.encodings, threading.active_count()
    broken = [IMAGES[0], IMAGES[1] * np.float32(np.nan), IMAGES[2] * np.float32(np.inf), "no batch"]
    with pytest.raises(DataError, match="x:input in batch 1"):
        sim.calibrate(broken, progress=False)
    assert sim.encodings == before
    assert threading.active_count() == threads
