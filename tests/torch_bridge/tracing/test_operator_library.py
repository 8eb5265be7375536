"""Torch's exporter looks up once what does not change, and is as it was after each trace."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import qsdk
from torch_bridge.tracing import trace
from torch_bridge.workarounds.exporter_speed import composites, kernels, operators_read_once, registration

LOOKED_UP = [
    (registration.onnxscript_apis, "get_torchlib_ops"),
    (registration._schemas, "op_signature_from_function"),
    (composites, "_materialize_cpp_cia_ops"),
]


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> tuple[Callable[..., Any], list]:
    """Count the calls of a function of torch."""
    function, calls = getattr(owner, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)
    return counting, calls


def test_the_library_and_its_signatures_are_read_once_and_put_back(monkeypatch: pytest.MonkeyPatch):
    (read, reads), (derive, derived) = (counted(monkeypatch, *place) for place in LOOKED_UP[:2])
    for _ in range(2):
        qsdk.quantize(nn.Linear(2, 2), torch.zeros(1, 2))
        assert registration.onnxscript_apis.get_torchlib_ops is read
        assert registration._schemas.op_signature_from_function is derive
    assert len(reads) == 1
    assert len(derived) == len(set(derived)) > 100


@pytest.mark.slow
def test_composed_ops_are_listed_once_at_each_trace(monkeypatch: pytest.MonkeyPatch):
    listed, lists = counted(monkeypatch, *LOOKED_UP[2])
    annotation = kernels.Callable
    for traces in (1, 2):
        qsdk.quantize(nn.Linear(2, 2), torch.zeros(1, 2))
        assert len(lists) == traces
        assert composites._materialize_cpp_cia_ops is listed
        assert kernels.Callable is annotation


@pytest.mark.slow
def test_a_trace_is_the_same_when_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch):
    model, example = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.zeros(2, 3, 8)
    qsdk.quantize(model, example)
    remembered, _ = qsdk.quantize(model, example).traced()
    monkeypatch.setattr(trace, "operators_read_once", nullcontext)
    assert qsdk.quantize(model, example).traced()[0] == remembered


@pytest.mark.parametrize(
    ("owner", "name"),
    [(registration, "onnxscript_apis"), (registration, "_schemas"), (composites, "_materialize_cpp_cia_ops")],
)
def test_an_exporter_that_keeps_it_elsewhere_traces_as_ever(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str):
    monkeypatch.delattr(owner, name)
    with operators_read_once():
        assert not hasattr(owner, name)
