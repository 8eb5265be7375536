"""Files made to harm, or broken by accident: refused by name within seconds, and nothing is replaced."""

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper
from qdq_models import convnet
from torch_models import ConvNet, calibrated, seeded

import qsdk
from onnx_backend.proto.write_file import write_files
from qsdk import ExportError, FileFormatError
from qsdk.core.atomic_files import write_text, write_with_companions

OWN = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
NEG = helper.make_node("Neg", ["a"], ["c"])
SPECIAL: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a symbolic link": lambda path: path.symlink_to(path),  # a circle
}


# functions of ONNX models


def call(name: str, inputs: Sequence[str] = ("a",), outputs: Sequence[str] = ("c",)) -> NodeProto:
    return helper.make_node(name, inputs, outputs, domain="own")


def function(name: str, *body: NodeProto) -> FunctionProto:
    return helper.make_function("own", name, ["a"], ["c"], body, OWN)


def with_functions(functions: Sequence[FunctionProto], node: NodeProto | None = None) -> ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([node or call("f0", ["x"], ["y"])], "g", [x], [y])
    return helper.make_model(graph, functions=functions, opset_imports=OWN, ir_version=10)


def doubling(depth: int) -> list[FunctionProto]:
    """Functions of which each calls the next one twice: 2**depth nodes."""
    twice = [function(f"f{i}", call(f"f{i + 1}", "a", "b"), call(f"f{i + 1}", "b", "c")) for i in range(depth)]
    return [*twice, function(f"f{depth}", NEG)]


def chain(depth: int) -> list[FunctionProto]:
    return [*(function(f"f{i}", call(f"f{i + 1}")) for i in range(depth)), function(f"f{depth}", NEG)]


FUNCTIONS: dict[str, tuple[ModelProto, str]] = {
    "doubling 28 times": (with_functions(doubling(28)), r"stand for 805,306,366 nodes of .* most of them in own::f0"),
    "doubling 90 times": (with_functions(doubling(90)), r"stand for more than 1,000,000,000,000,000 nodes"),
    "a circle": (
        with_functions([function("f0", call("f1")), function("f1", call("f0"))]),
        r"a function calls itself \(own::f0 -> own::f1 -> own::f0\)",
    ),
    "itself": (with_functions([function("f0", call("f0"))]), r"calls itself \(own::f0 -> own::f0\)"),
    "deep": (with_functions(chain(5000)), r"functions call functions more than 100 deep, from own::f0 on"),
    "twice the same": (with_functions([function("f0", NEG), function("f0", NEG)]), r"holds two functions own::f0"),
    "too many inputs": (
        with_functions([function("f0", NEG)], call("f0", ["x", "x"], ["y"])),
        r"the node 'y' calls own::f0 with 2 inputs, it has 1",
    ),
    "too many outputs": (
        with_functions([function("f0", NEG)], call("f0", ["x"], ["y", "z"])),
        r"the node 'y' calls own::f0 with 2 outputs, it has 1",
    ),
    "without a body": (with_functions([function("f0")]), r"the function own::f0 does not make 'c'"),
}
READERS: dict[str, Callable[[Any, Path], Any]] = {
    "quantize": lambda model, out: qsdk.quantize(model, None, qsdk.w8a8()),
    "adopt": lambda model, out: qsdk.quantize(model, None, None),
    "validate": lambda model, out: qsdk.validate(model),
    "to_integer": lambda model, out: qsdk.to_integer(model, out),
}


@pytest.mark.spread(33)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_without_end_and_calls_that_do_not_fit(name: str, reader: str, tmp_path: Path):
    model, said = FUNCTIONS[name]
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    for source in (path, model):
        with pytest.raises(FileFormatError, match=said):
            READERS[reader](source, tmp_path / "int.onnx")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]


def test_functions_that_come_to_an_end_are_opened():
    for functions in (doubling(8), chain(99)):
        sim = qsdk.quantize(with_functions(functions), None, qsdk.w8a8())
        assert len(sim.graph.ops) == (2**8 if len(functions) == 9 else 1)


# what is no ordinary file is never replaced


def kind_of(path: Path) -> int:
    return stat.S_IFMT(path.lstat().st_mode)


@pytest.fixture(scope="module")
def sim() -> Any:
    return calibrated(ConvNet(), seeded(2, 3, 6, 6))


WRITERS: dict[str, tuple[Callable[[Any, Path, Path], Any], tuple[str, ...]]] = {
    "export": (lambda sim, path, qdq: qsdk.export(sim, path), ("", ".encodings.json")),
    "save": (lambda sim, path, qdq: qsdk.save(sim, path), ("",)),
    "save_encodings": (lambda sim, path, qdq: qsdk.save_encodings(sim, path), ("",)),
    "to_integer": (
        lambda sim, path, qdq: qsdk.to_integer(qdq, path, firmware=path.with_suffix(".npz")),
        ("", ".onnx.certificate.json", ".npz"),
    ),
    "config": (lambda sim, path, qdq: qsdk.w8a8().save(path), ("",)),
    "report": (lambda sim, path, qdq: write_text(path, "page"), ("",)),
}
PLACES = [(writer, suffix) for writer, (_, suffixes) in WRITERS.items() for suffix in suffixes]


@pytest.mark.spread(17)
@pytest.mark.parametrize(("writer", "suffix"), PLACES)
@pytest.mark.parametrize("kind", SPECIAL)
def test_no_writer_replaces_what_is_no_ordinary_file(sim: Any, tmp_path: Path, writer: str, suffix: str, kind: str):
    qdq = tmp_path / "qdq" / "model.onnx"
    qdq.parent.mkdir()
    qsdk.export(sim, qdq)
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "model.onnx"
    special = (folder / f"model{suffix}") if suffix else path
    SPECIAL[kind](special)
    before = kind_of(special)
    with pytest.raises(ExportError, match=rf"{special.name} is {kind}, and only ordinary files are replaced"):
        WRITERS[writer][0](sim, path, qdq)
    assert kind_of(special) == before
    assert list(folder.iterdir()) == [special]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root makes devices")
def test_a_device_and_a_link_to_one_stay(tmp_path: Path):
    try:
        os.mknod(tmp_path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no devices can be made here")
    (tmp_path / "link").symlink_to("null")
    for name in ("null", "link"):
        with pytest.raises(ExportError, match="null is a device, and only ordinary files are replaced"):
            write_text(tmp_path / name, "x")
        with pytest.raises(ExportError, match="null is a device"):
            write_with_companions(tmp_path / "model", b"1", {tmp_path / name: "x"})
    assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "null"]


def test_a_companion_that_is_a_link_keeps_pointing_where_it_did(sim: Any, tmp_path: Path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "model.encodings.json"
    link.symlink_to(tmp_path / "real" / "encodings.json")
    qsdk.export(sim, tmp_path / "model.onnx")
    assert link.is_symlink()
    assert link.read_bytes() == (tmp_path / "real" / "encodings.json").read_bytes()
    qsdk.check_parity(sim, tmp_path / "model.onnx", [seeded(2, 3, 6, 6)], progress=False)


def test_a_companion_that_is_a_link_to_the_model_is_refused(sim: Any, tmp_path: Path):
    (tmp_path / "model.onnx").write_text("mine")
    (tmp_path / "model.encodings.json").symlink_to("model.onnx")
    with pytest.raises(
        ExportError, match=r"model\.encodings\.json is a link to .*model\.onnx, which is written as well"
    ):
        qsdk.export(sim, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_text() == "mine"


def test_what_only_bears_the_name_of_an_old_data_file_stays(tmp_path: Path):
    fifo = tmp_path / f"model.onnx.{'0' * 16}.data"
    os.mkfifo(fifo)
    old = tmp_path / f"model.onnx.{'1' * 16}.data"
    old.write_text("of an earlier model")
    write_files({tmp_path / "model.onnx": convnet()}, {}, base=tmp_path / "model.onnx", external_data=True)
    assert stat.S_ISFIFO(kind_of(fifo))
    assert not old.exists()


def test_a_pipe_beside_a_model_is_not_waited_for(sim: Any, tmp_path: Path):
    qsdk.export(sim, tmp_path / "model.onnx")
    (tmp_path / "model.encodings.json").unlink()
    os.mkfifo(tmp_path / "model.encodings.json")
    with pytest.raises(FileFormatError, match=r"model\.encodings\.json is no ordinary file"):
        qsdk.quantize(tmp_path / "model.onnx", None, None)


def test_a_device_is_no_model(tmp_path: Path):
    for name in ("quantize", "adopt", "validate"):
        with pytest.raises(FileFormatError, match="there is no file /dev/zero"):
            READERS[name](Path("/dev/zero"), tmp_path)
    with pytest.raises(FileFormatError, match="/dev/zero is no ordinary file, but a pipe or a device"):
        qsdk.load("/dev/zero", torch.nn.Linear(2, 2))
