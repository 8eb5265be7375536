"""Weights outside their model: what is written, what is refused, and how much memory it takes."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from large_models import batches, export_peak, external_stack, inline_stack, leftovers, weights

import qsdk
from onnx_backend.lower import lower
from onnx_backend.proto import write_file as writing
from onnx_backend.proto.external_data import DATA_KEY, INLINE, array, data_facts
from onnx_backend.proto.lazy_tensors import LargeTensor, is_stub, quantize_tensor, with_large
from onnx_backend.proto.model_io import load, serialize
from onnx_backend.proto.write_file import write_files
from qsdk import Encoding, ExportError, FileFormatError
from qsdk.core.numerics.dtypes import DTYPES

pytestmark = pytest.mark.usefixtures("exact_products")

WIDTH = 520  # 1.03 MiB in float32: more than is read at once
X = batches(WIDTH)


def calibrated(source, config=None, method="min_max"):
    sim = qsdk.quantize(source, None, config or qsdk.w8a8())
    qsdk.calibrate(sim, X, method=method, progress=False)
    return sim


@pytest.fixture(scope="module")
def float_file(tmp_path_factory):
    assert 4 * WIDTH * WIDTH > INLINE
    return external_stack(tmp_path_factory.mktemp("float") / "float.onnx", WIDTH)


@pytest.fixture(scope="module")
def sim(float_file):
    return calibrated(float_file)


@pytest.fixture
def exported(sim, tmp_path):
    """A model with its data in a file beside it."""
    qsdk.export(sim, tmp_path / "m.onnx", external_data=True)
    return tmp_path / "m.onnx"


def data_of(path: Path) -> Path:
    (found,) = (entry for entry in path.parent.iterdir() if entry.name.startswith(f"{path.name}."))
    return found


def run(path: Path) -> np.ndarray:
    return ort.InferenceSession(str(path)).run(None, {"x": X[0]})[0]


# --- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint2", "int16", "float8e4m3fn"])
@pytest.mark.parametrize("permutation", [None, [1, 0]])
@pytest.mark.parametrize("how", ["tensor", "channel 0", "channel 1", "block 0", "block 1"])
def test_pieces_are_the_codes_of_the_whole(dtype, permutation, how, monkeypatch):
    monkeypatch.setattr("onnx_backend.proto.lazy_tensors.PIECE", 1000)
    values = np.random.default_rng(0).normal(size=(96, 75)).astype(np.float32)
    scale = np.random.default_rng(1).uniform(0.01, 0.1, (96, 75)).astype(np.float32)
    axis, block = (int(how[-1]) if how != "tensor" else None), (5 if axis_is_75(how) else 8)
    if how == "tensor":
        scale = scale[:1, 0]
    elif how.startswith("channel"):
        scale = scale[:, 0] if axis == 0 else scale[0]
    else:
        scale = scale[::block] if axis == 0 else scale[:, ::block]
    encoding = Encoding(DTYPES[dtype], scale, np.zeros(scale.shape), axis, block if how.startswith("block") else None)
    stored = LargeTensor(onnx.TensorProto.FLOAT, values.shape, lambda: values, lambda v, a, b: v[a:b])
    large = quantize_tensor(encoding, stored, permutation)
    wanted = encoding.quantize(values).transpose(permutation or (0, 1))
    np.testing.assert_array_equal(large.value().astype(np.float32), wanted.astype(np.float32))
    whole = onnx.numpy_helper.from_array(np.ascontiguousarray(wanted))
    assert b"".join(large.pieces()) == whole.raw_data
    assert (large.nbytes, large.data_type, list(large.dims)) == (len(whole.raw_data), whole.data_type, whole.dims)


def axis_is_75(how: str) -> bool:
    return how.endswith("1")


def test_an_encoding_that_does_not_fit_is_refused_before_anything_is_written(sim, tmp_path):
    encodings = dict(sim.encodings)
    site = "mm0:weight"
    longer = np.full(WIDTH + 8, 0.1, np.float32)
    encodings[site] = Encoding(encodings[site].dtype, longer, np.zeros(WIDTH + 8), encodings[site].axis)
    with pytest.raises(ExportError, match="the encoding of mm0:weight does not fit its shape"):
        lower(sim.traced().model, sim.plan, encodings)


def test_the_streamed_file_is_the_serialized_model(sim, tmp_path):
    lowered = lower(sim.traced().model, sim.plan, sim.encodings)
    write_files({tmp_path / "m.onnx": lowered.model}, lowered.large, base=tmp_path / "m.onnx")
    whole = with_large(lowered.model, lowered.large)
    assert (tmp_path / "m.onnx").read_bytes() == whole.SerializeToString()
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_scales_of_blocks_stay_outside_a_model_whose_caller_asks_for_it(float_file):
    sim = calibrated(float_file, qsdk.weight_only("int4", block_size=8))
    marked, encodings = sim.traced().model, sim.encodings
    whole, light = (lower(marked, sim.plan, encodings, unfinished=flag) for flag in (False, True))
    held = {tensor.name: array(tensor) for tensor in whole.model.graph.initializer if not is_stub(tensor)}
    stubs = [tensor.name for tensor in light.model.graph.initializer if is_stub(tensor) and tensor.name in held]
    assert len(stubs) == sum(encoding.block_size is not None for encoding in encodings.values()) > 0
    for name in stubs:
        np.testing.assert_array_equal(light.large[name].value(), held[name])


def test_one_file_and_two_hold_the_same_model(sim, exported, tmp_path):
    qsdk.export(sim, tmp_path / "one.onnx", external_data=False)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("one.onnx.")]
    np.testing.assert_array_equal(run(exported), run(tmp_path / "one.onnx"))
    one, two = (load(path).graph.initializer for path in (tmp_path / "one.onnx", exported))
    for left, right in zip(one, two, strict=True):
        assert left.name == right.name
        np.testing.assert_array_equal(array(left), array(right))
    onnx.checker.check_model(str(exported), full_check=True)  # also that its data lies beside it


def test_the_data_file_is_written_when_one_file_cannot_hold_the_model(sim, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SINGLE", 10**5)
    with pytest.raises(ExportError, match="one ONNX file holds 2 GiB; export it without external_data=False"):
        qsdk.export(sim, tmp_path / "m.onnx", external_data=False)
    assert os.listdir(tmp_path) == []
    report = qsdk.export(sim, tmp_path / "m.onnx")
    assert [Path(name).name for name in report.summary["paths"]][2:] == [data_of(tmp_path / "m.onnx").name]
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", X, progress=False).summary["passed"]


def test_a_model_without_large_weights_has_no_data_file(tmp_path):
    small = calibrated_small(tmp_path)
    report = qsdk.export(small, tmp_path / "m.onnx", external_data=True)
    assert [Path(path).name for path in report.summary["paths"]] == ["m.onnx", "m.encodings.json"]
    assert not list(tmp_path.glob("*.data"))


def calibrated_small(folder):
    sim = qsdk.quantize(external_stack(folder / "float.onnx", 8), None, qsdk.w8a8())
    qsdk.calibrate(sim, batches(8), progress=False)
    return sim


def test_the_same_weights_give_the_same_data_file(sim, exported):
    before = {path.name: path.read_bytes() for path in exported.parent.iterdir()}
    qsdk.export(sim, exported, external_data=True)
    assert {path.name: path.read_bytes() for path in exported.parent.iterdir()} == before


def test_other_weights_leave_one_data_file(sim, exported, float_file):
    old = data_of(exported)
    (exported.parent / "m.onnx.notes.data").write_text("not ours")
    qsdk.export(calibrated(float_file, qsdk.w4a8()), exported, external_data=True)
    names = sorted(name for name in os.listdir(exported.parent) if name.endswith(".data"))
    assert old.name not in names
    assert len(names) == 2
    assert "m.onnx.notes.data" in names
    qsdk.export(sim, exported)
    assert [name for name in os.listdir(exported.parent) if name.endswith(".data")] == ["m.onnx.notes.data"]


def test_data_has_the_mode_that_the_umask_gives(sim, tmp_path):
    before = os.umask(0o027)
    try:
        qsdk.export(sim, tmp_path / "m.onnx", external_data=True)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


@pytest.mark.parametrize("after", [0, 10_000, 100_000])
def test_a_full_disk_leaves_the_old_model_and_nothing_else(sim, exported, float_file, monkeypatch, after):
    before = {path.name: path.read_bytes() for path in exported.parent.iterdir()}
    other = calibrated(float_file, qsdk.w4a8())
    pieces = LargeTensor.pieces

    def full(self):
        written = 0
        for piece in pieces(self):
            written += len(piece)
            if written > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield piece

    monkeypatch.setattr(LargeTensor, "pieces", full)
    for external in (True, False):
        with pytest.raises(ExportError, match=r"cannot write .*m.onnx: .*No space left on device; choose a folder"):
            qsdk.export(other, exported, external_data=external)
    assert {path.name: path.read_bytes() for path in exported.parent.iterdir()} == before


@pytest.mark.slow
def test_an_export_over_the_file_that_the_sim_reads(sim, exported):
    again = qsdk.quantize(load(exported, inline=1000))
    assert again.files_read() == {data_of(exported)}
    wanted = again.run(X[0])[0]
    qsdk.export(again, exported, external_data=True)  # the same data: whoever reads it goes on
    assert qsdk.check_parity(again, load(exported), X, progress=False).summary["passed"]
    old = data_of(exported)
    again.set_encoding("mm0:weight", halved(again.encodings["mm0:weight"]))
    assert again.files_read() == set()  # it simulates anew from its own weights
    qsdk.export(again, exported, external_data=True)
    assert data_of(exported) != old
    other = qsdk.quantize(load(exported, inline=1000))
    qsdk.export(sim, exported, external_data=True)
    with pytest.raises(FileFormatError, match="was replaced or removed after the model was opened; open the model"):
        other.run(X[0])
    np.testing.assert_array_equal(sim.run(X[0])[0], wanted)


def halved(encoding):
    return replace(encoding, scale=encoding.scale / 2)


def test_an_export_beside_the_float_weights_leaves_them(float_file, tmp_path):
    for path in float_file.parent.iterdir():
        shutil.copy(path, tmp_path)
    path = tmp_path / "float.onnx"
    sim = calibrated(path)
    wanted = sim.run(X[0])[0]
    qsdk.export(sim, path, external_data=True)
    assert (tmp_path / "float.bin").exists()
    assert qsdk.check_parity(sim, path, X, progress=False).summary["passed"]
    np.testing.assert_array_equal(run(path), wanted)


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_sim_does_is_the_same_wherever_its_weights_lie(sim, float_file, exported):
    inside = calibrated(onnx.load(float_file))
    assert sim.files_read() == {float_file.parent / "float.bin"}
    assert inside.files_read() == set()
    assert inside.encodings == sim.encodings
    spooling = calibrated(float_file)
    spooling.in_memory = 0  # its quantized weights go to a temporary file
    wanted = inside.run(X[0])[0]
    for other in (sim, spooling, qsdk.quantize(exported, None, None)):
        np.testing.assert_array_equal(other.run(X[0])[0], wanted)
    folder = next(iter(spooling.files_read() - sim.files_read())).parent
    assert folder.exists()
    spooling.set_encoding("x:input", spooling.encodings["x:input"])
    assert not folder.exists()


def test_weights_that_change_under_a_sim_are_refused(float_file, tmp_path):
    for path in float_file.parent.iterdir():
        shutil.copy(path, tmp_path)
    sim = calibrated(tmp_path / "float.onnx")
    with (tmp_path / "float.bin").open("r+b") as file:
        file.write(b"\0" * 64)
    with pytest.raises(FileFormatError, match=r"float.bin, which holds the weight 'w0', was replaced or removed after"):
        qsdk.export(sim, tmp_path / "m.onnx")
    assert sorted(os.listdir(tmp_path)) == ["float.bin", "float.onnx"]


def truncated(path):
    os.truncate(path, path.stat().st_size - 1)


def replaced(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "which holds the weights of .*m.onnx, is missing: an export was interrupted or one file was"),
        (
            truncated,
            r"has \d+ bytes, not the \d+ of .*m.onnx: an export was interrupted or one file was replaced; copy",
        ),
        (replaced, "does not belong to .*m.onnx: an export was interrupted or one file was replaced; copy both"),
    ],
)
def test_another_data_file_is_refused_with_the_remedy(exported, damage, message):
    damage(data_of(exported))
    for read in (lambda: qsdk.quantize(exported, None, None), lambda: qsdk.validate(exported)):
        with pytest.raises(FileFormatError, match=message):
            read()


def test_validation_reads_all_the_data(exported, monkeypatch):
    monkeypatch.setattr("onnx_backend.proto.external_data._PAGES", 2)
    path = data_of(exported)
    model = onnx.load(exported, load_external_data=False)
    said = next(entry for entry in model.metadata_props if entry.key == DATA_KEY)
    facts = json.loads(said.value)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    said.value = json.dumps({**facts, "sample_sha256": data_facts(path)["sample_sha256"]})
    exported.write_bytes(model.SerializeToString())
    assert load(exported).graph.node  # a single bit between the pages of the sample
    with pytest.raises(FileFormatError, match="does not belong to"):
        qsdk.validate(exported)


def test_facts_on_the_data_that_cannot_be_read_are_named(exported):
    model = onnx.load(exported, load_external_data=False)
    next(entry for entry in model.metadata_props if entry.key == DATA_KEY).value = "{"
    exported.write_bytes(model.SerializeToString())
    with pytest.raises(FileFormatError, match=r"is damaged: its qsdk.data cannot be read; export the model again"):
        qsdk.quantize(exported, None, None)


def test_a_model_that_another_tool_stored_anew_is_read(exported, tmp_path):
    (tmp_path / "moved").mkdir()
    onnx.save(onnx.load(exported), tmp_path / "moved" / "m.onnx", save_as_external_data=True, location="w.bin")
    again = qsdk.quantize(tmp_path / "moved" / "m.onnx", None, None)
    np.testing.assert_array_equal(again.run(X[0])[0], run(exported))


def test_a_saved_sim_keeps_its_weights(sim, float_file, tmp_path):
    for path in float_file.parent.iterdir():
        shutil.copy(path, tmp_path)
    own = calibrated(tmp_path / "float.onnx")
    wanted = own.run(X[0])[0]
    for name, most in (("one", 2**30), ("two", 0)):
        own.in_memory = most
        qsdk.save(own, tmp_path / name)
    (tmp_path / "float.bin").unlink()
    for name in ("one", "two"):
        again = qsdk.load(tmp_path / name)
        assert bool(again.files_read()) == (name == "two")
        np.testing.assert_array_equal(again.run(X[0])[0], wanted)
        qsdk.save(again, tmp_path / name)
        np.testing.assert_array_equal(qsdk.load(tmp_path / name).run(X[0])[0], wanted)


def test_a_damaged_part_of_a_saved_sim_is_refused(float_file, tmp_path):
    own = calibrated(float_file)
    own.in_memory = 0
    qsdk.save(own, tmp_path / "sim")
    content = bytearray((tmp_path / "sim").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "sim").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"weights.data is missing or damaged in .*sim; write it again"):
        qsdk.load(tmp_path / "sim")


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_export_holds_no_second_copy_of_the_weights(tmp_path):
    assert export_peak("module", tmp_path, 3000, 3) < 0.5


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "most"), [("module", 0.1), ("external", 0.1), ("inline", 0.5)])
def test_peak_memory_of_export(kind, most, tmp_path):
    assert export_peak(kind, tmp_path, 5000, 4) < most
    assert not list(leftovers(tmp_path))


def test_inline_and_external_weights_are_equal():
    assert {t.name for t in inline_stack(WIDTH).graph.initializer} == set(weights(WIDTH))


@pytest.mark.nightly
def test_the_whole_road_of_a_file_above_two_gigabytes(tmp_path):
    width = 13_600  # 3 x 0.69 GiB
    x = batches(width)
    sim = qsdk.quantize(external_stack(tmp_path / "float.onnx", width, 3), None, qsdk.w8a8())
    qsdk.calibrate(sim, x, progress=False)
    qsdk.export(sim, tmp_path / "m.onnx", external_data=True)
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", x, progress=False).summary["passed"]
    qsdk.save(sim, tmp_path / "sim")
    np.testing.assert_array_equal(qsdk.load(tmp_path / "sim").run(x[0])[0], sim.run(x[0])[0])
    assert (tmp_path / "sim").stat().st_size > 2**31
    assert data_of(tmp_path / "m.onnx").stat().st_size >= 3 * width * width


@pytest.mark.nightly
def test_a_module_above_two_gigabytes_is_exported_without_a_copy(tmp_path):
    assert export_peak("module", tmp_path, 13_600, 3) < 0.1
    assert list(leftovers(tmp_path)) == []
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=False)


@pytest.mark.nightly
def test_float_weights_above_two_gigabytes_go_to_a_file_of_their_own(tmp_path):
    path = external_stack(tmp_path / "float.onnx", 13_600, 3)
    sim = calibrated_wide(path, 13_600)
    report = qsdk.export(sim, tmp_path / "m.onnx")
    assert len(report.summary["paths"]) == 3
    assert load(tmp_path / "m.onnx").graph.node
    assert ort.InferenceSession(str(tmp_path / "m.onnx")).get_inputs()[0].name == "x"


def calibrated_wide(path, width):
    sim = qsdk.quantize(path, None, qsdk.w8a8().override("mm*", weight="float32"))
    qsdk.calibrate(sim, batches(width), progress=False)
    return sim


def test_weights_in_files_are_read_into_a_model_that_must_hold_them(exported):
    outside, inside = load(exported, inline=1000), load(exported)
    assert outside.ByteSize() < 10**5 < inside.ByteSize()
    assert serialize(outside) == serialize(inside)
    assert outside.ByteSize() < 10**5
