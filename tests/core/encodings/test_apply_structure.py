"""`apply_encodings` onto the float exports of a module: sites are found on structure, from the encodings file alone."""

import json
import logging
import shutil
import warnings

import numpy as np
import onnx
import pytest
import torch
from foreign_models import integers
from zoo_models import ZOO, distinct

import qsdk
from onnx_backend.runtime.session import simulation_session
from qsdk import FileFormatError, calibrate, export, quantize, w8a8
from qsdk.core.encodings.qsdk_format import StoredEncodings
from qsdk.core.encodings.tensors import match_by_structure
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.graph_json import graph_from_plain, graph_from_text, graph_to_plain, graph_to_text
from qsdk.demo.model import load_pretrained

IN_CI, NIGHTLY = ("encoder",), [name for name in (*ZOO, "demo") if name not in ("mobile", "encoder")]
NETS = [
    "mobile",
    *(pytest.param(name, marks=pytest.mark.slow) for name in IN_CI),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY),
]
#: written by the exporter with lists of tensors or slices of weights where its optimizer leaves one op
RAW_ONLY = ("gpt", "lstm", "gru")


@pytest.fixture(autouse=True)
def _quiet():
    """No words of the exporter about packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def net_of(name):
    if name == "demo":
        return load_pretrained().eval(), (torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)),)
    make, inputs = ZOO[name]
    return distinct(make()), tuple(inputs(0))


class Exports:
    """Of each network: its inputs, what its quantized export computes, and a folder with `q.onnx`; made once."""

    def __init__(self, folder):
        self.folder = folder
        self.made = {}

    def __call__(self, name):
        if name not in self.made:
            net, inputs = net_of(name)
            folder = self.folder / name
            folder.mkdir()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the exporter warns about itself
                sim = quantize(net, inputs, w8a8())
                calibrate(sim, [inputs], progress=False)
                export(sim, folder / "q.onnx")
            self.made[name] = folder, net, inputs, computed(folder / "q.onnx", inputs)
        return self.made[name]

    def float_model(self, name, *, optimize=True):
        folder, net, inputs, _ = self(name)
        path = folder / f"float {optimize}.onnx"
        if not path.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(net, inputs, path, dynamo=True, verbose=False, optimize=optimize)
        return path


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return Exports(tmp_path_factory.mktemp("exports"))


def computed(path, inputs):
    session = simulation_session(onnx.load(path))
    feeds = dict(zip([i.name for i in session.get_inputs()], [x.numpy() for x in inputs], strict=True))
    return session.run(None, feeds)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_the_encodings_file_alone_gives_what_the_quantized_export_computes(name, exports, tmp_path):
    """Bit for bit: the network that torch exports, and the file beside the Q/DQ model, which is not looked at."""
    folder, _, inputs, wanted = exports(name)
    codes = {str(stored) for stored in integers(onnx.load(folder / "q.onnx")).values()}
    file = shutil.copy(folder / "q.encodings.json", tmp_path / "alone.json")
    for optimize in (True, False):
        if not optimize and name in RAW_ONLY:
            continue
        source = exports.float_model(name, optimize=optimize)
        report = qsdk.apply_encodings(source, file, tmp_path / "out.onnx")
        for got, want in zip(computed(tmp_path / "out.onnx", inputs), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
        assert report.summary["unmatched"] == 0
        if not optimize:  # else what was looked up or expanded is stored as well
            assert {str(stored) for stored in integers(onnx.load(tmp_path / "out.onnx")).values()} <= codes


@pytest.mark.slow
def test_the_rows_of_a_table_that_the_exporter_looked_up_are_quantized_as_the_table_and_as_rows(exports, tmp_path):
    folder, net, _, _ = exports("bert")
    report = qsdk.apply_encodings(exports.float_model("bert"), folder / "q.encodings.json", tmp_path / "out.onnx")
    (row,) = [row for row in report.rows if row["state"] == "absorbed"]
    assert row["name"] == "positions:weight"
    assert row["detail"] == "the model stores positions:output instead, which is quantized twice"
    encodings = quantize(folder / "q.onnx", None, None).encodings
    table = encodings["positions:weight"].fake_quantize(net.state_dict()["positions.weight"].numpy())
    wanted = encodings["positions:output"].quantize(table[:8])
    (_, codes), *_ = integers(onnx.load(tmp_path / "out.onnx"))[row["site"]]
    np.testing.assert_array_equal(codes, wanted)


@pytest.mark.parametrize("name", ["lstm", pytest.param("gru", marks=pytest.mark.nightly)])
def test_an_export_of_other_ops_is_refused_by_name_and_writes_nothing(name, exports, tmp_path):
    folder, *_ = exports(name)
    source = exports.float_model(name, optimize=False)
    with pytest.raises(FileFormatError, match=r"(?s)no tensor of that name: layer:weight_ih_l0 .*optimize=True"):
        qsdk.apply_encodings(source, folder / "q.encodings.json", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_another_network_is_refused(exports, tmp_path):
    folder, *_ = exports("mobile")
    with pytest.raises(
        FileFormatError, match=r"does not fit the model:\n  \d+ no tensor of that name: x:input \(nothing here"
    ):
        qsdk.apply_encodings(exports.float_model("bert"), folder / "q.encodings.json", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.slow
def test_an_entry_that_was_added_by_hand_means_a_tensor_by_name(exports, tmp_path):
    folder, *_ = exports("mobile")
    data = json.loads((folder / "q.encodings.json").read_text())
    del data["encodings"]["head:weight"], data["encodings"]["head:bias"]
    data["encodings"]["head.weight"] = {"dtype": "int8", "scale": [0.01]}
    (tmp_path / "edited.json").write_text(json.dumps(data))
    report = qsdk.apply_encodings(exports.float_model("mobile"), tmp_path / "edited.json", tmp_path / "out.onnx")
    (row,) = [row for row in report.rows if row["name"] == "head.weight"]
    assert (row["state"], row["dtype"], row["site"]) == ("applied", "int8", "node_linear:weight")
    # the file's own entries are found on structure still, under the export's own names
    assert {row["name"]: row["site"] for row in report.rows}["mean.0:output"] == "node_mean_1:output"


@pytest.mark.parametrize("name", ["mobile", pytest.param("encoder", marks=pytest.mark.slow)])
def test_a_graph_survives_json_as_far_as_structure_goes(name, exports):
    sim = quantize(exports(name)[0] / "q.onnx", None, None)
    plain = graph_to_plain(sim.graph)
    again = graph_from_text(graph_to_text(sim.graph), "e.json")
    assert json.dumps(plain, allow_nan=False)
    assert graph_to_plain(again) == plain
    assert again.sites == sim.graph.sites
    target = quantize(exports.float_model(name), None, w8a8()).graph
    file = StoredEncodings(sim.encodings)
    placed = match_by_structure(file, again, target)
    assert placed == match_by_structure(file, sim.graph, target)
    assert len(placed.encodings) > 20


def damaged(change):
    graph = {"inputs": [0], "outputs": [2], "tensors": [["float32", 0, "x:input"], ["float32", 1, None, [4]]]}
    graph |= {"tensors": [*graph["tensors"], ["float32", 0, "y:output"]], "ops": [["Add", [2, 1], [2]]]}
    change(graph)
    return graph


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph.pop("ops"), "KeyError"),
        (lambda graph: graph.update(ops=[["Add", [0, 1], [2]]]), "Add reads what nothing before it makes"),
        (lambda graph: graph.update(outputs=[7]), "names a tensor that is not there"),
        (lambda graph: graph["tensors"][2].__setitem__(2, "x:input"), "a site twice"),
        (lambda graph: graph["tensors"][1].__setitem__(3, [None, [1]]), "#1 has no shape or dtype"),
        (lambda graph: graph["tensors"][1].__setitem__(0, 5), "TypeError|#1 has no shape or dtype"),
        (lambda graph: graph.update(tensors="many"), "Error"),
        (lambda graph: graph["ops"][0].append(3), "TypeError"),
    ],
)
def test_a_damaged_graph_is_refused_with_the_file(change, message):
    assert graph_from_plain(damaged(lambda graph: None), "e.json").outputs == [2]
    with pytest.raises(FileFormatError, match=rf"the graph in the provenance of e\.json is damaged \(.*{message}"):
        graph_from_plain(damaged(change), "e.json")


def test_the_graph_adds_little_to_a_model_file(exports):
    said = {entry.key: entry.value for entry in onnx.load(exports("bert")[0] / "q.onnx").metadata_props}
    text = json.loads(said["qsdk.encodings"])["provenance"]["graph"]
    assert len(text) < 40 * len(graph_from_text(text, "e.json").ops)


@pytest.mark.parametrize("text", ["", "no base 85", "AAAA", 5, graph_to_text(Graph([], [], [], []))[:8]])
def test_a_graph_that_cannot_be_unpacked_is_refused_with_the_file(text):
    with pytest.raises(FileFormatError, match=r"the graph in the provenance of e\.json is damaged"):
        graph_from_text(text, "e.json")
