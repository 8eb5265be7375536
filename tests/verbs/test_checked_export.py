"""The last act of an export: the written file is opened as a user does, in a process that it may end."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qsdk
from onnx_backend.data_passes import written_file
from onnx_backend.runtime.user_session import user_session
from onnx_backend.runtimes import onnxruntime
from onnx_backend.workarounds import onnxruntime_barriers
from qsdk import ExportError, ModelError
from qsdk.verbs.doors.onnx_door import OnnxDoor

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 4, 8)).astype(np.float32)
node = helper.make_node


def net(*nodes, dtype=TensorProto.FLOAT16, sizes=("n", 4, 8), **stored):
    """A model of `x` in a dtype; stored tensors of floats have it too."""
    values = {name: np.asarray(value) for name, value in stored.items()}
    narrow = helper.tensor_dtype_to_np_dtype(dtype)
    tensors = [
        numpy_helper.from_array(v.astype(narrow) if v.dtype.kind == "f" else v, name) for name, v in values.items()
    ]
    edges = [helper.make_tensor_value_info("x", dtype, sizes), helper.make_tensor_value_info("y", dtype, None)]
    graph = helper.make_graph(nodes, "g", edges[:1], edges[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def moved_batch(**options):
    """A Linear behind a transpose of the first two axes."""
    weight, bias = RNG.normal(size=(8, 8)), RNG.normal(size=8)
    nodes = [node("Transpose", ["x"], ["t"], perm=[1, 0, 2]), node("MatMul", ["t", "w"], ["m"], "layer")]
    return net(*nodes, node("Add", ["m", "b"], ["y"]), w=weight, b=bias, **options)


def calibrated(model, config):
    sim = qsdk.quantize(model, None, config)
    qsdk.calibrate(sim, [X], progress=False)
    return sim


def without_barriers(monkeypatch):
    monkeypatch.setattr(onnxruntime, "insert_barriers", lambda *given, **options: None)


def listed(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("external_data", [None, True])
def test_a_file_that_ends_the_process_of_a_session_is_refused_and_the_old_one_stays(
    tmp_path, monkeypatch, external_data
):
    sim, path = calibrated(moved_batch(), qsdk.weight_only("int4", block_size=4)), tmp_path / "q.onnx"
    qsdk.export(sim, path, external_data=external_data)
    before = listed(tmp_path)
    without_barriers(monkeypatch)
    with pytest.raises(ExportError, match=r"q\.onnx was not written: .* ends its process \(SIGSEGV\); .*EXTENDED"):
        qsdk.export(sim, path, external_data=external_data)
    assert listed(tmp_path) == before
    with pytest.raises(ExportError, match="ends its process"):
        qsdk.export(sim, tmp_path / "new.onnx", external_data=external_data)
    assert listed(tmp_path) == before
    written = qsdk.export(sim, tmp_path / "new.onnx", check=False)
    assert "default_session" not in written.summary
    rows = qsdk.validate(tmp_path / "new.onnx").rows
    assert [(row["node"], row["rule"]) for row in rows] == [("layer", "default_session")]
    assert "ends its process" in rows[0]["problem"]
    with pytest.raises(ModelError, match="ends its process"):
        qsdk.analysis.profile(tmp_path / "new.onnx", repeats=1, shapes={"x": (2, 4, 8)}, progress=False)


def test_a_file_that_does_not_load_is_refused_with_the_words_of_the_runtime(tmp_path, monkeypatch):
    sim = calibrated(net(node("Concat", ["x", "x"], ["y"], axis=1)), qsdk.w8a8())
    without_barriers(monkeypatch)
    with pytest.raises(ExportError, match=r"does not load: .*QLinearConcat.*; leave the layer float by set_precision"):
        qsdk.export(sim, tmp_path / "q.onnx")
    assert not listed(tmp_path)
    # the dialect `onnx` is written without regard to this runtime: it cannot fail by it
    assert "default_session" in qsdk.export(sim, tmp_path / "pure.onnx", dialect="onnx").summary


def test_a_file_that_computes_something_else_is_refused_with_the_site(tmp_path, monkeypatch):
    layer = node("Conv", ["x", "w"], ["y"], "layer")
    model = net(layer, dtype=TensorProto.FLOAT, sizes=("n", 4, 8, 8), w=RNG.normal(size=(4, 4, 3, 3)))
    sim = qsdk.quantize(model, None, qsdk.w8a16().override("layer", weight="float32"))
    qsdk.calibrate(sim, [RNG.normal(size=(2, 4, 8, 8)).astype(np.float32)], progress=False)
    assert "default_session" not in qsdk.export(sim, tmp_path / "right.onnx").summary
    without_barriers(monkeypatch)
    problem = r"computes something else than the simulation, layer:output: \d+ steps off; .* check=False$"
    with pytest.raises(ExportError, match=problem):
        qsdk.export(sim, tmp_path / "wrong.onnx")
    ran = OnnxDoor.run_example  # a device may multiply with fewer bits than float32, and then the sim is off
    monkeypatch.setattr(OnnxDoor, "run_example", lambda door, model: replace(ran(door, model), place="cuda"))
    said = qsdk.export(sim, tmp_path / "elsewhere.onnx").summary["default_session"]
    assert re.search(r"at the worst output: the sim runs on cuda, layer:output: \d+ steps off", said)


class Masked(nn.Module):
    """A convolution, and a mask that is left out where it hides nothing, though the trace has it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x, hidden):
        x = self.conv(x)
        return (x - hidden * 5 if torch.compiler.is_compiling() or bool(hidden.any()) else x).sigmoid()


def test_a_site_that_the_example_leaves_out_hides_no_site_that_is_wrong(tmp_path, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    sim = qsdk.quantize(Masked().eval(), (x, torch.zeros(2, 1, 1, 1)), qsdk.w8a16().override("conv", weight="float32"))
    qsdk.calibrate(sim, [(x, torch.ones(2, 1, 1, 1))], progress=False)
    said = qsdk.export(sim, tmp_path / "q.onnx").summary["default_session"]
    assert said.endswith("leaves out mul.0:output and 1 others, which the file computes")
    without_barriers(monkeypatch)
    with pytest.raises(ExportError, match=r"something else than the simulation, conv:output: \d+ steps off"):
        qsdk.export(sim, tmp_path / "wrong.onnx")


def test_a_difference_that_no_rounding_explains_is_told_where_no_site_is(tmp_path):
    weight = RNG.normal(size=(64, 64))
    sim = qsdk.quantize(
        net(node("MatMul", ["x", "w"], ["y"]), dtype=TensorProto.FLOAT, sizes=("n", 64), w=weight),
        None,
        qsdk.weight_only("int8"),
    )
    qsdk.calibrate(sim, [RNG.normal(size=(8, 64)).astype(np.float32)], progress=False)
    summary = qsdk.export(sim, tmp_path / "q.onnx").summary
    if "session_options" in summary:
        assert "open it with the entries that session_options names" in summary["default_session"]
    else:
        assert "default_session" not in summary


def test_what_is_not_compared_is_said(tmp_path, monkeypatch):
    model = net(node("Relu", ["x"], ["y"]), dtype=TensorProto.FLOAT)
    sim = calibrated(model, qsdk.w8a8())
    assert "default_session" not in qsdk.export(sim, tmp_path / "q.onnx").summary
    drawn = calibrated(
        net(node("RandomNormalLike", ["x"], ["r"]), node("Add", ["x", "r"], ["y"]), dtype=TensorProto.FLOAT),
        qsdk.w8a8(),
    )
    assert "draws random numbers" in qsdk.export(drawn, tmp_path / "r.onnx").summary["default_session"]
    x = torch.randn(2, 8)
    layer = qsdk.quantize(nn.Linear(8, 4).eval(), x)
    qsdk.calibrate(layer, [x], progress=False)
    parts = {"one": {"input": (1, 8)}, "two": {"input": (2, 8)}}
    said = qsdk.export(layer, tmp_path / "l.onnx", shapes=parts).summary["default_session"]
    assert said == "run, and not compared: its sizes are not those of the example (l.one.onnx)"
    monkeypatch.setattr(written_file, "_MOST", 10)
    assert qsdk.export(sim, tmp_path / "q.onnx").summary["default_session"].startswith("not opened: ")


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.layer = 0, nn.Linear(8, 8)

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def test_the_run_of_the_check_leaves_the_sim_as_it_was(tmp_path):
    x = torch.randn(4, 8)
    sim = qsdk.quantize(Counting().eval(), x, "w8a8")
    qsdk.calibrate(sim, [x], progress=False)
    calls, drawn = sim.model.calls, torch.get_rng_state()
    qsdk.export(sim, tmp_path / "q.onnx")
    assert sim.model.calls == calls
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("config", ["int8", "int4", "dynamic"])
def test_a_linear_behind_a_moved_batch_runs_in_half_precision(tmp_path, dtype, config):
    configs = {"int8": qsdk.weight_only("int8"), "int4": qsdk.weight_only("int4", block_size=4)}
    sim = calibrated(moved_batch(dtype=dtype), configs.get(config, qsdk.QuantConfig(dynamic_activations=True)))
    qsdk.export(sim, tmp_path / "q.onnx")
    assert not [row for row in qsdk.validate(tmp_path / "q.onnx").rows if "process" in row["problem"]]


class Moving(nn.Module):
    """A stack, whose Concat is behind Unsqueezes, or a roll, behind Slices."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        return torch.stack([x, x], 1) if self.op == "stack" else torch.roll(x, 1, 1)


@pytest.mark.parametrize("op", ["stack", "roll"])
def test_a_concat_behind_moves_of_a_float16_pair_loads(tmp_path, op):
    x = torch.from_numpy(X).half()
    sim = qsdk.quantize(Moving(op), x, "w8a8")
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")


def test_axes_of_one_name_and_several_sizes_get_names_of_their_own(tmp_path):
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "c", "h", "w"]) for name in "ab"]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4, "h", "w"]) for name in ("ya", "yb")]
    nodes, stored = [], []
    for name in "ab":
        stored.append(numpy_helper.from_array(RNG.normal(size=(4, 4, 3, 3)).astype(np.float32), f"w{name}"))
        nodes.append(node("Conv", [name, f"w{name}"], [f"c{name}"], pads=[1] * 4))
        nodes.append(node("Relu", [f"c{name}"], [f"y{name}"]))
    graph = helper.make_graph(nodes, "g", edges, results, stored)
    sim = qsdk.quantize(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    sizes = {"a": (1, 4, 16, 16), "b": (1, 4, 8, 8)}
    qsdk.calibrate(sim, [{k: RNG.normal(size=v).astype(np.float32) for k, v in sizes.items()}], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")
    written = onnx.load(tmp_path / "q.onnx").graph
    names = [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in (*written.input, *written.output)]
    assert names == [["n", "c", "h_a", "w_a"], ["n", "c", "h_b", "w_b"], ["n", "", "", ""], ["n", "", "", ""]]
    session = ort.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"])
    for first, second in ((16, 8), (8, 8), (4, 12)):
        fed = {"a": np.ones((1, 4, first, first), np.float32), "b": np.ones((1, 4, second, second), np.float32)}
        assert [value.shape[2] for value in session.run(None, fed)] == [first, second]


def test_a_session_in_another_process_takes_and_gives_bfloat16_and_texts(tmp_path):
    for code, values in (
        (TensorProto.BFLOAT16, np.array([[1.0, 2.5, -0.25]], np.float32)),
        (TensorProto.STRING, np.array([["a", "bc", ""]], object)),
    ):
        edges = [helper.make_tensor_value_info(name, code, ["n", 3]) for name in "xy"]
        graph = helper.make_graph([node("Identity", ["x"], ["y"])], "g", edges[:1], edges[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.save(model, tmp_path / "m.onnx")
        session = user_session(tmp_path / "m.onnx")
        assert session.get_inputs()[0].shape == ["n", 3]
        (got,) = session.run(None, {"x": values})
        assert got.dtype == values.dtype
        assert got.tolist() == values.tolist()
        with pytest.raises(RuntimeError, match="rank"):
            session.run(None, {"x": values[0]})
        assert session.run(None, {"x": values})[0].tolist() == values.tolist()


@pytest.mark.slow
def test_the_process_of_sessions_ends_with_the_one_that_started_it(tmp_path):
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([node("Identity", ["x"], ["y"])], "g", edges[:1], edges[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    code = (
        "import os, sys; from pathlib import Path; from onnx_backend.runtime.user_session import user_session; "
        f"s = user_session(Path({str(tmp_path / 'm.onnx')!r})); print(s._process.process.pid, flush=True); "
        "os.kill(os.getpid(), 9) if sys.argv[1] == 'killed' else None"
    )
    for how in ("normally", "killed"):
        ended = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=False)
        pid = int(ended.stdout)
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or "(zombie)" in Path(f"/proc/{pid}/status").read_text():
                break
            os.sched_yield()
            subprocess.run(["sleep", "0.1"], check=True)
        else:
            pytest.fail(f"the process still runs after its parent has ended {how}")


class Levels(nn.Module):
    """A head that reads two levels of a pyramid, whose values become small on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.smaller = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        layers = [layer for _ in range(2) for layer in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.ReLU())]
        self.head = nn.Sequential(*layers, nn.Conv2d(8, 4, 3, padding=1))
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = self.stem(x).relu()
        levels = [self.head(level).flatten(2) for level in (large, self.smaller(large).relu())]
        return torch.cat(levels, -1)


def test_a_bias_that_layers_of_unlike_inputs_share_is_right_in_an_ordinary_session(tmp_path):
    """The runtime's QLinearConv takes the scale of the bias for that of the layer, if they differ by less than 1e-6."""
    torch.manual_seed(0)
    x, model = torch.randn(1, 3, 8, 8), Levels().eval()
    sim = qsdk.quantize(model, x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")  # refuses a file that an ordinary session computes otherwise
    wanted = sim(x).detach().numpy()
    found = ort.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})
    assert np.abs(found[0] - wanted).max() < 0.02 * np.abs(wanted).max()


class Router(nn.Module):
    """The two most probable of eight experts get their probabilities, the others 0."""

    def __init__(self, in_order: bool = True) -> None:
        super().__init__()
        self.scores, self.in_order = nn.Linear(16, 8), in_order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.scores(x).softmax(-1)
        values, chosen = probabilities.topk(2, -1, sorted=self.in_order)
        return torch.zeros_like(probabilities).scatter(-1, chosen, values)


class Ordered(nn.Module):
    """Rows of a table, which the order of values with many ties among them chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.table = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scores(x).clamp(0, 3).round()
        chosen = [y.topk(3)[1], torch.topk(y, 3, largest=False)[1], y.sort(-1, True)[1], torch.sort(y)[1]]
        chosen += [y.argsort(descending=True), torch.sort(y, stable=True)[1], y.argsort(stable=True)]
        return torch.cat([self.table[indices[..., :3]].sum(-2) for indices in chosen], -1)


@pytest.mark.parametrize("network", [Router, Ordered])
def test_of_equal_values_the_sim_takes_those_that_the_file_takes(network, tmp_path):
    torch.manual_seed(0)
    model = network().eval()
    x = torch.randn(64, model.scores.in_features)
    sim = qsdk.quantize(model, x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")
    report = qsdk.check_parity(sim, tmp_path / "q.onnx", [x], progress=False)
    assert report.summary["activations_max_lsb"] == 0
    assert not any("ties" in row.get("remark", "") for row in report.rows)


def test_ties_that_a_top_k_breaks_otherwise_are_said_and_no_fault(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 64, 16)
    sim = qsdk.quantize(Router(in_order=False).eval(), x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")
    report = qsdk.check_parity(sim, tmp_path / "q.onnx", [x], progress=False)
    assert report.summary["passed"]
    assert any("broke ties" in row.get("remark", "") for row in report.rows)
    model = onnx.load(tmp_path / "q.onnx")
    (top,) = [node for node in model.graph.node if node.op_type == "TopK"]
    largest = [attribute for attribute in top.attribute if attribute.name == "largest"]
    (largest[0] if largest else top.attribute.add(name="largest", type=2)).i = 0
    onnx.save(model, tmp_path / "other.onnx")
    assert not qsdk.check_parity(sim, tmp_path / "other.onnx", [x], progress=False).summary["passed"]


@pytest.mark.parametrize("pad", [0, 1])
def test_windows_beyond_the_edge_of_a_pool_are_divided_by_what_they_hold(pad, tmp_path, monkeypatch):
    torch.manual_seed(0)
    pool, x = nn.AvgPool2d(3, 2, pad, ceil_mode=True), torch.randn(2, 3, 8, 8)
    sim = qsdk.quantize(nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), pool, nn.Conv2d(16, 4, 1)).eval(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    monkeypatch.setattr(onnxruntime_barriers, "_divides_by_more", lambda node: False)
    with pytest.raises(ExportError, match=r"2:output: \d+ steps off"):  # what the runtime's own kernel makes of it
        qsdk.export(sim, tmp_path / "fused.onnx")
