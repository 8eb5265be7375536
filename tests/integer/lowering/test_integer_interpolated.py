"""Functions of 16-bit codes by straight lines: at most one code off, by as much as the row says, in every form."""

import json

import firmware_runner
import numpy as np
import onnx
import pytest
import torch
from c_program import COMPILER, compiled
from c_program import run as run_c
from firmware_models import silu_of_sixteen_bits
from integer_models import INT16, LEVELS, UINT8, UINT16, Net, run, small_cnn
from onnx import TensorProto, shape_inference

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.firmware.files import archive
from onnx_backend.integer.firmware.header import header
from onnx_backend.integer.firmware.program import firmware_program
from onnx_backend.integer.ir.piecewise_linear import FRACTION, evaluate, segments
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.integer_only import integer_findings
from qsdk.cli import main
from qsdk.core.errors import ConfigError

FORM = "interpolated table"
EVERY = np.arange(65536)
#: Encodings of inputs: fine and coarse, signed and not; those of zero point 0 are for what takes no negative number.
INPUTS = {
    "uint16": (1.3e-4, 31007, UINT16),
    "int16": (3.1e-4, -411, INT16),
    "coarse": (1e-3, 40000, UINT16),
    "positive": (1.1e-4, 0, UINT16),
}
#: A function, its output's scale and zero point, and whether it takes positive inputs alone.
FUNCTIONS = {
    "Sigmoid": (lambda net, x: net.op("Sigmoid", x), 1 / 65535, 0, False),
    "Tanh": (lambda net, x: net.op("Tanh", x), 3.1e-5, 32768, False),
    "Gelu": (lambda net, x: net.op("Gelu", x), 1.4e-4, 1300, False),
    "Exp": (lambda net, x: net.op("Exp", net.op("Clip", x, net.const(np.float32(-9)), "")), 1.1e-3, 0, False),
    "Elu": (lambda net, x: net.op("Elu", x), 1.1e-4, 10000, False),
    "HardSwish": (lambda net, x: net.op("HardSwish", x), 8e-5, 5000, False),
    "LeakyRelu": (lambda net, x: net.op("LeakyRelu", x), 7e-5, 1000, False),
    "Abs": (lambda net, x: net.op("Abs", x), 7e-5, 0, False),
    "Cube": (lambda net, x: net.op("Pow", x, net.const(np.float32(3))), 2e-3, 30000, False),
    "Sqrt": (lambda net, x: net.op("Sqrt", x), 4.1e-5, 0, True),
    "Root": (lambda net, x: net.op("Pow", x, net.const(np.float32(0.25))), 2.6e-5, 0, True),
    "Linear": (lambda net, x: net.op("Identity", x), 1.7e-4, 20000, False),
}


def functions(encoding, out=UINT16):
    """Every function of one tensor that holds all 65,536 codes, and that tensor."""
    scale, zero, dtype = encoding
    net = Net()
    x = net.qdq(net.input([256, 256]), scale, zero, dtype)
    for name, (write, out_scale, out_zero, positive) in FUNCTIONS.items():
        if not positive or zero == 0:
            y = write(net, x)
            parameters = (out_scale, out_zero) if out == UINT16 else (out_scale * 256, out_zero // 256)
            net.output(net.qdq(y, *parameters, out), [256, 256], name)
    codes = EVERY - (32768 if dtype == INT16 else 0)
    return net.model(), {"x": ((codes - zero) * np.float32(scale)).astype(np.float32).reshape(256, 256)}


def in_codes(result, outputs):
    edges = result.certificate["outputs"]
    return {name: np.rint(value / np.float32(edges[name]["scale"])).astype(int) for name, value in outputs.items()}


def rows_by_output(result):
    """The certificate's rows of tables, by the name of the output that they make."""
    made = {row["tensor"]: name for name, row in result.certificate["outputs"].items()}
    return {made[row["tensor"]]: row for row in result.certificate["requantizations"]}


@pytest.mark.spread(1)
@pytest.mark.parametrize("out", [UINT16, UINT8])
@pytest.mark.parametrize("encoding", INPUTS)
def test_every_code_is_off_by_exactly_what_the_row_says(encoding, out):
    model, feeds = functions(INPUTS[encoding], out)
    exact, result = convert(model), convert(model, tables="interpolated")
    assert integer_findings(result.model) == []
    reference = run_reference(result.model, feeds)
    for level in LEVELS:
        for name, found in run(result.model, feeds, level).items():
            np.testing.assert_array_equal(found, reference[name], err_msg=f"{name} at {level}")
    wanted, found = in_codes(exact, run_reference(exact.model, feeds)), in_codes(result, reference)
    rows = rows_by_output(result)
    assert set(rows) == set(found)
    for name, row in rows.items():
        off = np.abs(found[name] - wanted[name])
        assert row["form"] == FORM, name
        assert off.max() == row["largest_deviation"] == row["error_bound"] <= 1, name
        assert np.count_nonzero(off) == row["codes_differing"] < 0.35 * 65536, name
        assert row["table_bytes"] == 3 * 256 + 8 * row["segments"] < 7000, name
        assert np.unique(wanted[name]).size > 100, name
    if out == UINT16:
        assert any(row["largest_deviation"] for row in rows.values())


@pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc) on the PATH")
@pytest.mark.parametrize("encoding", [pytest.param("int16", marks=pytest.mark.slow), "positive"])
def test_archive_and_c_give_the_references_bytes(encoding, tmp_path):
    model, feeds = functions(INPUTS[encoding])
    result = convert(model, tables="interpolated")
    made = firmware_program(result)
    assert {op["op"] for op in made.ops if op["op"] != "Cast"} == {"InterpolatedTable"}
    reference = run_reference(result.model, feeds, every_tensor=True)
    codes = firmware_runner.codes(made.inputs[0], feeds["x"])
    found = firmware_runner.run(archive(made), {made.inputs[0]["tensor"]: codes})
    for entry in made.outputs:
        np.testing.assert_array_equal(found[entry["tensor"]], reference[entry["tensor"]], err_msg=entry["model_name"])
    binary = compiled(header(made), tmp_path, "-fsanitize=undefined,address", "-fno-sanitize-recover")
    expected = b"".join(reference[entry["tensor"]].tobytes() for entry in made.outputs)
    assert run_c(binary, codes.tobytes()) == expected


@pytest.mark.spread(2)
@pytest.mark.parametrize("options", [{"target": "onnxruntime"}, {"requantize": "qlinear"}, {"product_bits": 32}])
def test_every_target_gives_the_same_codes(options):
    model, feeds = functions(INPUTS["uint16"])
    wanted = run(convert(model, tables="interpolated").model, feeds)
    result = convert(model, tables="interpolated", **options)
    for name, found in run(result.model, feeds).items():
        np.testing.assert_array_equal(found, wanted[name], err_msg=name)


def test_nothing_is_computed_in_more_than_32_bits():
    model, _ = functions(INPUTS["uint16"])
    graph = shape_inference.infer_shapes(convert(model, tables="interpolated", product_bits=32).model).graph
    kinds = {info.name: info.type.tensor_type.elem_type for info in graph.value_info}
    computed = [node for node in graph.node if node.op_type in ("Add", "Sub", "Mul", "BitShift", "Clip")]
    assert len(computed) > 50
    assert {kinds[node.output[0]] for node in computed} == {TensorProto.INT32, TensorProto.UINT32}


def test_integer_edges_take_codes():
    net = Net()
    x = net.qdq(net.input(["n", 3]), *INPUTS["int16"])
    net.output(net.qdq(net.op("Tanh", x), 3.1e-5, 0, INT16), ["n", 3])
    result, exact = (convert(net.model(), edges="integer", tables=tables) for tables in ("interpolated", "exact"))
    for count in (5, 1, 0):
        codes = np.random.default_rng(0).integers(-32768, 32768, (count, 3)).astype(np.int16)
        found, wanted = (run(made.model, {"x": codes})["y"] for made in (result, exact))
        assert found.shape == wanted.shape == (count, 3)
        assert np.abs(found.astype(int) - wanted).max(initial=0) <= 1
        np.testing.assert_array_equal(run_reference(result.model, {"x": codes})["y"], found)


# --- where tables stay as they are -----------------------------------------------------------------------------------


def rough(net, x):
    """x * sigmoid(x) with a sigmoid of 8 bits: a jump at each of its steps."""
    return net.op("Mul", x, net.qdq(net.op("Sigmoid", x), 1 / 256, 0, UINT8))


@pytest.mark.parametrize("write", [rough, lambda net, x: net.op("Sin", net.op("Mul", x, net.const(np.float32(9e3))))])
def test_a_table_that_jumps_everywhere_stays_exact_and_says_so(write):
    net = Net()
    x = net.qdq(net.input([65536]), *INPUTS["uint16"])
    net.output(net.qdq(write(net, x), 8e-5, 10000, UINT16), [65536])
    feeds = {"x": ((EVERY - 31007) * np.float32(1.3e-4)).astype(np.float32)}
    exact, result = convert(net.model()), convert(net.model(), tables="interpolated")
    (row,) = rows_by_output(result).values()
    assert (row["form"], row["error_bound"]) == ("table", 0.0)
    count, taken, table = (int(word) for word in row["kept_exact"].split() if word.isdigit())
    assert taken == 768 + 8 * count >= table == 131072
    np.testing.assert_array_equal(run(result.model, feeds)["y"], run(exact.model, feeds)["y"])


def test_codes_of_8_bits_and_clips_are_not_interpolated():
    model = small_cnn()
    wanted, found = (convert(model, tables=tables) for tables in ("exact", "interpolated"))
    assert found.model.SerializeToString() == wanted.model.SerializeToString()
    net = Net()
    x = net.qdq(net.input([64]), *INPUTS["uint16"])
    net.output(net.qdq(net.op("Relu", x), *INPUTS["uint16"]), [64])
    (row,) = convert(net.model(), tables="interpolated").certificate["requantizations"]
    assert (row["form"], row["error_bound"]) == ("clip", 0.0)
    assert "segments" not in row


# --- the lines themselves --------------------------------------------------------------------------------------------


TABLES = {
    "constant": lambda rng: np.full(65536, 7),
    "largest": lambda rng: np.full(65536, 65535),
    "rising": lambda rng: EVERY,
    "falling": lambda rng: EVERY[::-1].copy(),
    "one jump": lambda rng: np.where(EVERY < 20001, 0, 65535),
    "two jumps a cell": lambda rng: np.where(EVERY % 256 < 100, 65535, 0),
    "noise of one": lambda rng: (EVERY + rng.integers(-1, 2, 65536)).clip(0, 65535),
    "random": lambda rng: rng.integers(0, 65536, 65536),
    "steep clip": lambda rng: ((EVERY - 30000) * 97).clip(0, 65535),
    "8 bits": lambda rng: EVERY // 256,
}


@pytest.mark.parametrize("name", TABLES)
def test_lines_of_any_table_are_within_one_code_and_within_int32(name):
    table = TABLES[name](np.random.default_rng(3))
    lines = segments(table, 255 if name == "8 bits" else 65535)
    off = np.abs(evaluate(lines, EVERY) - table)
    assert off.max() == lines.deviation <= 1
    assert np.count_nonzero(off) == lines.differing
    counts = 256 >> lines.bits
    np.testing.assert_array_equal(lines.first, np.cumsum(counts) - counts)
    assert lines.base.size == counts.sum()
    within = np.repeat((1 << lines.bits) - 1, counts)
    for reached in (lines.base, lines.slope * within, lines.base + lines.slope * within):
        assert np.abs(reached).max() < 1 << 31


def test_lines_are_as_few_as_they_can_be():
    assert segments(EVERY, 65535).base.size == 256
    assert segments(np.full(65536, 9), 65535).base.size == 256
    jump = segments(np.where(EVERY < 20001, 0, 65535), 65535)
    assert sorted(set(jump.bits)) == [1, 8]  # 20001 is odd: a line through two codes
    assert jump.base.size == 255 + 128
    assert jump.differing == 0
    even = segments(np.where(EVERY < 20016, 0, 65535), 65535)
    assert sorted(set(even.bits)) == [4, 8]  # 20016 is a multiple of 16
    assert segments(EVERY, 65535).slope.tolist() == [1 << FRACTION] * 256


# --- the verb --------------------------------------------------------------------------------------------------------


def test_an_archive_of_silu_at_16_bits_is_a_fraction(tmp_path):
    model, feeds = silu_of_sixteen_bits()
    sizes = {}
    for tables in ("exact", "interpolated"):
        out = tmp_path / f"{tables}.npz"
        onnx.save(model, tmp_path / "model.onnx")
        report = qsdk.to_integer(
            tmp_path / "model.onnx", tmp_path / "int.onnx", tables=tables, firmware=out, data=[feeds]
        )
        assert report.summary["operations_max_lsb"] <= 1
        assert report.summary["reference_equal"]
        with np.load(out) as members:
            sizes[tables] = sum(members[name].nbytes for name in members.files if name != "program.json")
    assert 390_000 < sizes["exact"] < 400_000
    assert sizes["interpolated"] < 9_500
    certificate = json.loads((tmp_path / "int.onnx.certificate.json").read_text())
    assert certificate["tables"] == "interpolated"
    assert FORM in {row["form"] for row in report.rows}


@pytest.mark.slow
def test_a_model_of_qsdk_at_16_bits(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.SiLU(), torch.nn.Conv2d(8, 8, 3), torch.nn.GELU(), torch.nn.Flatten()
    ).eval()
    batch = torch.randn(4, 3, 12, 12)
    sim = qsdk.quantize(model, batch, qsdk.w8a16())
    qsdk.calibrate(sim, [batch], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    report = qsdk.to_integer(
        tmp_path / "model.onnx", tmp_path / "int.onnx", tables="interpolated", data=[batch.numpy()]
    )
    assert report.summary["operations_max_lsb"] <= 1
    assert FORM in {row["form"] for row in report.rows}


def test_the_command_takes_the_option(tmp_path):
    model, _ = functions(INPUTS["uint16"])
    onnx.save(model, tmp_path / "model.onnx")
    assert (
        main(["to-integer", *(str(tmp_path / n) for n in ("model.onnx", "int.onnx")), "--tables", "interpolated"]) == 0
    )
    saved = onnx.load(tmp_path / "int.onnx")
    assert len(saved.SerializeToString()) < 200_000  # a single table of 65,536 entries has 131,072 bytes
    with pytest.raises(ConfigError, match=r"tables='fine' is unknown; choose \"exact\" or \"interpolated\""):
        convert(model, tables="fine")
