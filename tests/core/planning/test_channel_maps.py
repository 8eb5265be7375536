"""Channels of equal factors, followed through a graph: where they continue, and where their sizes do not allow it."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import GraphBuilder

from qsdk.core.channel_maps.flood import broadcast_back
from qsdk.core.channel_maps.scale_groups import find_scale_groups


@pytest.mark.parametrize(
    ("shape", "found"),
    [((4,), [0, 1, 2, 3]), ((3, 4), [[0, 1, 2, 3]]), ((1,), None), ((3, 1), None), ((2, 3, 4), [[[0, 1, 2, 3]]])],
)
def test_an_operand_has_the_channels_of_its_result_unless_it_has_too_few(shape, found):
    ids = broadcast_back(np.arange(4).reshape(1, 1, 4), shape)
    assert (None if ids is None else ids.tolist()) == found


def test_channels_of_a_concat_are_those_of_its_parts():
    b = GraphBuilder()
    x = b.input()
    parts = [b.conv(x, name, outputs=size) for name, size in (("left", 4), ("right", 2))]
    joined = b.op("Concat", parts, "joined:output", (1, 6, 8, 8), axis=1)
    last = b.op("Conv", [joined, b.stored("last:weight", (5, 6, 3, 3))], "last:output", (1, 5, 8, 8))
    (group,) = [group for group in find_scale_groups(b.graph(last)) if joined in group.members]
    assert (group.blocked, group.channels) == ("", 6)
    assert group.members[parts[0]].ids.reshape(-1).tolist() == [0, 1, 2, 3]
    assert group.members[parts[1]].ids.reshape(-1).tolist() == [4, 5]


def test_a_tensor_that_is_joined_with_itself_has_its_own_channels_twice():
    b = GraphBuilder()
    part = b.conv(b.input(), "conv", outputs=3)
    joined = b.op("Concat", [part, part], "joined:output", (1, 6, 8, 8), axis=1)
    last = b.op("Conv", [joined, b.stored("last:weight", (5, 6, 3, 3))], "last:output", (1, 5, 8, 8))
    (group,) = [group for group in find_scale_groups(b.graph(last)) if joined in group.members]
    assert (group.blocked, group.channels) == ("", 3)
    assert group.members[joined].ids.reshape(-1).tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(("shape", "channels"), [((1, 2, 5, 4), 8), ((1, 5, 4), 4), (None, None)])
def test_a_product_of_two_layers_has_common_factors_where_its_rank_is_known(shape, channels):
    b = GraphBuilder()
    x = b.input("x", (1, 5, 8))
    sides = []
    for name in ("query", "key"):
        made = b.op("MatMul", [x, b.stored(f"{name}:weight", (8, 8))], f"{name}:output", (1, 5, 8))
        sides.append(b.op("Opaque", [made], f"{name}.split:output", shape or ()))
    turned = None if shape is None else (*shape[:-2], shape[-1], shape[-2])
    sides[1] = b.op("Opaque", [sides[1]], "key.turned:output", turned or ())
    for tensor in sides:
        b.tensors[tensor] = replace(b.tensors[tensor], shape=b.tensors[tensor].shape or None)
    last = b.op("MatMul", sides, "product:output", (1, 5, 5))
    groups = find_scale_groups(b.graph(last))
    assert all(group.blocked for group in groups if sides[0] in group.members)
