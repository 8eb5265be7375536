"""What qsdk notes in its files: whatever stands there instead is refused by name, by every verb, before it is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import ModelProto, NodeProto
from torch import nn

import qsdk
from qsdk import FileFormatError

PORTS = '{"inputs":{"0":["0:weight","weight"]},"outputs":{"0":["0:output","activation","y"]}}'


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModelProto:
    """A file with a float16 island, transposed weights and a frozen site."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8)
    sim = qsdk.quantize(model, x, qsdk.w8a8().skip("0", "float16"))
    qsdk.calibrate(sim, [x], progress=False)
    path = tmp_path_factory.mktemp("noted") / "model.onnx"
    qsdk.export(sim, path)
    return onnx.load(path)


def copied(model: ModelProto) -> ModelProto:
    return ModelProto.FromString(model.SerializeToString())


def noted(model: ModelProto, key: str) -> NodeProto:
    """Return the first node that has a note, else the first one of all."""
    nodes = [node for node in model.graph.node if any(entry.key == key for entry in node.metadata_props)]
    return (nodes or list(model.graph.node))[0]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("qsdk.site", [""]),
        ("qsdk.dtype", ["int99", "", "5"]),
        ("qsdk.kind", ["sideways"]),
        ("qsdk.computes_in", ["int8", "", "null"]),
        ("qsdk.enters", ["[", "float8"]),
        ("qsdk.perm", ["", "x", "0,0", "1,2", "[[1]]", "0,1,2", "9" * 5000]),
        ("qsdk.kernel_attributes", ["to", "to=int8", ""]),
        ("qsdk.stands_for", ["[", "[]", "null", "[5]", '["%"]', '["AAAA"]', '[""]']),
        ("qsdk.island", ["[", "5", "null", "{}", '{"inputs":5}', "[" * 100_000]),
        ("qsdk.island", [PORTS.replace('"0"', '"7"'), PORTS.replace('"0"', '"-1"'), PORTS.replace(',"y"', "")]),
    ],
)
def test_a_damaged_note_of_a_node_is_refused_by_name(exported: ModelProto, key: str, values: list[str]) -> None:
    for value in values:
        model = copied(exported)
        node = noted(model, key)
        kept = [(entry.key, entry.value) for entry in node.metadata_props if entry.key != key]
        del node.metadata_props[:]
        for name, text in [*kept, (key, value)]:
            node.metadata_props.add(key=name, value=text)
        with pytest.raises(FileFormatError, match=rf"node '.+' (has|lacks) {key}.* damaged, export it again"):
            qsdk.validate(model)


@pytest.mark.parametrize(
    ("of", "missing"),
    [("qsdk.enters", ""), ("qsdk.island", "qsdk.computes_in"), ("qsdk.perm", "qsdk.site")],
)
def test_a_note_without_the_one_it_needs_is_refused(exported: ModelProto, of: str, missing: str) -> None:
    model = copied(exported)
    node = noted(model, of)
    if not missing:  # a cast at a site says its dtype and kind
        node, missing = next(n for n in model.graph.node if n.op_type == "Cast"), "qsdk.kind"
        node.metadata_props.add(key="qsdk.site", value="0:input")
        node.metadata_props.add(key="qsdk.dtype", value="float16")
    kept = [(entry.key, entry.value) for entry in node.metadata_props if entry.key != missing]
    del node.metadata_props[:]
    for name, text in kept:
        node.metadata_props.add(key=name, value=text)
    with pytest.raises(FileFormatError, match=f"lacks {missing}"):
        qsdk.quantize(model, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("qsdk.constant_sites", value) for value in ("[", "5", "null", "{}", "[[1]]")),
        *(("qsdk.encodings.file", value) for value in ("../e.json", "/e.json", "..", "")),
        ("qsdk.input.x.dtype", "int99"),
        *(("qsdk.input.x.scale", value) for value in ("0", "nan", "-1", "inf", "one")),
        ("qsdk.output.y.zero_point", "1.5"),
    ],
)
def test_a_damaged_note_of_a_model_is_refused_by_name(exported: ModelProto, tmp_path: Path, key: str, value: str):
    model, path = copied(exported), tmp_path / "model.onnx"
    model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    verbs: list[Callable[[], Any]] = [lambda: qsdk.validate(path), lambda: qsdk.quantize(path, None)]
    for verb in verbs:
        with pytest.raises(FileFormatError, match=rf"model\.onnx has {key} = .* damaged, export it again"):
            verb()


def test_notes_that_qsdk_writes_are_taken(exported: ModelProto) -> None:
    assert qsdk.validate(exported).summary["errors"] == 0
    assert qsdk.quantize(exported, None).coverage().rows
