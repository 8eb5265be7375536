"""MiniLM (BERT) and stories15M (Llama) with their published weights on integers only: attention, norms and all."""

import onnx
import onnxruntime as ort
import pytest
import torch
import zoo_text
from pretrained_road import travelled
from zoo_text import cosine, perplexity

import qsdk
from onnx_backend.integer.verify.integer_only import integer_findings

pytestmark = [pytest.mark.network, pytest.mark.nightly]


def on_integers(path, batches):
    """The first output of an integer-only model for batches of integer tensors by name."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [info.name for info in session.get_inputs()]
    runs = [session.run(None, {name: batch[name].numpy() for name in names})[0] for batch in batches]
    return torch.cat([torch.from_numpy(found) for found in runs])


def require_integers(report, path):
    assert report.summary["float_tensors"] == 0
    assert report.summary["operations_max_lsb"] <= 1
    assert report.summary["operations_differing"] <= 1e-4
    assert integer_findings(onnx.load(path)) == []


def test_mini_lm_means_the_same_on_integers(tmp_path):
    batches = zoo_text.sentences(zoo_text.reviews(32)[0])
    road = travelled(zoo_text.mini_lm(), batches, qsdk.w8a8(), tmp_path)
    path = tmp_path / "integer.onnx"
    require_integers(qsdk.to_integer(road.path, path), path)
    found = on_integers(path, batches)
    exact, simulated = road.in_float(batches), road.simulated(batches)
    assert abs(cosine(exact, found) - cosine(exact, simulated)) <= 0.03


def test_stories_stay_fluent_on_integers(tmp_path):
    model = zoo_text.NextToken(zoo_text.stories()).eval()
    tokens = zoo_text.told(model, 4, 65)
    road = travelled(model, [tokens[:2, :-1]], qsdk.w8a8(), tmp_path)
    path = tmp_path / "integer.onnx"
    require_integers(qsdk.to_integer(road.path, path), path)
    found = on_integers(path, [{"input_ids": tokens[i : i + 2, :-1]} for i in (0, 2)])
    assert perplexity(found, tokens) <= 1.5 * perplexity(road.in_float([tokens[:, :-1]]), tokens)
