"""Embedding tables in the layer verbs of both doors: ranges by how often rows are read; rounding has nothing to do."""

import numpy as np
import pytest
import torch
from islands import DOORS
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from qsdk import QuantConfig, adaround, calibrate, correct_bias, gptq, quantize, seq_mse, weight_only

both = pytest.mark.parametrize("door", DOORS)
ROWS, WIDTH = 40, 12


class Words(nn.Module):
    """A table, positions that are always read alike, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.words(tokens)))
        return found


def words() -> nn.Module:
    """One row has a weight far outside: it is in no batch."""
    torch.manual_seed(0)
    model = Words()
    with torch.no_grad():
        model.words.weight[:4, 0] *= 4
    return model.eval()


def tokens(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 30, (8, 16), generator=generator) for _ in range(count)]


def sim_at(door: str, config: QuantConfig):
    model = words()
    if door == "torch":
        sim = quantize(model, tokens()[0], config)
    else:
        stored = {name: x.detach().numpy() for name, x in model.state_dict().items()}
        nodes = [
            helper.make_node("Gather", ["words.weight", "tokens"], ["e"], "words"),
            helper.make_node("Relu", ["e"], ["r"], "relu"),
            helper.make_node("MatMul", ["r", "head.w"], ["m"], "head"),
            helper.make_node("Add", ["m", "head.bias"], ["y"], "head_add"),
        ]
        stored["head.w"] = stored.pop("head.weight").T.copy()
        graph = helper.make_graph(
            nodes,
            "words",
            [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["n", 16])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16, 5])],
            [numpy_helper.from_array(x, name) for name, x in stored.items()],
        )
        opsets = [helper.make_opsetid("", 21)]
        sim = quantize(helper.make_model(graph, ir_version=10, opset_imports=opsets), None, config)
    calibrate(sim, data_of(door), progress=False)
    return sim


def data_of(door: str) -> list:
    return [batch if door == "torch" else batch.numpy() for batch in tokens()]


def table_of(sim) -> str:
    return next(site for site in sim.plan.decisions if site.startswith("words:"))


def config_of(dtype: str, **granularity) -> QuantConfig:
    return weight_only("int8").override("words", weight=dtype, **granularity)


def weighted_error(sim) -> float:
    """Of the rows that are read, as often as they are."""
    counts = torch.bincount(torch.cat(tokens()).flatten(), minlength=ROWS).numpy()[:, None]
    site = table_of(sim)
    values = sim.stored_floats([site])[site]
    return float((counts * np.square(sim.encodings[site].fake_quantize(values) - values)).sum())


@pytest.mark.spread(1)
@both
def test_the_range_of_a_table_follows_the_rows_that_are_read(door):
    sim = sim_at(door, config_of("int4"))
    before, site = weighted_error(sim), table_of(sim)
    rows = {row["site"]: row for row in seq_mse(sim, data_of(door), progress=False).rows}
    assert not rows[site]["note"]
    assert rows[site]["error_after"] < 0.7 * rows[site]["error_before"]
    assert weighted_error(sim) < 0.7 * before


def test_both_doors_choose_the_same_range():
    sims = [sim_at(door, config_of("int4")) for door in DOORS]
    for door, sim in zip(DOORS, sims, strict=True):
        seq_mse(sim, data_of(door), progress=False)
    one, other = (sim.encodings[table_of(sim)] for sim in sims)
    np.testing.assert_allclose(one.scale, other.scale, rtol=1e-5)


def test_of_a_large_table_some_rows_are_enough(monkeypatch):
    from qsdk.algorithms.solvers import seq_mse as solver

    errors = []
    for most in (1 << 21, ROWS * WIDTH // 3):
        monkeypatch.setattr(solver, "TABLE", most)
        sim = sim_at("torch", config_of("int4"))
        seq_mse(sim, data_of("torch"), progress=False)
        errors.append(weighted_error(sim))
    assert errors[1] < 1.3 * errors[0]


@both
@pytest.mark.parametrize("verb", [gptq, adaround], ids=["gptq", "adaround"])
def test_rounding_to_nearest_is_best_and_said(door, verb):
    sim = sim_at(door, config_of("int4"))
    site = table_of(sim)
    before, stored = sim.encodings[site], sim.stored_floats([site])[site].copy()
    rows = {row["site"]: row for row in verb(sim, data_of(door), progress=False).rows}
    assert rows.pop(site)["note"] == "each weight is read by itself: nearest is best"
    assert [row["note"] for row in rows.values()] == [""]
    assert sim.encodings[site] == before
    assert np.array_equal(sim.stored_floats([site])[site], stored)


@pytest.mark.spread(1)
@both
def test_the_other_losses_and_a_correction_of_biases_go_past_it(door):
    sim = sim_at(door, config_of("int4"))
    for loss in ("l1", "sqnr"):
        rows = {row["site"]: row for row in seq_mse(sim, data_of(door), loss=loss, progress=False).rows}
        assert rows[table_of(sim)]["error_after"] <= rows[table_of(sim)]["error_before"]
    rows = {row["site"]: row for row in correct_bias(sim, data_of(door), progress=False).rows}
    assert rows[table_of(sim)]["note"] == "it has no bias that could take the shift"


def test_a_table_that_a_function_reads_and_one_that_is_the_head_too():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
            self.words = nn.Embedding(ROWS, WIDTH)

        def forward(self, given: Tensor) -> Tensor:
            x = nn.functional.embedding(given, self.table) + self.words(given)
            return nn.functional.linear(x, self.words.weight)

    torch.manual_seed(0)
    sim = quantize(Tied().eval(), tokens()[0], weight_only("int4"))
    calibrate(sim, [], progress=False)
    notes = {row["site"]: row["note"] for row in seq_mse(sim, tokens(), progress=False).rows}
    assert "several ops read it" in notes.pop("words:weight")
    assert set(notes.values()) == {""}
    assert any(site.startswith("table") or "table" in site for site in notes)
