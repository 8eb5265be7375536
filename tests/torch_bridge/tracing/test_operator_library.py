"""Torch's exporter reads its operator library once in a process, and is as it was after each trace."""

import pytest
import torch
from torch import nn

import qsdk
from torch_bridge.tracing.operator_library import operators_read_once, registration


def test_the_library_is_read_once_and_put_back(monkeypatch: pytest.MonkeyPatch):
    read, count = registration.onnxscript_apis.get_torchlib_ops, []

    def counted() -> list:
        count.append(1)
        return read()

    monkeypatch.setattr(registration.onnxscript_apis, "get_torchlib_ops", counted)
    for _ in range(2):
        qsdk.quantize(nn.Linear(2, 2), torch.zeros(1, 2))
        assert registration.onnxscript_apis.get_torchlib_ops is counted
    assert len(count) == 1


def test_an_exporter_that_keeps_it_elsewhere_traces_as_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(registration, "onnxscript_apis")
    with operators_read_once():
        assert not hasattr(registration, "onnxscript_apis")
