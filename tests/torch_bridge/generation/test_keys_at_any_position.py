"""Ranges of what rotary embeddings turn: those of a short text serve every position."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_decoders import decoder
from torch import Tensor, nn

import qsdk
from qsdk.core.planning.plan import Turns
from qsdk.core.planning.turning import pair_places


class Rotary(nn.Module):
    """Rotates rows of 8 values, whose first `size` turn with the position, in halves or in neighbours.

    It gives them as they are, and turned over and scaled, as attention multiplies keys.
    """

    def __init__(self, layout: str, size: int) -> None:
        super().__init__()
        self.layout, self.size = layout, size
        self.register_buffer("frequencies", 0.5 ** torch.arange(size // 2))

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None] * self.frequencies
        rows, rest = x[..., : self.size], x[..., self.size :]
        if self.layout == "halves":
            a, b = rows.chunk(2, -1)
            turned, angles = torch.cat([-b, a], -1), torch.cat([angles, angles], -1)
        else:
            turned = torch.stack([-rows[..., 1::2], rows[..., ::2]], -1).flatten(-2)
            angles = angles.repeat_interleave(2, -1)
        turned = rows * angles.cos() + turned * angles.sin()
        turned = torch.cat([turned, rest], -1) if self.size < 8 else turned
        return turned, turned.transpose(-1, -2) * 2.0


@pytest.mark.parametrize(("layout", "size"), [("halves", 8), ("pairs", 8), ("halves", 4)])
def test_a_range_holds_the_radius_of_each_pair_on_both_sides(layout: str, size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Rotary(layout, size).eval(), torch.randn(2, 5, 8) * torch.arange(1, 9)
    positions = torch.arange(5.0).expand(2, 5)
    sim = qsdk.quantize(model, (x, positions))
    qsdk.calibrate(sim, [(x, positions)], progress=False)
    rows = [place for place in sim.plan.decisions.values() if place.turns is not None]
    assert {place.turns for place in rows} == {Turns(layout, size), Turns(layout, size, -2)}
    first, second, _ = pair_places(Turns(layout, size))
    radius = float((x[..., first].square() + x[..., second].square()).sqrt().max())
    rest = x[..., size:]
    low, high = min([-radius, *rest.flatten().tolist()]), max([radius, *rest.flatten().tolist()])
    scale = next(sim.encodings[row.encoding_site].scale for row in rows if row.turns == Turns(layout, size))
    np.testing.assert_allclose(scale, (high - low) / 255, rtol=1e-3)
    np.testing.assert_allclose(sim.encodings[rows[-1].encoding_site].scale, 2 * scale, rtol=1e-3)
    program = torch.onnx.export(model, (x, positions), dynamo=True, verbose=False)
    assert program is not None
    program.save(tmp_path / "float.onnx")
    other = qsdk.quantize(str(tmp_path / "float.onnx"), None)
    qsdk.calibrate(other, [(x.numpy(), positions.numpy())], progress=False)
    turning = {place.encoding_site for place in other.plan.decisions.values() if place.turns is not None}
    for factor in (1, 2):
        assert any(np.allclose(other.encodings[name].scale, factor * scale, rtol=1e-6) for name in turning)


def test_positions_that_are_stored_are_all_that_there_are() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary("halves", 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.rotary(x, torch.arange(5.0))

    sim = qsdk.quantize(Fixed().eval(), torch.randn(2, 5, 8))
    assert not any(place.turns for place in sim.plan.decisions.values())


class Rotated(nn.Module):
    """A language model of a table, a rotation by the position, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rotary, self.head = nn.Embedding(16, 8), Rotary("halves", 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], dtype=torch.float32).expand(ids.shape)
        result: Tensor = self.head(self.rotary(self.table(ids), positions)[0])
        return result


def test_reports_know_the_length_of_the_longest_text_and_longer_ones_are_warned_of(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, texts = Rotated().eval(), [torch.randint(0, 16, (2, length)) for length in (5, 7, 3)]
    sim = qsdk.quantize(model, texts[0], dynamic_shapes={"ids": {1: "length"}})
    qsdk.export(
        qsdk.quantize(model, texts[0], qsdk.w8a8().skip("*"), dynamic_shapes={"ids": {1: "length"}}), tmp_path / "f"
    )
    other = qsdk.quantize(str(tmp_path / "f"), None, qsdk.w8a8())
    assert qsdk.calibrate(other, [text.numpy() for text in texts], progress=False).summary["calibrated_length"] == 7
    assert "calibrated_length" not in sim.coverage().summary
    assert qsdk.calibrate(sim, texts, progress=False).summary["calibrated_length"] == 7
    qsdk.save(sim, tmp_path / "sim.qsdk")
    for one in (sim, other, qsdk.load(tmp_path / "sim.qsdk", model)):
        assert one.coverage().summary["calibrated_length"] == 7
    assert qsdk.export(sim, tmp_path / "m.onnx").summary["calibrated_length"] == 7
    qsdk.analysis.perplexity(sim, texts[1])
    longer = torch.randint(0, 16, (3, 12))
    with pytest.warns(UserWarning, match="calibrated on texts of up to 7 tokens and reads 12 here.*error_by_position"):
        qsdk.analysis.perplexity(sim, longer)
    rows = qsdk.analysis.error_by_position(sim, model, longer).rows
    parts = [("0", True), ("1", True), ("2 to 3", True), ("4 to 6", True), ("7", False), ("8 to 11", False)]
    assert [(row["positions"], row["calibrated"]) for row in rows] == parts
    assert min(row["sqnr_db"] for row in rows[-2:]) > min(row["sqnr_db"] for row in rows[:-2]) - 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        qsdk.weight_only("int8").override("*", kv_cache="int8", kv_cache_scales="channel"),
        qsdk.w8a8(kv_cache="uint8"),
        qsdk.w8a8(kv_cache="float32"),
    ],
    ids=["cache per channel", "all", "all but the cache"],
)
def test_keys_of_a_short_text_serve_position_32k_as_well(config: qsdk.QuantConfig) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    sizes = {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 32}
    model: Any = decoder("Llama", **sizes, attention_bias=True, max_position_embeddings=1 << 17, rope_parameters=rope)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.bias[8:16] = torch.linspace(4, 20, 8)  # slow pairs, as trained models have them
        attention.q_proj.weight.mul_(8)
        attention.v_proj.weight.mul_(50)
        attention.o_proj.weight.mul_(50)

    def batch(seed: int, start: int = 0) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (1, 48), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "position_ids": torch.arange(start, start + 48)[None]}

    sim = qsdk.quantize(model, batch(0), config)
    qsdk.calibrate(sim, [batch(seed) for seed in range(1, 4)], progress=False)

    @torch.no_grad()
    def error(start: int) -> float:
        pairs = [(model(**x).logits, sim.run(x).logits) for x in (batch(seed, start) for seed in range(5, 9))]
        wanted, found = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return float((found - wanted).norm() / wanted.norm())

    assert error(32768) <= 1.1 * error(0)
