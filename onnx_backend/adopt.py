"""Adopting a Q/DQ file: the plan it must have come from."""

from collections.abc import Mapping
from typing import cast

import numpy as np

from onnx_backend.marks import Opened
from qsdk.core.dtypes import dtype_named
from qsdk.core.encoding import Encoding
from qsdk.core.graph import Graph
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.spec import Granularity, Kind, PerBlock, PerChannel, PerTensor, Spec


def adopted_plan(graph: Graph, opened: Opened) -> Plan:
    """The plan that a Q/DQ file must have come from: its encodings, and which biases are derived."""
    derived = _derived_biases(graph, opened.encodings)
    decisions = {}
    for site, tensor in graph.sites.items():
        facts = graph.tensors[tensor]
        maker = graph.producer.get(tensor)
        op_type = graph.ops[maker].type if maker is not None else "Stored" if facts.constant else "Input"
        kind = cast(Kind, opened.kinds.get(site) or "activation")
        encoding = opened.encodings.get(site)
        spec = Spec(dtype_named(opened.casts[site])) if encoding is None else _spec_of(encoding)
        decisions[site] = Decision(
            site, op_type, kind, spec, "as the file says", "the file", bias_of=derived.get(site), shape=facts.shape
        )
    return Plan(decisions)


def _spec_of(encoding: Encoding) -> Spec:
    granularity: Granularity = PerTensor()
    if encoding.axis is not None:
        granularity = PerChannel(encoding.axis)
        if encoding.block_size is not None:
            granularity = PerBlock(encoding.axis, encoding.block_size)
    return Spec(encoding.dtype, granularity, encoding.symmetric)


def _derived_biases(graph: Graph, encodings: Mapping[str, Encoding]) -> dict[str, tuple[str, str]]:
    """Bias site -> the sites of input and weight, where the file's scales are their products to the last digit."""
    found: dict[str, tuple[str, str]] = {}
    for index, op in enumerate(graph.ops):
        for operand in operands_of(graph, index):
            bias = graph.tensors[operand.root].site or ""
            if operand.role != "bias" or bias not in encodings:
                continue
            head = index
            if op.type == "Add":
                head = graph.producer[next(t for t in op.inputs if t is not None and t != operand.tensor)]
            source, weight = graph.ops[head].inputs[:2]
            root = None if weight is None else graph.constant_root(weight)
            if source is None or root is None:
                continue
            sites = (graph.tensors[source].site or "", graph.tensors[root].site or "")
            if sites[0] in encodings and sites[1] in encodings:
                product = np.multiply(encodings[sites[0]].scale, encodings[sites[1]].scale)
                if np.array_equal(product, encodings[bias].scale):
                    found[bias] = sites
    return found
