"""Inputs and outputs of modules: every structure reaches the exported file under its own names."""

from collections import UserDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from edges import road
from torch import Tensor, nn
from torch_models import seeded, sim_of
from transformers.modeling_outputs import BaseModelOutput

from qsdk import DataError, calibrate
from torch_bridge.torch_values.pytree import leaves_of, map_leaves, name_leaves, tensors_of


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Out:
    logits: Tensor
    hidden: Tensor | None = None
    parts: tuple[Any, ...] = ()


@dataclass
class Batch:
    tokens: Tensor
    scales: list[Tensor]


class Gives(nn.Module):
    """Gives tensors in every kind of container, an input, a buffer, a tensor twice, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("table", torch.arange(5))

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor | None = None, gain: float = 1.0) -> dict[str, Any]:
        hidden = self.fc(x).relu() * gain
        if mask is not None:
            hidden = torch.where(mask, hidden, 0.0)
        result = Out(self.head(hidden), None, (hidden, {"again": hidden}))
        return {
            "result": result,
            "pair": Pair(x, ids),
            "state": BaseModelOutput(last_hidden_state=hidden + 1),
            "x": hidden.mean(),  # called as an input is
            "add": self.table,  # called as a tensor inside the traced graph is
            "best": [result.logits.argmax(-1), None, 7],
        }


def gives_batch(rows: int, seed: int) -> dict[str, Any]:
    mask = seeded(rows, 4, seed=seed + 9) > -1
    return {"x": seeded(rows, 4, seed=seed), "ids": torch.arange(rows), "mask": mask, "gain": 0.5}


@pytest.mark.slow
def test_outputs_of_every_structure(tmp_path: Path):
    came = road(Gives().eval(), gives_batch(3, 0), [gives_batch(5, 1)], tmp_path)
    assert came.inputs == {"x": ["batch", 4], "ids": ["batch"], "mask": ["batch", 4]}
    assert came.outputs == {
        "result_logits": ["batch", 3],
        "result_parts_0": ["batch", 4],
        "result_parts_1_again": ["batch", 4],
        "pair_left": ["batch", 4],
        "pair_right": ["batch"],
        "state_last_hidden_state": ["batch", 4],
        "x_out": [],
        "add": [5],
        "best_0": ["batch"],
    }
    out = came.sim.run(gives_batch(2, 2))
    assert isinstance(out["result"], Out)
    assert isinstance(out["pair"], Pair)
    assert isinstance(out["state"], BaseModelOutput)
    assert out["best"][1:] == [None, 7]
    told = came.sim.coverage().summary
    assert told["argument gain"] == "fixed at 0.5 in the exported file"
    assert told["output best.2"] == "a int, no tensor: not in the exported file"


class Takes(nn.Module):
    """Takes containers, a 0-dim tensor, None, text, more positional arguments, and defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(
        self, batch: Batch, pair: Any, scale: Tensor, none: None, mode: str, *more: Tensor, offset: int = 2
    ) -> tuple[Tensor, Tensor]:
        assert none is None
        assert mode == "plain"
        x = self.fc(batch.tokens) * batch.scales[0] + pair["a"] * scale + pair["b"][0] + offset
        return x, more[0] * more[1]


def takes_batch(rows: int, seed: int) -> tuple[Any, ...]:
    a, b, c, d = (seeded(rows, 4, seed=seed + i) for i in range(4))
    return Batch(a, [b]), {"a": c, "b": (d,)}, torch.tensor(0.5), None, "plain", a, b


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_of_every_structure(tmp_path: Path, rows: int):
    came = road(Takes().eval(), takes_batch(rows, 0), [takes_batch(4, 5)], tmp_path)
    rows_of_4 = ["batch", 4]
    names = ["batch_tokens", "batch_scales_0", "pair_a", "pair_b_0", "scale", "more_0", "more_1"]
    assert came.inputs == {name: [] if name == "scale" else rows_of_4 for name in names}
    assert came.outputs == {"output_0": rows_of_4, "output_1": rows_of_4}
    sites = [d.site.removesuffix(":input") for d in came.sim.plan.decisions.values() if d.kind == "input"]
    assert sites == ["batch.tokens", "batch.scales.0", "pair.a", "pair.b.0", "scale", "more.0", "more.1"]


@pytest.mark.slow
def test_keywords_that_forward_does_not_name_and_mappings_of_other_classes(tmp_path: Path):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(4, 4)

        def forward(self, weight: Tensor, **named: Any) -> UserDict[str, Tensor]:
            return UserDict(linear=self.weight(weight), sum=named["extra"]["mul"] + 1)

    example = UserDict(weight=seeded(3, 4), extra=UserDict(mul=seeded(3, 4, seed=1)))
    came = road(Model().eval(), example, [], tmp_path)
    assert list(came.inputs) == ["weight", "extra_mul"]
    assert list(came.outputs) == ["linear", "sum"]
    assert isinstance(came.sim.run(example), UserDict)


@pytest.mark.slow
def test_a_name_of_an_edge_that_a_stored_tensor_has(tmp_path: Path):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(seeded(4, seed=3))
            self.fc = nn.Linear(4, 4)

        def forward(self, scale: Tensor) -> dict[str, Tensor]:
            return {"fc.weight": self.fc(scale) * self.scale}

    came = road(Model().eval(), seeded(3, 4), [seeded(2, 4)], tmp_path)
    assert list(came.inputs) == ["scale"]
    assert list(came.outputs) == ["fc.weight"]


def test_a_model_may_return_only_integers(tmp_path: Path):
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    came = road(Model(nn.Linear(4, 5)).eval(), seeded(6, 4), [seeded(2, 4, seed=1)], tmp_path)
    assert came.outputs == {"output": ["batch"]}


def test_batches_have_the_structure_of_the_example():
    model = Takes().eval()
    sim = sim_of(model, takes_batch(3, 0))
    calibrate(sim, [takes_batch(2, 1), takes_batch(5, 2)], progress=False)
    low = min(float(x[0].tokens.min()) for x in (takes_batch(2, 1), takes_batch(5, 2)))
    encoding = sim.encodings["batch.tokens:input"]
    assert abs(float(encoding.low[0]) - low) <= float(encoding.scale[0])
    with pytest.raises(DataError, match="batch 0 has 8 elements, the model was quantized with 7"):
        calibrate(sim, [(*takes_batch(2, 1), "label")], progress=False)


def test_structures_keep_their_classes_and_say_where_their_leaves_are():
    x = torch.zeros(1)
    value = {"a": Pair([x], None), "b": Out(x, parts=(deque([1, x]),)), 3: UserDict(c=torch.Size([2]))}
    leaves = dict(leaves_of(value))
    assert list(leaves) == [
        *(("a", "left", "0"), ("a", "right"), ("b", "logits"), ("b", "hidden"), ("b", "parts", "0", "0")),
        *(("b", "parts", "0", "1"), ("3", "c", "0")),
    ]
    made = map_leaves(value, lambda _, leaf: "tensor" if leaf is x else leaf)
    assert made == {"a": Pair(["tensor"], None), "b": Out("tensor", parts=(deque([1, "tensor"]),)), 3: {"c": (2,)}}
    assert [type(made["b"]), type(made["b"].parts[0]), type(made[3])] == [Out, deque, UserDict]
    assert value["a"].left[0] is x
    assert len(tensors_of(value)) == 3
    assert list(name_leaves([(("x", "0"), 1), (("x_0",), 2)], {"x_0_1"})) == ["x_0", "x_0_2"]
