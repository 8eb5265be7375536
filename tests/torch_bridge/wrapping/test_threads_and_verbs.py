"""A verb keeps the sim to its thread: no forward pass sees half of a change, none hangs, none is float unawares."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from in_threads import in_threads
from torch import Tensor, nn
from torch_models import calibrated, seeded

import qsdk
from qsdk import ModelError

X = seeded(4, 3, 4, 4)
DATA = [X, seeded(4, 3, 4, 4, seed=1)]


class Small(nn.Module):
    """A layer with a BatchNorm that is not folded, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))


@pytest.fixture(scope="module")
def sim() -> Any:
    torch.manual_seed(0)
    return calibrated(Small().eval(), X, qsdk.w4a8().skip("norm"))


def train(sim: Any) -> None:
    with sim.training():
        pass


VERBS: dict[str, Callable[..., Any]] = {
    "calibrate": lambda sim, **o: qsdk.calibrate(sim, DATA, progress=False, **o),
    "seq_mse": lambda sim, **o: qsdk.seq_mse(sim, DATA, progress=False, **o),
    "adaround": lambda sim, **o: qsdk.adaround(sim, DATA, iterations=5, progress=False, **o),
    "correct_bias": lambda sim, **o: qsdk.correct_bias(sim, DATA, progress=False, **o),
    "reestimate_batch_norm": lambda sim, **o: qsdk.reestimate_batch_norm(sim, DATA, progress=False, **o),
    "tune_blocks": lambda sim, **o: qsdk.tune_blocks(sim, DATA, blocks=["conv"], iterations=2, progress=False, **o),
}
WITHOUT_DATA: dict[str, Callable[..., Any]] = {
    "training": train,
    "set_precision": lambda sim: sim.set_precision("fc", weight="int8"),
    "captured": lambda sim: sim.captured().__enter__(),
}


@contextmanager
def in_the_middle(sim: Any) -> Iterator[list[Any]]:
    """Keep another thread in the middle of a forward pass; its result is in the list afterwards."""
    reached, go_on, results = threading.Event(), threading.Event(), []

    def wait(*_: Any) -> None:
        if threading.current_thread() is thread:
            reached.set()
            go_on.wait()

    thread = threading.Thread(target=lambda: results.append(sim(X)))
    handle = sim.model.conv.register_forward_hook(wait)
    thread.start()
    try:
        assert reached.wait(60)
        yield results
    finally:
        go_on.set()
        thread.join()
        handle.remove()


@pytest.mark.spread(8)
@pytest.mark.parametrize("verb", [*VERBS, *WITHOUT_DATA])
def test_a_verb_does_not_begin_in_the_middle_of_a_forward_of_another_thread(sim: Any, verb: str):
    want, encodings = sim(X), dict(sim.encodings)
    message = r"another thread is in the middle of a forward pass of the sim.*let that pass end first"
    with in_the_middle(sim) as results, pytest.raises(ModelError, match=message):
        (VERBS | WITHOUT_DATA)[verb](sim)
    assert torch.equal(results[0], want)
    assert torch.equal(sim(X), want)
    assert not sim.model.training
    assert sim.encodings.keys() == encodings.keys()
    for site, encoding in encodings.items():
        np.testing.assert_array_equal(sim.encodings[site].scale, encoding.scale)


@pytest.mark.parametrize("verb", VERBS)
def test_other_threads_cannot_run_the_sim_while_a_verb_does(sim: Any, verb: str):
    own, met = sim.snapshot(weights=True), []

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        met.extend(in_threads([lambda: sim(X)]))
        return model(batch)

    VERBS[verb](sim, forward=forward)
    sim.restore(own)
    assert met
    assert all(isinstance(one, ModelError) and "another thread calibrates" in str(one) for one in met)
    want = sim(X)
    assert torch.equal(in_threads([lambda: sim(X)])[0], want)  # afterwards it may


def test_two_verbs_do_not_run_at_once(sim: Any):
    own, met = sim.snapshot(weights=True), []

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        met.extend(in_threads([lambda: VERBS["calibrate"](sim)]))
        return model(batch)

    VERBS["adaround"](sim, forward=forward)
    sim.restore(own)
    assert met
    assert all(isinstance(one, ModelError) for one in met)


def test_threads_may_train_one_sim_together(sim: Any):
    own = sim.snapshot(weights=True)
    with sim.training():
        results = in_threads([lambda: sim.model(X).sum().item()] * 2)
    sim.restore(own)
    assert results[0] == results[1]
