"""Batches of the command line: how files are cut, and random inputs."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnx_backend.proto.inputs import ModelInput, inputs_of
from qsdk import ConfigError, DataError, FileFormatError, ModelError
from qsdk.commands.batches import from_files, random_batches

FLOAT, LONG = np.dtype(np.float32), np.dtype(np.int64)
OPEN = ModelInput("x", FLOAT, ("n", 3))
FIXED = ModelInput("x", FLOAT, (4, 3))
STATE = ModelInput("state", FLOAT, (2, 1, 8))
RATE = ModelInput("rate", LONG, ())


def shapes(inputs: list[ModelInput], path: Path, batch_size: int = 4) -> list[dict[str, tuple[int, ...]]]:
    batches = from_files(inputs, [str(path)], batch_size)
    found = [{name: array.shape for name, array in batch.items()} for batch in batches]
    assert found == [{name: array.shape for name, array in batch.items()} for batch in batches]  # again
    return found


def test_samples_are_cut_into_batches_and_keep_their_order(tmp_path: Path):
    samples = np.arange(30, dtype=np.float32).reshape(10, 3)
    np.save(tmp_path / "x.npy", samples)
    assert shapes([OPEN], tmp_path / "x.npy") == [{"x": (4, 3)}, {"x": (4, 3)}, {"x": (2, 3)}]
    batches = list(from_files([OPEN], [str(tmp_path / "x.npy")], 4))
    np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), samples)
    np.savez(tmp_path / "any.npz", samples)  # one array and one input need no name
    assert shapes([OPEN], tmp_path / "any.npz", 10) == [{"x": (10, 3)}]


def test_a_fixed_batch_is_kept_to(tmp_path: Path):
    np.save(tmp_path / "8.npy", np.zeros((8, 3)))
    assert shapes([FIXED], tmp_path / "8.npy", 32) == [{"x": (4, 3)}] * 2
    np.save(tmp_path / "10.npy", np.zeros((10, 3)))
    with pytest.raises(DataError, match=r"10\.npy holds 10 samples, which do not cut into batches of 4"):
        shapes([FIXED], tmp_path / "10.npy")


def test_a_stack_gives_its_batches_and_other_shapes_are_one(tmp_path: Path):
    np.save(tmp_path / "stack.npy", np.zeros((5, 4, 3)))
    assert shapes([FIXED], tmp_path / "stack.npy") == [{"x": (4, 3)}] * 5
    np.savez(tmp_path / "one.npz", x=np.zeros((6, 3)), state=np.zeros((2, 1, 8)), rate=16000)
    assert shapes([OPEN, STATE, RATE], tmp_path / "one.npz") == [{"x": (6, 3), "state": (2, 1, 8), "rate": ()}]
    np.savez(tmp_path / "many.npz", x=np.zeros((7, 6, 3)), state=np.zeros((7, 2, 1, 8)), rate=np.zeros(7, int))
    found = shapes([OPEN, STATE, RATE], tmp_path / "many.npz")
    assert found == [{"x": (6, 3), "state": (2, 1, 8), "rate": ()}] * 7


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 3)), "state": np.zeros((3, 2, 1, 8))}, "does not fit the model's inputs: x .4, 3. for"),
        ({"x": np.zeros((4, 3))}, "holds x, the model also needs state; name them so"),
        ({"x": np.zeros(3), "state": np.zeros((2, 1, 8))}, "stack samples along the first axis"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_shapes(tmp_path: Path, arrays, message: str):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=rf"x\.npz.*{message}"):
        shapes([OPEN, STATE], tmp_path / "x.npz")


def test_one_array_for_two_inputs_is_refused(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.zeros((4, 3)))
    with pytest.raises(DataError, match=r"x\.npy holds one array, the model takes x, state; give an \.npz"):
        shapes([OPEN, STATE], tmp_path / "x.npy")


@pytest.mark.parametrize("cut", [10, 200, -30])
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_truncated_files_are_named(tmp_path: Path, suffix: str, cut: int):
    whole = tmp_path / f"whole{suffix}"
    (np.save if suffix == ".npy" else np.savez_compressed)(whole, np.random.default_rng(0).normal(size=(64, 3)))
    (tmp_path / f"cut{suffix}").write_bytes(whole.read_bytes()[:cut])
    with pytest.raises(FileFormatError, match=rf"cut\{suffix} cannot be read as an array"):
        shapes([OPEN], tmp_path / f"cut{suffix}")


def test_random_inputs_have_the_types_and_shapes_of_the_model():
    ids = ModelInput("ids", LONG, ("batch", "sequence"))
    flag = ModelInput("flag", np.dtype(bool), ())
    first, second = random_batches([OPEN, ids, flag], 2, {"ids": (2, 16)}, 0)
    assert {name: (array.shape, array.dtype) for name, array in first.items()} == {
        "x": ((1, 3), FLOAT),
        "ids": ((2, 16), LONG),
        "flag": ((), np.dtype(bool)),
    }
    assert set(np.unique(first["ids"])) == {0, 1}
    assert not np.array_equal(first["x"], second["x"])
    again, _ = random_batches([OPEN, ids, flag], 2, {"ids": (2, 16)}, 0)
    np.testing.assert_array_equal(first["x"], again["x"])
    with pytest.raises(
        ConfigError, match=r"the shape of the input 'ids' is \['batch', 'sequence'\]; say it by --shape ids=1,3,224,224"
    ):
        random_batches([ids], 1, {}, 0)
    with pytest.raises(ConfigError, match="'y'; the inputs are x"):
        random_batches([OPEN], 1, {"y": (1,)}, 0)


def test_inputs_are_read_off_the_model():
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 3, None]),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("free", TensorProto.INT32, None),
    ]
    stored = [helper.make_tensor("w", TensorProto.FLOAT, [1], [0.5])]
    model = helper.make_model(helper.make_graph([], "g", values, values[:1], stored))
    found = {item.name: (item.dtype.name, item.shape) for item in inputs_of(model)}
    assert found == {"x": ("float16", ("n", 3, "")), "free": ("int32", None)}
    model.graph.input.append(helper.make_tensor_sequence_value_info("many", TensorProto.FLOAT, None))
    with pytest.raises(ModelError, match="the input 'many' is no numeric tensor; feed the model from Python"):
        inputs_of(model)
