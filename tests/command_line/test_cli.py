"""The command line: every command with good and bad input, what it prints, and what it returns."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdq_models import convnet, make_model, mlp

import qsdk
from qsdk.cli import main
from qsdk.commands.printing import in_shell_words

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "demo",
    "quantize",
    "inspect",
    "validate",
    "parity",
    "to-integer",
    "encodings show",
    "encodings convert",
    "profile",
)
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(70, 3, 8, 8)).astype(np.float32)
node = helper.make_node


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float.onnx (a residual net), mlp.onnx, data, model.onnx quantized from it by the command, and bad files."""
    home = tmp_path_factory.mktemp("cli")
    onnx.save(convnet(), home / "float.onnx")
    onnx.save(mlp(), home / "mlp.onnx")
    onnx.save(conflicting(), home / "conflict.onnx")
    onnx.save(landmine(), home / "landmine.onnx")
    (home / "text.onnx").write_text("hello there")
    np.savez(home / "images.npz", x=IMAGES)
    np.savez(home / "labelled.npz", x=IMAGES[:4], labels=np.zeros(4))
    np.savez(home / "foreign.npz", a=IMAGES, b=IMAGES)
    np.save(home / "images.npy", IMAGES)
    np.save(home / "flat.npy", IMAGES.reshape(70, -1))
    np.save(home / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.save(home / "vectors.npy", RNG.normal(size=(20, 6)).astype(np.float32))
    (home / "half.npz").write_bytes((home / "images.npz").read_bytes()[:1000])
    (home / "empty").mkdir()
    (home / "some").mkdir()
    np.save(home / "some" / "b.npy", IMAGES[40:])
    np.save(home / "some" / "a.npy", IMAGES[:40])
    assert (
        main(["quantize", str(home / "float.onnx"), str(home / "model.onnx"), "--data", str(home / "images.npz")]) == 0
    )
    return home


@pytest.fixture
def at(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder for what is written; relative paths are those of `folder`."""
    monkeypatch.chdir(folder)
    return tmp_path


def conflicting() -> onnx.ModelProto:
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "the_q", output_dtype=TensorProto.INT8),
        node("DequantizeLinear", ["q", "s"], ["y"], "the_dq"),
    ]
    return make_model(nodes, {"x": [2]}, {"y": [2]}, {"s": np.float32(1), "z": np.zeros((), np.uint8)})


def landmine() -> onnx.ModelProto:
    """Relu in front of 4 bits with a zero point, which the runtime's default level drops."""
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("QuantizeLinear", ["r", "s", "z"], ["q"], "the_q"),
        node("DequantizeLinear", ["q", "s", "z"], ["y"], "the_dq"),
    ]
    model = make_model(nodes, {"x": ["n", 8]}, {"y": ["n", 8]}, {"s": np.float32(0.2)})
    model.graph.initializer.append(helper.make_tensor("z", TensorProto.INT4, [], [0]))
    return model


def said(capsys: pytest.CaptureFixture[str], *command: str | Path) -> tuple[int, str, str]:
    """The exit code of a command, and what it printed."""
    capsys.readouterr()
    code = main([str(part) for part in command])
    found = capsys.readouterr()
    return code, found.out, found.err


def document(capsys: pytest.CaptureFixture[str], *command: str | Path, code: int = 0) -> dict:
    """What a command printed with `--json`: one document, strictly."""
    returned, out, _ = said(capsys, *command, "--json")
    assert returned == code
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(found) == ["title", "rows", "summary"]
    return found


# --- quantize -----------------------------------------------------------------------------------------------------


def test_quantize_writes_a_file_for_litert(at: Path, tmp_path: Path, capsys):
    layer = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        relu (float[n, 4] x) => (float[n, 4] y) { a = Add(x, x) y = Relu(a) }""")
    onnx.save(layer, tmp_path / "float.onnx")
    np.save(tmp_path / "data.npy", np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4))
    command = ("quantize", tmp_path / "float.onnx", tmp_path / "m.tflite", "--data", tmp_path / "data.npy")
    found = document(capsys, *command, "--format", "tflite")
    assert found["summary"]["kinds"] == ["ADD"]
    assert found["summary"]["differing_from_prediction"] == 0
    assert (tmp_path / "m.tflite").read_bytes()[4:8] == b"TFL3"


@pytest.mark.slow
def test_quantize_gives_what_the_verbs_give(at: Path, capsys):
    command = (
        "quantize",
        "float.onnx",
        at / "m.onnx",
        "--data",
        "images.npy",
        "--batch-size",
        "16",
        "--config",
        "w8a16",
    )
    found = document(
        capsys, *command, "--override", "gemm", "weight=int4,per_channel=false,activation=uint8", "--skip", "deconv"
    )
    config = qsdk.w8a16().override("gemm", weight="int4", per_channel=False, activation="uint8").skip("deconv")
    sim = qsdk.quantize("float.onnx", None, config)
    qsdk.calibrate(sim, [IMAGES[i : i + 16] for i in range(0, 70, 16)], progress=False)
    opened = qsdk.quantize(str(at / "m.onnx"), None, None)
    assert opened.encodings == sim.encodings
    np.testing.assert_array_equal(opened.run(IMAGES)[0], sim.run(IMAGES)[0])
    rows = {row["site"]: row for row in found["rows"]}
    assert rows["gemm:weight"]["dtype"] == "int4"
    assert rows["deconv:weight"]["state"] == "float"
    assert found["summary"]["bytes"] == (at / "m.onnx").stat().st_size
    assert found["summary"]["calibration"] == "min_max on images.npy"


@pytest.mark.slow
def test_a_folder_is_read_in_order_and_a_config_from_a_file(at: Path, capsys):
    qsdk.w4a8().save(at / "config.json")
    for name, data in (("a.onnx", ["--data", "some"]), ("b.onnx", ["--data", "some/a.npy", "--data", "some/b.npy"])):
        options = ("--config", at / "config.json", "--method", "moving_average", "--batch-size", "10")
        assert said(capsys, "quantize", "float.onnx", at / name, *data, *options)[0] == 0
    first, second = (qsdk.quantize(str(at / name), None, None).encodings for name in ("a.onnx", "b.onnx"))
    assert first == second
    assert first["conv:weight"].dtype.name == "int4"
    sim = qsdk.quantize("float.onnx", None, qsdk.w4a8())
    qsdk.calibrate(sim, [IMAGES[i : i + 10] for i in range(0, 70, 10)], method="moving_average", progress=False)
    assert first == sim.encodings


@pytest.mark.slow
def test_random_data_says_that_it_is_not_for_deployment(at: Path, capsys):
    command = ("quantize", "float.onnx", at / "m.onnx", "--random", "2", "--shape", "x=4,3,8,8")
    code, out, err = said(capsys, *command)
    assert code == 0
    assert "random inputs" in err
    assert "accuracy means nothing" in err
    assert "min_max on random inputs" in out
    first = (at / "m.onnx").read_bytes()
    assert said(capsys, *command)[0] == 0
    assert (at / "m.onnx").read_bytes() == first
    assert said(capsys, *command, "--seed", "1")[0] == 0
    assert (at / "m.onnx").read_bytes() != first


def test_weights_of_4_bits_are_packed_where_size_is_preferred(at: Path, capsys):
    command = ("quantize", "float.onnx", at / "m.onnx", "--data", "images.npz", "--config", "w4a8")
    fast, small = (document(capsys, *command, "--prefer", word)["summary"] for word in ("speed", "size"))
    assert fast["bytes_if_packed"] < fast["bytes"]
    assert "bytes_if_packed" not in small
    assert small["bytes"] < fast["bytes"]


def test_what_is_not_used_of_a_file_is_said(at: Path, capsys):
    code, _, err = said(capsys, "quantize", "float.onnx", at / "m.onnx", "--data", "labelled.npz")
    assert code == 0
    assert "labelled.npz: not used: labels" in err


REFUSED = {
    "missing model": (["nothing.onnx", "--random", "1"], 2, "there is no file nothing.onnx"),
    "no model": (["text.onnx", "--random", "1"], 2, "truncated or no ONNX model"),
    "missing data": (["float.onnx", "--data", "nothing.npz"], 2, "there is no file or folder nothing.npz"),
    "empty folder": (["float.onnx", "--data", "empty"], 2, "holds no .npy or .npz file"),
    "damaged data": (["float.onnx", "--data", "half.npz"], 2, "half.npz cannot be read as an array"),
    "pickled data": (["float.onnx", "--data", "objects.npy"], 2, "objects.npy cannot be read as an array"),
    "other names": (["float.onnx", "--data", "foreign.npz"], 1, "foreign.npz holds a, b, the model also needs x"),
    "another rank": (["float.onnx", "--data", "flat.npy"], 1, "flat.npy does not fit the model's inputs"),
    "batch size": (["float.onnx", "--data", "images.npz", "--batch-size", "0"], 2, "a batch size of 0"),
    "no batches": (["float.onnx", "--random", "0"], 2, "--random needs 1 or more"),
    "shape of another": (["float.onnx", "--random", "1", "--shape", "z=1,2"], 2, "the inputs are x"),
    "config": (["float.onnx", "--random", "1", "--config", "best.json"], 2, "no file best.json"),
    "widths": (["float.onnx", "--random", "1", "--config", "w3a3"], 2, "no preset w3a3; write it as"),
    "override": (["float.onnx", "--random", "1", "--override", "gemm", "wight=int4"], 2, "'wight' is none of weight"),
    "value": (["float.onnx", "--random", "1", "--override", "gemm", "block_size=x"], 2, "block_size is a whole number"),
    "dtype": (["float.onnx", "--random", "1", "--override", "gemm", "weight=int99"], 2, "unknown dtype 'int99'"),
    "owner": (["float.onnx", "--random", "1", "--skip", "germ"], 2, "gemm"),
    "method": (["float.onnx", "--random", "1", "--method", "best"], 2, "best"),
    "opset": (["float.onnx", "--random", "1", "--opset", "26"], 2, "opset 26 cannot be written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_quantize_refuses_and_leaves_what_was_there(at: Path, capsys, name: str):
    (model, *options), code, message = REFUSED[name]
    (at / "m.onnx").write_text("mine")
    returned, out, err = said(capsys, "quantize", model, at / "m.onnx", *options)
    assert (returned, out) == (code, "")
    assert err.startswith("qsdk: ")
    assert message in err
    assert [path.name for path in at.iterdir()] == ["m.onnx"]
    assert (at / "m.onnx").read_text() == "mine"


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["quantise"],
        ["quantize", "float.onnx", "m.onnx", "--data", "images.npz", "--random", "2"],
        ["quantize", "float.onnx", "m.onnx", "--random", "1", "--shape", "x=0,3"],
        ["quantize", "float.onnx", "m.onnx", "--random", "1", "--shape", "1,3"],
        ["validate"],
        ["validate", "model.onnx", "--dialect", "abacus"],
        ["parity", "model.onnx", "--random", "1", "--level", "most"],
        ["parity", "model.onnx", "--random", "1", "--entry", "session"],
        ["encodings"],
        ["encodings", "convert", "model.onnx", "out.json"],
    ],
)
def test_wrong_usage_is_code_2(at: Path, capsys, command: list[str]):
    with pytest.raises(SystemExit) as left:
        main(command)
    assert left.value.code == 2
    assert "usage: qsdk" in capsys.readouterr().err


def test_activations_have_no_ranges_without_data(at: Path, capsys):
    assert main(["quantize", "float.onnx", "m.onnx"]) == 2
    assert "give --data with inputs of the model, or --random 1 to try out" in capsys.readouterr().err


def test_no_command_shows_the_list_and_a_wrong_one_the_nearest(capsys):
    for words, shown in ([], "to-integer"), (["quantise"], "did you mean quantize?"), (["xyz"], "choose from"):
        with pytest.raises(SystemExit):
            main(words)
        err = capsys.readouterr().err
        assert shown in err
        assert ("did you mean" in err) == (words == ["quantise"])
    with pytest.raises(SystemExit):
        main(["validate", "model.onnx", "--dialect", "onnx-runtime"])
    assert "did you mean onnxruntime?" in capsys.readouterr().err


# --- reading ------------------------------------------------------------------------------------------------------


def test_validate_finds_nothing_in_what_quantize_wrote(at: Path, capsys):
    assert document(capsys, "validate", "model.onnx")["summary"] == {"errors": 0, "warnings": 0}
    assert said(capsys, "validate", "model.onnx", "--strict")[0] == 0


def test_kernels_on_codes_are_something_quantized_in_a_file_that_stores_no_codes(tmp_path: Path, capsys):
    inputs, head = "uint8[2,3] a, uint8[3,4] b, float s, uint8 z", '<ir_version: 10, opset_import: ["" : 21]>'
    made = "y = QLinearMatMul (a, s, z, b, s, z, s, z)"
    onnx.save(onnx.parser.parse_model(f"{head} net ({inputs}) => (uint8[2,4] y) {{ {made} }}"), tmp_path / "codes.onnx")
    main(["validate", str(tmp_path / "codes.onnx")])
    assert "nothing in the file is quantized" not in capsys.readouterr().err


def test_validate_returns_1_on_errors_and_2_on_what_cannot_be_read(at: Path, capsys):
    found = document(capsys, "validate", "conflict.onnx", code=1)
    assert [(row["node"], row["rule"], row["severity"]) for row in found["rows"]] == [
        ("the_q", "output_dtype", "error")
    ]
    code, out, err = said(capsys, "validate", "conflict.onnx")
    assert (code, err) == (1, "")
    assert "drop one of the two, or make them agree" in out
    code, out, err = said(capsys, "validate", "text.onnx", "--json")
    assert (code, out) == (2, "")
    assert "text.onnx cannot be read as ONNX" in err


def test_validate_counts_warnings_only_when_strict(at: Path, capsys):
    onnx.save(with_unread(), at / "warned.onnx")
    assert said(capsys, "validate", at / "warned.onnx")[0] == 0
    assert document(capsys, "validate", at / "warned.onnx", "--strict", code=1)["summary"]["warnings"] == 1


def with_unread() -> onnx.ModelProto:
    model = conflicting()
    model.graph.node[0].attribute.pop()
    model.graph.node[1].input.append("z")
    model.graph.node.append(node("DequantizeLinear", ["q", "s", "z"], ["lost"], "unread"))
    return model


def test_inspect_and_encodings_show_the_same(at: Path, capsys):
    inspected = document(capsys, "inspect", "model.onnx")
    for source in ("model.onnx", "model.encodings.json"):
        shown = document(capsys, "encodings", "show", source)
        assert [row["site"] for row in shown["rows"]] == [row["site"] for row in inspected["rows"]]
        assert [row["largest_scale"] for row in shown["rows"]] == [row["largest scale"] for row in inspected["rows"]]
        rows = {row["site"]: row for row in shown["rows"]}
        assert rows["conv:weight"]["granularity"] == "per channel, axis 0"
        assert rows["x:input"]["dtype"] == "uint8"
    assert said(capsys, "encodings", "show", "images.npz")[0] == 2
    assert said(capsys, "inspect", "conflict.onnx")[0] == 2


def test_encodings_convert_there_and_back(at: Path, capsys):
    converted = at / "aimet.json"
    found = document(capsys, "encodings", "convert", "model.onnx", converted, "--to", "2.0.0", "--model", "float.onnx")
    assert found["summary"]["version"] == "2.0.0"
    assert json.loads(converted.read_text())["version"] == "2.0.0"
    sim = qsdk.quantize("float.onnx", None, qsdk.w8a8())
    qsdk.load_encodings(sim, str(converted))
    written = qsdk.quantize("model.onnx", None, None).encodings
    assert {site: e.scale.tolist() for site, e in sim.encodings.items()} == {
        s: e.scale.tolist() for s, e in written.items()
    }
    code, _, err = said(capsys, "encodings", "convert", "model.onnx", at / "b.json", "--to", "9.9")
    assert code == 2
    assert "9.9" in err
    assert not (at / "b.json").exists()


# --- parity -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parity_passes_for_what_quantize_wrote(at: Path, capsys):
    found = document(
        capsys, "parity", "model.onnx", "--data", "images.npz", "--float", "float.onnx", "--min-sqnr", "30"
    )
    assert found["summary"]["passed"] is True
    assert found["summary"]["activations_max_lsb"] <= 1
    assert 15 < found["summary"]["float_sqnr_db"] < float(found["summary"]["sqnr_db"])  # "inf" of equal outputs
    sites = {row["site"]: row["elements"] for row in found["rows"]}
    assert sites["x:input"] == IMAGES.size
    gates = ("--float", "float.onnx", "--min-float-sqnr", "500")
    assert said(capsys, "parity", "model.onnx", "--data", "images.npz", *gates)[0] == 1


def test_parity_finds_what_the_session_gets_wrong(at: Path, capsys):
    np.save(at / "x.npy", RNG.normal(size=(16, 8)).astype(np.float32))
    found = document(capsys, "parity", "landmine.onnx", "--data", at / "x.npy", code=1)
    assert found["summary"]["passed"] is False
    assert found["summary"]["activations_max_lsb"] > 1
    assert found["summary"]["sqnr_db"] < 10
    exact = document(capsys, "parity", "landmine.onnx", "--data", at / "x.npy", "--level", "none")
    assert exact["summary"]["activations_max_lsb"] == 0
    assert exact["summary"]["sqnr_db"] == "inf"


@pytest.mark.slow
def test_parity_says_what_cannot_be_loaded_at_a_level(at: Path, capsys):
    sim = qsdk.quantize("float.onnx", None, qsdk.w8a8().override("*", activation="int8"))
    qsdk.calibrate(sim, [IMAGES], progress=False)
    qsdk.export(sim, at / "int8.onnx", dialect="onnx")
    code, out, err = said(capsys, "parity", at / "int8.onnx", "--data", "images.npz")
    assert (code, out) == (1, "")
    assert "cannot load the model at level 'all'" in err
    assert said(capsys, "parity", at / "int8.onnx", "--data", "images.npz", "--level", "basic")[0] == 0


def test_parity_against_another_file(at: Path, capsys):
    assert said(capsys, "parity", "model.onnx", "--data", "images.npz", "--against", "model.onnx")[0] == 0
    changed = onnx.load("model.onnx")
    scale = next(t for t in changed.graph.initializer if t.name == "conv:weight/scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(1.5), scale.name))
    onnx.save(changed, at / "changed.onnx")
    found = document(capsys, "parity", at / "changed.onnx", "--data", "images.npz", "--against", "model.onnx", code=1)
    assert found["summary"]["passed"] is False
    assert [row["site"] for row in found["rows"] if "note" in row][:1] == ["conv:weight"]


def test_parity_refuses_an_invalid_file(at: Path, capsys):
    code, out, err = said(capsys, "parity", "conflict.onnx", "--random", "1")
    assert (code, out) == (2, "")
    assert "node 'the_q': output_dtype INT8 contradicts the zero point" in err


# --- to-integer, report ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_to_integer(at: Path, capsys):
    assert said(capsys, "quantize", "mlp.onnx", at / "mlp.q.onnx", "--data", "vectors.npy")[0] == 0
    found = document(capsys, "to-integer", at / "mlp.q.onnx", at / "mlp.int.onnx", "--edges", "integer")
    assert said(capsys, "to-integer", at / "mlp.q.onnx", at / "no_bar.onnx")[2] == ""  # a bar is for terminals alone
    assert found["summary"]["float_tensors"] == 0
    assert (at / "mlp.int.onnx.certificate.json").exists()
    assert said(capsys, "validate", at / "mlp.int.onnx", "--strict")[0] == 0
    code, _, err = said(capsys, "to-integer", "model.onnx", at / "no.onnx", "--allow-float", "Softmix")
    assert code == 2
    assert "--allow-float Softmix matches no node" in err
    found = document(capsys, "to-integer", at / "mlp.q.onnx", at / "mlp.kernels.onnx", "--target", "onnxruntime")
    assert {row["form"] for row in found["rows"]} == {"QGemm"}
    assert said(capsys, "to-integer", at / "mlp.q.onnx", at / "no.onnx", "--rounding", "up")[0] == 2
    assert not (at / "no.onnx").exists()


class Page(HTMLParser):
    """The tags that are open, what was read, and every address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.pictures = 0
        self.addresses: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "input", "!doctype"):
            self.open.append(tag)
        self.pictures += tag == "svg"
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.seen.append(data.strip())


@pytest.mark.slow
def test_the_page_of_a_report_stands_alone(at: Path, capsys):
    found = document(capsys, "report", "model.onnx")
    layers = document(capsys, "report", "model.onnx", "--out", at / "model.html")
    page = Page((at / "model.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert all(address.startswith("#") for address in page.addresses)
    assert {row["layer"] for row in layers["rows"]} <= set(page.seen)
    assert layers["summary"]["path"] == str(at / "model.html")
    encodings = qsdk.quantize("model.onnx", None, None).encodings
    assert {row["site"] for row in found["rows"] if row["largest_scale"] is not None} == set(encodings)
    drawn = {site for site, encoding in encodings.items() if encoding.dtype.name != "int32"}
    assert {row["site"] for row in found["rows"] if row["low"] is not None} == drawn
    weights = [site for site in drawn if site.endswith(":weight")]
    assert page.pictures == 1 + sum(1 + (encodings[site].scale.size > 1) for site in weights)
    assert set(encodings) <= set(page.seen)
    rows = {row["site"]: row for row in found["rows"]}
    assert rows["deconv:bias"]["reason"] == "float in the file"
    assert rows["deconv:bias"]["op_type"] == "ConvTranspose"
    assert rows["sigmoid:output"]["reason"] == "inside SiLU"
    assert rows["softmax:output"]["low"] == 0
    assert rows["softmax:output"]["high"] == pytest.approx(float(encodings["softmax:output"].high.max()))
    assert {"speed", "note"} <= set(page.seen)


def test_what_is_for_the_page_needs_one(at: Path, capsys):
    code, _, err = said(capsys, "report", "model.onnx", "--against", "model.onnx")
    assert code == 2
    assert "--against is for the page; give --out FILE.html too" in err


def test_sizes_have_one_name_and_number_wherever_they_are_said(at: Path, capsys):
    found = document(capsys, "report", "model.onnx")["summary"]
    model = onnx.load("model.onnx")
    stored = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    weights = [numpy_helper.to_array(tensor) for tensor in onnx.load("float.onnx").graph.initializer]
    assert found["bytes"] == Path("model.onnx").stat().st_size
    assert found["stored_bytes"] == stored
    assert found["as_float32_bytes"] == found["bytes"] - stored + sum(4 * values.size for values in weights)
    assert found["ratio"] == found["bytes"] / found["as_float32_bytes"]
    page = document(capsys, "report", "model.onnx", "--out", "page.html")["summary"]
    exported = qsdk.export(qsdk.quantize("model.onnx", None), "again.onnx").summary
    names = ("bytes", "as_float32_bytes", "ratio", "stored_bytes")
    assert [page[name] for name in names] == [found[name] for name in names]
    assert set(names) <= set(exported)
    again = document(capsys, "report", "again.onnx")["summary"]
    assert [exported[name] for name in names] == [again[name] for name in names]


def test_a_page_escapes_names(at: Path, capsys):
    model = mlp()
    for owner in model.graph.node:
        owner.name = f"<script>{owner.name}</script>"
    onnx.save(model, at / "named.onnx")
    assert said(capsys, "quantize", at / "named.onnx", at / "q.onnx", "--data", "vectors.npy")[0] == 0
    assert said(capsys, "report", at / "q.onnx", "--out", at / "page.html")[0] == 0
    page = (at / "page.html").read_text(encoding="utf-8")
    assert page.count("<script>") == 1  # its own
    assert "&lt;script&gt;mm1&lt;/script&gt;" in page
    code, out, _ = said(capsys, "report", at / "q.onnx")
    assert code == 0
    assert "<script>mm1</script>:weight" in out
    assert said(capsys, "report", at / "q.onnx", "--out", at / "missing" / "page.html")[0] == 2


def test_profile_shows_milliseconds_by_layer(at: Path, capsys):
    found = document(capsys, "profile", "model.onnx", "--data", "images.npz", "--batch-size", "2", "--repeats", "2")
    assert "QLinearAdd" in {row["op_type"] for row in found["rows"]}
    assert found["summary"]["integer_share"] > 0
    options = ["--shape", "x=1,3,8,8", "--threads", "1", "--repeats", "2", "--against", "float.onnx"]
    compared = document(capsys, "profile", "model.onnx", *options)
    assert compared["summary"]["speedup"] > 0
    code, _, errors = said(capsys, "profile", "model.onnx", "--threads", "0")
    assert code == 2
    assert "--threads 0 and --repeats 20 must be 1 or more" in errors


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_and_the_exit_codes(capsys, command: str):
    with pytest.raises(SystemExit) as left:
        main([*command.split(), "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert re.search(rf"example:\n +qsdk {command} ", text)
    assert "exit codes: 0 fine; 1 errors found" in text


@pytest.mark.slow
@pytest.mark.parametrize(("model", "code"), [("model.onnx", 0), ("conflict.onnx", 1), ("text.onnx", 2)])
def test_a_process_exits_with_the_code(folder: Path, model: str, code: int):
    command = [sys.executable, "-m", "qsdk.cli", "validate", model, "--json"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == code
    if code < 2:
        assert json.loads(found.stdout)["summary"]["errors"] == code
    else:
        assert found.stdout == ""


@pytest.mark.slow
def test_the_command_line_is_light_to_import():
    code = "import sys, qsdk.cli; print(sorted({'torch', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_file_in_which_nothing_is_quantized_fails(at: Path, capsys):
    for command in (("validate",), ("parity", "--data", "images.npz")):
        code, _, err = said(capsys, command[0], "float.onnx", *command[1:])
        assert code == 1
        assert "float.onnx: nothing in the file is quantized; give the file that" in err


def test_parity_gates_the_distance_from_the_float_model(at: Path, capsys):
    asked = ("parity", "model.onnx", "--data", "images.npz", "--float", "float.onnx", "--min-float-sqnr")
    assert said(capsys, *asked, "10")[0] == 0
    found = document(capsys, *asked, "200", code=1)
    assert found["summary"]["activations_max_lsb"] <= 1
    assert "dB, not 200" in found["summary"]["reason"]
    code, _, err = said(capsys, "parity", "model.onnx", "--data", "images.npz", "--min-float-sqnr", "10")
    assert code
    assert "name it with --float FILE" in err
    code, _, err = said(
        capsys, "parity", "model.onnx", "--data", "images.npz", "--against", "model.onnx", "--min-sqnr", "1"
    )
    assert code
    assert "leave out --min-sqnr" in err


# --- wrong use that reaches the verbs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("one.npz", {"z": IMAGES}, "one.npz holds z, the model also needs x; name them so"),
        (
            "wide.npz",
            {"x": IMAGES[:, :, :7]},
            "batch 0: the input 'x' takes float32 [n, 3, 8, 8], got float32 [32, 3, 7",
        ),
        ("last.npz", {"x": IMAGES.transpose(0, 2, 3, 1)}, "its channels come last: x.transpose(0, 3, 1, 2) brings"),
        ("whole.npz", {"x": IMAGES.astype(np.int64)}, "got int64 [32, 3, 8, 8]; convert it with .astype('float32')"),
    ],
)
def test_data_that_the_model_does_not_take(at: Path, capsys, name: str, data: dict, message: str):
    np.savez(at / name, **data)
    code, out, err = said(capsys, "quantize", "float.onnx", at / "m.onnx", "--data", at / name)
    assert (code, out) == (1, "")
    assert message in err
    assert not (at / "m.onnx").exists()


def test_an_array_without_a_name_is_that_of_the_only_input(at: Path, capsys):
    np.savez(at / "unnamed.npz", IMAGES)
    assert said(capsys, "quantize", "float.onnx", at / "m.onnx", "--data", at / "unnamed.npz")[0] == 0


def test_an_interrupt_is_one_line(at: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("qsdk.commands.quantize.calibrate", interrupted)
    code, out, err = said(capsys, "quantize", "float.onnx", at / "m.onnx", "--random", "1")
    assert (code, out) == (130, "")
    assert err.strip().splitlines()[-1] == "qsdk: interrupted; what was being written was not put in place"
    assert not (at / "m.onnx").exists()


def test_errors_name_the_options_of_the_shell(at: Path, capsys):
    code, _, err = said(capsys, "compare", "float.onnx", "model.onnx")
    assert code == 2
    assert "--data is missing" in err
    assert "data=" not in err
    code, _, err = said(capsys, "compare", "float.onnx", "model.onnx", "--random", 1, "--name", "nothing=mm1")
    assert code == 2
    assert "--name has 'nothing'" in err
    code, _, err = said(capsys, "to-integer", "float.onnx", "i.onnx")
    assert code == 1
    assert "in the shell, qsdk quantize MODEL OUT --data PATH" in err


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("data= is missing", "--data is missing"),
        ("give data=[batch], or leave it out", "give --data, or leave it out"),
        ("export with dialect='onnx', or edges=\"integer\"", "export with --dialect onnx, or --edges integer"),
        ("its sizes: shapes={'x': (1, 3, 8, 8)} (its own)", "its sizes: --shape x=1,3,8,8 (its own)"),
        ("dynamic axes: shapes={input name: sizes}", "dynamic axes: --shape NAME=VALUE"),
        ("give float_model= for max_drop=0.5", "give --float for --max-drop 0.5"),
        (
            "open it with config=None, forward=lambda m, b: m(b[0])",
            "open it with config=None, forward=lambda m, b: m(b[0])",
        ),
    ],
)
def test_arguments_of_python_become_options(message: str, shown: str):
    options = dict.fromkeys(("data", "dialect", "edges", "shape", "float", "max_drop", "config", "model"))
    assert in_shell_words(message, options) == shown
