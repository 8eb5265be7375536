"""What `compare` takes: each kind of side, folders that devices dump, layouts, names; and its errors."""

import io
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

import qsdk
from qsdk import ConfigError, DataError, FileFormatError

Array = np.ndarray


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()
        self.block = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU())
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.relu(self.conv1(x))).mean((2, 3)))


class Forms:
    """A network as a module, a float file, a sim and a Q/DQ file; and a run of the Q/DQ file with all it computes."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.module, self.batches = Net().eval(), [torch.randn(2, 3, 8, 8) for _ in range(2)]
        program = torch.onnx.export(self.module, (self.batches[0],), dynamo=True, verbose=False)
        assert program is not None
        program.save(folder / "float.onnx")
        self.float_file = str(folder / "float.onnx")
        self.sim = qsdk.quantize(self.module, self.batches[0])
        qsdk.calibrate(self.sim, self.batches, progress=False)
        self.file = str(folder / "model.onnx")
        qsdk.export(self.sim, self.file)

    def computed(self, path: str) -> dict[str, Array]:
        """Return every float that a file computes, over all batches."""
        model = onnx.load(path)
        names = [name for node in model.graph.node for name in node.output]
        model.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in names if name != model.graph.output[0].name
        )
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        wanted = [output.name for output in session.get_outputs() if output.type == "tensor(float)"]
        source = session.get_inputs()[0].name
        runs = [session.run(wanted, {source: x.numpy()}) for x in self.batches]
        return {name: np.concatenate(parts) for name, parts in zip(wanted, zip(*runs, strict=True), strict=True)}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(tmp_path_factory.mktemp("forms"))


@pytest.fixture(scope="module")
def onnx_sim(forms: Forms) -> Any:
    sim = qsdk.quantize(forms.float_file, None)
    qsdk.calibrate(sim, [x.numpy() for x in forms.batches], progress=False)
    return sim


def compared(forms: Forms, a: Any, b: Any, **options: Any) -> qsdk.Report:
    return qsdk.compare(a, b, forms.batches, progress=False, **options)


def rows(report: qsdk.Report) -> Mapping[str, Mapping[str, Any]]:
    return {row["site"]: row for row in report.rows}


SITES = ["relu", "block.1", "head"]


@pytest.mark.spread(4)
@pytest.mark.parametrize("other", ["sim", "file", "float_file", "onnx_sim", "module"])
def test_a_module_is_compared_with_every_kind_of_model(forms: Forms, onnx_sim: Any, other: str) -> None:
    report = compared(forms, forms.module, onnx_sim if other == "onnx_sim" else getattr(forms, other))
    assert report.summary["first_off"] is None
    assert set(SITES) <= set(rows(report))
    order = ["x", "conv1", "relu", "block.0", "block.1", "head"]
    assert list(rows(report)) == [name for name in order if name in rows(report)]
    assert report.summary["sqnr_db"] > (100 if other in ("float_file", "module") else 25)
    assert report.summary["matched"] == len(report.rows)


def test_numbers_of_a_row_are_those_of_the_tensors(forms: Forms) -> None:
    report = compared(forms, forms.module, forms.sim)
    with torch.no_grad():
        wanted = [forms.module(x).numpy() for x in forms.batches]
        got = [forms.sim(x).numpy() for x in forms.batches]
    off, exact = np.concatenate(wanted) - np.concatenate(got), np.concatenate(wanted)
    row = rows(report)["head"]
    assert row["other"] == "head:output"
    assert row["max_difference"] == pytest.approx(np.abs(off).max(), rel=1e-5)
    assert row["sqnr_db"] == pytest.approx(10 * np.log10((exact**2).sum() / (off**2).sum()), rel=1e-5)
    step = float(forms.sim.encodings["head:output"].scale[0])
    assert row["max_lsb"] == pytest.approx(np.abs(off).max() / step, rel=1e-4)
    assert row["max_lsb"] > 0.4
    inner = rows(report)["block.1"]
    assert inner["own_sqnr_db"] > inner["sqnr_db"] + 1
    assert report.summary["sqnr_db"] == pytest.approx(row["sqnr_db"])


def test_an_integer_only_file_is_compared_by_its_codes(forms: Forms, tmp_path: Path) -> None:
    path = str(tmp_path / "integer.onnx")
    qsdk.to_integer(forms.file, path)
    for other in (forms.sim, forms.file):
        report = compared(forms, other, path)
        assert report.summary["first_off"] is None
        assert {"relu:output", "block.1:output", "head:output"} <= set(rows(report))
        assert max(row["max_lsb"] for row in report.rows if row["max_lsb"] is not None) <= 2
    faulty = onnx.load(path)
    rounding = next(
        node for node in faulty.graph.node if node.op_type == "ConvInteger" and "conv2d_1" in node.output[0]
    )
    weight = next(tensor for tensor in faulty.graph.initializer if tensor.name == rounding.input[1])
    codes = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(codes[::-1].copy(), weight.name))
    assert compared(forms, forms.sim, faulty).summary["first_off"] == "block.1:output"


def dumped(folder: Path, values: Mapping[str, Array], save: Callable[[Path, Array], None]) -> Path:
    """Write tensors as a device does, with `_` in place of other characters."""
    for name, value in values.items():
        plain = "".join(character if character.isalnum() else "_" for character in name)
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / plain, value)
    return folder


def raw(path: Path, value: Array) -> None:
    value.tofile(path.with_suffix(".raw"))


def npy(path: Path, value: Array) -> None:
    np.save(path.with_suffix(".npy"), value)


def last(value: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(value, 1, -1)) if value.ndim == 4 else value


@pytest.mark.parametrize("save", [raw, npy])
@pytest.mark.parametrize("on_a", [True, False])
def test_a_dump_in_nhwc_is_found_to_be_so(forms: Forms, tmp_path: Path, save: Any, on_a: bool) -> None:
    folder = dumped(tmp_path, {name: last(value) for name, value in forms.computed(forms.float_file).items()}, save)
    sides = (folder, forms.float_file) if on_a else (forms.float_file, folder)
    report = compared(forms, *sides)
    assert report.summary["first_off"] is None
    assert report.summary["matched"] >= 6
    layouts = {row["other" if on_a else "site"]: row["layout"] for row in report.rows}
    side = "a" if on_a else "b"
    assert layouts["relu"] == layouts["conv2d"] == f"NHWC on side {side}"
    assert layouts["linear"] == ""
    assert min(row["sqnr_db"] for row in report.rows) > 100


def test_the_layout_of_a_faulty_tensor_is_that_of_the_others(forms: Forms, tmp_path: Path) -> None:
    values = forms.computed(forms.float_file)
    faulty = {name: last(value) for name, value in values.items()} | {"relu": last(values["relu"][:, ::-1])}
    report = compared(forms, forms.float_file, dumped(tmp_path, faulty, raw))
    assert rows(report)["relu"]["layout"] == "NHWC on side b"
    # what reads it did not get what was dumped
    assert [row["site"] for row in report.rows if row["off"]] == ["relu", "conv2d_1"]
    assert report.summary["first_off"] == "relu"


def test_a_dump_by_samples_lies_in_numbered_folders(forms: Forms, tmp_path: Path) -> None:
    values = forms.computed(forms.file)
    for sample in range(4):
        dumped(tmp_path / f"Result_{sample}", {name: value[sample] for name, value in values.items()}, raw)
    report = compared(forms, forms.sim, tmp_path)
    assert report.summary["first_off"] is None
    assert max(row["max_lsb"] for row in report.rows if row["max_lsb"] is not None) <= 1
    assert {"relu:output", "block.1:output", "mean.0:output"} <= set(rows(report))
    swapped = values["relu"][:, ::-1]
    for sample in range(4):  # what a device does wrong in its first layer
        dumped(tmp_path / f"Result_{sample}", {"relu:output/dequantized": swapped[sample]}, raw)
    assert compared(forms, forms.sim, tmp_path).summary["first_off"] == "relu:output"


def test_samples_of_npy_may_lack_the_batch_axis(forms: Forms, tmp_path: Path) -> None:
    values = forms.computed(forms.float_file)
    for sample in range(4):
        dumped(tmp_path / f"{sample}", {name: last(value[sample][None])[0] for name, value in values.items()}, npy)
    report = compared(forms, forms.float_file, tmp_path)
    assert report.summary["first_off"] is None
    assert rows(report)["relu"]["layout"] == "NHWC on side b"


def test_folders_of_layers_are_parts_of_names(forms: Forms, tmp_path: Path) -> None:
    with torch.no_grad():
        x = forms.module.relu(forms.module.conv1(torch.cat(forms.batches)))
        value = forms.module.block[0](x).numpy()
    dumped(tmp_path / "block", {"0": value}, npy)
    dumped(tmp_path / "layer1", {"zero": value}, npy)
    report = compared(forms, forms.module, tmp_path)
    assert rows(report)["block.0"]["other"] == "block/0"
    assert rows(report)["block.0"]["sqnr_db"] > 100
    assert report.summary["unmatched_b"] == ["layer1/zero"]


def test_more_than_ten_samples_are_read_by_number(forms: Forms, tmp_path: Path) -> None:
    data = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        outputs = forms.module(data).numpy()
    for sample in range(12):
        dumped(tmp_path / f"Result_{sample}", {"head": outputs[sample]}, raw)
    report = qsdk.compare(forms.module, tmp_path, [data[:5], data[5:]], progress=False)
    assert report.summary["sqnr_db"] > 100


def test_codes_in_a_dump_are_those_of_the_site(forms: Forms, tmp_path: Path) -> None:
    values = forms.computed(forms.file)
    encoding = forms.sim.encodings["relu:output"]
    codes = encoding.quantize(values["relu"])
    for save in (raw, npy):
        folder = dumped(tmp_path / save.__name__, {"relu": codes}, save)
        report = compared(forms, forms.sim, folder)
        assert rows(report)["relu:output"]["max_lsb"] == 0
    with pytest.raises(DataError, match=r"relu.npy holds uint8, and the other side has no quantized site here"):
        compared(forms, forms.module, folder)


def test_half_precision_in_a_dump_is_told_by_its_size(forms: Forms, tmp_path: Path) -> None:
    values = forms.computed(forms.float_file)
    folder = dumped(tmp_path, {name: values[name].astype(np.float16) for name in ("relu", "linear")}, raw)
    report = compared(forms, forms.float_file, folder)
    assert 60 < rows(report)["relu"]["sqnr_db"] < 90
    assert compared(forms, forms.float_file, folder, tolerance=1e-2).summary["first_off"] is None
    assert compared(forms, forms.float_file, folder).summary["first_off"] == "relu"


def test_two_folders_need_no_data(forms: Forms, tmp_path: Path) -> None:
    values = forms.computed(forms.float_file)
    ours = dumped(tmp_path / "ours", values, npy)
    theirs = dumped(tmp_path / "theirs", {name: last(value) for name, value in values.items()}, npy)
    report = qsdk.compare(ours, theirs)
    assert report.summary["first_off"] is None
    assert rows(report)["relu"]["layout"] == "NHWC on side b"
    changed = {**values, "relu_1": values["relu_1"] * 1.01}
    report = qsdk.compare(ours, dumped(tmp_path / "changed", changed, npy), None)
    assert report.summary["first_off"] == "relu_1"
    assert [row["site"] for row in report.rows if row["off"]] == ["relu_1"]


def test_a_missing_batch_axis_is_said(forms: Forms, tmp_path: Path) -> None:
    one = [forms.batches[0][:1]]
    with torch.no_grad():
        output = forms.module(one[0]).numpy()
    np.save(tmp_path / "head.npy", output[0])
    report = qsdk.compare(forms.module, tmp_path, one, progress=False)
    assert rows(report)["head"]["layout"] == "axes of one: 1x5 on side a, 5 on side b"
    assert rows(report)["head"]["sqnr_db"] > 100


def test_forward_feeds_both_sides(forms: Forms) -> None:
    labelled = [(x, torch.zeros(2)) for x in forms.batches]
    call = lambda model, batch: model(batch[0])  # noqa: E731
    for a, b in ((forms.module, forms.file), (forms.float_file, forms.sim), (forms.module, forms.sim)):
        report = qsdk.compare(a, b, labelled, forward=call, progress=False)
        assert report.summary["first_off"] is None
        assert report.summary["sqnr_db"] > 25
    with pytest.raises(ConfigError, match=r"forward= calls an nn.Module"):
        qsdk.compare(forms.file, forms.float_file, labelled, forward=call, progress=False)
    with pytest.raises(DataError, match=r"batch 0.*forward"):
        qsdk.compare(forms.module, forms.sim, labelled, progress=False)


def test_numpy_batches_feed_a_module(forms: Forms) -> None:
    report = qsdk.compare(forms.module, forms.file, [x.numpy() for x in forms.batches], progress=False)
    assert report.summary["first_off"] is None


def test_the_sides_stay_as_they_are(forms: Forms) -> None:
    module = Net().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x = forms.batches[0]
    wanted = forms.sim(x).clone()
    compared(forms, module, forms.module)
    assert all(part.training for part in module.modules())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    compared(forms, forms.sim, forms.module)
    assert torch.equal(forms.sim(x), wanted)


def renamed(path: str) -> ModelProto:
    """Return a file whose tensors have names of their own, and no metadata."""
    model = onnx.load(path)
    names: dict[str, str] = {}
    for number, node in enumerate(model.graph.node):
        del node.metadata_props[:]
        node.name = f"n{number}"
        for at, name in enumerate(node.output):
            names[name] = f"zz{number}"
            node.output[at] = names[name]
        for at, name in enumerate(node.input):
            node.input[at] = names.get(name, name)
    model.graph.output[0].name = names[model.graph.output[0].name]
    del model.graph.value_info[:]
    return model


def test_names_say_what_cannot_be_matched(forms: Forms) -> None:
    model = renamed(forms.float_file)
    relu = next(node.output[0] for node in model.graph.node if node.op_type == "Relu")
    report = compared(forms, forms.module, model, names={"relu": relu})
    assert rows(report)["relu"]["other"] == relu
    assert rows(report)["relu"]["sqnr_db"] > 100
    assert "head" in rows(report)  # the outputs belong together by their position
    with pytest.raises(ConfigError, match=r"names= has 'relv', which side a does not compute; the nearest are relu"):
        compared(forms, forms.module, model, names={"relv": relu})
    with pytest.raises(ConfigError, match=r"names= has 'zy1', which side b does not compute; the nearest are zz"):
        compared(forms, forms.module, model, names={"relu": "zy1"})


def test_a_wrong_name_is_seen_in_the_numbers(forms: Forms) -> None:
    report = compared(forms, forms.module, forms.float_file, names={"relu": "conv2d"})
    assert report.summary["first_off"] == "relu"
    assert report.summary["why"].endswith("of the largest value")
    report = compared(forms, forms.module, forms.float_file, names={"relu": "relu_1"})
    assert rows(report)["relu"]["layout"] == "shapes differ: 2x4x8x8 against 2x6x6x6"
    assert report.summary["why"] == "the shapes differ: (2, 4, 8, 8) against (2, 6, 6, 6)"


def test_nan_on_one_side_is_off(forms: Forms, tmp_path: Path) -> None:
    values = forms.computed(forms.float_file)
    values["relu"][0, 0, 0, 0] = np.nan
    report = compared(forms, forms.float_file, dumped(tmp_path, values, npy))
    assert report.summary["first_off"] == "relu"
    assert report.summary["why"] == "one side is NaN or infinite where the other is not"


def test_names_of_the_exporter_of_torchscript_hold_module_paths() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 2)).eval()
    weights = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    names = ["/0/0.0/Gemm_output_0", "/0/0.1/Relu_output_0", "y"]
    nodes = [
        helper.make_node("Gemm", ["x", "0.0.weight", "0.0.bias"], names[:1], transB=1),
        helper.make_node("Relu", names[:1], names[1:2]),
        helper.make_node("Gemm", [names[1], "1.weight", "1.bias"], names[2:], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    report = qsdk.compare(module, model, [torch.randn(3, 4)], progress=False)
    assert {row["site"]: row["other"] for row in report.rows} == dict(zip(["0.0", "0.1", "1"], names, strict=True))
    assert report.summary["unmatched_a"] == report.summary["unmatched_b"] == []


def test_nothing_in_common_is_an_error_with_the_nearest_names(forms: Forms, tmp_path: Path) -> None:
    np.save(tmp_path / "rely.npy", np.zeros((4, 4, 8, 8), np.float32))
    with pytest.raises(ConfigError, match=r"no tensor of side a \(\d+\) .* nearest are 'relu' and 'rely'.*names=\{"):
        compared(forms, forms.module, tmp_path)


@pytest.mark.parametrize(
    ("a", "b", "options", "error", "message"),
    [
        ("module", 3, {}, ConfigError, "side b is a int; give a module, a sim, an ONNX model"),
        ("module", "nowhere.onnx", {}, FileFormatError, "there is no file nowhere.onnx"),
        ("module", "empty", {}, FileFormatError, r"holds no .npy, .raw or .bin file"),
        ("module", "module", {"tolerance": -1.0}, ConfigError, r"tolerance=-1.0 is no share"),
        ("module", "uncalibrated", {}, qsdk.CalibrationError, "calibrate"),
    ],
)
def test_errors_of_sides(
    forms: Forms, tmp_path: Path, a: str, b: Any, options: Any, error: type[Exception], message: str
) -> None:
    made = {"module": forms.module, "empty": tmp_path}
    if b == "uncalibrated":
        made[b] = qsdk.quantize(forms.module, forms.batches[0])
    with pytest.raises(error, match=message):
        compared(forms, made[a], made.get(b, b), **options)


def test_errors_of_data(forms: Forms, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data= is missing: only two folders"):
        qsdk.compare(forms.module, forms.sim)
    with pytest.raises(DataError, match=r"got one batch; wrap it in a list"):
        qsdk.compare(forms.module, forms.sim, forms.batches[0], progress=False)
    with pytest.raises(DataError, match=r"got one batch; wrap it in a list"):
        qsdk.compare(forms.file, forms.float_file, forms.batches[0].numpy(), progress=False)
    np.save(tmp_path / "head.npy", np.zeros((2, 5), np.float32))
    with pytest.raises(DataError, match=r"head.npy: 0 values are left of 'head', the other side has 10"):
        compared(forms, forms.module, tmp_path)
    (tmp_path / "head.npy").write_bytes(b"no array")
    with pytest.raises(FileFormatError, match=r"head.npy cannot be read as an array"):
        compared(forms, forms.module, tmp_path)
    (tmp_path / "head.npy").unlink()
    (tmp_path / "head.raw").write_bytes(b"123")
    with pytest.raises(DataError, match=r"head.raw has 3 bytes, the other side 5 values per sample"):
        compared(forms, forms.module, tmp_path)


def written(shape: str, dtype: str = "'<f4'", body: bytes = b"", header: str = "") -> bytes:
    """Return the bytes of an array file, whatever they say."""
    said = (header or f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}").encode()
    said += b" " * ((64 - (11 + len(said)) % 64) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(said)) + said + body


def zipped() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.ones(4))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped(), "cannot be read as an array"),
        (b"PK\x03\x04" + b"a" * 50, "cannot be read as an array"),
        (written("(1099511627776, 4)"), "cannot be read as an array"),
        (written("(4000000000, 4)", body=b"a" * 64), "cannot be read as an array"),
        (written("", header="(" * 9000), "cannot be read as an array"),
        (written("(4, 5)", "'<U4'", bytes(320)), "holds <U4, which are no numbers"),
        (written("(4, 5)", "'|V4'", bytes(80)), r"holds \|V4, which are no numbers"),
        (written("(4, 5)", "[('a','<f4')]", bytes(80)), "which are no numbers"),
        (written("(4, 5)", "'<c8'", bytes(160)), "holds complex64, which are no numbers"),
        (written("(4, 5)", "'<M8[s]'", bytes(160)), "which are no numbers"),
        (written("(4, 5)", "'|b1'", bytes(20)), "holds truth values, which no grid has codes for"),
        (written("(0,)"), "0 values are left of 'head'"),
    ],
)
def test_a_dump_that_is_no_array_of_numbers_is_refused_by_name(
    forms: Forms, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "head.npy").write_bytes(content)
    with pytest.raises(qsdk.QsdkError, match=rf"head\.npy.*{message}"):
        compared(forms, forms.sim, tmp_path)


def test_two_folders_without_values_or_of_different_shapes_are_refused(tmp_path: Path) -> None:
    for name, sizes in (("empty", [(0,)]), ("other", [(2, 5), (2, 4)])):
        for index, size in enumerate(sizes):
            path = tmp_path / name / f"sample_{index}"
            path.mkdir(parents=True)
            np.save(path / "head.npy", np.zeros(size, np.float32))
    for name, message in (("empty", "holds no values of 'head'"), ("other", r"hold \(2, 5\), \(2, 4\), which do not")):
        with pytest.raises(DataError, match=message):
            qsdk.compare(tmp_path / name, tmp_path / name, progress=False)
