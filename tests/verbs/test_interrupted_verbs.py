"""A verb that is interrupted, wherever it is, leaves the sim as it was: bit for bit, without threads and files."""

import contextlib
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from every_verb import GRADIENTS, LAYERS, VERBS, everything, zoo_sim

import onnx_backend
import qsdk
import torch_bridge
from qsdk import DataError
from qsdk.verbs.doors.choose import Sim


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run beside these, and `everything` lists the temporary files of verbs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


OURS = tuple(str(Path(package.__file__).parent) for package in (qsdk, torch_bridge, onnx_backend))
READ_DATA = [name for name in VERBS if name != "analytic"]
#: where Python itself may be the caller, which ignores what is raised
SILENT = ("<genexpr>", "__del__")
DOORS = ["torch", "onnx"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sims() -> dict[str, tuple[Sim, list[Any]]]:
    """A calibrated sim of one network at each door, and its data; tests leave them as they are."""
    return {door: zoo_sim("cnn", "w4a8", door) for door in DOORS}


def can(name: str, door: str) -> bool:
    return door == "torch" or name not in GRADIENTS


@pytest.mark.spread(1)
@pytest.mark.parametrize("door", DOORS)
def test_an_interrupt_while_data_is_read(door: str, sims: dict[str, tuple[Sim, list[Any]]]):
    sim, data = sims[door]
    before = everything(sim)

    def broken() -> Iterator[Any]:
        yield from data[:2]
        raise KeyboardInterrupt

    for name in READ_DATA:
        if can(name, door):
            with pytest.raises(KeyboardInterrupt):
                VERBS[name](sim, broken(), progress=False)
            assert everything(sim) == before, name


@pytest.mark.slow
def test_an_error_of_the_model_at_any_layer(sims: dict[str, tuple[Sim, list[Any]]]):
    sim, data = sims["torch"]
    rng = random.Random(0)
    for name in READ_DATA:
        layer = rng.choice(["conv1", "conv2", "pool", "fc"])
        calls = iter(range(rng.randint(3, 5)))  # the batches are five

        def fail(*_: Any, left: Iterator[int] = calls, where: str = layer) -> None:
            if next(left, None) is None:
                raise RuntimeError(f"{where} is broken")

        handle = sim.model.get_submodule(layer).register_forward_pre_hook(fail)
        before = everything(sim)
        with pytest.raises(DataError, match=f"does not run on batch .*{layer} is broken"):
            VERBS[name](sim, data, progress=False)
        assert everything(sim) == before, (name, layer)
        handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gptq" else pytest.mark.nightly) for name in VERBS]
)
def test_an_interrupt_anywhere(name: str, door: str, sims: dict[str, tuple[Sim, list[Any]]]):
    if not can(name, door):
        return
    sim, data = sims[door]
    rng = random.Random(name)
    before, state = everything(sim), sim.snapshot(weights=True)
    clock = Clock(None)
    clock.run(lambda: VERBS[name](sim, data, progress=False))
    sim.restore(state)
    total = clock.calls
    # the last calls too, but for those that clean up: what comes there comes too late
    points = [total - rng.randint(10, total // 20) for _ in range(2)]
    points += [rng.randint(1, total) for _ in range(2 if name == "gptq" else 10)]
    for point in points:
        clock = Clock(point)
        raised = False
        try:
            clock.run(lambda: VERBS[name](sim, data, progress=False))
        except KeyboardInterrupt:
            raised = True
        if raised:
            assert everything(sim) == before, (point, clock.place)
        else:
            assert clock.place is None, clock.place  # the verb took fewer calls this time
            sim.restore(state)


@pytest.mark.slow
def test_an_interrupt_of_a_forward_pass_ends_the_pass(sims: dict[str, tuple[Sim, list[Any]]]):
    sim, data = sims["torch"]
    before = everything(sim)
    clock = Clock(None)
    clock.run(lambda: sim(*data[0]))
    for point in (*range(1, 40), *range(40, clock.calls - 40, 9), *range(clock.calls - 40, clock.calls + 1)):
        with contextlib.suppress(KeyboardInterrupt):
            Clock(point).run(lambda: sim(*data[0]))
        assert sim.runtime.is_first_call(), point
        assert everything(sim) == before, point
    outputs: list[Any] = []
    other = threading.Thread(target=lambda: outputs.append(sim(*data[0])), daemon=True)
    other.start()
    other.join(60)
    assert outputs, "the interrupted thread still holds a lock of the sim"


class Clock:
    """Counts calls of functions of the packages in the main thread, and interrupts one of them.

    Attributes:
        calls: how many there were.
        place: the function that was interrupted.
    """

    def __init__(self, last: int | None) -> None:
        self.calls = 0
        self.place: str | None = None
        self._last = last
        self._known: dict[CodeType, bool] = {}

    def run(self, what: Callable[[], Any]) -> None:
        old = sys.gettrace()
        sys.settrace(self._called)
        try:
            what()
        finally:
            sys.settrace(old)

    def _called(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        ours = self._known.setdefault(code, code.co_filename.startswith(OURS) and code.co_name not in SILENT)
        if ours and threading.current_thread() is threading.main_thread():
            self.calls += 1
            if self.calls == self._last:
                self.place = code.co_name
                raise KeyboardInterrupt


def test_layer_verbs_leave_the_number_of_threads(sims: dict[str, tuple[Sim, list[Any]]]):
    sim, data = sims["torch"]
    state, before = sim.snapshot(weights=True), threading.active_count()
    for verb in LAYERS.values():
        verb(sim, data, progress=False)
        assert threading.active_count() == before
    sim.restore(state)
