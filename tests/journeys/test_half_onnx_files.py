"""ONNX files in float16, bfloat16 and float64, and mixed ones: simulated, exported, proven, opened again."""

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from float_files import float_onnx
from foreign_nets import NETS, cnn, lstm, transformer
from half_files import CODES, in_type
from torch import nn

import qsdk
from onnx_backend.runtime.session import simulation_session

MIXED = ("LayerNormalization", "Softmax", "Sigmoid", "HardSwish")


@dataclass(frozen=True)
class Road:
    """A file, its float type, and batches that it takes."""

    model: onnx.ModelProto
    dtype: str
    data: list[np.ndarray]


def of_net(net, dtype: str, *, mixed: bool = False) -> Road:
    rng = np.random.default_rng(0)
    data = [rng.standard_normal(NETS[net]).astype(np.float32) for _ in range(3)]
    return Road(in_type(net(), dtype, keep=MIXED if mixed else ()), dtype, data)


def of_module(kind: str, dtype: str) -> Road:
    """What torch exports of a module in this type."""
    torch.manual_seed(0)
    linear = [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)]
    convs = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    module = (
        nn.Sequential(*(linear if kind == "linear" else [*convs, nn.Linear(8, 4)])).eval().to(getattr(torch, dtype))
    )
    x = torch.randn((4, 64) if kind == "linear" else (2, 3, 12, 12)).to(getattr(torch, dtype))
    return Road(float_onnx(module, (x,)), dtype, [x.float().numpy()])


ROADS = {
    **{
        f"{net.__name__} {dtype}": (of_net, net, dtype)
        for net in (cnn, transformer)
        for dtype in ("float16", "bfloat16")
    },
    "transformer float64": (of_net, transformer, "float64"),
    "lstm bfloat16": (of_net, lstm, "bfloat16"),
    "torch linear float16": (of_module, "linear", "float16"),
    "torch conv bfloat16": (of_module, "conv", "bfloat16"),
}


def check_road(road: Road, tmp_path, config, worst: float = 0.07) -> None:
    sim = qsdk.quantize(road.model, None, config)
    qsdk.calibrate(sim, road.data, progress=False)
    exact = simulation_session(road.model)
    fed = {exact.get_inputs()[0].name: road.data[0].astype(np.float16 if road.dtype == "float16" else np.float32)}
    fed = {name: x.astype(np.float64) if road.dtype == "float64" else x for name, x in fed.items()}
    got, wanted = (np.asarray(y, np.float32) for y in (sim.run(road.data[0])[0], exact.run(None, fed)[0]))
    assert np.abs(got - wanted).max() <= worst * np.abs(wanted).max()
    path = tmp_path / "model.onnx"
    qsdk.export(sim, path)
    qsdk.validate(path)
    ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    edges = onnx.load(path).graph
    assert {value.type.tensor_type.elem_type for value in (*edges.input, *edges.output)} == {CODES[road.dtype]}
    parity = qsdk.check_parity(sim, path, road.data, progress=False).summary
    assert parity["passed"]
    assert (parity["weights_max_lsb"], parity["activations_max_lsb"] <= 1) == (0, True)
    back = qsdk.quantize(path, None)
    assert back.encodings == sim.encodings
    np.testing.assert_array_equal(np.asarray(back.run(road.data[0])[0]), np.asarray(sim.run(road.data[0])[0]))
    again = tmp_path / "again.onnx"
    qsdk.export(back, again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ROADS)
def test_a_file_of_another_float_type_goes_the_whole_road(name: str, tmp_path):
    build, *facts = ROADS[name]
    check_road(build(*facts), tmp_path, qsdk.w8a8())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("net", [cnn, transformer])
def test_a_mixed_file_goes_the_whole_road(net, dtype: str, tmp_path):
    check_road(of_net(net, dtype, mixed=True), tmp_path, qsdk.w8a8())


@pytest.mark.slow
def test_int4_weights_in_blocks_and_16_bit_activations_too(tmp_path):
    check_road(of_module("linear", "bfloat16"), tmp_path, qsdk.w4a16(block_size=32), worst=0.2)
