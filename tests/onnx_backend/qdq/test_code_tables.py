"""Look-ups in quantized tables are written on codes, and read back as the sites that the sim has."""

import numpy as np
import onnx
import pytest
import torch
from runtime_probes import LEVELS, opened
from torch import nn

import qsdk


class Words(nn.Module):
    """Two tables, one of them read twice, and one that a Linear reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Embedding(12, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Gives scores of words."""
        places = self.places(torch.arange(ids.shape[1]))
        return self.head(torch.tanh(self.words(ids) + places + self.places(ids % 12)))


def written(path, config=None, dialect="onnxruntime"):
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 12))
    sim = qsdk.quantize(Words().eval(), ids, config)
    qsdk.calibrate(sim, [ids], progress=False)
    qsdk.export(sim, path, dialect=dialect)
    return sim, ids, onnx.load(path)


def whole_tables(model):
    """Names of the tables that are dequantized whole and then looked up."""
    made = {node.output[0]: node for node in model.graph.node if node.op_type == "DequantizeLinear"}
    return [node.name for node in model.graph.node if node.op_type == "Gather" and node.input[0] in made]


@pytest.mark.parametrize(
    "config",
    [qsdk.w8a8(), qsdk.w8a16(), qsdk.w8a8().override("*", op_type="Gather", per_channel=True)],
    ids=["w8a8", "w8a16", "per channel"],
)
def test_no_table_is_dequantized_whole_and_every_verb_reads_the_file(config, tmp_path):
    sim, ids, model = written(tmp_path / "model.onnx", config)
    assert whole_tables(model) == []
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", [ids], progress=False)
    assert (parity.summary["passed"], parity.summary["weights_max_lsb"]) == (True, 0)
    assert qsdk.validate(tmp_path / "model.onnx").summary == {"errors": 0, "warnings": 0}
    again = qsdk.quantize(tmp_path / "model.onnx")
    assert set(again.encodings) == set(sim.encodings)
    qsdk.export(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


def test_it_computes_what_the_whole_tables_compute(tmp_path):
    _, ids, model = written(tmp_path / "model.onnx")
    _, _, plain = written(tmp_path / "plain.onnx", dialect="onnx")
    assert len(whole_tables(plain)) == 3
    feed = {plain.graph.input[0].name: ids.numpy()}
    for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
        np.testing.assert_array_equal(opened(model, level).run(None, feed)[0], opened(plain, level).run(None, feed)[0])


def test_a_table_whose_rows_have_scales_of_their_own_is_left_whole(tmp_path):
    """Its scales would have to be looked up too."""
    rows = qsdk.w8a8().override("places", per_channel=True)
    sim, ids, model = written(tmp_path / "model.onnx", rows)
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [ids], progress=False).summary["passed"]
    scales = {t.name: list(t.dims) for t in model.graph.initializer if t.name.startswith("places:weight/scale")}
    assert (len(whole_tables(model)) > 0) == (list(scales.values()) == [[12]])


def test_to_integer_takes_the_file(tmp_path):
    _, ids, _ = written(tmp_path / "model.onnx")
    report = qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx", data=[ids], progress=False)
    assert report.summary["float_tensors"] == 0
