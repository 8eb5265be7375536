"""The C of a network, compiled with every warning an error, against the NumPy reference, bit for bit."""

import re
import shlex
import subprocess

import firmware_runner
import numpy as np
import onnx
import pytest
import torch
from c_program import COMPILER, EXAMPLE, compiled, run
from firmware_models import IN_C, cnn, ties
from integer_models import Net

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.firmware.files import header
from onnx_backend.integer.firmware.program import firmware_program
from onnx_backend.integer.reference.run import run_reference
from qsdk.cli import main
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc) on the PATH")


def compare(model, feeds, folder, *flags, **options):
    """Run the program image by image (all of a fixed batch at once): every byte is the reference's."""
    result = convert(model, **options)
    made = firmware_program(result)
    fixed = made.inputs[0]["shape"][0] is not None
    codes = [firmware_runner.codes(entry, feeds[entry["model_name"]]) for entry in made.inputs]
    images = [codes] if fixed else [[part[i : i + 1] for part in codes] for i in range(len(codes[0]))]
    assert fixed or len(images) > 1
    taken = codes if options.get("edges") == "integer" else None
    given = feeds if taken is None else {e["model_name"]: c for e, c in zip(made.inputs, taken, strict=True)}
    reference = run_reference(result.model, given, every_tensor=True)
    wanted = [reference[entry["tensor"]] for entry in made.outputs]
    rows = [wanted] if fixed else [[part[i : i + 1] for part in wanted] for i in range(len(images))]
    binary = compiled(header(made), folder, *flags)
    found = run(binary, b"".join(part.tobytes() for image in images for part in image))
    expected = b"".join(part.tobytes() for row in rows for part in row)
    assert len(found) == len(expected)
    assert found == expected
    return made


# with sanitizers a compilation takes seconds: one network by default, every form in the slow tests
QUICK = "cnn of int8"
FORMS = [name if name == QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in IN_C]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_every_byte_is_the_references(name, tmp_path):
    # the sanitizers end the program at an overflow, a wrong shift or an access outside an array
    compare(*IN_C[name](), tmp_path, "-fsanitize=undefined,address", "-fno-sanitize-recover")


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["half_even", "half_up", "half_away", "gemmlowp"])
def test_roundings_where_ties_occur(rounding, tmp_path):
    made = compare(*ties(), tmp_path, rounding=rounding)
    assert [op["attributes"]["rounding"] for op in made.ops if op["op"] == "Requantize"] == [rounding]


@pytest.mark.parametrize("name", ["cnn of int8", "16 bits", "three axes"])
def test_integer_edges(name, tmp_path):
    compare(*IN_C[name](), tmp_path, "-O3", edges="integer")


def test_names_of_tensors_cannot_break_a_header(tmp_path):
    net = Net()
    x = net.qdq(net.input([1, 2, 4, 4], 'a"b\\c*/d??/\nint x;'), 0.03, 100)
    y = net.op("Conv", x, net.weight((2, 2, 3, 3), 0)[0])
    net.nodes[-1].name = "*/\n#error \\"
    net.output(net.qdq(y, 0.03, 100), [1, 2, 2, 2])
    text = header(firmware_program(convert(net.model())))
    assert "#error" in text
    compiled(text, tmp_path)


@pytest.mark.slow
def test_an_input_that_ends_inside_an_image_is_an_error(tmp_path):
    model, _ = cnn()
    binary = compiled(header(firmware_program(convert(model))), tmp_path)
    assert run(binary, b"") == b""
    done = subprocess.run([binary], input=bytes(3 * 12 * 12 + 7), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"the input ends inside an image: 7 of 432 bytes" in done.stderr
    assert len(done.stdout) == 10  # of the first image


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of the demo network as a Q/DQ model, and real images with their labels."""
    data, folder = load(), tmp_path_factory.mktemp("demo")
    sim = qsdk.quantize(load_pretrained(), torch.from_numpy(data.calibration_images[:2]), qsdk.w8a8())
    qsdk.calibrate(sim, [torch.from_numpy(data.calibration_images[:100])], progress=False)
    qsdk.export(sim, folder / "model.onnx")
    return folder, data.test_images[:24], data.test_labels[:24]


@pytest.mark.slow
def test_the_demo_network_on_real_images(demo, tmp_path):
    folder, images, labels = demo
    made = compare(onnx.load(folder / "model.onnx"), {"images": images}, tmp_path)
    codes = run(tmp_path / "network", firmware_runner.codes(made.inputs[0], images).tobytes())
    logits = np.frombuffer(codes, np.uint8).reshape(24, 10)
    assert (logits.argmax(1) == labels).mean() > 0.85


@pytest.mark.slow
def test_the_readme_does_as_it_says(demo, monkeypatch):
    folder, images, labels = demo
    (folder / "examples").symlink_to(EXAMPLE.parent)
    np.save(folder / "images.npy", images)
    monkeypatch.chdir(folder)
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    (before, after), (shell,) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "bash"))
    convert_it, compile_it, run_it = shell.strip().splitlines()
    assert main(shlex.split(convert_it)[1:]) == 0
    exec(before, {})
    for command in (compile_it, run_it):
        subprocess.run(command, shell=True, check=True)
    found = {}
    exec(after, found)
    assert found["logits"].shape == (24, 10)
    assert (found["logits"].argmax(1) == labels).mean() > 0.85
    reference = run_reference(onnx.load("model.int.onnx"), {"images": images})["output"]
    np.testing.assert_array_equal(found["logits"], reference)
