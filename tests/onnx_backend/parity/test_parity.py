import gc
import weakref

import numpy as np
import pytest
from onnx import numpy_helper
from qdq_models import convnet, mlp, prepared, simulated_mlp, stored_of

from onnx_backend.lower import insert
from onnx_backend.parity.cuts import cut_model, find_cuts
from onnx_backend.parity.parity import check
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from qsdk import DataError, Encoding, check_parity, quantize, w4a8, w4a16, w8a8, w8a16
from qsdk.core.comparing.tally import float_lsb

RNG = np.random.default_rng(3)
BATCHES = [RNG.normal(size=(n, 6)).astype(np.float32) for n in (16, 5)]
CONFIGS = {
    "w8a8": w8a8(),
    "w4a8": w4a8(),
    "w4a16": w4a16(),
    "w8a16 blocks": w8a16(block_size=4),
    "int8": w8a8().override("*", activation="int8"),
    "strict": w8a8().override("*", activation="int8_strict", weight="int8_strict"),
    "uint6": w8a8().override("*", activation="uint6"),
    "uint4": w8a8().override("*", activation="uint4"),
    "uint2": w8a8().override("*", activation="uint2", weight="int2"),
    "float8": w8a8().override("*", activation="float8e4m3fn", weight="float8e5m2"),
}


def simulation(config):
    """An exported MLP and its simulation in NumPy: model, captures, stored values, encodings."""
    marked, graph, plan, encodings = prepared(mlp(), config)
    model, _ = insert(marked, plan, encodings)
    values = {t.name: array(t) for t in mlp().graph.initializer}
    raw = {s: values[graph.tensors[i].name] for s, i in graph.sites.items() if graph.tensors[i].constant}
    stored = stored_of(mlp(), graph, plan, encodings)
    captures = [simulated_mlp(encodings, {**raw, **stored}, x) for x in BATCHES]
    captures = [{k: v for k, v in capture.items() if k == "x" or k in encodings} for capture in captures]
    return model, captures, stored, encodings


def compared(model, captures, *facts, outputs=None):
    """Compare with runs whose outputs are those of the MLP as captured."""
    whole = captures if outputs is None else outputs
    runs = ((values, [one["add2:output"]]) for values, one in zip(captures, whole, strict=True))
    return check(model, runs, *facts)


def rows_of(report):
    return {row["site"]: row for row in report.rows}


def failing(report):
    limits = {"weight": 0, "bias": 0}
    return {row["site"] for row in report.rows if not row["max_lsb"] <= limits.get(row["kind"], 1)}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_matches_its_simulation_in_numpy(name):
    model, captures, stored, encodings = simulation(CONFIGS[name])
    report = compared(model, captures, stored, encodings)
    assert report.summary["passed"], report
    assert report.summary["weights_max_lsb"] == 0
    assert set(rows_of(report)) == set(encodings)
    row = rows_of(report)["relu:output"]
    assert (row["kind"], row["elements"]) == ("activation", 21 * 8)
    assert rows_of(report)["x:input"]["max_lsb"] == 0
    assert report.summary["sqnr_db"] > 40


def test_a_weight_that_is_off_by_one_fails_at_that_weight():
    model, captures, stored, encodings = simulation(w8a8())
    tensor = initializers(model.graph)["w2_quantized"]
    codes = array(tensor).copy()
    codes[3, 1] += 1 if codes[3, 1] < 127 else -1
    tensor.CopyFrom(numpy_helper.from_array(codes, tensor.name))
    report = compared(model, captures, stored, encodings)
    row = rows_of(report)["mm2:weight"]
    assert (row["max_lsb"], row["mean_lsb"]) == (1, 1 / 24)
    assert not report.summary["passed"]
    assert rows_of(report)["x:input"]["max_lsb"] == rows_of(report)["relu:output"]["max_lsb"] == 0


@pytest.mark.parametrize("nodes", [("quantize", "dequantize"), ("quantize",), ("dequantize",)])
def test_a_wrong_scale_fails_wherever_it_is(nodes):
    model, captures, stored, encodings = simulation(w8a8())
    wrong = encodings["relu:output"].scale.reshape(()) * np.float32(1.01)
    model.graph.initializer.append(numpy_helper.from_array(wrong, "wrong"))
    for node in model.graph.node:
        if node.name in {f"relu:output/{name}" for name in nodes}:
            node.input[1] = "wrong"
    report = compared(model, captures, stored, encodings)
    assert not report.summary["passed"]
    if "dequantize" in nodes:
        row = rows_of(report)["relu:output"]
        assert row["max_lsb"] == np.inf
        assert "another scale" in row["note"]
    assert failing(report) == {"relu:output"}


def test_a_wrong_activation_is_seen_where_it_is_and_nowhere_else():
    model, captures, stored, encodings = simulation(w8a8())
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = "Abs"
    report = compared(model, captures, stored, encodings)
    assert failing(report) == {"relu:output"}
    assert rows_of(report)["add2:output"]["max_lsb"] <= 1


def test_an_activation_off_by_exactly_two_steps_is_counted():
    model, captures, stored, encodings = simulation(w8a8())
    scale = encodings["relu:output"].scale[0]
    moved = captures[0]["relu:output"].copy()
    moved[moved == 0] = 2 * scale
    report = compared(model, [{**captures[0], "relu:output": moved}], stored, encodings)
    assert rows_of(report)["relu:output"]["max_lsb"] == 2
    assert failing(report) == {"relu:output"}
    assert not report.summary["passed"]


@pytest.mark.parametrize("site", ["relu:output", "x:input", "add2:output"])
def test_a_site_that_one_side_lacks_fails(site):
    model, captures, stored, encodings = simulation(w8a8())
    without = [{k: v for k, v in capture.items() if k != site} for capture in captures]
    report = compared(model, without, stored, encodings, outputs=captures)
    assert failing(report) == {site}
    assert "captured nothing" in rows_of(report)[site]["note"]
    some = [captures[0], without[1]]
    assert failing(compared(model, some, stored, encodings, outputs=captures)) == {site}
    more = [{**capture, "ghost:output": capture[site]} for capture in captures]
    report = compared(model, more, stored, {**encodings, "ghost:output": encodings[site]})
    assert failing(report) == {"ghost:output"}
    fewer = {s: e for s, e in encodings.items() if s != site}
    assert site in failing(compared(model, captures, stored, fewer))


def test_a_stored_site_that_one_side_lacks_fails():
    model, captures, stored, encodings = simulation(w8a8())
    without = {site: value for site, value in stored.items() if site != "add1:bias"}
    assert failing(compared(model, captures, without, encodings)) == {"add1:bias"}
    more = {**stored, "ghost:weight": stored["mm1:weight"]}
    assert failing(compared(model, captures, more, encodings)) == {"ghost:weight"}
    turned = {**stored, "mm1:weight": stored["mm1:weight"].T}
    assert "the simulation (8, 6)" in rows_of(compared(model, captures, turned, encodings))["mm1:weight"]["note"]


def test_another_shape_fails_without_a_crash():
    model, captures, stored, encodings = simulation(w8a8())
    captures[0]["add2:output"] = captures[0]["add2:output"][:1]
    report = compared(model, captures, stored, encodings)
    assert failing(report) == {"add2:output"}
    assert "shape (16, 3), the simulation (1, 3)" in rows_of(report)["add2:output"]["note"]


@pytest.mark.slow
def test_batches_are_streamed():
    model, captures, stored, encodings = simulation(w8a8())
    alive = []

    class Batch(dict):
        pass

    def stream():
        for _ in range(4):
            gc.collect()
            assert sum(reference() is not None for reference in alive) <= 1
            batch = Batch(captures[0])
            alive.append(weakref.ref(batch))
            yield batch, [batch["add2:output"]]
            del batch

    assert check(model, stream(), stored, encodings).summary["passed"]
    assert len(alive) == 4


def test_what_is_missing_is_said():
    model, captures, stored, encodings = simulation(w8a8())
    with pytest.raises(DataError, match="no batches"):
        compared(model, [], stored, encodings)
    with pytest.raises(DataError, match="lack the graph input"):
        compared(model, [{k: v for k, v in captures[0].items() if k != "x"}], stored, encodings)
    none = check(model, [(captures[0], [])], stored, encodings)
    assert rows_of(none)["the model"]["note"] == "the model has 1 outputs, the simulation 0"


def test_the_end_to_end_figure_is_information():
    model, captures, stored, encodings = simulation(w8a8())
    assert compared(model, captures, stored, encodings).summary["sqnr_db"] > 40
    noisy = [{"add2:output": capture["add2:output"] * np.float32(1.1)} for capture in captures]
    report = compared(model, captures, stored, encodings, outputs=noisy)
    assert report.summary["passed"]
    assert 15 < report.summary["sqnr_db"] < 25


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_are_compared_in_units_in_the_last_place(dtype):
    sim = quantize(mlp(), None, w8a8().skip("relu", dtype=dtype).skip("mm1", dtype=dtype))
    sim.calibrate(BATCHES, progress=False)
    model = sim.qdq_model()
    captures, stored = [sim.capture(x) for x in BATCHES], sim.stored_values()
    report = compared(model, captures, stored, sim.encodings)
    assert report.summary["passed"], report
    assert {"relu:output", "mm1:weight"} <= set(rows_of(report))
    ulp = 2.0 ** (-10 if dtype == "float16" else -7)
    capture = dict(captures[0])
    values = capture["relu:output"]
    mantissa, exponent = np.frexp(values)
    away = np.ldexp(mantissa + np.float32(ulp), exponent)  # 2 units: frexp's mantissa is below 1
    capture["relu:output"] = np.where((values > 0) & (mantissa < 0.9), away, values).astype(np.float32)
    rows = rows_of(compared(model, [capture], stored, sim.encodings))
    assert rows["relu:output"]["max_lsb"] == 2
    capture["relu:output"] = np.where(values > 0, values, np.float32(-(2.0**-24 if dtype == "float16" else 2.0**-133)))
    assert rows_of(compared(model, [capture], stored, sim.encodings))["relu:output"]["max_lsb"] == 1
    spoiled = {**stored, "mm1:weight": stored["mm1:weight"] * np.float32(1 + ulp)}
    assert not compared(model, captures, spoiled, sim.encodings).summary["passed"]


def test_codes_beyond_float32_are_equal_where_their_values_are():
    marked, graph, plan, encodings = prepared(mlp(), w8a8())
    fine = encodings["add1:bias"]
    encodings["add1:bias"] = Encoding(fine.dtype, np.linspace(3e-10, 9e-10, 8), np.zeros(8), fine.axis)
    model, _ = insert(marked, plan, encodings)
    stored = stored_of(mlp(), graph, plan, encodings)
    captures = [simulated_mlp(encodings, stored, BATCHES[0])]
    captures = [{k: v for k, v in capture.items() if k == "x" or k in encodings} for capture in captures]
    assert rows_of(compared(model, captures, stored, encodings))["add1:bias"]["max_lsb"] == 0


def test_cutting_leaves_no_path_from_one_site_to_the_next():
    marked, _, plan, encodings = prepared(convnet(), w8a8())
    model, _ = insert(marked, plan, encodings)
    cuts = find_cuts(model)
    cut, fed = cut_model(model, cuts)
    assert [len(cut.graph.output), len(cuts)] == [11, 11]
    made = {name for node in cut.graph.node for name in node.output}
    assert not made & {item.read for item in cuts}
    assert set(fed) == {item.site for item in cuts} - {"softmax:output"}
    assert not [n for n in cut.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in made]


@pytest.mark.slow
def test_a_convnet_matches_at_every_site():
    sim = quantize(convnet(), None, w8a8())
    images = [RNG.normal(size=(4, 3, 8, 8)).astype(np.float32) for _ in range(2)]
    sim.calibrate(images, progress=False)
    report = check_parity(sim, sim.qdq_model(), images, progress=False)
    assert report.summary["passed"]
    assert report.summary["sqnr_db"] == np.inf


def test_floats_far_below_the_largest_are_counted_in_units_of_its_1024th():
    unit = 2.0**-33  # of float32 at 2**-10
    exact = np.float32([1.0, 0.5, 2.0**-20, 2.0**-20, 2.0**-20])
    moved = exact + np.float32([2.0**-23, 0, unit, 2 * unit, 1.25 * unit])
    np.testing.assert_array_equal(float_lsb(moved, exact), [1, 0, 1, 2, 1])
