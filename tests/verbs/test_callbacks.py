"""What the verbs log to callbacks, at both doors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qsdk

DATA = [torch.randn(8, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]


class Log(list[tuple[str, float, int]]):
    """A callback that keeps what it gets."""

    def __call__(self, name: str, value: float, step: int) -> None:
        assert type(value) is float
        self.append((name, value, step))

    def values(self, name: str) -> list[float]:
        """The values of a name, whose steps count them."""
        assert [step for known, _, step in self if known == name] == list(range(sum(one[0] == name for one in self)))
        return [value for known, value, _ in self if known == name]


@pytest.fixture(params=["PyTorch", "ONNX"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, list[Any]]:
    """A sim that is not calibrated, and its data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    if request.param == "PyTorch":
        return qsdk.quantize(model, DATA[0], qsdk.w4a8()), DATA
    torch.onnx.export(model, (DATA[0],), tmp_path / "float.onnx", dynamo=True, verbose=False)
    return qsdk.quantize(tmp_path / "float.onnx", None, qsdk.w4a8()), [x.numpy() for x in DATA]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the exporter warns about itself
def test_calibrating_logs_which_share_of_the_ranges_each_batch_moved(opened: tuple[Any, list[Any]]):
    sim, data = opened
    with qsdk.train.callbacks(log := Log()):
        qsdk.calibrate(sim, [data[0], data[0], 2 * data[0], 0 * data[0]], progress=False)
    first, same, wider, inside = log.values("calibrate/moved_ranges")
    assert (first, same, inside) == (1.0, 0.0, 0.0)
    assert wider > 0.5


@pytest.mark.spread(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("verb", ["seq_mse", "adaround", "gptq"])
def test_a_layer_solver_logs_the_errors_of_its_report(verb: str, opened: tuple[Any, list[Any]]):
    sim, data = opened
    qsdk.calibrate(sim, data, progress=False)
    with qsdk.train.callbacks(log := Log()):
        report = getattr(qsdk, verb)(sim, data, progress=False)
    for name in ("error_before", "error_after"):
        assert log.values(f"{verb}/{name}") == [row[name] for row in report.rows]
    assert len(report.rows) == 2


@pytest.mark.spread(1)
@pytest.mark.filterwarnings("ignore")
def test_a_search_logs_every_value_of_the_metric(opened: tuple[Any, list[Any]]):
    sim, data = opened
    qsdk.calibrate(sim, data, progress=False)
    seen: list[float] = []

    def metric(sim: Any) -> float:
        seen.append(-float(np.abs(np.asarray(sim.run(data[0])[0].tolist())).max()))
        return seen[-1]

    with qsdk.train.callbacks(log := Log()):
        report = qsdk.mixed_precision(sim, data, metric, max_drop=0.01, progress=False)
    assert log.values("metric") == seen
    assert len(seen) == report.summary["evaluations"] > 1


def calibrated() -> Any:
    sim = qsdk.quantize(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), DATA[0], qsdk.w4a8())
    qsdk.calibrate(sim, DATA, progress=False)
    return sim


def test_autoquant_logs_the_metric_of_each_step_and_what_its_verbs_log():
    sim_of_metric: list[Any] = []
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def metric(sim: Any) -> float:
        sim_of_metric.append(sim)
        return 1.0 if len(sim_of_metric) == 1 else 0.0  # the float model; nothing else reaches it

    with qsdk.train.callbacks(log := Log()):
        report = qsdk.autoquant(model, DATA[0], DATA, metric, max_drop=0.5, config=qsdk.w4a8(), progress=False)
    assert log.values("metric")[0] == 1.0
    assert log.values("autoquant/metric") == [row["metric"] for row in report.rows if row["bytes"] is not None]
    assert len(log.values("metric")) >= len(sim_of_metric) > 5  # it is shown again where a search begins and ends
    assert {"calibrate/moved_ranges", "seq_mse/error_after", "adaround/error_after"} <= {name for name, *_ in log}


@pytest.mark.slow
def test_tuning_logs_errors_by_block_and_by_step():
    with qsdk.train.callbacks(log := Log()):
        blocks = qsdk.tune_blocks(calibrated(), DATA, iterations=3, progress=False)
        qsdk.train.tune_ranges(calibrated(), DATA, steps=4, progress=False)
    assert log.values("tune_blocks/error_before") == [row["error_before"] for row in blocks.rows]
    assert log.values("tune_blocks/error_after") == [row["error_after"] for row in blocks.rows]
    losses = log.values("tune_blocks/loss")
    assert len(losses) == 3 * len(blocks.rows)
    assert all(0.0 < loss < 1.0 for loss in losses)
    assert len(log.values("tune_ranges/error")) == 4


def test_steps_count_on_from_verb_to_verb_and_nothing_is_logged_outside_of_the_block():
    sim = calibrated()
    with qsdk.train.callbacks(log := Log()):
        qsdk.calibrate(sim, DATA, progress=False)
        qsdk.calibrate(sim, DATA, progress=False)
    assert len(log.values("calibrate/moved_ranges")) == 6
    qsdk.calibrate(sim, DATA, progress=False)
    assert len(log) == 6


def test_blocks_inside_one_another_all_get_the_numbers_each_with_its_own_steps():
    sim, outer, inner, second = calibrated(), Log(), Log(), Log()
    with qsdk.train.callbacks(outer):
        qsdk.calibrate(sim, DATA, progress=False)
        with qsdk.train.callbacks(inner, second):
            qsdk.calibrate(sim, DATA, progress=False)
    assert len(outer.values("calibrate/moved_ranges")) == 6
    assert inner == second
    assert len(inner.values("calibrate/moved_ranges")) == 3


@pytest.mark.slow
def test_an_error_of_a_callback_ends_the_verb_and_leaves_the_sim():
    sim = calibrated()
    before = sim.encodings

    def broken(name: str, value: float, step: int) -> None:
        if name == "seq_mse/error_after" and step == 1:
            raise ConnectionError("the tracker is gone")

    with pytest.raises(ConnectionError, match="the tracker is gone"), qsdk.train.callbacks(broken):
        qsdk.seq_mse(sim, DATA, progress=False)
    assert sim.encodings == before
    with qsdk.train.callbacks(log := Log()):
        qsdk.calibrate(sim, DATA, progress=False)
    assert len(log) == 3
