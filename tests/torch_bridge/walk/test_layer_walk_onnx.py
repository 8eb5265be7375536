"""The walk through an ONNX sim: the inputs of its layers are those of whole runs, bit for bit, and writing is right."""

import gc
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from float_files import float_onnx
from onnx import ModelProto, helper
from walked import exposed, float_model, model_of, names_in, product
from zoo_models import ZOO, distinct

import qsdk
from onnx_backend.walk import run
from onnx_backend.walk.layer_walk import walk_layers
from qsdk import DataError, OnnxSim, QuantConfig, calibrate, check_parity, export, float16, quantize, w4a8, w4a16, w8a8

Feeds = dict[str, np.ndarray]
CONFIG = w4a8().layer("RmsNorm", "weight")


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def calibrated(model: ModelProto, data: list[Feeds], config: QuantConfig | None = None) -> OnnxSim:
    sim = quantize(model, None, config or w4a8())
    assert isinstance(sim, OnnxSim)
    calibrate(sim, data, progress=False)
    return sim


def from_zoo(name: str, config: QuantConfig = CONFIG) -> tuple[OnnxSim, list[Feeds]]:
    build, inputs = ZOO[name]
    model = float_onnx(distinct(build()), inputs(0))
    names = [value.name for value in model.graph.input]
    data = [dict(zip(names, (x.numpy() for x in inputs(seed)), strict=True)) for seed in range(2)]
    return calibrated(model, data, config), data


def spread(sim: OnnxSim) -> dict[str, Any]:
    """All that a sim is: encodings with their flags, weights, plan."""
    own = {s: (e.scale.tobytes(), e.zero_point.tobytes(), e.frozen) for s, e in sim.snapshot().own.items()}
    return {"own": own, "plan": sim.plan, "model": sim.traced().model.SerializeToString(deterministic=True)}


def compare_with_whole_runs(sim: OnnxSim, data: list[Feeds]) -> int:
    """Walk, and hold every input against whole runs, and every float product against the model's own."""
    steps = 0
    rounds = all(decision.quantized for decision in sim.plan.decisions.values() if decision.kind == "activation")
    exact, rounded = float_model(sim), sim.qdq_model()
    with walk_layers(sim, iter(data), progress=False) as walk:
        assert walk.batches == len(data)
        for step in walk:
            steps += 1
            names, quantized = names_in(step)
            results = [step.run.streams[0].nodes[step.run.streams[0].at[c.tag]].output[0] for c in step.place.calls]
            pairs = iter(step.inputs())
            for feeds in data:
                wanted, found = exposed(exact, [*names, *results], feeds), exposed(rounded, quantized, feeds)
                for call, name, other, result in zip(step.place.calls, names, quantized, results, strict=True):
                    x, x_quantized = next(pairs)
                    if call.reading.states:
                        assert x.shape[-1] == wanted[name].shape[1] * wanted[name].shape[-1]
                        continue
                    # what the runtime fuses, and so the order of its float sums, depends on where a run ends
                    assert np.allclose(x, call.reading.rows(wanted[name]), rtol=1e-5, atol=1e-5)
                    assert np.allclose(x_quantized, call.reading.rows(found[other]), rtol=1e-5, atol=1e-5)
                    assert not rounds or np.array_equal(x_quantized, call.reading.rows(found[other]))
                    if call.reading.directions == 0:
                        compare_products(sim, walk, step, x, wanted[result])
            assert next(pairs, None) is None
        assert walk.float_seconds > 0
    return steps


def compare_products(sim: OnnxSim, walk: Any, step: Any, x: np.ndarray, result: np.ndarray) -> None:
    """The closed form of a step's first layer gives what its op gives, up to the bias that the op adds."""
    layer = step.layers[0]
    if len(step.layers) > 1 and len({s.layout.kind for s in step.layers}) > 1:
        return
    made = product(layer, walk.weight(layer.site), x)
    if layer.geometry is None:
        flat = made[0].reshape(-1)
        second = step.place.calls[0].reading.source == 1 and layer.layout.kind == "linear"
        node_outputs = result.swapaxes(-1, -2) if second else result
        rest = np.sort((node_outputs.reshape(flat.shape) - flat).reshape(-1, made.shape[-1]), 0)
    else:
        groups, _, outputs = made.shape
        laid_out = made.reshape(groups, result.shape[0], -1, outputs).transpose(1, 0, 3, 2).reshape(result.shape)
        rest = np.moveaxis(result - laid_out, 1, -1).reshape(-1, result.shape[1])
    assert np.abs(rest - rest[:1]).max() < 1e-4 * max(float(np.abs(result).max()), 1), layer.site


@pytest.mark.nightly
@pytest.mark.parametrize("name", ZOO)
def test_inputs_of_layers_equal_those_of_full_runs(name: str) -> None:
    sim, data = from_zoo(name)
    before = spread(sim)
    assert compare_with_whole_runs(sim, data) > 1
    assert spread(sim) == before


def branched(config: QuantConfig | None = None) -> tuple[OnnxSim, list[Feeds]]:
    """A depthwise convolution, a shortcut with a projection, a gate, and a reshape that asks for a size: calibrated."""
    nodes = [
        node("Conv", "x w1 b1", "c1", pads=[1, 1, 1, 1]),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "c2", pads=[1, 1, 1, 1], group=6),
        node("Conv", "r1 w3", "c3"),
        node("Relu", "c2", "r2"),
        node("Conv", "r2 w4 b1", "c4"),
        node("Add", "c4 c3", "s"),
        node("GlobalAveragePool", "s", "pool"),
        node("Conv", "pool w5", "c5"),
        node("Sigmoid", "c5", "gate"),
        node("Mul", "s gate", "gated"),
        node("Shape", "x", "size", start=0, end=1),
        node("Concat", "size rest", "shape", axis=0),
        node("Reshape", "gated shape", "flat"),
        node("MatMul", "flat w6", "m"),
        node("Tanh", "m", "t"),
        node("MatMul", "t w7", "y"),
    ]
    stored = {"w1": random(1, 6, 2, 3, 3), "b1": random(2, 6), "w2": random(3, 6, 1, 3, 3), "w3": random(4, 6, 6, 1, 1)}
    stored |= {"w4": random(5, 6, 6, 1, 1), "w5": random(6, 6, 6, 1, 1), "w6": random(7, 384, 5), "w7": random(8, 5, 3)}
    model = model_of(nodes, {"x": ["n", 2, 8, 8]}, ["y"], **stored, rest=np.array([384]))
    data = [{"x": random(i, n, 2, 8, 8)} for i, n in ((11, 4), (12, 4), (13, 3))]
    return calibrated(model, data, config), data


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        w4a8(),
        w8a8(symmetric_activations=True),
        w4a16(block_size=3),
        w4a8().skip("Conv_c[24]", dtype=float16),
        w4a8().override("*", activation="float32"),
    ],
    ids=["w4a8", "symmetric", "blocks", "float16 islands", "weights only"],
)
def test_inputs_of_branches_equal_those_of_full_runs(config: QuantConfig) -> None:
    sim, data = branched(config)
    before = spread(sim)
    compare_with_whole_runs(sim, data)
    assert spread(sim) == before


def node(op: str, inputs: str, outputs: str, **options: Any) -> Any:
    return helper.make_node(op, inputs.split(), outputs.split(), f"{op}_{outputs.split()[0]}", **options)


def spellings() -> dict[str, Callable[[], tuple[ModelProto, list[Feeds]]]]:
    """Layers in every spelling that ONNX has for them."""

    def convs(**options: Any) -> tuple[ModelProto, list[Feeds]]:
        layers = [node("Conv", "x w b", "a", **options), node("Relu", "a", "r"), node("Conv", "r v", "y", **options)]
        stored = {"w": random(1, 4, 2, 3, 3), "b": random(2, 4), "v": random(3, 4, 4, 3, 3)}
        return model_of(layers, {"x": ["n", 2, 9, 8]}, ["y"], **stored), [{"x": random(i, 3, 2, 9, 8)} for i in (5, 6)]

    def dims(rank: int, *, transposed: bool = False) -> tuple[ModelProto, list[Feeds]]:
        op, kernel = "ConvTranspose" if transposed else "Conv", [3, 2, 2][:rank]
        options: dict[str, Any] = {"group": 2, "strides": [2, 1, 1][:rank], "pads": [1, 0, 1][:rank] + [0, 1, 1][:rank]}
        if transposed:
            options["output_padding"] = [1, 0, 0][:rank]
        layers = [node(op, "x w b", "a", **options), node("Relu", "a", "y")]
        stored = {"w": random(1, *((4, 3) if transposed else (6, 2)), *kernel), "b": random(2, 6)}
        sizes = [7, 6, 5][:rank]
        return model_of(layers, {"x": ["n", 4, *sizes]}, ["y"], **stored), [
            {"x": random(i, 2, 4, *sizes)} for i in (5, 6)
        ]

    def gemm(x_shape: tuple[int, int], w_shape: tuple[int, int], **options: Any) -> tuple[ModelProto, list[Feeds]]:
        layers = [node("Gemm", "x w b", "y", **options)]
        stored = {"w": random(1, *w_shape), "b": random(2, 5)}
        return model_of(layers, {"x": list(x_shape)}, ["y"], **stored), [{"x": random(i, *x_shape)} for i in (5, 6)]

    def matmul(left: bool) -> tuple[ModelProto, list[Feeds]]:
        layers = [node("MatMul", "w x" if left else "x w", "a"), node("Add", "a b", "s"), node("Relu", "s", "y")]
        stored = {"w": random(1, 5, 4) if left else random(1, 4, 5), "b": random(2, 6 if left else 5)}
        shape = (2, 3, 4, 6) if left else (2, 3, 6, 4)
        return model_of(layers, {"x": list(shape)}, ["y"], **stored), [{"x": random(i, *shape)} for i in (5, 6)]

    def behind_views() -> tuple[ModelProto, list[Feeds]]:
        layers = [
            node("Identity", "w", "i"),
            node("Transpose", "i", "t", perm=[1, 0]),
            node("MatMul", "x t", "y"),
        ]
        return model_of(layers, {"x": [3, 4]}, ["y"], w=random(1, 5, 4)), [{"x": random(5, 3, 4)}]

    return {
        "pads": lambda: convs(pads=[1, 0, 2, 1], dilations=[1, 2]),
        "no attributes": lambda: convs(),
        "same upper": lambda: convs(auto_pad="SAME_UPPER"),
        "same lower": lambda: convs(auto_pad="SAME_LOWER"),
        "same upper strided": lambda: convs(auto_pad="SAME_UPPER", strides=[2, 3]),
        "same lower strided": lambda: convs(auto_pad="SAME_LOWER", strides=[2, 2]),
        "valid": lambda: convs(auto_pad="VALID", strides=[2, 1]),
        "1d": lambda: dims(1),
        "2d": lambda: dims(2),
        "3d": lambda: dims(3),
        "transposed 1d": lambda: dims(1, transposed=True),
        "transposed 2d": lambda: dims(2, transposed=True),
        "transposed 3d": lambda: dims(3, transposed=True),
        "gemm": lambda: gemm((3, 4), (4, 5)),
        "gemm transB": lambda: gemm((3, 4), (5, 4), transB=1),
        "gemm transA": lambda: gemm((4, 3), (4, 5), transA=1),
        "gemm both": lambda: gemm((4, 3), (5, 4), transA=1, transB=1),
        "matmul": lambda: matmul(left=False),
        "matmul from the left": lambda: matmul(left=True),
        "behind views": behind_views,
    }


@pytest.mark.spread(16)
@pytest.mark.parametrize("name", spellings())
@pytest.mark.parametrize("config", [w4a8(), w4a16(block_size=2)], ids=["channels", "blocks"])
def test_every_spelling_of_a_layer(name: str, config: QuantConfig) -> None:
    model, data = spellings()[name]()
    sim = calibrated(model, data, config)
    assert compare_with_whole_runs(sim, data) == len(
        [n for n in model.graph.node if len(n.input) > 1 and n.op_type != "Add"]
    )


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_inputs_of_a_recurrent_weight_are_the_hidden_states(direction: str) -> None:
    """Y_t = tanh(W x_t + R h_t) with both inputs as the walk gives them."""
    count = 2 if direction == "bidirectional" else 1
    rnn = helper.make_node("RNN", ["x", "w", "r", "", "", "h"], ["", "last"], "rnn", hidden_size=3, direction=direction)
    stored = {"w": random(1, count, 3, 4), "r": random(2, count, 3, 3)}
    model = model_of([rnn], {"x": [5, 2, 4], "h": [count, 2, 3]}, ["last"], **stored)
    data = [{"x": random(i, 5, 2, 4), "h": random(i + 1, count, 2, 3)} for i in (7, 9)]
    sim = calibrated(model, data, w8a8())
    found: dict[str, list[Any]] = {}
    with walk_layers(sim, data, progress=False) as walk:
        assert [layer.site for layer in walk.layers] == ["rnn:constant", "rnn:constant_1"]
        for step in walk:
            (layer,) = step.layers
            found[layer.site] = [product(layer, walk.weight(layer.site), x) for x, _ in step.inputs()]
    for inputs, states, feeds in zip(*found.values(), data, strict=True):
        outputs = np.tanh(inputs + states).reshape(count, 5, 2, 3)
        ends = [outputs[d, 0 if direction == "reverse" or d else -1] for d in range(count)]
        whole = exposed(float_model(sim), ["last"], feeds)["last"]
        assert np.abs(np.stack(ends) - whole).max() < 1e-5


def test_layers_that_cannot_be_solved_are_skipped_with_a_reason() -> None:
    nodes = [
        node("Gather", "table ids", "e"),
        node("MatMul", "e w", "a"),
        node("MatMul", "a many", "b"),
        node("Gemm", "c v", "d", alpha=0.5),
        node("Reshape", "b shape", "c"),
        node("ConvTranspose", "image up", "grown", output_shape=[4, 4]),
        node("GRU", "steps win wrec", "states", hidden_size=2),
    ]
    nodes[3], nodes[4] = nodes[4], nodes[3]
    stored = {"table": random(0, 7, 4), "w": random(1, 4, 4), "many": random(2, 3, 4, 4), "v": random(3, 4, 2)}
    stored |= {"up": random(4, 1, 1, 2, 2), "win": random(5, 1, 6, 3), "wrec": random(6, 1, 6, 2)}
    model = model_of(nodes, {"image": [1, 1, 3, 3], "steps": [4, 1, 3]}, ["d", "grown", "states"], **stored)
    model.graph.initializer.extend(
        [helper.make_tensor("ids", 7, [3, 2], [0, 1, 2, 3, 4, 5]), helper.make_tensor("shape", 7, [2], [6, 4])]
    )
    data = [{"image": random(1, 1, 1, 3, 3), "steps": random(2, 4, 1, 3)}]
    config = w4a8().override("MatMul_a", weight="float16")
    sim = calibrated(model, data, config)
    sim.freeze("GRU_states:constant")
    with walk_layers(sim, data, progress=False) as walk:
        assert [layer.layout.kind for layer in walk.layers] == ["embedding"]
        (step,) = walk
        assert [x.tolist() for x, _ in step.inputs()] == [[[0, 1], [2, 3], [4, 5]]]  # stored, and read all the same
        left = walk.left
    reasons = {site.partition(":")[0]: why for site, why in left.items()}
    assert reasons["MatMul_a"].startswith("float")
    assert "dimensions" in reasons["MatMul_b"]
    assert "alpha=0.5" in reasons["Gemm_d"]
    assert "shape of its output" in reasons["ConvTranspose_grown"]
    assert left["GRU_states:constant"] == "its encoding is frozen"
    assert "resets the hidden state" in left["GRU_states:constant_1"]


# --- writing --------------------------------------------------------------------------------------------------------


def chain() -> tuple[OnnxSim, list[Feeds]]:
    """Three layers with a shortcut and biases, one weight read twice: calibrated."""
    nodes = [
        node("Conv", "x w1 b1", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "r"),
        node("Conv", "r w2 b2", "c", pads=[1, 1, 1, 1]),
        node("Add", "c r", "s"),
        node("GlobalAveragePool", "s", "p"),
        node("Flatten", "p", "f"),
        node("MatMul", "f w3", "g"),
        node("Relu", "g", "h"),
        node("MatMul", "h w3", "k"),
        node("Add", "k b4", "y"),
    ]
    stored = {"w1": random(1, 6, 2, 3, 3), "b1": random(2, 6), "w2": random(3, 6, 6, 3, 3), "b2": random(4, 6)}
    stored |= {"w3": random(5, 6, 6), "b4": random(6, 6)}
    data = [{"x": random(i, n, 2, 8, 8)} for i, n in ((11, 4), (12, 4), (13, 3))]
    return calibrated(model_of(nodes, {"x": ["n", 2, 8, 8]}, ["y"], **stored), data), data


def halved(walk: Any, site: str) -> tuple[Any, np.ndarray]:
    """Another encoding, and weights on it that are not the nearest ones."""
    encoding = replace(walk.encoding(site), scale=walk.encoding(site).scale * np.float32(0.75))
    return encoding, encoding.fake_quantize(walk.weight(site) * np.float32(0.8))


@pytest.mark.slow
def test_every_step_uses_earlier_writes_and_the_sim_keeps_them_all(tmp_path: Path) -> None:
    sim, data = chain()
    seen: list[tuple[list[str], list[str], list[Any]]] = []
    written: dict[str, np.ndarray] = {}
    with walk_layers(sim, data, progress=False) as walk:
        assert [layer.site for layer in walk.layers] == ["Conv_a:weight", "Conv_c:weight", "MatMul_g:weight"]
        assert [layer.bias for layer in walk.layers] == ["Conv_a:bias", "Conv_c:bias", ""]
        for step in walk:
            seen.append((*names_in(step), list(step.inputs())))
            for layer in step.layers:
                encoding, written[layer.site] = halved(walk, layer.site)
                shift = random(3, 6) if layer.bias else None
                walk.write(layer.site, encoding=encoding, weight=written[layer.site], bias_shift=shift)
                assert walk.encoding(layer.site) == encoding
    original = chain()[0]
    for site, weight in original.stored_floats(written).items():
        found = sim.stored_floats([site])[site]
        assert not np.array_equal(found, weight)
        assert sim.encodings[site].frozen
        assert np.array_equal(sim.encodings[site].fake_quantize(found), found)
    shifted, before = (one.stored_floats(["Conv_a:bias"])["Conv_a:bias"] for one in (sim, original))
    assert np.array_equal(shifted, before + random(3, 6))
    # what stands behind a layer changes no input before it: the finished sim gives what each step saw
    for names, quantized, pairs in seen[:2]:
        for number, feeds in enumerate(data):
            assert np.array_equal(pairs[number][0], exposed(float_model(original), names, feeds)[names[0]])
            assert np.array_equal(pairs[number][1], exposed(sim.qdq_model(), quantized, feeds)[quantized[0]])
    # the second call of the last layer was seen as the weight was before it was written
    assert not np.array_equal(seen[2][2][1][1], exposed(sim.qdq_model(), seen[2][1], data[0])[seen[2][1][1]])
    result = sim.run(data[0])[0]
    assert np.abs(result - original.run(data[0])[0]).max() > 1e-2
    qsdk.save(sim, tmp_path / "sim.qsdk")
    assert np.array_equal(qsdk.load(tmp_path / "sim.qsdk", None).run(data[0])[0], result)
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", data, progress=False).summary["weights_max_lsb"] == 0
    assert np.array_equal(quantize(tmp_path / "model.onnx", None, None).run(data[0])[0], result)
    calibrate(sim, data, progress=False)
    assert all(np.array_equal(sim.stored_values()[site], weight) for site, weight in written.items())


@pytest.mark.parametrize("dtype", ["float16", "float32", None])
def test_a_bias_is_shifted_in_its_own_dtype(dtype: str | None) -> None:
    sim, data = chain()
    if dtype is not None:
        sim.set_precision("Conv_a", bias=dtype)
        calibrate(sim, data, progress=False)
    before = exposed(sim.qdq_model(), ["Relu_r:output/dequantized"], data[0])["Relu_r:output/dequantized"]
    with walk_layers(sim, data, progress=False) as walk:
        steps = iter(walk)
        next(steps)
        walk.write("Conv_a:weight", bias_shift=np.full(6, -1000, np.float32))
        assert next(steps).layers[0].site == "Conv_c:weight"
        (_, x_quantized), *_ = walk.run and [(None, walk.run.live.get((1, 0, "Relu_r:output/dequantized")))]
        assert before.max() > 0
        assert not x_quantized.any()


@pytest.mark.spread(7)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["block", "commit", "start", "section"])
def test_a_walk_that_fails_leaves_the_sim_as_it_was(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    sim, data = chain()
    before, result = spread(sim), sim.run(data[0])[0]

    def fail(*_: Any) -> Any:
        raise error

    if where == "commit":
        monkeypatch.setattr(OnnxSim, "restore", lambda sim, state: (monkeypatch.undo(), fail()))
    if where == "start":
        monkeypatch.setattr(run, "run_session", fail)
    with pytest.raises(error), walk_layers(sim, data, progress=False) as walk:  # noqa: PT012
        for step in walk:
            for layer in step.layers:
                encoding, weight = halved(walk, layer.site)
                walk.write(layer.site, encoding=encoding, weight=weight)
            if where == "section":
                monkeypatch.setattr(run, "run_session", fail)
            if where == "block":
                raise error
    monkeypatch.undo()
    assert spread(sim) == before
    assert np.array_equal(sim.run(data[0])[0], result)


def test_wrong_use_of_a_walk_is_an_error() -> None:
    sim, data = chain()
    with pytest.raises(DataError, match="holds no batch"), walk_layers(sim, [], progress=False):
        pass
    with pytest.raises(DataError, match="batch 1"), walk_layers(sim, [data[0], {"x": data[0]["x"][0]}], progress=False):
        pass
    with walk_layers(sim, data, progress=False) as walk:
        with pytest.raises(qsdk.ModelError, match="nowhere:weight is no layer of this walk"):
            walk.write("nowhere:weight")
        with pytest.raises(qsdk.ModelError, match="has no bias of its own"):
            walk.write("MatMul_g:weight", bias_shift=np.zeros(6, np.float32))
        with pytest.raises(ValueError, match="has the shape"):
            walk.write("MatMul_g:weight", weight=np.zeros((5, 6), np.float32))
    fresh = OnnxSim(sim.traced().model, sim.graph, sim.plan, sim.config)
    with pytest.raises(qsdk.CalibrationError, match="no encoding"), walk_layers(fresh, data, progress=False):
        pass


# --- what it costs --------------------------------------------------------------------------------------------------


def test_data_and_nodes_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, data = branched()
    ran: list[set[int]] = [set(), set()]
    sections = run.SteppedRun._session

    def counting(run: Any, number: int, section: Any) -> Any:
        fresh = set(section.nodes) - run.streams[number]._again
        assert not fresh & ran[number]
        ran[number] |= fresh
        return sections(run, number, section)

    monkeypatch.setattr(run.SteppedRun, "_session", counting)
    with walk_layers(sim, (batch for batch in data), progress=False) as walk:
        steps = len(list(walk))
    assert all(ran)
    assert (steps, len(walk.layers)) == (6, 7)  # two convolutions read one input
    exact, rounded = walk.run.streams
    assert ran[0] == set(range(len(exact.nodes)))  # to its end; the quantized one up to the last layer
    behind = [rounded.nodes[index].op_type for index in sorted(set(range(len(rounded.nodes))) - ran[1])]
    assert behind == ["Sum", "MatMul", "QuantizeLinear", "DequantizeLinear"]
    sites = {site for site, decision in sim.plan.decisions.items() if decision.kind == "weight"}
    assert {layer.site for layer in walk.layers} | walk.left.keys() == sites


@pytest.mark.slow
def test_a_bound_on_memory_changes_no_bit_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sim, data = branched()
    found: list[list[Any]] = []
    held: list[int] = []
    for most in (None, 20_000, 0):
        with walk_layers(sim, data, max_memory=most, progress=False) as walk:
            found.append([])
            for step in walk:
                held.append(walk.run.live.held)
                found[-1].append([(x.copy(), other.copy()) for x, other in step.inputs()])
        if most is not None:
            assert max(held) <= most
        else:
            assert max(held) > 20_000
        held.clear()
        gc.collect()
        assert list(tmp_path.glob("qsdk*")) == []
    for other in found[1:]:
        for step, again in zip(found[0], other, strict=True):
            for (x, q), (y, r) in zip(step, again, strict=True):
                assert np.array_equal(x, y)
                assert np.array_equal(q, r)


@pytest.mark.parametrize("in_memory", [2**30, 1000], ids=["in memory", "by way of a file"])
def test_weights_in_files_are_walked_and_changed_without_touching_them(in_memory: int, tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w1", "a"), node("Relu", "a", "r"), node("MatMul", "r w2", "y")]
    model = model_of(nodes, {"x": ["n", 600]}, ["y"], w1=random(1, 600, 600), w2=random(2, 600, 600))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    before = (tmp_path / "m.data").read_bytes()
    data = [{"x": random(i, 4, 600)} for i in (5, 6)]
    sim = quantize(tmp_path / "m.onnx", None, w8a8())
    sim.in_memory = in_memory
    calibrate(sim, data, progress=False)
    result = sim.run(data[0])[0]
    held = sim.snapshot(weights=True)
    with walk_layers(sim, data, progress=False) as walk:
        for step in walk:
            _, quantized = names_in(step)
            (_, x_quantized), _ = step.inputs()
            encoding, weight = halved(walk, step.layers[0].site)
            walk.write(step.layers[0].site, encoding=encoding, weight=weight)
    assert np.array_equal(x_quantized, exposed(sim.qdq_model(), quantized, data[0])[quantized[0]])
    assert not np.array_equal(sim.run(data[0])[0], result)
    assert (tmp_path / "m.data").read_bytes() == before
    sim.restore(held)
    assert np.array_equal(sim.run(data[0])[0], result)
