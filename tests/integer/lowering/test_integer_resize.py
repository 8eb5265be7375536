"""Resize on integers: nearest in every mode, linear along one to three axes with stated errors, refusals."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from integer_comparison import compare, noise, refused
from integer_models import INT8, UINT8, UINT16, Net, run, simulate
from onnx import TensorProto, helper

from onnx_backend.integer.convert import convert
from onnx_backend.integer.ir.values import Refused
from onnx_backend.integer.lowering.movement.resize import Geometry, linear_taps, nearest_indices, positions
from onnx_backend.integer.reference.run import run_reference

TRANSFORMATIONS = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def network(
    shape, *, scales=None, sizes=None, encoding=(0.031, 119, UINT8), out=(0.031, 119, UINT8), roi=None, **attrs
):
    net = Net()
    x = net.qdq(net.input(shape), *encoding)
    region = "" if roi is None else net.const(np.array(roi, np.float32))
    given = net.const(np.array(scales, np.float32)) if scales is not None else ""
    wanted = [net.const(np.array(sizes, np.int64))] if sizes is not None else []
    y = net.op("Resize", x, region, given, *wanted, **attrs)
    net.output(net.qdq(y, *out) if out else y, [None] * len(shape))
    return net.model()


# --- nearest ---------------------------------------------------------------------------------------------------------


@pytest.mark.spread(8)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nearest_indices_are_the_runtimes(transformation, rounding):
    sizes = [(n, m) for n in (1, 2, 3, 5, 8, 13, 28, 49) for m in (1, 2, 3, 4, 6, 7, 10, 16, 25, 39, 56, 98)]
    scales = [(n, s) for n in (3, 5, 8, 21) for s in (0.34, 0.5, 0.7, 1.3, 1.7, 2.0, 2.5, 3.0, 7.0)]
    for n, target in sizes + scales:
        by_size = isinstance(target, int)
        attrs = {"mode": "nearest", "coordinate_transformation_mode": transformation, "nearest_mode": rounding}
        ends = (np.int64, TensorProto.INT64) if by_size else (np.float32, TensorProto.FLOAT)
        node = helper.make_node("Resize", ["x", "", *(["", "t"] if by_size else ["t"])], ["y"], **attrs)
        graph = helper.make_graph(
            [node],
            "resize",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [n])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])],
            [helper.make_tensor("t", ends[1], [1], [target])],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        wanted = run(model, {"x": np.arange(n, dtype=np.float32)}, "ORT_DISABLE_ALL")["y"]
        scale = Fraction(target, n) if by_size else Fraction(float(np.float32(target)))
        if wanted.size == n:
            np.testing.assert_array_equal(wanted, np.arange(n))  # copied whatever the scale says
            continue
        geometry = Geometry(0, n, wanted.size, scale, transformation)
        np.testing.assert_array_equal(nearest_indices(geometry, rounding), wanted, err_msg=f"{n} -> {target}")


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("target", [{"sizes": [2, 3, 8, 7]}, {"scales": [1, 1, 2.5, 0.5]}, {"sizes": [2, 3, 12, 10]}])
@pytest.mark.parametrize("out", [(0.031, 119, UINT8), (0.024, 90, UINT8), None])
def test_nearest(transformation, target, out):
    model = network([2, 3, 6, 5], out=out, coordinate_transformation_mode=transformation, **target)
    compare(model, {"x": noise((2, 3, 6, 5))}, tolerance=0.0)


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_doubling_uses_the_integer_kernel(transformation):
    attrs = {"coordinate_transformation_mode": transformation, "nearest_mode": "floor"}
    attrs = attrs if transformation == "asymmetric" else {**attrs, "nearest_mode": "round_prefer_floor"}
    result = compare(network([2, 3, 6, 5], scales=[1, 1, 2, 2], **attrs), {"x": noise((2, 3, 6, 5))}, tolerance=0.0)
    assert [node.op_type for node in result.model.graph.node].count("Resize") == 1
    assert "Gather" not in {node.op_type for node in result.model.graph.node}


def test_indices_that_the_kernel_does_not_take_are_gathered():
    attrs = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "ceil"}
    result = compare(network([2, 3, 6, 5], sizes=[2, 3, 9, 7], **attrs), {"x": noise((2, 3, 6, 5))}, tolerance=0.0)
    assert [node.op_type for node in result.model.graph.node].count("Gather") == 2


def test_nearest_of_dynamic_sizes():
    model = network(["n", 3, "h", "w"], scales=[1, 1, 2, 3], coordinate_transformation_mode="asymmetric",
                    nearest_mode="floor")  # fmt: skip
    for shape in ((1, 3, 6, 5), (4, 3, 2, 9)):
        compare(model, {"x": noise(shape)}, tolerance=0.0)


def test_nearest_of_a_dynamic_batch_and_of_some_axes():
    compare(network(["n", 3, 6, 5], sizes=[9, 4], axes=[2, 3]), {"x": noise((2, 3, 6, 5))}, tolerance=0.0)
    model = network(["n", 3, 6, 5], scales=[2.0], axes=[-1])
    compare(model, {"x": noise((2, 3, 6, 5))}, tolerance=0.0)


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_keeping_the_aspect_ratio(policy, mode):
    model = network(
        [2, 3, 6, 5], sizes=[9, 12], axes=[2, 3], keep_aspect_ratio_policy=policy, mode=mode, out=(0.024, 110, UINT8)
    )
    compare(model, {"x": noise((2, 3, 6, 5))}, tolerance=0.01)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_cropping_and_resizing(mode):
    roi = [0, 0, 0.2, 0.1, 1, 1, 0.9, 0.5]
    attrs = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize"}
    model = network([1, 3, 8, 9], roi=roi, sizes=[1, 3, 5, 7], out=(0.024, 110, UINT8), **attrs)
    compare(model, {"x": noise((1, 3, 8, 9))}, tolerance=0.01)


def test_nearest_behind_an_accumulator():
    net = Net()
    x = net.qdq(net.input([2, 3, 6, 6]), 0.031, 119)
    w, scale = net.weight((4, 3, 3, 3), 0)
    y = net.op("Conv", x, w, net.bias(4, 0.031, scale))
    y = net.op("Resize", y, "", net.const(np.array([1, 1, 2, 2], np.float32)))
    net.output(net.qdq(y, 0.04, 121), [2, 4, 8, 8])
    compare(net.model(), {"x": noise((2, 3, 6, 6))})


# --- linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize(
    "target", [[2, 3, 12, 10], [2, 3, 7, 13], [2, 3, 6, 9], [2, 3, 1, 2], [2, 3, 24, 5], [2, 3, 5, 5]]
)
@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_bilinear(transformation, target, dtype):
    zero = {UINT8: 119, INT8: -9}[dtype]
    model = network(
        [2, 3, 6, 5],
        sizes=target,
        encoding=(0.031, zero, dtype),
        out=(0.0213, zero + 3, dtype),
        mode="linear",
        coordinate_transformation_mode=transformation,
    )
    result = compare(model, {"x": noise((2, 3, 6, 5), 1.0)}, tolerance=0.02)
    assert result.certificate["requantizations"][0]["error_bound"] < 1e-5


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("shape", [([2, 3, 7], [1, 1, 1.7]), ([1, 2, 5, 4, 6], [1, 1, 1.7, 2.3, 1.45])])
def test_linear_of_one_and_three_axes_with_odd_scales(transformation, shape):
    model = network(
        shape[0],
        scales=shape[1],
        out=(0.0213, 130, UINT8),
        mode="linear",
        coordinate_transformation_mode=transformation,
    )
    result = compare(model, {"x": noise(shape[0], 1.0)}, tolerance=0.05)
    assert result.certificate["requantizations"][0]["error_bound"] < 0.01


def test_wide_axes_are_gathered_and_narrow_ones_multiplied():
    ops = []
    for width, target in ((8, 16), (600, 1200)):
        model = network([1, 1, 4, width], sizes=[1, 1, 8, target], mode="linear", out=(0.0213, 130, UINT8))
        result = compare(model, {"x": noise((1, 1, 4, width))}, tolerance=0.02)
        ops.append([node.op_type for node in result.model.graph.node])
    assert ops[0].count("MatMulInteger") == 1
    assert ops[1].count("MatMulInteger") == 0


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("sizes", [[12, 10], [24, 20], [48, 40], [6, 10], [5, 5]])
@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_a_kernel_interpolates_along_all_axes_at_once(transformation, sizes, dtype):
    """Eight times the size has weights beyond 8 bits, which two products of the same codes share."""
    zero = {UINT8: 119, INT8: -9}[dtype]
    model = network(
        ["n", 3, 6, 5],
        sizes=sizes,
        axes=[2, 3],
        encoding=(0.031, zero, dtype),
        out=(0.0213, zero + 3, dtype),
        mode="linear",
        coordinate_transformation_mode=transformation,
    )
    result, feeds = convert(model, target="onnxruntime"), {"x": noise((2, 3, 6, 5), 1.0)}
    (wanted,) = simulate(model, feeds).values()
    (found,) = run(result.model, feeds).values()
    steps = np.abs(np.rint((found - wanted) / np.float32(0.0213)))
    assert wanted.shape == (2, 3, *sizes)
    assert steps.max() <= 1
    assert (steps > 0).mean() < 0.02
    if transformation != "align_corners":
        assert [row["form"] for row in result.certificate["requantizations"]] == ["QLinearMatMul"]


def test_an_interpolation_that_no_quantizer_reads_is_added_to():
    net = Net()
    x, z = (net.qdq(net.input([2, 3, *size], name), 0.031, 119) for name, size in (("x", (4, 4)), ("z", (8, 8))))
    scales = net.const(np.array([1, 1, 2, 2], np.float32))
    net.output(net.qdq(net.op("Add", net.op("Resize", x, "", scales, mode="linear"), z), 0.05, 120), [2, 3, 8, 8])
    model, feeds = net.model(), {"x": noise((2, 3, 4, 4)), "z": noise((2, 3, 8, 8), seed=1)}
    (wanted,) = simulate(model, feeds).values()
    (found,) = run(convert(model, target="onnxruntime").model, feeds).values()
    steps = np.abs(np.rint((found - wanted) / np.float32(0.05)))
    assert steps.max() <= 1
    assert (steps > 0).mean() < 0.02


def exact_interpolation(codes, geometries):
    """Linear interpolation of integers in exact fractions."""
    found = codes.astype(object)
    for g in geometries:
        found = np.moveaxis(found, g.axis, 0)
        rows = []
        for x in positions(g):
            x = min(max(x, Fraction(0)), Fraction(g.inputs - 1))
            i = min(int(x), max(g.inputs - 2, 0))
            rows.append(found[i] * (1 - (x - i)) + found[min(i + 1, g.inputs - 1)] * (x - i))
        found = np.moveaxis(np.stack(rows), 0, g.axis)
    return found


@pytest.mark.parametrize("scales", [(1.7, 2.3, 1.45), (1.234567, 1.1, 0.77), (2.0, 3.0, 2.0), (0.37, 5.0, 1.01)])
@pytest.mark.parametrize("transformation", ["half_pixel", "asymmetric"])
def test_the_stated_error_bounds_the_measured_one(scales, transformation):
    rng = np.random.default_rng(0)
    shape = (1, 1, 5, 4, 6)
    model = network(
        list(shape), scales=[1, 1, *scales], encoding=(1.0, 0, UINT8), out=(1.0, 0, UINT8), mode="linear",
        coordinate_transformation_mode=transformation,
    )  # fmt: skip
    result = convert(model)
    row = result.certificate["requantizations"][0]
    term = row["accumulators"][0]
    worst = 0.0
    for _ in range(6):
        feeds = {"x": rng.choice([0.0, 255.0], shape).astype(np.float32)}
        sums = run_reference(result.model, feeds, every_tensor=True)[term]
        exact_scales = [Fraction(float(np.float32(s))) for s in scales]
        geometries = [
            Geometry(2 + i, n, int(n * s), s, transformation)
            for i, (n, s) in enumerate(zip(shape[2:], exact_scales, strict=True))
        ]
        wanted = exact_interpolation(feeds["x"].astype(np.int64), geometries)
        fractions = np.asarray([abs(float(Fraction(int(a)) * Fraction(row["multipliers"][0][0]) - w))
                                for a, w in zip(sums.reshape(-1), wanted.reshape(-1), strict=True)])  # fmt: skip
        worst = max(worst, fractions.max())
    assert worst <= row["error_bound"] + 1e-6
    assert row["error_bound"] < 0.01
    if scales == (2.0, 3.0, 2.0):
        assert row["error_bound"] < 1e-6


def test_sums_of_more_than_31_bits_are_rounded_to_the_nearest():
    model = network(
        [1, 1, 1, 64], scales=[1, 1, 1, 1.37], encoding=(1.0, 0, UINT16), out=(1.0, 0, UINT16), mode="linear",
        coordinate_transformation_mode="asymmetric",
    )  # fmt: skip
    result = convert(model)
    row = result.certificate["requantizations"][0]
    geometry = Geometry(0, 64, 87, Fraction(float(np.float32(1.37))), "asymmetric")
    for seed in range(3):
        codes = np.random.default_rng(seed).integers(0, 65536, 64)
        feeds = {"x": codes.reshape(1, 1, 1, 64).astype(np.float32)}
        sums = run_reference(result.model, feeds, every_tensor=True)[row["accumulators"][0]].reshape(-1)
        exact = exact_interpolation(codes, [geometry])
        unit = Fraction(row["multipliers"][0][0])
        assert max(abs(int(s) * unit - x) for s, x in zip(sums, exact, strict=True)) <= row["error_bound"]
    assert row["error_bound"] < 5e-5


@pytest.mark.parametrize("room", [255, 4000, 1 << 20])
@pytest.mark.parametrize(("n", "m"), list(product((1, 2, 5, 30), (1, 2, 7, 61))))
def test_taps_are_exact_or_state_their_error(n, m, room):
    for scale in (Fraction(m, n), Fraction(float(np.float32(m / n * 1.0001)))):
        geometry = Geometry(0, n, m, scale, "half_pixel")
        taps = linear_taps(geometry, room)
        assert taps.whole <= room
        assert ((taps.weight >= 0) & (taps.weight <= taps.whole)).all()
        exact = [min(max(x, Fraction(0)), Fraction(n - 1)) for x in positions(geometry)]
        found = [int(i) + Fraction(int(w), taps.whole) * int(r - i)
                 for i, r, w in zip(taps.left, taps.right, taps.weight, strict=True)]  # fmt: skip
        worst = max(abs(float(a - b)) for a, b in zip(found, exact, strict=True))
        assert worst <= taps.error + 1e-12
        assert taps.error <= 0.5 / (room.bit_length() and (1 << (room.bit_length() - 1)))


def test_linear_of_the_extremes_reaches_every_code():
    model = network([1, 1, 1, 256], sizes=[1, 1, 1, 511], encoding=(1.0, 0, UINT8), out=(1.0, 0, UINT8), mode="linear",
                    coordinate_transformation_mode="align_corners")  # fmt: skip
    feeds = {"x": np.arange(256, dtype=np.float32).reshape(1, 1, 1, 256)}
    compare(model, feeds, tolerance=0.0)  # every second output is an exact tie


# --- refusals --------------------------------------------------------------------------------------------------------


def test_refusals():
    net = Net()
    x = net.qdq(net.input([1, 3, 6, 6]), 0.031, 119)
    dynamic = net.qdq(net.input([1, 3, "h", 6], "z"), 0.031, 119)
    doubled = net.const(np.array([1, 1, 2, 2], np.float32))
    cubic = net.op("Resize", x, "", doubled, mode="cubic")
    antialias = net.op("Resize", x, "", doubled, mode="linear", antialias=1)
    linear = net.op("Resize", dynamic, "", doubled, mode="linear")
    half = net.op("Resize", dynamic, "", net.const(np.array([1, 1, 1.5, 2], np.float32)))
    roi = net.const(np.array([0, 0, 0, 0, 1, 1, 1.5, 1], np.float32))
    outside = net.op("Resize", x, roi, doubled, coordinate_transformation_mode="tf_crop_and_resize")
    w, _ = net.weight((2, 3, 1, 1), 0)
    pending = net.op("Resize", net.op("Conv", x, w), "", doubled, mode="linear")
    for i, y in enumerate((cubic, antialias, linear, half, outside, pending)):
        net.nodes.append(helper.make_node("Identity", [y], [f"i{i}"]))
        net.output(net.qdq(f"i{i}", 0.031, 119), [1, None, None, None], f"y{i}")
    message = refused(
        net, "6 nodes", "mode='cubic'", "antialias=1", "are not static", "outside of the input", "a float tensor"
    )
    assert message.count("are not static") == 2


def test_unknown_modes_are_refused():
    with pytest.raises(Refused, match="nearest_mode='simple'"):
        nearest_indices(Geometry(0, 4, 8, Fraction(2), "asymmetric"), "simple")


def test_every_level_agrees_for_a_large_doubling():
    model = network([1, 2, 20, 30], scales=[1, 1, 2, 2], mode="linear", out=(0.0313, 117, UINT8))
    feeds = {"x": noise((1, 2, 20, 30))}
    wanted = simulate(model, feeds)["y"]
    found = run(convert(model).model, feeds)["y"]
    assert np.abs(found - wanted).max() <= 0.0313 * 1.01


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("target", [[2, 3, 12, 10], [2, 3, 7, 13], [2, 3, 3, 9]])
def test_sixteen_bits(mode, target):
    encoding = (1.3e-4, 31007, UINT16)
    out = encoding if mode == "nearest" else (1.1e-4, 30000, UINT16)
    model = network([2, 3, 6, 5], sizes=target, encoding=encoding, out=out, mode=mode)
    result = compare(model, {"x": noise((2, 3, 6, 5), 0.8)}, tolerance=0.02 * (mode == "linear"))
    assert all(row["error_bound"] < 0.01 for row in result.certificate["requantizations"])
