"""What verbs share: keywords of a call, and `qsdk.options` for a block of calls."""

import inspect
from collections.abc import Callable
from threading import Thread
from typing import Any, get_args

import pytest
import torch
from torch import nn

import qsdk
from qsdk.core.run_options import Run, keywords_of, run_of

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
LABELLED = [(X, "a label")]


def first(model: Any, batch: Any) -> Any:
    return model(batch[0])


def calibrated() -> qsdk.QuantSim:
    sim = qsdk.quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), X, "w4a8")
    qsdk.calibrate(sim, [X], progress=False)
    return sim


def verbs() -> dict[str, Callable[..., Any]]:
    functions = {name: getattr(qsdk, name) for name in qsdk.__all__ if inspect.isfunction(getattr(qsdk, name))}
    return {name: verb for name, verb in functions.items() if get_args(verb.__annotations__.get("options"))}


def test_a_block_sets_what_its_calls_do_not_give(capsys: pytest.CaptureFixture[str]):
    sim = calibrated()
    with qsdk.options(forward=first, progress=False):
        qsdk.calibrate(sim, LABELLED)
        qsdk.correct_bias(sim, LABELLED)
        with qsdk.options(forward=None), pytest.raises(qsdk.DataError, match="forward="):
            qsdk.calibrate(sim, LABELLED)
        qsdk.calibrate(sim, [X], forward=None)
    with pytest.raises(qsdk.DataError, match="forward="):
        qsdk.calibrate(sim, LABELLED, progress=False)
    assert capsys.readouterr().err == ""


def test_a_call_takes_of_a_block_what_its_verb_has():
    with qsdk.options(seed=3, max_memory=5):
        assert run_of(qsdk.gptq, {"checkpoint": "folder"}) == Run(seed=3, max_memory=5, checkpoint="folder")
        assert run_of(qsdk.gptq, {"seed": 0}) == Run(max_memory=5)
        assert run_of(qsdk.sensitivity, {}) == Run(seed=3)
        assert run_of(qsdk.calibrate, {}) == Run()
        seen = []
        thread = Thread(target=lambda: seen.append(run_of(qsdk.gptq, {})))
        thread.start()
        thread.join()
    assert seen == [Run()]
    with pytest.raises(RuntimeError), qsdk.options(seed=3):
        raise RuntimeError
    assert run_of(qsdk.gptq, {}) == Run()


@pytest.mark.parametrize("name", sorted(verbs()))
def test_a_verb_names_the_keywords_that_it_takes(name: str):
    verb = verbs()[name]
    needed = [one for one in inspect.signature(verb).parameters.values() if one.default is one.empty]
    given = {one.name: None for one in needed if one.kind is not one.VAR_KEYWORD}
    known = ", ".join(keywords_of(verb))
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'sead'; it takes {known}$"):
        verb(**given, sead=1)


def test_an_option_that_nothing_takes_is_refused_before_a_checkpoint_is_read():
    with pytest.raises(TypeError, match=r"quantize_checkpoint\(\) has no option 'opsets'; beside its own .* opset, "):
        qsdk.quantize_checkpoint("missing", "out", opsets=21)


def test_a_verb_refuses_a_shared_option_that_it_has_no_use_for():
    with pytest.raises(TypeError, match=r"calibrate\(\) got an unexpected keyword argument 'seed'; it takes sim, data"):
        qsdk.calibrate(calibrated(), [X], seed=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"options\(\) got .* 'sead'; it takes forward, max_memory, progress, seed$"):
        qsdk.options(sead=1).__enter__()  # type: ignore[call-arg]
    assert "checkpoint" in keywords_of(qsdk.adaround)
    assert "checkpoint" not in keywords_of(qsdk.options)
