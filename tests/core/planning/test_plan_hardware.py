"""What a target asks of a plan: operands of MatMul, weights of norms, ranges that calibration leaves alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plans import site, spec_of
from strategies import GraphBuilder
from torch import nn
from torch_models import sim_of

import qsdk
from qsdk import QuantConfig, calibrate, check_parity, export, int8, int16, load_config, quantize, w4a8, w8a8, w8a16
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Plan


def product(*, moved: bool = True) -> Graph:
    """Two convolutions multiplied, the second behind a Reshape and a Transpose, of which one has no site."""
    b = GraphBuilder()
    x = b.input()
    left, right = b.conv(x, "left"), b.conv(x, "right")
    if moved:
        right = b.op("Transpose", [b.op("Reshape", [right], "reshape:output")], None)
    return b.graph(b.op("MatMul", [left, right], "product:output"))


def wide(*names: str) -> QuantConfig:
    """v73 with 16-bit activations at these owners."""
    config = load_config("htp_v73")
    for name in names:
        config = config.override(name, activation="uint16")
    return config


def dtypes(plan: Plan, *names: str) -> list[str]:
    return [str(spec_of(plan, f"{name}:output").dtype) for name in names]


def test_on_v73_a_16_bit_second_operand_is_symmetric_beside_a_16_bit_first_one():
    plan = make_plan(product(), wide("right", "reshape"))
    assert dtypes(plan, "left", "right", "reshape", "product") == ["uint16", "uint16", "uint16", "uint8"]
    assert spec_of(plan, "right:output").symmetric
    assert spec_of(plan, "reshape:output") == spec_of(plan, "right:output")  # they share an encoding
    assert not spec_of(plan, "left:output").symmetric
    assert site(plan, "left:output").reason == "Conv; uint16: a MatMul of v73 needs it"
    assert not spec_of(plan, "product:output").symmetric


def test_a_tensor_times_itself_moved_has_one_symmetric_encoding():
    """Both operands share it, so what the first one has is what the second one asks for."""
    b = GraphBuilder()
    x = b.conv(b.input(), "made")
    moved = b.op("Transpose", [b.op("Reshape", [x], "reshape:output")], "moved:output")
    plan = make_plan(b.graph(b.op("MatMul", [x, moved], "product:output")), wide("made", "reshape", "moved"))
    assert dtypes(plan, "made", "moved") == ["uint16", "uint16"]
    assert spec_of(plan, "made:output").symmetric
    assert spec_of(plan, "moved:output") == spec_of(plan, "made:output")


def test_on_v73_an_8_bit_second_operand_needs_nothing():
    for names in ((), ("left",)):
        plan = make_plan(product(), wide(*names))
        assert plan == make_plan(product(), replace(wide(*names), hardware="aimet"))


@pytest.mark.parametrize("hardware", ["v66", "v68", "v69"])
@pytest.mark.parametrize("base", [w8a8(), w8a16()])
def test_before_v73_the_second_operand_is_symmetric_with_8_bits(hardware: str, base: QuantConfig):
    plan = make_plan(product(), load_config(f"htp_{hardware}", base=base))
    assert spec_of(plan, "right:output") == spec_of(plan, "reshape:output")
    assert (spec_of(plan, "right:output").dtype, spec_of(plan, "right:output").symmetric) == (qsdk.uint8, True)
    assert spec_of(plan, "left:output").dtype == base.activation
    assert not spec_of(plan, "left:output").symmetric


@pytest.mark.parametrize("base", [w8a8(), w8a16()])
def test_for_qnn_the_second_operand_is_symmetric_and_keeps_its_bits(base: QuantConfig):
    config = base.for_dialect("qnn")
    assert config.hardware == "qnn"
    plan = make_plan(product(), config)
    assert (spec_of(plan, "right:output").dtype, spec_of(plan, "right:output").symmetric) == (base.activation, True)
    assert spec_of(plan, "reshape:output") == spec_of(plan, "right:output")
    assert site(plan, "right:output").reason == f"Conv; {base.activation}, symmetric: a MatMul of qnn needs it"
    assert not spec_of(plan, "left:output").symmetric
    assert load_config("htp_v73", base=base).for_dialect("qnn").hardware == "v73"  # a target that is named stays
    assert base.for_dialect("openvino").hardware is None


def test_symmetric_second_operands_are_for_that_hardware_only():
    config = w8a8().override("right", activation="uint16").override("reshape", activation="uint16")
    for hardware in (None, "aimet"):
        plan = make_plan(product(), replace(config, hardware=hardware))
        assert dtypes(plan, "left", "right") == ["uint8", "uint16"]
        assert not spec_of(plan, "right:output").symmetric


def test_a_stored_or_float_operand_is_left_alone():
    b = GraphBuilder()
    x = b.input(shape=(2, 4))
    graph = b.graph(b.op("MatMul", [x, b.stored("fc:weight", (4, 4))], "fc:output", (2, 4)))
    plan = make_plan(graph, load_config("htp_v73", base=w8a16()))
    assert not spec_of(plan, "x:input").symmetric
    plan = make_plan(product(), wide("right", "reshape").skip("left"))
    assert site(plan, "left:output").spec is None
    assert not spec_of(plan, "right:output").symmetric


@pytest.mark.parametrize("later", [True, False])
def test_a_raised_operand_raises_those_of_another_matmul(later: bool):
    b = GraphBuilder()
    x = b.input()
    a, c, d = (b.conv(x, name) for name in ("a", "c", "d"))
    pairs = [(a, c, "ac"), (c, d, "cd")]  # c is a second operand and a first one
    made = [b.op("MatMul", [left, right], f"{name}:output") for left, right, name in (pairs if later else pairs[::-1])]
    plan = make_plan(b.graph(*made), wide("d"))
    assert dtypes(plan, "a", "c", "d") == ["uint16", "uint16", "uint16"]
    assert [spec_of(plan, f"{n}:output").symmetric for n in ("a", "c", "d")] == [False, True, True]


def test_both_operands_may_be_one_tensor():
    b = GraphBuilder()
    y = b.conv(b.input(), "conv")
    plan = make_plan(b.graph(b.op("MatMul", [y, y], "square:output")), wide("conv"))
    assert (spec_of(plan, "conv:output").dtype, spec_of(plan, "conv:output").symmetric) == (qsdk.uint16, True)


def test_biases_follow_an_input_that_is_raised():
    b = GraphBuilder()
    x = b.input()
    left, right = b.conv(x, "left"), b.conv(x, "right")
    after = b.conv(left, "after", bias=True)
    graph = b.graph(b.op("MatMul", [left, right], "product:output"), after)
    config = wide("right").override("*", bias="int32")
    assert site(make_plan(graph, config), "after:bias").reason == "its input is not an integer of 8 bits or fewer"
    assert site(make_plan(graph, replace(config, hardware=None)), "after:bias").quantized


def norm(type: str) -> Graph:
    b = GraphBuilder()
    stored = [b.stored("norm:weight", (8,))] + [b.stored("norm:bias", (8,))] * (type != "RMSNormalization")
    return b.graph(b.op(type, [b.input(), *stored], "norm:output"))


AS_OUTPUT = ["GroupNormalization", "InstanceNormalization", "RMSNormalization"]


@pytest.mark.parametrize("type", AS_OUTPUT)
def test_the_weight_of_a_group_norm_has_the_bits_of_its_output(type: str):
    for base, dtype in ((w8a8(), int8), (w8a16(), int16), (w4a8(), int8)):
        spec = spec_of(make_plan(norm(type), load_config("default", base=base)), "norm:weight")
        assert (spec.dtype, spec.symmetric) == (dtype, False)
    symmetric = load_config("default", base=w8a16()).override("norm", symmetric_activations=True)
    assert spec_of(make_plan(norm(type), symmetric), "norm:weight").symmetric
    assert not site(make_plan(norm(type), load_config("default").skip("norm")), "norm:weight").quantized


@pytest.mark.parametrize("weight", ["int8", "int16", "int4"])
def test_the_weight_of_a_layer_norm_is_symmetric_iff_it_has_16_bits(weight: str):
    config = load_config("default").override("norm", weight=weight)
    spec = spec_of(make_plan(norm("LayerNormalization"), config), "norm:weight")
    assert (spec.dtype, spec.symmetric) == ((int16, True) if weight == "int16" else (int8, False))
    config = load_config("htp_v68").override("norm", weight=weight)
    spec = spec_of(make_plan(norm("LayerNormalization"), config), "norm:weight")
    assert (spec.dtype, spec.symmetric) == (int8, False)


@pytest.mark.parametrize("type", [*AS_OUTPUT, "LayerNormalization"])
def test_without_hardware_the_weight_of_a_norm_is_symmetric_with_8_bits_or_more(type: str):
    for base in (w8a8(), w8a16(), w4a8()):
        spec = spec_of(make_plan(norm(type), base), "norm:weight")
        assert (spec.dtype, spec.symmetric) == (int8, True)
    spec = spec_of(make_plan(norm(type), w8a8().override("norm", weight="int16")), "norm:weight")
    assert (spec.dtype, spec.symmetric) == (int16, True)


def test_the_weight_of_a_decomposed_layer_norm_is_symmetric_iff_it_has_16_bits():
    b = GraphBuilder()
    x = b.input(shape=(1, 4, 8))
    mean = b.op("ReduceMean", [x], None, (1, 4, 1), axes=[-1], keepdims=1)
    centred = b.op("Sub", [x, mean], None, (1, 4, 8))
    square = b.op("Mul", [centred, centred], None, (1, 4, 8))
    variance = b.op("ReduceMean", [square], None, (1, 4, 1), axes=[-1], keepdims=1)
    root = b.op("Sqrt", [b.op("Add", [variance, b.stored(None, (), value=1e-5)], None, (1, 4, 1))], None, (1, 4, 1))
    scaled = b.op(
        "Mul", [b.op("Div", [centred, root], None, (1, 4, 8)), b.stored("norm:weight", (8,))], None, (1, 4, 8)
    )
    graph = b.graph(b.op("Add", [scaled, b.stored("norm:bias", (8,))], "norm:output", (1, 4, 8)))
    assert site(make_plan(graph, load_config("htp_v73")), "norm:output").reason == "LayerNorm"
    spec = spec_of(make_plan(graph, load_config("htp_v73")), "norm:weight")
    assert (spec.dtype, spec.symmetric) == (int8, False)
    spec = spec_of(
        make_plan(graph, load_config("htp_v73", base=w8a8().override("norm", weight="int16"))), "norm:weight"
    )
    assert (spec.dtype, spec.symmetric) == (int16, True)
    config = load_config("htp_v73").override(op_type="LayerNormalization", weight="int16")
    assert spec_of(make_plan(graph, config), "norm:weight").dtype == int16


def test_unknown_hardware():
    with pytest.raises(qsdk.ConfigError, match="unknown hardware 'v1'; known are aimet, v66, v68, v69, v73"):
        make_plan(product(), replace(w8a8(), hardware="v1"))


class Bounded(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.softmax(-1), torch.sigmoid(x), torch.tanh(x), torch.sin(x), torch.cos(x)


def test_calibration_leaves_a_fixed_range():
    x = torch.randn(2, 8)
    sim = sim_of(Bounded(), x)
    first = None
    for scale in (1e-3, 1e3):
        calibrate(sim, [x * scale], progress=False)
        made = {name: e for name, e in sim.encodings.items() if not name.endswith("input")}
        found = {name: (float(e.low[0]), float(e.high[0])) for name, e in made.items()}
        assert len(found) == 5
        for name, (low, high) in found.items():
            signed = any(function in name for function in ("tanh", "sin", "cos"))
            assert high == pytest.approx(1.0, abs=0.01), name
            assert low == pytest.approx(-1.0 if signed else 0.0, abs=0.01), name
        assert first in (None, found)
        first = found


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return torch.softmax(y @ torch.tanh(y).transpose(-1, -2), -1)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "config",
    [
        load_config("htp_v68", base=w8a16()),
        load_config("htp_v73", base=w8a16()),
        load_config("enpu_v7"),
        w8a8().override("*", symmetric_weights=False, output="float32"),
    ],
    ids=["v68", "v73", "enpu", "asymmetric"],
)
def test_such_plans_are_calibrated_exported_and_at_parity(config: QuantConfig, tmp_path: Path):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    sim = sim_of(Small(), x, config)
    calibrate(sim, [x], progress=False)
    export(sim, tmp_path / "small.onnx")
    assert check_parity(sim, tmp_path / "small.onnx", [x], progress=False).summary["passed"]
    again = quantize(str(tmp_path / "small.onnx"), None, None)
    assert set(again.encodings) <= set(sim.plan.decisions)
