"""Operations that the target `onnxruntime` writes as kernels like them: blocks, rows of channels, an axis last."""

from itertools import product

import numpy as np
import pytest
from integer_models import LEVELS, UINT8, Net, run, simulate

from onnx_backend.integer.convert import convert

GEOMETRIES = [
    ((3, 3), [1, 1, 1, 1]),
    ((3, 3), [0, 0, 1, 1]),
    ((2, 2), [0, 0, 0, 0]),
    ((7, 7), [3, 3, 3, 3]),
    ((4, 3), [2, 1, 1, 0]),
    ((5, 1), [2, 0, 2, 0]),
]


def uniform(shape, seed=1):
    return np.random.default_rng(seed).uniform(-4.0, 4.0, shape).astype(np.float32)


def kinds(model):
    return [node.op_type for node in model.graph.node]


def convolution(kernel, pads, size=(10, 12), channels=3, **attributes):
    net = Net()
    x = net.qdq(net.input([2, channels, *size]), 0.031, 117)
    y = net.op("Conv", x, net.weight((5, channels, *kernel), 0)[0], pads=pads, strides=[2, 2], **attributes)
    net.output(net.qdq(y, 0.041, 119), [2, 5, None, None])
    return net.model(), {"x": uniform([2, channels, *(10 if n is None else n for n in size)])}


@pytest.mark.parametrize(("kernel", "pads"), GEOMETRIES)
def test_a_convolution_of_stride_2_over_few_channels_takes_blocks_and_gives_the_same_integers(
    kernel, pads, monkeypatch
):
    model, feeds = convolution(kernel, pads)
    blocks = convert(model, target="onnxruntime").model
    monkeypatch.setattr("onnx_backend.integer.codegen.runtime.in_blocks", lambda builder, maker: maker)
    plain = convert(model, target="onnxruntime").model
    assert ("SpaceToDepth" in kinds(blocks), "SpaceToDepth" in kinds(plain)) == (True, False)
    for level, (name, wanted) in product(LEVELS, run(plain, feeds, LEVELS[0]).items()):
        np.testing.assert_array_equal(run(blocks, feeds, level)[name], wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"size": (9, 12)},
        {"channels": 8},
        {"dilations": [2, 2]},
        {"size": (None, 12)},
        {"auto_pad": "SAME_UPPER"},
        {"kernel": (1, 1)},
    ],
)
def test_others_stay_as_they_are(options):
    given = {"kernel": (3, 3), "pads": [1] * 4, **options}
    if "auto_pad" in options or given["kernel"] == (1, 1):
        given["pads"] = [0] * 4
    assert "SpaceToDepth" not in kinds(convert(convolution(**given)[0], target="onnxruntime").model)


def repeated(sizes, scales):
    net = Net()
    x = net.qdq(net.input(sizes), 0.031, 117)
    factors = net.const(np.asarray([1, 1, *scales], np.float32))
    y = net.op(
        "Resize", x, "", factors, mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric"
    )
    net.output(net.qdq(y, 0.031, 117), [None] * 4)
    return net.model(), {"x": uniform(sizes)}


@pytest.mark.parametrize("scales", [(2, 2), (1, 3), (4, 2)])
def test_a_resize_that_repeats_is_written_as_rows_of_channels(scales):
    model, feeds = repeated([2, 3, 5, 4], scales)
    found = convert(model, target="onnxruntime").model
    assert "Resize" not in kinds(found)
    assert "Resize" in kinds(convert(model).model)
    wanted = simulate(model, feeds)
    for level in LEVELS:
        for name, got in run(found, feeds, level).items():
            np.testing.assert_array_equal(got, wanted[name])


@pytest.mark.parametrize("scales", [(5, 2), (1.5, 2)])
def test_a_resize_that_does_not_repeat_few_times_stays(scales):
    model, feeds = repeated([2, 3, 4, 4], scales)
    found = convert(model, target="onnxruntime").model
    assert "Resize" in kinds(found)
    np.testing.assert_array_equal(*(next(iter(got.values())) for got in (run(found, feeds), simulate(model, feeds))))


@pytest.mark.parametrize("axis", [1, 2, -1, -3])
def test_a_softmax_along_the_channels_of_pictures_puts_them_last(axis):
    net = Net()
    x = net.qdq(net.input([2, 6, 5, 4]), 0.031, 117)
    net.output(net.qdq(net.op("Softmax", x, axis=axis), 1 / 256, 0, UINT8), [2, 6, 5, 4])
    model, feeds = net.model(), {"x": uniform([2, 6, 5, 4])}
    found = convert(model, target="onnxruntime").model
    assert kinds(found).count("Transpose") == (2 if axis in (1, -3) else 0)
    assert "QLinearSoftmax" in kinds(found)
    (wanted,) = simulate(model, feeds).values()
    for level in LEVELS:
        (got,) = run(found, feeds, level).values()
        assert np.abs(got - wanted).max() <= 1.01 / 256
