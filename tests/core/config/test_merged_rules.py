"""Rules that a later one decides are left out, and runs of rules with the same choices are one entry of a file."""

import random
from functools import reduce

import onnx
import pytest
import torch
from torch import nn

import qsdk
from qsdk import QuantConfig
from qsdk.core.config.rules import make_rule, with_rule

PATTERNS = ("*", "first", "f*", "body*", "body.0", "body.0:weight", "*:weight", "body.0:output", "last", "*last")
CHOICES = (
    {"weight": "int4"},
    {"weight": "int8", "activation": "uint16"},
    {"activation": "uint8"},
    {"activation": "float32"},
    {"input": "uint16"},
    {"output": "float16"},
    {"weight": "int4", "per_channel": False},
    {"bias": "float32"},
    {"weight": "int8", "op_type": "Gemm"},
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def forward(self, x):
        return self.last(self.body(self.first(x)))


@pytest.fixture(scope="module")
def sim():
    torch.manual_seed(0)
    sim = qsdk.quantize(Net(), x := torch.randn(16, 6))
    qsdk.calibrate(sim, [x], progress=False)
    return sim


@pytest.mark.slow
def test_what_is_left_of_the_rules_decides_the_same(sim):
    rng, shorter = random.Random(0), 0
    for _ in range(400):
        rules = [
            make_rule(rng.choice(PATTERNS), rng.choice(CHOICES), optional=rng.random() < 0.1)
            for _ in range(rng.randint(2, 8))
        ]
        merged = reduce(with_rule, rules, ())
        try:
            whole = sim.planned(QuantConfig(rules=tuple(rules))).plan.decisions
        except qsdk.ConfigError:  # a rule that reaches nothing: what is left of the rules may lack it
            continue
        shorter += len(merged) < len(rules)
        assert sim.planned(QuantConfig(rules=merged)).plan.decisions == whole, rules
    assert shorter > 20


@pytest.mark.slow
def test_precisions_that_were_changed_often_take_no_more_room_than_the_last_ones(sim, tmp_path):
    state, names = sim.snapshot(), [site for site in sim.plan.decisions if site.endswith(":weight")]
    for site in names:
        sim.set_precision(site, weight="int4")
    qsdk.export(sim, tmp_path / "once.onnx")
    for dtype in ("int8", "int4", "int8", "int4"):
        for site in names:
            sim.set_precision(site, weight=dtype)
    qsdk.export(sim, tmp_path / "often.onnx")
    assert len(sim.config.rules) == len(names)
    sizes = [len((tmp_path / f"{name}.onnx").read_bytes()) for name in ("once", "often")]
    assert sizes[0] == sizes[1]
    stored = {prop.key: prop.value for prop in onnx.load(tmp_path / "often.onnx").metadata_props}
    assert stored["qsdk.encodings"].count('"weight": "int4"') == 1
    qsdk.save(sim, tmp_path / "sim.qsdk")
    again = qsdk.load(tmp_path / "sim.qsdk", Net())
    assert again.config == sim.config
    assert again.plan.decisions == sim.plan.decisions
    sim.restore(state)


def test_a_run_of_rules_is_one_entry_and_single_ones_are_read_as_before():
    config = qsdk.w8a8().override("a", weight="int4").override("b", weight="int4").override("a", activation="uint16")
    config = config.override("c", weight="int4")
    entries = config.to_dict()["rules"]
    assert entries == [
        {"pattern": ["a", "b"], "weight": "int4"},
        {"pattern": "a", "activation": "uint16"},
        {"pattern": "c", "weight": "int4"},
    ]
    assert QuantConfig.from_dict(config.to_dict()) == config
    old = {**config.to_dict(), "rules": [{"pattern": name, "weight": "int4"} for name in "ab"] + entries[1:]}
    assert QuantConfig.from_dict(old) == config
    for wrong in ([], ["a", 3], 3):
        with pytest.raises(qsdk.ConfigError, match="pattern is a string, or a list of strings, not"):
            QuantConfig.from_dict({**config.to_dict(), "rules": [{"pattern": wrong, "weight": "int4"}]})
