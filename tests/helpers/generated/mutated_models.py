"""Damaged ONNX files and what becomes of them: built from small models, opened in processes of their own."""

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper
from qdq_models import convnet, make_model, mlp, weights

SECONDS = 60  # for one file; more is a hang
COMMAND = [sys.executable, str(Path(__file__).with_name("open_mutated.py"))]
node = helper.make_node


def plumbed(opset=17):
    """Shapes computed at run time, Split, Concat, LayerNormalization, attention and a decided and an open If."""
    then = helper.make_graph([node("Relu", ["m"], ["o"])], "then", [], [helper.make_tensor_value_info("o", 1, None)])
    other = helper.make_graph([node("Neg", ["m"], ["n"])], "else", [], [helper.make_tensor_value_info("n", 1, None)])
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "zero"], ["batch"], "gather", axis=0),
        node("Unsqueeze", ["batch", "axes"], ["batch1"], "unsqueeze"),
        node("Concat", ["batch1", "rest"], ["target"], "concat_shape", axis=0),
        node("Reshape", ["x", "target"], ["r"], "reshape"),
        node("LayerNormalization", ["r", "g", "h"], ["l"], "norm", axis=-1),
        node("Split", ["l", "sizes"], ["q", "k"], "split", axis=2),
        node("Transpose", ["k"], ["kt"], "transpose", perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], ["qk"], "qk"),
        node("Softmax", ["qk"], ["p"], "softmax", axis=-1),
        node("MatMul", ["p", "l"], ["m"], "av"),
        node("ReduceMax", ["x"], ["top"], "top", keepdims=0),
        node("Greater", ["top", "limit"], ["c"], "greater"),
        node("If", ["c"], ["y"], "choose", then_branch=then, else_branch=other),
    ]
    stored = weights(g=(8,), h=(8,)) | {
        "zero": np.int64(0),
        "axes": np.array([0]),
        "rest": np.array([3, 8]),
        "sizes": np.array([4, 4]),
        "limit": np.float32(0.5),
    }
    return make_model(nodes, {"x": ["n", 24]}, {"y": None, "p": None}, stored, opset, 8)


def recurrent(opset=11):
    """An LSTM between reshapes, and a Loop that doubles."""
    stored = weights(w=(1, 12, 4), r=(1, 12, 3), b=(1, 24))
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["s", "", ""], "lstm", hidden_size=3),
        node("Squeeze", ["s"], ["t"], "squeeze", axes=[1]),
        node("Clip", ["t"], ["y"], "clip", min=-0.5, max=0.5)
        if opset < 11
        else node("Clip", ["t", "lo"], ["y"], "clip"),
    ]
    stored["lo"] = np.float32(-0.5)
    return make_model(nodes, {"x": [5, 1, 4]}, {"y": None}, stored, opset, 6)


def bases():
    """The models that are damaged."""
    return [mlp(), convnet(), convnet(13), plumbed(), recurrent(), recurrent(10)]


def mutations(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Give `count` damaged files: a description and the bytes."""
    rng = np.random.default_rng(seed)
    models = bases()
    for number in range(count):
        base = int(rng.integers(len(models)))
        ways = _BYTES if number % 3 == 0 else _PROTOS
        way = ways[int(rng.integers(len(ways)))]
        if way in _BYTES:
            data = way(models[base].SerializeToString(), rng)
        else:
            model = ModelProto()
            model.CopyFrom(models[base])
            for _ in range(int(rng.integers(1, 3))):
                with contextlib.suppress(ValueError, IndexError):  # nothing left to damage in this way
                    way(model, rng)
            data = model.SerializeToString()
        yield f"{number}-{base}-{way.__name__.strip('_')}", data


# --- bytes ------------------------------------------------------------------------------------------------------------


def _flipped(data, rng):
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        changed[int(rng.integers(len(changed)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _flipped_near_the_front(data, rng):
    changed = bytearray(data)
    changed[int(rng.integers(min(len(changed), 200)))] = int(rng.integers(256))
    return bytes(changed)


def _cut(data, rng):
    return data[: int(rng.integers(len(data)))]


def _without_a_piece(data, rng):
    start = int(rng.integers(len(data)))
    return data[:start] + data[start + int(rng.integers(1, 40)) :]


def _zeroed(data, rng):
    start = int(rng.integers(len(data)))
    return data[:start] + bytes(16) + data[start + 16 :]


# --- protos -----------------------------------------------------------------------------------------------------------


def _one(items, rng):
    return items[int(rng.integers(len(items)))]


def _drop_node(model, rng):
    if model.graph.node:
        del model.graph.node[int(rng.integers(len(model.graph.node)))]


def _twice(model, rng):
    model.graph.node.append(_one(list(model.graph.node), rng))


def _reversed(model, rng):
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _circle(model, rng):
    first, last = sorted(rng.integers(len(model.graph.node), size=2))
    if model.graph.node[int(first)].input:
        model.graph.node[int(first)].input[0] = model.graph.node[int(last)].output[0]


def _rewire(model, rng):
    names = [name for n in model.graph.node for name in (*n.input, *n.output)] + [
        t.name for t in model.graph.initializer
    ]
    picked = _one(model.graph.node, rng)
    if picked.input:
        picked.input[int(rng.integers(len(picked.input)))] = _one(names, rng)


def _rename(model, rng):
    picked = _one(model.graph.node, rng)
    picked.output[0] = _one(["", "x", "renamed", picked.input[0] if picked.input else "y"], rng)


def _wrong_dims(model, rng):
    tensor = _one(model.graph.initializer, rng)
    if tensor.dims:
        tensor.dims[int(rng.integers(len(tensor.dims)))] = int(_one([0, -1, 1, 7, 2**31, 2**62], rng))


def _wrong_rank(model, rng):
    tensor = _one(model.graph.initializer, rng)
    flat = numpy_helper.to_array(tensor).reshape(_one([(-1,), (1, -1), (-1, 1)], rng))
    tensor.CopyFrom(numpy_helper.from_array(flat, tensor.name))


def _wrong_type(model, rng):
    tensor = _one(model.graph.initializer, rng)
    tensor.data_type = int(rng.integers(0, 30))


def _wrong_values(model, rng):
    tensor = _one(model.graph.initializer, rng)
    value = numpy_helper.to_array(tensor).copy()
    if value.dtype.kind == "i":
        value[...] = _one([-1, 0, 99, 2**40], rng)
    elif value.dtype.kind == "f":
        value[...] = _one([np.nan, np.inf, 0, 1e38, -1e-40], rng)
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def _wrong_attribute(model, rng):
    nodes = [n for n in model.graph.node if n.attribute]
    if not nodes:
        return
    attribute = _one(_one(nodes, rng).attribute, rng)
    number = int(_one([-1, -7, 0, 3, 100, 2**31, 2**62], rng))
    if attribute.type == AttributeProto.INT:
        attribute.i = number
    elif attribute.type == AttributeProto.INTS and attribute.ints:
        attribute.ints[int(rng.integers(len(attribute.ints)))] = number
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = float(_one([np.nan, -1.0, 1e30], rng))
    else:
        attribute.name = "nonsense"


def _drop_attribute(model, rng):
    nodes = [n for n in model.graph.node if n.attribute]
    if nodes:
        del _one(nodes, rng).attribute[0]


def _untyped_attribute(model, rng):
    nodes = [n for n in model.graph.node if n.attribute]
    if nodes:
        _one(nodes, rng).attribute[0].type = int(rng.integers(0, 15))


def _other_op(model, rng):
    _one(model.graph.node, rng).op_type = str(
        _one(
            ["Relu", "Conv", "Concat", "If", "Loop", "Nonsense", "MatMul", "Transpose", "BatchNormalization", "LSTM"],
            rng,
        )
    )


def _other_domain(model, rng):
    _one(model.graph.node, rng).domain = str(_one(["com.microsoft", "nowhere", "ai.onnx.ml"], rng))


def _fewer_inputs(model, rng):
    picked = _one(model.graph.node, rng)
    if picked.input:
        del picked.input[int(rng.integers(len(picked.input))) :]


def _more_inputs(model, rng):
    _one(model.graph.node, rng).input.append(str(_one(["x", "", "w", "nothing"], rng)))


def _fewer_outputs(model, rng):
    picked = _one(model.graph.node, rng)
    del picked.output[int(rng.integers(len(picked.output))) :]


def _other_opset(model, rng):
    model.opset_import[0].version = int(_one([0, 1, 6, 9, 12, 18, 22, 27, 99, -3], rng))


def _other_ir(model, rng):
    model.ir_version = int(_one([0, 2, 3, 13, 99], rng))


def _other_input(model, rng):
    value = _one(model.graph.input, rng)
    value.type.tensor_type.elem_type = int(_one([0, 7, 8, 9, 10, 11, 1], rng))
    dims = value.type.tensor_type.shape.dim
    if dims:
        _one(dims, rng).dim_value = int(_one([0, -1, 1, 5, 2**40], rng))


def _other_output(model, rng):
    value = _one(model.graph.output, rng)
    if rng.integers(2):
        value.name = str(_one(["", "x", "w", "nothing", "r"], rng))
    else:
        value.type.tensor_type.elem_type = int(_one([0, 7, 10, 11], rng))


def _twice_an_output(model, rng):
    model.graph.output.append(model.graph.output[0])


def _lie_about_shapes(model, rng):
    name = _one([name for n in model.graph.node for name in n.output] or ["x"], rng)
    model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [int(rng.integers(9)), 3]))


def _no_inputs(model, rng):
    del model.graph.input[:]


def _external(model, rng):
    tensor = _one(model.graph.initializer, rng)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(
        key="location", value=str(_one(["../../etc/passwd", "/etc/passwd", "absent.bin", ""], rng))
    )


_BYTES = [_flipped, _flipped_near_the_front, _cut, _without_a_piece, _zeroed]
_PROTOS = [
    _drop_node, _twice, _reversed, _circle, _rewire, _rename, _wrong_dims, _wrong_rank, _wrong_type, _wrong_values,
    _wrong_attribute, _drop_attribute, _untyped_attribute, _other_op, _other_domain, _fewer_inputs, _more_inputs,
    _fewer_outputs, _other_opset, _other_ir, _other_input, _other_output, _twice_an_output, _lie_about_shapes,
    _no_inputs, _external,
]  # fmt: skip


# --- judging ----------------------------------------------------------------------------------------------------------


def judged(files: list[Path], *, workers: int = 2) -> dict[Path, str]:
    """Open every file in a process of its own kind; gives a verdict for each, `crash` and `hang` included."""
    queue, verdicts = list(files), {}
    running = [_Process() for _ in range(min(workers, len(queue)))]
    while queue or any(process.file for process in running):
        for process in running:
            if process.file is None and queue:
                process.give(queue.pop(0))
            verdict = process.verdict()
            if verdict is not None:
                verdicts[process.file] = verdict
                process.file = None
    for process in running:
        process.stop()
    return verdicts


class _Process:
    """A worker that judges one file at a time, started again where a file has ended it."""

    def __init__(self):
        self.file, self.since = None, 0.0
        self._start()

    def _start(self):
        self.process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def give(self, file):
        self.file, self.since = file, time.monotonic()
        self.process.stdin.write(f"{file}\n")
        self.process.stdin.flush()

    def verdict(self):
        if self.file is None:
            return None
        ready, _, _ = select.select([self.process.stdout], [], [], 0.05)
        if ready:
            line = self.process.stdout.readline()
            if line:
                return json.loads(line)
            return f"crash: the process ended with {self._restart()}"
        if time.monotonic() - self.since > SECONDS:
            self.process.kill()
            self._restart()
            return f"hang: no verdict in {SECONDS} s"
        return None

    def _restart(self):
        code = self.stop()
        self._start()
        return code

    def stop(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        code = self.process.wait()
        self.process.stdout.close()
        return code
