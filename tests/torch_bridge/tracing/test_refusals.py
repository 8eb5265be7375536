"""A module that cannot be traced is refused with the user's own line and a remedy, and stays as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch_models import seeded

from qsdk import ExportError, calibrate, export, quantize, w8a8


def decides(x: Tensor) -> Any:
    return x if x.sum() > 0 else -x


def loops(x: Tensor) -> Any:
    while x.abs().max() > 0.1:
        x = x * 0.1
    return x


def cuts(x: Tensor) -> Any:
    return x[: int(x.abs().sum())]


def leaves_torch(x: Tensor) -> Any:
    return torch.from_numpy(x.detach().numpy()) * 2


def divides_by_another_number(x: Tensor) -> Any:
    return F.avg_pool2d(x[None], 2, divisor_override=3)


def is_made_of_what_has_no_form(x: Tensor) -> Tensor:
    return torch.special.bessel_j0(x)


def has_no_form(x: Tensor) -> Any:
    return torch.special.airy_ai(x)


@pytest.mark.parametrize(
    ("compute", "match"),
    [
        (
            decides,
            r"depends on the values of a tensor at .*test_refusals\.py:\d+ \(return x if x\.sum\(\) > 0 .*\).*where",
        ),
        (
            loops,
            r"depends on the values of a tensor at .*\(while x\.abs\(\)\.max\(\) > 0\.1:\), and a file holds one path",
        ),
        (cuts, r"depends on the values of a tensor at .*\(return x\[: int\(x\.abs\(\)\.sum\(\)\)\]\)"),
        (
            leaves_torch,
            r"cannot trace the model at .*\(return torch\.from_numpy.*numpy.*write that part with tensor ops",
        ),
        (divides_by_another_number, "drops divisor_override= of an average pooling.*multiply the result by the size"),
        (has_no_form, r"torch has no ONNX form for aten\.special_airy_ai.*compute it with other ops"),
        (is_made_of_what_has_no_form, r"special_bessel_j0 \(prims\.bessel_j0.* at .*test_refusals\.py:\d+"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_cannot_be_traced_is_refused_with_a_remedy(compute: Callable[[Tensor], Any], match: str):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return compute(self.fc(x))

    model = Model().eval()
    expected = model(seeded(2, 4))
    with pytest.raises(ExportError, match=match):
        quantize(model, seeded(2, 4), w8a8(), in_place=True)
    assert type(model) is Model
    assert torch.equal(model(seeded(2, 4)), expected)


def test_a_model_that_gives_no_tensor():
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"mean": x.sigmoid().mean().item(), "label": "dog"}

    with pytest.raises(ExportError, match=r"the model gives no tensor \(.*str\); return the tensors that"):
        quantize(Model(), seeded(2, 4), w8a8())


class Cache:
    """An object that holds a tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_an_argument_whose_tensors_the_trace_would_not_see():
    class Model(nn.Module):
        def forward(self, x: Tensor, past: Cache) -> Tensor:
            return x.sigmoid() + past.value

    match = (
        r"the argument past is a Cache, and the exported file would hold what is in it fixed; quantize a module that"
    )
    with pytest.raises(ExportError, match=match):
        quantize(Model(), (seeded(2, 4), Cache(seeded(2, 4))), w8a8())


def test_an_output_that_is_not_a_tensor_is_left_out_with_a_note():
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"y": x.sigmoid(), "past": Cache(x)}

    sim = quantize(Model(), seeded(2, 4), w8a8())
    assert sim.coverage().summary["output past"] == "a Cache, no tensor: not in the exported file"


def test_a_cache_that_the_file_lacks_is_named_by_the_report_of_the_export(tmp_path: Path):
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            cache = transformers.DynamicCache()
            cache.update(x[:, None], x[:, None], 0)
            return {"logits": x.sigmoid(), "past_key_values": cache}

    sim = quantize(Model(), (x := seeded(2, 4, 4)), w8a8())
    calibrate(sim, [x], progress=False)
    told = export(sim, tmp_path / "model.onnx").summary["output past_key_values"]
    assert "not in the exported file, which reads all earlier tokens again" in told
    assert 'kv_cache="float32" or "int8" (--kv-cache)' in told


class Untranslatable(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: torch.cumprod(x, -1), r"cumprod \(prims\.prod in its trace\) at .*test_refusals\.py:\d+ \("),
        (lambda x: torch.median(x, -1).values, r"median at .*test_refusals\.py:\d+ \("),
        (lambda x: torch.histc(x, 4), r"cannot trace the model at .*test_refusals\.py:\d+ \("),
    ],
    ids=["cumprod", "median", "histc"],
)
def test_a_function_without_an_onnx_form_is_named_as_it_was_called_with_its_line(function, said: str):
    with pytest.raises(ExportError, match=said):
        quantize(Untranslatable(function), torch.randn(2, 4))
