"""What users bring from training code: labels in batches, endless loaders, names of PyTorch classes."""

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from qdq_models import classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qsdk

X, Y = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(12)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.LayerNorm(5))


class TwoInputs(nn.Module):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ids * mask


def test_labels_of_tuples_and_mappings_are_dropped():
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    sim = qsdk.quantize(network(), X[:4])
    qsdk.calibrate(sim, qsdk.inputs_only(loader), progress=False)
    plain = qsdk.quantize(network(), X[:4])
    qsdk.calibrate(plain, X.split(4), progress=False)
    assert sim.encodings == plain.encodings
    batches = qsdk.inputs_only(loader)
    assert len(batches) == len(list(batches)) == len(list(batches)) == 3
    mapped = qsdk.inputs_only([{"x": X, "label": Y, "labels": Y, "target": Y}])
    assert [list(batch) for batch in mapped] == [["x"]]
    assert list(qsdk.inputs_only([[1]])) == [(1,)]
    assert next(iter(qsdk.inputs_only([X]))) is X


def test_a_sim_tells_its_inputs(tmp_path: Path):
    ids = torch.ones(2, 3)
    sim = qsdk.quantize(TwoInputs(), (ids, ids))
    assert [len(batch) for batch in qsdk.inputs_only([(ids, ids, Y)], sim)] == [2]
    assert [len(batch) for batch in qsdk.inputs_only([(ids, ids)], sim)] == [2]
    keywords = qsdk.quantize(TwoInputs(), {"ids": ids, "mask": ids})
    (batch,) = qsdk.inputs_only([{"ids": ids, "mask": ids, "weights": Y}], keywords)
    assert list(batch) == ["ids", "mask"]
    onnx.save(classifier(), tmp_path / "float.onnx")
    opened = qsdk.quantize(str(tmp_path / "float.onnx"))
    (batch,) = qsdk.inputs_only([{"x": X, "class": Y}], opened)
    assert list(batch) == ["x"]
    with pytest.raises(qsdk.DataError, match="got one batch; wrap it in a list"):
        qsdk.inputs_only(X)
    with pytest.raises(qsdk.ConfigError, match="sim"):
        qsdk.inputs_only([X], network())


def test_calibrate_stops_after_so_many_batches(tmp_path: Path):
    onnx.save(classifier(), tmp_path / "float.onnx")
    for model in (network(), str(tmp_path / "float.onnx")):
        seen = itertools.count()
        endless = (X.numpy() * (1 + next(seen)) for _ in itertools.repeat(None))
        batches = endless if isinstance(model, str) else map(torch.from_numpy, endless)
        sim, plain = (qsdk.quantize(model, X) for _ in range(2))
        qsdk.calibrate(sim, batches, max_batches=2, progress=False)
        assert next(seen) == 2
        qsdk.calibrate(plain, [X, X * 2], progress=False)
        assert sim.encodings == plain.encodings
        with pytest.raises(qsdk.ConfigError, match="max_batches=0 leaves no data"):
            qsdk.calibrate(sim, [X], max_batches=0, progress=False)
        with pytest.raises(qsdk.DataError, match="got one batch; wrap it in a list"):
            qsdk.calibrate(sim, np.zeros((2, 3, 8, 8)) if isinstance(model, str) else X, max_batches=1, progress=False)


@pytest.mark.slow
def test_rules_take_the_names_of_torch_classes(tmp_path: Path):
    config = qsdk.w8a8().override(op_type="Linear", weight="int4").override(op_type="Conv2d", weight="int16")
    sim = qsdk.quantize(network(), X, config.skip(op_type="LayerNorm"))
    decided = sim.plan.decisions
    assert decided["3:weight"].spec.dtype.name == "int4"
    assert decided["0:weight"].spec.dtype.name == "int16"
    assert not decided["4:output"].quantized
    onnx.save(classifier(), tmp_path / "float.onnx")
    opened = qsdk.quantize(str(tmp_path / "float.onnx"), None, config)
    assert opened.plan.decisions["head:weight"].spec.dtype.name == "int4"
    assert opened.plan.decisions["stem:weight"].spec.dtype.name == "int16"
    with pytest.raises(qsdk.ConfigError, match="no op of that type"):
        qsdk.quantize(network(), X, qsdk.w8a8().override(op_type="Embedding", weight="int4"))
