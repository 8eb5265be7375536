"""Firmware programs: the archive is complete, what it says is the integer model, and refusals say why."""

import io
import json

import firmware_runner
import numpy as np
import onnx
import pytest
from firmware_models import MODELS, cnn, softmax, ties
from integer_models import Net

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.firmware.files import archive, header
from onnx_backend.integer.firmware.program import firmware_program
from onnx_backend.integer.reference.run import run_reference
from qsdk import ConfigError, ExportError, IntegerError
from qsdk.cli import main
from qsdk.verbs.qdq_files import opened_qdq


def compare(model, feeds, **options):
    """The archive in the NumPy interpreter == the reference of the integer model, bit for bit, at both edges."""
    result = convert(model, **options)
    data = archive(firmware_program(result))
    described, _ = firmware_runner.load(data)
    if options.get("edges") == "integer":
        entries = {entry["model_name"]: entry for entry in described["inputs"]}
        feeds = {name: firmware_runner.codes(entries[name], x) for name, x in feeds.items()}
        found = firmware_runner.run(data, feeds)
    else:
        codes = [firmware_runner.feed(described, name, x) for name, x in feeds.items()]
        found = firmware_runner.run(data, {tensor: value for part in codes for tensor, value in part.items()})
    reference = run_reference(result.model, feeds, every_tensor=True)
    for entry in described["outputs"]:
        codes = found[entry["tensor"]]
        np.testing.assert_array_equal(codes, reference[entry["tensor"]], err_msg=entry["tensor"])
        assert np.unique(codes).size > 3
        assert entry["dtype"] == codes.dtype.name
        if options.get("edges") != "integer":
            np.testing.assert_array_equal(firmware_runner.values(entry, codes), reference[entry["model_name"]])
    return described


@pytest.mark.parametrize("name", MODELS)
def test_the_archive_alone_gives_the_integer_models_outputs(name):
    described = compare(*MODELS[name]())
    assert bool(described["ops"]) == (name != "nothing")


@pytest.mark.slow
def test_every_kind_of_operation_is_exercised():
    seen = {op["op"] for make in MODELS.values() for op in firmware_program(convert(make()[0])).ops}
    assert set(firmware_runner.OPS) <= {*seen}


@pytest.mark.parametrize("rounding", ["half_even", "half_up", "half_away", "gemmlowp"])
def test_roundings_where_ties_occur(rounding):
    described = compare(*ties(), rounding=rounding)
    (op,) = [op for op in described["ops"] if op["op"] == "Requantize"]
    assert op["attributes"]["rounding"] == rounding
    assert op["attributes"]["ties_possible"]


def test_integer_edges_take_what_the_model_takes():
    described = compare(*MODELS["cnn of int8"](), edges="integer")
    (entry,) = described["inputs"]
    assert entry == {
        "tensor": "x",
        "model_name": "x",
        "dtype": "int8",
        "shape": [None, 3, 12, 12],
        "scale": pytest.approx(0.0313),
        "zero_point": -9,
        "axis": None,
    }


def test_a_program_says_what_it_is():
    described, arrays = firmware_runner.load(archive(firmware_program(convert(cnn()[0]))))
    first, second = described["ops"][:2]
    assert (first["op"], second["op"]) == ("AccumulateConv", "Requantize")
    assert first["node"] == "node_conv_14" or first["node"].startswith("node_conv")
    assert first["dtypes"] == ["int32"]
    assert first["shapes"] == [[None, 8, 12, 12]]
    assert first["attributes"]["pads"] == [1, 1, 1, 1]
    assert arrays[first["parameters"]["weight"]].dtype == np.int8
    parameters = {role: arrays[name] for role, name in second["parameters"].items()}
    assert {role: (a.dtype.name, a.shape) for role, a in parameters.items()} == {
        "mantissa_0": ("int32", (8, 1, 1)),
        "shift": ("uint8", (8, 1, 1)),
        "bias": ("int32", (8, 1, 1)),
    }
    assert (parameters["mantissa_0"] >= 1 << 30).all()
    tables = [arrays[op["parameters"]["table"]] for op in described["ops"] if op["op"] == "Table"]
    assert [(table.dtype.name, table.shape) for table in tables] == [("uint8", (256,))]


def test_equal_programs_give_equal_files():
    def both():
        made = firmware_program(convert(cnn()[0]))
        return archive(made), header(made)

    assert both() == both()


# --- the verb --------------------------------------------------------------------------------------------------------


@pytest.fixture
def qdq(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(cnn()[0], path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".npz", ".h"])
def test_to_integer_writes_it_beside_the_model_or_elsewhere(qdq, tmp_path, suffix):
    (tmp_path / "other").mkdir()
    beside, elsewhere = tmp_path / f"network{suffix}", tmp_path / "other" / f"network{suffix}"
    for path in (beside, elsewhere):
        qsdk.to_integer(qdq, tmp_path / "model.int.onnx", firmware=path)
    made = firmware_program(convert(opened_qdq(qdq)))
    wanted = archive(made) if suffix == ".npz" else header(made).encode()
    assert beside.read_bytes() == elsewhere.read_bytes() == wanted
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [f"network{suffix}"]


def test_the_command_line_writes_it(qdq, tmp_path, capsys):
    arguments = ["to-integer", str(qdq), str(tmp_path / "out.onnx"), "--firmware", str(tmp_path / "network.npz")]
    assert main(arguments) == 0
    assert firmware_runner.load((tmp_path / "network.npz").read_bytes())[0]["ops"]
    assert main([*arguments[:-1], str(tmp_path / "network.bin")]) == 2
    assert "ends in no known format; end it in .npz or .h" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"firmware": "network.c"}, "firmware='network.c' ends in no known format; end it in .npz or .h"),
        ({"firmware": "out.npz"}, "firmware='out.npz' is the model's own path; give it another name"),
        ({"firmware": "network.npz", "target": "onnxruntime"}, 'needs target="standard"'),
        ({"firmware": "network.h", "allow_float": ["Concat"]}, "stays float by allow_float="),
    ],
)
def test_refused_options_leave_nothing(qdq, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        qsdk.to_integer(qdq, "out.npz", **options)
    assert words in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_folder_that_cannot_be_written_leaves_nothing(qdq, tmp_path):
    with pytest.raises(ExportError, match="missing"):
        qsdk.to_integer(qdq, tmp_path / "out.onnx", firmware=tmp_path / "missing" / "network.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


# --- what a header cannot say ----------------------------------------------------------------------------------------


def refused(model, *words):
    made = firmware_program(convert(model))
    with pytest.raises(IntegerError) as caught:
        header(made)
    for word in (*words, ".npz, which has them all"):
        assert word in str(caught.value), str(caught.value)
    archive(made)


def test_a_header_names_the_operation_that_it_cannot_express():
    model, _ = softmax()
    node = next(node for node in model.graph.node if node.op_type == "Softmax")
    leave = "leave it out of the model and take the largest of its inputs"
    refused(model, f"the header cannot express Softmax {node.name!r}", "has no form in C", leave)


def test_a_header_needs_static_sizes():
    net = Net()
    x = net.qdq(net.input(["n", 3, "height", 8]), 0.03, 100)
    net.output(net.qdq(net.op("MaxPool", x, kernel_shape=[2, 2]), 0.03, 100), ["n", 3, None, None])
    refused(net.model(), "input 'x' has the dynamic shape [None, 3, None, 8]; fix its sizes")


def test_a_header_has_no_lookup_of_rows():
    refused(MODELS["embedding"]()[0], "the header cannot express Gather", "is computed from data")


def test_the_archive_holds_plain_values_only():
    with np.load(io.BytesIO(archive(firmware_program(convert(cnn()[0])))), allow_pickle=False) as members:
        assert json.loads(str(members["program.json"]))["version"] == 1
        assert all(members[name].dtype.kind in "iuU" for name in members.files)
