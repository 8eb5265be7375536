"""Dynamic axes by name: in the file, at other sizes than the example's, and refused where the module fixes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from edges import road
from torch import Tensor, nn
from torch_models import calibrated, randomized, seeded, sim_of

import qsdk
from qsdk import ConfigError, ExportError, w8a8


class Tokens(nn.Module):
    """A small encoder with learned positions (at most 16), one attention and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        hidden = None if mask is None else mask == 0
        x = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return {"logits": self.head(x), "pooled": x.mean(1)}


def tokens(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * length).reshape(rows, length) % 20
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[:, length // 2 + 1 :] = 0
    return {"ids": ids, "mask": mask}


NAMED = {"ids": {0: "batch", 1: "sequence"}, "mask": {0: "batch", -1: torch.export.Dim("sequence")}}


@pytest.mark.slow
def test_axes_by_name(tmp_path: Path):
    others = [tokens(1, 5), tokens(4, 9), tokens(3, 2)]
    came = road(Tokens().eval(), tokens(2, 6), others, tmp_path, dynamic_shapes=NAMED)
    assert came.inputs == {"ids": ["batch", "sequence"], "mask": ["batch", "sequence"]}
    assert came.outputs == {"logits": ["batch", "sequence", 3], "pooled": ["batch", 8]}
    lengths = str(came.sim.coverage().summary["lengths"])
    assert lengths.startswith("traced for sequence")
    assert "min(16, sequence)" in lengths


@pytest.mark.slow
def test_an_example_of_one_row_and_one_token(tmp_path: Path):
    shapes = ([("batch"), "time", None],)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).cumsum(1) + x.mean((0, 1))

    others = [seeded(3, 5, 4), seeded(2, 1, 4, seed=1), seeded(1, 7, 4, seed=2)]
    came = road(Model().eval(), seeded(1, 1, 4), others, tmp_path, dynamic_shapes=shapes)
    assert came.outputs == {"output": ["batch", "time", 4]}


@pytest.mark.slow
def test_batch_size_1_is_dynamic_by_default(tmp_path: Path):
    model = randomized(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    )
    came = road(model, seeded(1, 2, 6, 6), [seeded(5, 2, 6, 6, seed=1)], tmp_path)
    assert came.inputs == {"input": ["batch", 2, 6, 6]}
    assert came.outputs == {"output": ["batch", 3]}


class PerRow(nn.Module):
    """Loops over its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(row) for row in x])


class Squeezed(nn.Module):
    """Drops every axis that is one long."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).squeeze()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rows"), [(PerRow(), 3), (PerRow(), 1), (Squeezed(), 1)], ids=["3", "1", "squeeze"])
def test_a_module_that_fixes_its_batch_is_static_by_default_and_says_so(tmp_path: Path, model: nn.Module, rows: int):
    came = road(model.eval(), seeded(rows, 4), [seeded(rows, 4, seed=1)], tmp_path)
    assert came.inputs == {"x": [rows, 4]}
    note = str(came.sim.coverage().summary["batch axis"])
    assert note.startswith("the exported file takes only the example's length, because ")


@pytest.mark.parametrize("rows", [1, 3])
def test_an_axis_that_was_asked_for_by_name_is_never_made_static(rows: int):
    match = r"the axis 'rows' \(axis 0 of x\) cannot be dynamic, since the model's code fixes its length.*by a loop"
    with pytest.raises(ExportError, match=match):
        sim_of(PerRow().eval(), seeded(rows, 4), dynamic_shapes={"x": {0: "rows"}})


def test_a_trace_of_another_shape_than_the_model_gives_is_refused():
    match = r"on the example the model gives one output: float32 \[4\] and its trace one output: float32 \[.*, 4\]"
    with pytest.raises(ExportError, match=match):
        sim_of(Squeezed().eval(), seeded(1, 4), dynamic_shapes={"x": {0: "rows"}})


@pytest.mark.slow
def test_only_tensors_that_share_the_batch_are_dynamic_by_default(tmp_path: Path):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, table: Tensor, gain: Tensor) -> Tensor:
            return (self.fc(x) @ table.T) * gain

    rest = seeded(7, 4, seed=2), torch.tensor(2.0)
    came = road(Model().eval(), (seeded(3, 4), *rest), [(seeded(5, 4), *rest)], tmp_path)
    assert came.inputs == {"x": ["batch", 4], "table": [7, 4], "gain": []}


@pytest.mark.slow
def test_no_axis_is_dynamic_where_none_is_named(tmp_path: Path):
    came = road(nn.Linear(4, 4).eval(), seeded(3, 4), [], tmp_path, dynamic_shapes={})
    assert came.inputs == {"input": [3, 4]}


@pytest.mark.slow
def test_coverage_reports_a_path_that_depends_on_a_length():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.shape[0] > 2 else -self.fc(x)

    sim = sim_of(Model().eval(), seeded(3, 4))
    assert sim.coverage().summary["lengths"] == ("traced for batch > 2; for others the module may take another path")


def test_shapes_of_containers(tmp_path: Path):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, pair: Any, named: Any) -> Tensor:
            return self.fc(pair[0]) + pair[1][0] + named["table"].sum(0)

    def batch(rows: int, table: int) -> tuple[Any, ...]:
        return (seeded(rows, 4), [seeded(4)]), {"table": seeded(table, 4, seed=1)}

    shapes = {"pair": ({0: "rows"}, None), "named": {"table": ("length", None)}}
    came = road(Model().eval(), batch(2, 3), [batch(5, 1)], tmp_path, dynamic_shapes=shapes)
    assert came.inputs == {"pair_0": ["rows", 4], "pair_1_0": [4], "named_table": ["length", 4]}


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        ({"y": {0: "batch"}}, r"dynamic_shapes names y, and the example has ids, mask; name what the example gives"),
        ({"ids": {2: "batch"}}, r"dynamic_shapes of ids \(shape \(2, 6\)\) names the axis 2; it has the axes 0 to 1"),
        ({"ids": {0: 3}}, r"dynamic_shapes of ids \(shape \(2, 6\)\) calls axis 0 3; give it a name, such as 'batch'"),
        ({"ids": {0: torch.export.Dim.AUTO}}, r"calls axis 0 .*; give it a name, such as 'batch', or None"),
        ({"ids": "batch"}, r"dynamic_shapes of ids \(shape \(2, 6\)\) is 'batch'; give \{axis: name\}"),
        (({0: "a"}, None, {0: "b"}), r"dynamic_shapes has 3 entries, and the example has ids, mask"),
        ("batch", r"dynamic_shapes is 'batch'; give a mapping by name, or a tuple in order"),
    ],
    ids=["unknown", "axis", "number", "hint", "text", "too many", "no mapping"],
)
def test_dynamic_shapes_that_do_not_fit_the_example(shapes: Any, match: str):
    with pytest.raises(ConfigError, match=match):
        sim_of(Tokens().eval(), tokens(2, 6), dynamic_shapes=shapes)


def test_dynamic_shapes_at_the_onnx_door(tmp_path: Path):
    sim = calibrated(nn.Linear(4, 4).eval(), seeded(3, 4))
    qsdk.export(sim, tmp_path / "model.onnx")
    for config in (None, w8a8()):
        with pytest.raises(ConfigError, match=r"dynamic_shapes= is for an nn\.Module; an ONNX model says itself"):
            qsdk.quantize(tmp_path / "model.onnx", None, config, dynamic_shapes={})


@pytest.mark.slow
def test_a_saved_sim_keeps_its_dynamic_axes(tmp_path: Path):
    model = Tokens().eval()
    sim = calibrated(model, tokens(2, 6), dynamic_shapes=NAMED)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    again = qsdk.load(tmp_path / "sim.qsdk", model)
    qsdk.export(sim, tmp_path / "one.onnx")
    qsdk.export(again, tmp_path / "two.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    given = tokens(3, 9)
    assert torch.equal(again.run(given)["logits"], sim.run(given)["logits"])
    assert again.example.dynamic_shapes == {"ids": {0: "batch", 1: "sequence"}, "mask": {0: "batch", -1: "sequence"}}
