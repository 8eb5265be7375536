"""Configs that quantize linear layers and what they read, and nothing else."""

import pytest
import torch
from torch import nn

import qsdk


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32, bias=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        scores = x @ x.mT
        return self.head((scores.softmax(-1) @ x) * self.scale)


def quantized(config: qsdk.QuantConfig) -> set[str]:
    torch.manual_seed(0)
    sim = qsdk.quantize(Block(), torch.arange(8)[None], config)
    return {d.site for d in sim.plan.decisions.values() if d.state != "float"}


@pytest.mark.slow
def test_weights_of_linear_layers_and_what_they_read():
    config = qsdk.w8a8().for_dialect("compressed-tensors")
    weights = {"up:weight", "down:weight", "head:weight"}
    assert quantized(config) == {*weights, "norm:output", "relu.0:output", "mul.0:output"}
    assert quantized(qsdk.weight_only("int4").for_dialect("compressed-tensors")) == weights
    assert quantized(config.skip("head")) == {*weights - {"head:weight"}, "norm:output", "relu.0:output"}
    assert len(quantized(qsdk.w8a8())) > 12


def test_what_the_dialect_changes():
    config = qsdk.w4a16(block_size=32).for_dialect("compressed-tensors")
    assert (config.weight, config.activation, config.block_size) == (qsdk.int4, qsdk.float32, 32)
    assert config.only_linear
    assert qsdk.QuantConfig.from_dict(config.to_dict()) == config
    eight = qsdk.w8a8().override("up", activation="uint8").for_dialect("compressed-tensors")
    assert (eight.activation, eight.symmetric_activations, eight.rules[0].activation) == (qsdk.int8, True, qsdk.int8)
    assert not qsdk.w8a8().for_dialect("onnxruntime").only_linear
    assert "only_linear=True" in str(eight)
    for refused in ({"weight": "int3"}, {"weight": "mxint8"}, {"activation": "float8e5m2"}):
        with pytest.raises(qsdk.ConfigError, match="cannot be had in the dialect compressed-tensors; choose another"):
            qsdk.w8a8().override("*", **refused).for_dialect("compressed-tensors")


@pytest.mark.slow
def test_a_table_that_an_embedding_shares_stays_float():
    class Tied(Block):
        def __init__(self):
            super().__init__()
            self.head.weight = self.table.weight

    sim = qsdk.quantize(Tied(), torch.arange(8)[None], qsdk.w8a8().for_dialect("compressed-tensors"))
    assert sim.plan.decisions["table:weight"].reason.startswith("no weight of a linear layer alone")
    assert sim.plan.decisions["mul.0:output"].reason.startswith("no quantized linear layer reads it")


def test_blocks_that_do_not_divide_are_refused_before_any_data_is_seen():
    network, x = nn.Sequential(nn.Linear(80, 64), nn.ReLU(), nn.Linear(64, 4)), torch.zeros(1, 80)
    message = r"blocks of 32 do not divide the 80 input channels of 0:weight, .* 40, 20, 16, .*override\('0'.* 16, 8, 4"
    with pytest.raises(qsdk.ConfigError, match=message):
        qsdk.quantize(network, x, qsdk.weight_only("int4", block_size=32).for_dialect("compressed-tensors"))
    config = qsdk.weight_only("int4", block_size=32).for_dialect("compressed-tensors").override("0", block_size=40)
    assert qsdk.quantize(network, x, config).plan.decisions["0:weight"].quantized
