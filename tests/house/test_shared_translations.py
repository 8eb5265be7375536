"""Tests share the translation of equal captured programs, and of no others."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared_translations import key_of, own_translations, shared_translations
from torch import Tensor, nn
from torch.export import Dim

import qsdk


class Net(nn.Module):
    def __init__(self, *, slope: float = 0.1, constant: float = 1.0, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.slope, self.constant = slope, torch.full((4,), constant)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.b(self.a(x)), self.slope) + self.constant


X = torch.ones(3, 4)


@pytest.fixture(autouse=True)
def own_traces() -> Iterator[None]:
    """Nothing is shared but what a test here shares itself."""
    with own_translations():
        yield


def key(net: nn.Module, x: Tensor = X, *, dynamic: bool = False, **options: Any) -> str | None:
    shapes = {"x": {0: Dim.DYNAMIC}} if dynamic else None
    with torch.no_grad():
        return key_of(torch.export.export(net.eval(), (x,), dynamic_shapes=shapes), options)


def test_other_weights_make_no_other_program():
    assert key(Net()) == key(Net())


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(Net(slope=0.2)),
        lambda: key(Net(constant=2.0)),
        lambda: key(Net(tied=True)),
        lambda: key(Net(), torch.ones(2, 4)),
        lambda: key(Net(), dynamic=True),
        lambda: key(Net().double(), X.double()),
        lambda: key(Net(), opset_version=20),
        lambda: key(nn.Sequential(Net())),
        lambda: key(Net().requires_grad_(False)),
    ],
    ids=["attribute", "constant", "tied", "length", "dynamic", "dtype", "opset", "names", "frozen"],
)
def test_everything_else_does(other: Any):
    assert other() not in (None, key(Net()))


def test_the_length_of_a_dynamic_axis_belongs_to_the_program():
    assert key(Net(), X, dynamic=True) != key(Net(), torch.ones(5, 4), dynamic=True)


def test_a_custom_op_is_translated_by_each_test():
    @torch.library.custom_op("tests_shared::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return twice(x)

    assert key(Custom()) is None


@pytest.mark.slow
def test_a_shared_translation_is_that_of_its_own_module(monkeypatch: pytest.MonkeyPatch):
    first = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.linear1.weight.mul_(3)
    example, export, translated = torch.ones(2, 3, 4), torch.onnx.export, []

    def counted(*args: Any, **options: Any) -> Any:
        translated.append(args)
        return export(*args, **options)

    alone = qsdk.quantize(second, example)
    monkeypatch.setattr(torch.onnx, "export", counted)
    with shared_translations():
        sims = [qsdk.quantize(net, example) for net in (first, second)]
    assert len(translated) == 1
    (model, stored), (other, held) = (sim.traced() for sim in sims)
    expected, _ = alone.traced()
    assert model == other == expected
    assert (held["linear1.weight"] == 3 * stored["linear1.weight"]).all()
