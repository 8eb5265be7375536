"""Weights in files beside the model: read whole, once, and from nowhere else."""

import os
import tracemalloc

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from qdq_models import make_model, mlp

import qsdk
from onnx_backend.proto.external_data import array, read_external_data
from onnx_backend.proto.model_io import load
from onnx_backend.runtime.session_input import session_of
from qsdk import FileFormatError, w8a8

BATCH = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


@pytest.fixture
def saved(tmp_path):
    """The MLP with its weights in `weights.bin`."""
    path = tmp_path / "m.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_external_weights_are_read(saved):
    for left, right in zip(load(saved).graph.initializer, mlp().graph.initializer, strict=True):
        np.testing.assert_array_equal(array(left), array(right))
    sim = qsdk.quantize(saved, None, w8a8())
    qsdk.calibrate(sim, [BATCH], progress=False)
    own = qsdk.quantize(mlp(), None, w8a8())
    qsdk.calibrate(own, [BATCH], progress=False)
    assert sim.encodings == own.encodings


def pointing(path, **entries):
    model = onnx.load(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    kept = {entry.key: entry.value for entry in tensor.external_data} | entries
    del tensor.external_data[:]
    for key, text in kept.items():
        if text is not None:
            tensor.external_data.add(key=key, value=text)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "sub/../../secret.bin", ""])
def test_nothing_outside_the_folder_of_the_model_is_read(saved, location):
    (saved.parent.parent / "secret.bin").write_bytes(bytes(1000))
    with pytest.raises(
        FileFormatError, match=r"'w1' in the file .* not in its folder; only files beside the model are read"
    ):
        load(pointing(saved, location=location))


def test_a_link_out_of_the_folder_is_not_followed(saved):
    outside = saved.parent.parent / "outside.bin"
    outside.write_bytes(bytes(1000))
    os.symlink(outside, saved.parent / "linked.bin")
    with pytest.raises(FileFormatError, match="not in its folder"):
        load(pointing(saved, location="linked.bin"))


def test_a_file_in_a_folder_below_is_read(saved):
    (saved.parent / "data").mkdir()
    (saved.parent / "weights.bin").rename(saved.parent / "data" / "w.bin")
    model = onnx.load(saved, load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "data/w.bin"
    saved.write_bytes(model.SerializeToString())
    assert len(load(saved).graph.initializer) == 4


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "100000"}, r"has \d+ bytes where 100000 \+ \d+ are needed"),
        ({"length": "99999999999"}, "copy it again, whole"),
        ({"offset": "-4"}, "are needed"),
        ({"offset": "many"}, "at a place that is no number"),
        ({"location": "gone.bin"}, "cannot be read"),
        ({"length": "4"}, "cannot be read .* bytes where its shape"),
    ],
)
def test_a_damaged_reference_is_named(saved, entries, message):
    with pytest.raises(FileFormatError, match=message):
        qsdk.quantize(pointing(saved, **entries), None, w8a8())


def test_a_model_in_memory_without_its_weights_asks_for_the_path(saved):
    model = onnx.load(saved, load_external_data=False)
    with pytest.raises(FileFormatError, match=r"'w1' of the model lies in another file.*pass the path"):
        qsdk.quantize(model, None, w8a8())


def large(path, rows):
    """A MatMul whose weight of `rows` x 1024 floats is a hole in a sparse file."""
    model = make_model([helper.make_node("MatMul", ["x", "w"], ["y"], "mm")], {"x": ["n", rows]}, {"y": None}, {})
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, 1024], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    model.graph.initializer.append(tensor)
    path.write_bytes(model.SerializeToString())
    with open(path.parent / "w.bin", "wb") as file:
        file.truncate(rows * 4096)
    return path


def test_only_one_tensor_at_a_time_is_held_twice(tmp_path):
    path = large(tmp_path / "m.onnx", 2**12)
    model = onnx.load(path, load_external_data=False)
    tracemalloc.start()
    read_external_data(model, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * 2**24  # what Python held; the proto's own copy is not Python's


@pytest.mark.nightly
def test_a_model_above_two_gigabytes_is_opened_and_planned(tmp_path):
    sim = qsdk.quantize(large(tmp_path / "m.onnx", 2**19 + 2**10), None, w8a8())
    assert sim.plan.decisions["mm:weight"].quantized
    assert sim.plan.decisions["mm:weight"].shape == (2**19 + 2**10, 1024)


def test_what_is_no_ordinary_file_is_refused_and_not_waited_for(saved):
    os.mkfifo(saved.parent / "pipe")
    with pytest.raises(FileFormatError, match="'pipe', which is no ordinary file; put the weights beside the model"):
        load(pointing(saved, location="pipe"))


@pytest.mark.parametrize("location", [".", "sub/..", "circle", "with\0nul"])
def test_what_is_no_file_is_refused(saved, location):
    (saved.parent / "sub").mkdir()
    (saved.parent / "circle").symlink_to("circle")
    with pytest.raises(FileFormatError, match="'w1' in the file"):
        load(pointing(saved, location=location))


@pytest.mark.parametrize("entrance", [qsdk.validate, lambda m: qsdk.quantize(m, None, None), lambda m: load(m)])
def test_a_link_of_a_folder_is_not_followed_out_of_the_folder(saved, entrance):
    (saved.parent.parent / "w.bin").write_bytes(bytes(1000))
    (saved.parent / "up").symlink_to("..")
    with pytest.raises(FileFormatError, match="not in its folder"):
        entrance(pointing(saved, location="up/w.bin"))


def test_a_stamp_that_a_file_brings_along_counts_for_nothing(saved, tmp_path):
    (tmp_path.parent / "secret.bin").write_bytes(bytes(10**5))
    facts = (tmp_path.parent / "secret.bin").stat()
    stamp = f"0 {facts.st_dev} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"
    path = pointing(saved, location=str(tmp_path.parent / "secret.bin"), **{"qsdk.stamp": stamp})
    with pytest.raises(FileFormatError, match="not in its folder"):
        load(path)
    inside = onnx.load(path, load_external_data=False)
    for entrance in (
        lambda: qsdk.quantize(inside, None, w8a8()),
        lambda: qsdk.quantize(inside, None, None),
        lambda: array(inside.graph.initializer[0]),
        lambda: session_of(inside, ort.SessionOptions()),
    ):
        with pytest.raises(FileFormatError, match="lies in another file, whose folder is unknown here; pass the path"):
            entrance()


def test_a_large_weight_is_left_in_its_file_and_a_small_one_is_read(tmp_path):
    path = large(tmp_path / "m.onnx", 2**8)
    assert load(path).graph.initializer[0].data_location == TensorProto.DEFAULT
    model = load(path, inline=2**19)
    assert model.graph.initializer[0].data_location == TensorProto.EXTERNAL
    value = array(model.graph.initializer[0])
    assert (value.shape, value.dtype.name) == ((2**8, 1024), "float32")
    with pytest.raises(ValueError, match="read-only"):
        value[0, 0] = 1
    x = np.ones((1, 2**8), np.float32)
    np.testing.assert_array_equal(session_of(model, ort.SessionOptions()).run(None, {"x": x})[0], x @ value)
