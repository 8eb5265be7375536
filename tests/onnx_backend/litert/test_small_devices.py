"""What reads `.tflite` files besides LiteRT: TFLite Micro computes the same codes, Vela places all ops on an NPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
from fetch import TFLITE_MICRO, VELA, fetch
from image_networks import network

import qsdk
from onnx_backend.litert.program import from_bytes
from onnx_backend.litert.reference import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11) or sys.platform != "linux", reason="these wheels are of CPython 3.11 on Linux"
    ),
]
MICRO = """
import sys, numpy as np
from tflite_micro.python.tflite_micro import runtime
interpreter = runtime.Interpreter.from_file(sys.argv[1])
made = []
for codes in np.load(sys.argv[2]):
    interpreter.set_input(codes, 0)
    interpreter.invoke()
    made.append(interpreter.get_output(0))
np.save(sys.argv[3], made)
"""
COMPILE = "import sys; from ethosu.vela.vela import main; main(sys.argv[1:])"


def with_package(package, program, *arguments):
    """Run a program in a process that finds a package which was fetched."""
    where = {**os.environ, "PYTHONPATH": str(fetch(package))}
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], env=where, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(params=["residual", "mobilenet_v2", "inception"])
def path(request, tmp_path):
    model, x = network(request.param)
    sim = qsdk.quantize(model, x, qsdk.w8a8().for_dialect("litert"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.tflite", format="tflite", check=False)
    return tmp_path / "model.tflite"


def test_tflite_micro_computes_within_a_step_of_the_prediction(path, tmp_path):
    program = from_bytes(path.read_bytes(), "it")
    shape = program.tensors[program.inputs[0]].shape
    codes = np.random.default_rng(0).integers(-128, 128, (5, *shape)).astype(np.int8)
    np.save(tmp_path / "given.npy", codes)
    with_package(TFLITE_MICRO, MICRO, path, tmp_path / "given.npy", tmp_path / "made.npy")
    wanted = np.array([run(program, [one])[program.outputs[0]] for one in codes])
    assert np.abs(np.load(tmp_path / "made.npy").astype(int) - wanted).max() <= 1


def test_vela_places_every_op_on_the_npu(path, tmp_path):
    said = with_package(VELA, COMPILE, "--accelerator-config", "ethos-u55-128", "--output-dir", tmp_path, path)
    assert "CPU operators = 0 " in said, said
    assert (tmp_path / "model_vela.tflite").stat().st_size > 0
