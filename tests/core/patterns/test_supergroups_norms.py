"""Norms as supergroups: every spelling, at every opset, means what its name says."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm_models import DIVISIONS, SQUARES, Norm, at, build, error_of, quantized_tensors
from norm_spellings import ALL, _groups, assert_whole, found
from onnx import helper
from qdq_models import make_model

from onnx_backend.proto.opsets import at_opset, opset_of
from qsdk.core.patterns.supergroup import MatchResult

OPSETS = (13, 17, 18, 21, 23)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(("gamma", "beta"), list(itertools.product(("right", "left"), repeat=2)))
@pytest.mark.parametrize("divide", DIVISIONS)
@pytest.mark.parametrize("square", SQUARES)
def test_layer_norm_quantizes_x_gamma_and_y_in_each_form(square, divide, gamma, beta, opset):
    norm = Norm(square=square, divide=divide, gamma=gamma, beta=beta, opset=opset)
    model = build(norm)
    assert quantized_tensors(model) == ALL
    assert_whole(model, "LayerNorm")
    assert error_of(model, norm) < 1e-5


@pytest.mark.parametrize("divide", DIVISIONS)
@pytest.mark.parametrize("square", SQUARES)
def test_layer_norm_of_a_model_converted_from_opset_13_is_quantized_as_one_op(square, divide):
    model = build(Norm(square=square, divide=divide, opset=13))
    raised = at_opset(model, 21)
    assert opset_of(raised) == 21
    assert quantized_tensors(raised) == ALL


AFFINE = {
    "no gamma": (Norm(gamma=None), {"x", "y"}),
    "no beta": (Norm(beta=None), ALL),
    "no affine": (Norm(gamma=None, beta=None), {"x", "y"}),
}
SPELLINGS = {
    **AFFINE,
    "two Subs": (Norm(centred="twice"), ALL),
    "a negated mean": (Norm(centred="negated"), ALL),
    "E[x2] - E[x]2": (Norm(variance="difference"), ALL),
    "E[x2] - E[x]2 by Mul": (Norm(variance="difference", square="Mul", divide="Reciprocal"), ALL),
    "a sum over N": (Norm(variance="sum"), ALL),
    "axis 3": (Norm(axes=(3,)), ALL),
    "axis 0": (Norm(axes=(0,), gamma_shape=(2, 1, 1, 1)), ALL),
    "two axes": (Norm(axes=(-2, -1)), ALL),
    "two positive axes": (Norm(axes=(2, 3)), ALL),
    "channels first": (Norm(axes=(1,), gamma_shape=(6, 1, 1)), ALL),
    "epsilon first": (Norm(epsilon="first"), ALL),
    "no epsilon": (Norm(epsilon="none"), ALL),
    "vectors": (Norm(vectors=True), ALL),
    "vectors and Pow": (Norm(vectors=True, divide="Pow -0.5"), ALL),
    "Cast in and out": (Norm(casts="in out"), ALL),
    "Cast in and between": (Norm(casts="in between"), ALL),
}


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_each_variant_of_a_layer_norm_is_matched(name, opset):
    norm, expected = SPELLINGS[name]
    model = build(at(norm, opset))
    assert quantized_tensors(model) == expected
    assert_whole(model, "LayerNorm")
    assert error_of(model, norm) < 1e-5


def test_axes_named_from_either_end_are_the_same():
    first = build(Norm())
    for node in first.graph.node[1:]:
        if node.op_type == "ReduceMean":
            node.attribute[0].ints[0] = 3
    assert len({tuple(n.attribute[0].ints) for n in first.graph.node if n.op_type == "ReduceMean"}) == 2
    assert_whole(first, "LayerNorm")


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("gamma", ["right", "left", None])
@pytest.mark.parametrize("divide", DIVISIONS)
@pytest.mark.parametrize("square", SQUARES)
def test_rms_norm_quantizes_x_gamma_and_y(square, divide, gamma, opset):
    norm = Norm("rms", square, divide, gamma, None, opset=opset)
    model = build(norm)
    assert quantized_tensors(model) == ({"x", "gamma", "y"} if gamma else {"x", "y"})
    assert_whole(model, "RMSNorm")
    assert error_of(model, norm) < 1e-5


@pytest.mark.parametrize("casts", ["in between", "in out", ""])
@pytest.mark.parametrize("beta", ["right", None])
def test_rms_norm_with_casts_and_beta_is_matched(casts, beta):
    norm = Norm("rms", divide="Reciprocal", beta=beta, casts=casts)
    assert_whole(build(norm), "RMSNorm")
    assert error_of(build(norm), norm) < 1e-5


LOOKALIKES = {
    "late epsilon": (Norm(epsilon="late"), "LayerNorm-like, not fused: the epsilon is added after the Sqrt"),
    "late epsilon of a rms": (
        Norm("rms", epsilon="late", beta=None, divide="1/x"),
        "RMSNorm-like, not fused: the epsilon is added after the Sqrt",
    ),
    "mean of |x|": (Norm(variance="absolute"), "LayerNorm-like, not fused: its mean is of |x|, not of the square"),
    "mean of |x| of a rms": (
        Norm("rms", variance="absolute", beta=None),
        "RMSNorm-like, not fused: its mean is of |x|, not of the square",
    ),
    "unbiased": (Norm(variance="unbiased"), "LayerNorm-like, not fused: its variance is divided by N - 1, not by N"),
    "exponent 4": (Norm(exponent=4.0), "LayerNorm-like, not fused: 4 stands where 2 was expected"),
    "exponent 4 of a rms": (
        Norm("rms", exponent=4.0, divide="Pow -0.5", beta=None),
        "RMSNorm-like, not fused: 4 stands where 2 was expected",
    ),
    "huge epsilon": (Norm(epsilon="huge"), "LayerNorm-like, not fused: 10 stands where an epsilon was expected"),
}


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_lookalike_of_a_norm_is_not_matched_and_the_first_difference_is_named(name, opset):
    norm, reason = LOOKALIKES[name]
    model = build(at(norm, opset))
    assert [str(miss) for miss in found(model).near_misses] == [reason]
    assert not [group for group in _groups(model) if group.name in ("LayerNorm", "RMSNorm")]
    assert error_of(model, norm) > 1e-2 or name.startswith(("late", "huge", "unbiased"))


def _axes(model, node: int, axes: list[int]):
    attribute = next(a for a in model.graph.node[node].attribute if a.name == "axes")
    attribute.ints[:] = axes
    return model


def test_mean_and_variance_over_different_axes_are_no_layer_norm_but_leave_an_rms_norm():
    model = _axes(build(Norm()), 0, [-2])
    (group,) = _groups(model)
    assert group.name == "RMSNorm"
    (miss,) = found(model).near_misses
    assert str(miss) == "LayerNorm-like, not fused: its mean and its variance run over different axes"


def test_a_mean_that_is_read_elsewhere_stays_a_tensor_of_its_own():
    model = build(Norm())
    model.graph.node.append(helper.make_node("Relu", ["t0"], ["z"], "reader"))
    model.graph.output.append(helper.make_tensor_value_info("z", 1, [2, 6, 4, 1]))
    (miss,) = found(model).near_misses
    assert str(miss) == "LayerNorm-like, not fused: 't0' inside it is read by Relu 'reader' outside it"
    assert "t0" in quantized_tensors(model)


def test_a_mean_that_leaves_the_model_keeps_its_own_decision():
    model = build(Norm())
    model.graph.output.append(helper.make_tensor_value_info("t0", 1, [2, 6, 4, 1]))
    (miss,) = found(model).near_misses
    assert str(miss) == "LayerNorm-like, not fused: 't0' inside it leaves the model"
    assert quantized_tensors(model) >= {"x", "t0", "gamma", "y"}


def test_the_shape_of_an_inner_tensor_may_be_read():
    model = build(Norm())
    model.graph.node.append(helper.make_node("Shape", ["t0"], ["z"], "reader"))
    model.graph.output.append(helper.make_tensor_value_info("z", 7, [4]))
    assert quantized_tensors(model) == ALL


def test_a_tensor_that_leaves_before_beta_ends_the_group_there_without_a_near_miss():
    model = build(Norm())
    before = model.graph.node[-1].input[0]
    model.graph.output.append(helper.make_tensor_value_info(before, 1, [2, 6, 4, 8]))
    (group,) = _groups(model)
    assert (group.name, len(group.ops)) == ("LayerNorm", len(model.graph.node) - 1)
    assert found(model).near_misses == ()


def test_a_position_table_behind_a_norm_is_no_beta():
    model = build(Norm(gamma_shape=(8,)))
    table = np.zeros((1, 1, 4, 8), np.float32)
    beta = next(t for t in model.graph.initializer if t.name == "beta")
    beta.CopyFrom(helper.make_tensor("beta", 1, table.shape, table.reshape(-1)))
    assert quantized_tensors(model) == ALL | {"beta", model.graph.node[-1].input[0]}


def test_an_affine_part_over_channels_of_a_norm_over_pixels_is_an_instance_norm():
    norm = Norm(axes=(2, 3), gamma_shape=(6, 1, 1))
    assert_whole(build(norm), "InstanceNorm")
    assert error_of(build(norm), norm) < 1e-5


def test_a_norm_of_a_stored_tensor_is_none():
    model = build(Norm("rms", gamma=None, beta=None))
    del model.graph.input[:]
    model.graph.initializer.append(helper.make_tensor("x", 1, [2, 6, 4, 8], np.ones(384, np.float32)))
    assert found(model) == MatchResult({}, ())


RIGHT = {"epsilon": ["inside", "first", "none"], "variance": ["squares", "difference", "sum"], "exponent": [2.0]}
WRONG = {"epsilon": ["late", "huge"], "variance": ["absolute", "unbiased"], "exponent": [3.0, 1.0]}


@st.composite
def norms(draw):
    pick = {key: st.sampled_from(RIGHT[key] + WRONG[key]) for key in RIGHT}
    axes, shape = draw(st.sampled_from([((-1,), None), ((3,), None), ((1,), (6, 1, 1)), ((-2, -1), None)]))
    return draw(
        st.builds(
            Norm,
            kind=st.sampled_from(["layer", "rms"]),
            square=st.sampled_from(SQUARES),
            divide=st.sampled_from(DIVISIONS),
            gamma=st.sampled_from(["left", "right", None]),
            beta=st.sampled_from(["left", "right", None]),
            axes=st.just(axes),
            gamma_shape=st.just(shape),
            opset=st.sampled_from(OPSETS),
            centred=st.sampled_from(["once", "twice", "negated"]),
            vectors=st.booleans(),
            casts=st.sampled_from(["", "in out", "in between"]),
            **pick,
        )
    )


def is_right(norm: Norm) -> bool:
    squares_by_pow = norm.square == "Pow" and norm.variance not in ("absolute",)
    exponent = norm.exponent == 2.0 or not squares_by_pow
    return exponent and norm.epsilon in RIGHT["epsilon"] and norm.variance in RIGHT["variance"]


@pytest.mark.slow
@given(norms())
def test_whatever_is_matched_means_what_it_says_and_whatever_is_not_says_why(norm):
    if norm.kind == "rms" and norm.variance == "difference":
        norm = replace(norm, variance="squares")
    if norm.epsilon == "late" and norm.divide == "Pow -0.5":
        norm = replace(norm, epsilon="huge")
    model = build(norm)
    kinds = {group.name for group in _groups(model)}
    if is_right(norm):
        assert_whole(model, "LayerNorm" if norm.kind == "layer" else "RMSNorm")
        assert error_of(model, norm) < 1e-4
    else:
        assert "LayerNorm" not in kinds
        (miss,) = found(model).near_misses
        assert miss.pattern == ("LayerNorm" if norm.kind == "layer" else "RMSNorm")


def test_arithmetic_that_is_no_norm_is_not_reported():
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["m"], "mean"),
        helper.make_node("Sigmoid", ["m"], ["s"], "gate"),
        helper.make_node("Mul", ["x", "s"], ["g"], "gated"),
        helper.make_node("Add", ["g", "x"], ["y"], "residual"),
    ]
    model = make_model(nodes, {"x": [2, 8]}, {"y": [2, 8]}, {"axes": np.array([-1])})
    assert found(model) == MatchResult({}, ())
