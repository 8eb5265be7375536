"""The walk over modules that call layers in their own ways: again, sometimes, packed, step by step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import calibrated, seeded

from qsdk import QuantConfig, QuantSim, w4a8
from torch_bridge.walk.layer_walk import walk_layers
from torch_bridge.walk.module_walk import walk_modules


def tokens(*sizes: int, width: int = 8) -> list[Tensor]:
    return [seeded(n, 5, width, seed=n) for n in sizes]


def walked(sim: QuantSim, data: Any, **options: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Site -> the inputs of its layer, nothing being solved; of a site that is solved again, the last."""
    found = {}
    with walk_layers(sim, data, **options) as walk:
        for step in walk:
            for layer in step.layers:
                found[layer.site] = list(step.inputs())
    return found


def sim_of(model: nn.Module, data: list[Any], config: QuantConfig | None = None) -> QuantSim:
    return calibrated(model.eval(), data[0], config or w4a8())


def calls_of(sim: QuantSim, path: str, data: list[Tensor], *, quantized: bool) -> list[Tensor]:
    found: list[Tensor] = []
    handle = sim.model.get_submodule(path).register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad(), sim.runtime.in_phase("quantize" if quantized else "float"):
        for batch in data:
            sim.model(batch)
    handle.remove()
    return found


@pytest.mark.slow
def test_a_layer_that_is_called_again_gives_all_its_inputs() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice, self.last = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.twice(F.relu(self.twice(self.first(x)))))

    data = tokens(2, 3, 4)
    sim = sim_of(Twice(), data)
    found = walked(sim, data)
    assert {site: len(pairs) for site, pairs in found.items()} == {
        "first:weight": 3,
        "twice:weight": 6,
        "last:weight": 3,
    }
    for path in ("first", "twice", "last"):
        for quantized in (False, True):
            expected = calls_of(sim, path, data, quantized=quantized)
            assert all(torch.equal(a[quantized], b) for a, b in zip(found[f"{path}:weight"], expected, strict=True))


class Sometimes(nn.Module):
    """Batches of three rows skip a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.maybe, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        """Gives [N, 5, 8]."""
        x = self.first(x)
        if self.rows != 3:
            x = self.maybe(x)
        return self.last(x)


@pytest.mark.slow
def test_a_layer_that_only_some_batches_call() -> None:
    data = tokens(2, 3, 4)
    sim = sim_of(Sometimes(), data)

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        model.rows = len(batch)
        return model(batch)

    found = walked(sim, data, forward=forward)
    assert {site: len(x) for site, x in found.items()} == {"first:weight": 3, "maybe:weight": 2, "last:weight": 3}
    assert [len(x) for x, _ in found["maybe:weight"]] == [2, 4]


class Attends(nn.Module):
    """Self-attention in torch's packed form and in separate layers."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.MultiheadAttention(8, 2, batch_first=True)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Gives [N, 5, 8]."""
        x = self.packed(x, x, x, need_weights=False)[0] + x
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


@pytest.mark.slow
def test_attention_is_walked_part_by_part() -> None:
    data = tokens(2, 3)
    sim = sim_of(Attends(), data)
    steps, found = [], {}
    with walk_layers(sim, data) as walk:
        assert walk.left == {}
        for step in walk:
            steps.append([layer.site for layer in step.layers])
            found[steps[-1][0]] = list(step.inputs())
    packed = [["packed:in_proj_weight"], ["packed.out_proj:weight"]]
    assert steps == [*packed, ["q:weight", "k:weight", "v:weight"], ["o:weight"]]
    for (x, _), batch in zip(found["packed:in_proj_weight"], data, strict=True):
        assert torch.equal(x, batch.transpose(0, 1))
    weight, bias = sim.model.packed.out_proj._parameters["weight"], sim.model.packed.out_proj._parameters["bias"]
    for number, batch in enumerate(data):
        x, x_quantized = found["packed.out_proj:weight"][number]
        with torch.no_grad(), sim.float_phase():
            expected = sim.model.packed(batch, batch, batch, need_weights=False)[0]
        torch.testing.assert_close(F.linear(x, weight, bias).view(5, -1, 8).transpose(0, 1), expected)
        assert 0 < (x - x_quantized).abs().max() < 0.5
    for path in ("q", "o"):
        for pair, x in zip(found[f"{path}:weight"], calls_of(sim, path, data, quantized=True), strict=True):
            assert torch.equal(pair[1], x)


@pytest.mark.parametrize(
    "kind", [nn.LSTM, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in (nn.GRU, nn.RNN))]
)
def test_recurrent_weights_are_multiplied_with_inputs_and_states(kind: Any) -> None:
    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = kind(8, 4, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[0]

    data = tokens(2, 3)
    sim = sim_of(Runs(), data)
    found = walked(sim, data)
    assert list(found) == [f"net:weight_{name}_l{layer}" for layer in (0, 1) for name in ("ih", "hh")]
    with torch.no_grad(), sim.float_phase():
        outputs = [sim.model(batch) for batch in data]
    for batch, output, first, state in zip(
        data, outputs, found["net:weight_ih_l0"], found["net:weight_hh_l1"], strict=True
    ):
        assert torch.equal(first[0], torch.cat([batch, batch], -1).transpose(0, 1))
        forwards, backwards = output[..., :4].transpose(0, 1), output[..., 4:].transpose(0, 1)
        before = state[0]
        assert before.shape == (5, len(batch), 8)
        torch.testing.assert_close(before[1:, :, :4], forwards[:-1])
        torch.testing.assert_close(before[:-1, :, 4:], backwards[1:])
        assert not before[0, :, :4].any()
        assert not before[-1, :, 4:].any()
        assert 0 < (state[0] - state[1]).abs().max() < 0.5


def test_a_cell_in_a_loop_gives_every_step() -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            state = x[:, 0, :4]
            for step in range(3):
                state = self.cell(x[:, step], state)
            return state

    data = tokens(2, 3)
    sim = sim_of(Loops(), data)
    found = walked(sim, data)
    assert {site: len(pairs) for site, pairs in found.items()} == {"cell:weight_ih": 6, "cell:weight_hh": 6}
    inputs = [batch[:, step] for batch in data for step in range(3)]
    assert all(torch.equal(pair[0], x) for pair, x in zip(found["cell:weight_ih"], inputs, strict=True))
    assert torch.equal(found["cell:weight_hh"][3][0], data[1][:, 0, :4])


@pytest.mark.slow
def test_an_encoder_of_torch_is_walked() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    data = tokens(2, 3)
    sim = sim_of(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), data)
    found = walked(sim, data)
    names = ("self_attn:in_proj_weight", "self_attn.out_proj:weight", "linear1:weight", "linear2:weight")
    assert list(found) == [f"layers.{n}.{name}" for n in range(2) for name in names]
    for path in ("layers.0.linear2", "layers.1.linear1"):
        for pair, x in zip(found[f"{path}:weight"], calls_of(sim, path, data, quantized=True), strict=True):
            assert torch.equal(pair[1], x)


def test_memory_bound_changes_nothing() -> None:
    data = tokens(2, 3, 4)
    sim = sim_of(Attends(), data)
    free, bound = walked(sim, data), walked(sim, data, max_memory=300)
    assert free.keys() == bound.keys()
    for site, pairs in free.items():
        assert all(
            torch.equal(a, b)
            for one, other in zip(pairs, bound[site], strict=True)
            for a, b in zip(one, other, strict=True)
        )


def test_a_walk_over_modules_yields_their_arguments_and_results() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)]
    data = tokens(2, 3, 4)
    sim = sim_of(nn.Sequential(*blocks), data)
    for max_memory in (None, 300):
        with walk_modules(sim, data, ["0", "1", "2"], max_memory=max_memory) as walk:
            assert (walk.order, walk.left, walk.batches) == (["0", "1", "2"], {}, 3)
            for step in walk:
                in_float, quantized = (calls_of(sim, step.path, data, quantized=q) for q in (False, True))
                assert [call.number for call in step.calls] == [0, 1, 2]
                for call in step.calls:
                    assert torch.equal(call.float.args[0], in_float[call.number])
                    assert torch.equal(call.quantized.args[0], quantized[call.number])
                    with torch.no_grad(), sim.float_phase():
                        assert torch.equal(call.result, sim.model.get_submodule(step.path)(in_float[call.number]))
