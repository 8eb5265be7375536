"""Give single stored numbers the rank of what they meet, which ONNX Runtime broadcasts ten times as fast.

Between a tensor whose last axis has one element and a number without axes, its kernels go element by element.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.inputs import static_sizes
from onnx_backend.proto.weightless import inferred_skeleton, skeleton

_ELEMENTWISE = frozenset({"Add", "BitShift", "BitwiseAnd", "Div", "Equal", "Mul", "Sub"})


def with_equal_ranks(model: ModelProto, known: Mapping[str, Sequence[int | None]]) -> None:
    """Replace single stored numbers beside tensors whose last axis has one element, in place.

    Args:
        model: an integer model.
        known: sizes of tensors that shape inference does not find, behind kernels of the runtime.
    """
    single = {t.name: t for t in model.graph.initializer if not t.dims}
    places = [
        (node, i)
        for node in model.graph.node
        if node.op_type in _ELEMENTWISE and not node.domain and len(node.input) == 2
        for i in (0, 1)
        if node.input[i] in single and node.input[1 - i] not in single
    ]
    if not places:
        return
    sizes = _sizes(model, known)
    made: dict[tuple[str, int], str] = {}
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)}
    for node, i in places:
        other = sizes.get(node.input[1 - i], ())
        if len(other) < 2 or other[-1] != 1:
            continue
        key = node.input[i], len(other)
        if key not in made:
            name = f"{node.input[i]}.rank{len(other)}"
            while name in taken:
                name += "_"
            made[key] = name
            array = numpy_helper.to_array(single[node.input[i]])
            model.graph.initializer.append(numpy_helper.from_array(np.reshape(array, [1] * len(other)), name))
        node.input[i] = made[key]
    read = {name for node in model.graph.node for name in node.input} | {o.name for o in model.graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _sizes(model: ModelProto, known: Mapping[str, Sequence[int | None]]) -> dict[str, tuple[int | None, ...]]:
    stated = skeleton(model, value_info=False)
    results = {name for node in model.graph.node for name in node.output} - {o.name for o in model.graph.output}
    for name in sorted(results.intersection(known)):
        stated.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.UINT8, list(known[name])))
    return static_sizes(inferred_skeleton(stated))
