"""MiniLM (BERT) and stories15M (Llama) with their published weights through the whole road."""

import onnx
import onnxruntime as ort
import pytest
import torch
import zoo_text
from onnx import numpy_helper
from pretrained_road import require_whole_road, travelled
from tiny_decoders import CACHE
from zoo_text import cosine, perplexity

import qsdk

pytestmark = [pytest.mark.network, pytest.mark.nightly]
WEIGHT_ONLY = qsdk.w4a16(block_size=32).override("*", activation="float32")


@pytest.fixture(scope="module")
def batches():
    return zoo_text.sentences(zoo_text.reviews(32)[0])


@pytest.fixture(scope="module")
def mini_lm(batches, tmp_path_factory):
    return travelled(zoo_text.mini_lm(), batches, qsdk.w8a8(), tmp_path_factory.mktemp("minilm"))


def test_mini_lm_at_w8a8_is_at_parity_and_means_the_same(mini_lm, batches):
    require_whole_road(mini_lm, batches[:1])
    exact, simulated, deployed = (run(batches) for run in (mini_lm.in_float, mini_lm.simulated, mini_lm.deployed))
    assert cosine(exact, simulated) >= 0.8  # min_max: outliers of a few channels take most of the grid
    assert abs(cosine(exact, deployed) - cosine(exact, simulated)) <= 0.03


def test_the_file_of_mini_lm_weighs_what_its_tensors_weigh(mini_lm):
    stored = onnx.load(mini_lm.path).graph.initializer
    tensors = sum(numpy_helper.to_array(tensor).nbytes for tensor in stored)
    assert mini_lm.path.stat().st_size <= 1.01 * tensors


def test_mini_lm_with_weights_of_4_bits_in_blocks_stores_no_zero_point(batches, tmp_path):
    road = travelled(zoo_text.mini_lm(), batches[:1], WEIGHT_ONLY, tmp_path)
    model = onnx.load(road.path)
    packed = [tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.INT4]
    assert len(packed) == 36
    read = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert [node.name for node in read if len(node.input) != 2] == []
    assert road.exported.summary["zero_point_bytes_saved"] > 0
    require_whole_road(road, batches[:1])
    assert cosine(road.in_float(batches), road.deployed(batches)) >= 0.9


@pytest.fixture(scope="module")
def llama():
    model = zoo_text.NextToken(zoo_text.stories()).eval()
    return model, zoo_text.told(model, 8, 128)


@pytest.mark.parametrize(("config", "allowed"), [(qsdk.w8a8(), 1.5), (WEIGHT_ONLY, 1.25)], ids=["w8a8", "w4 blocks"])
def test_stories_stay_fluent_in_every_form_and_at_every_length(llama, config, allowed, tmp_path):
    model, tokens = llama
    shapes = {"input_ids": {0: "batch", 1: "sequence"}}
    road = travelled(model, [tokens[:4, :-1]], config, tmp_path, dynamic_shapes=shapes)
    require_whole_road(road, [tokens[:2, :40]])
    exact = perplexity(road.in_float([tokens[:, :-1]]), tokens)
    assert exact < 3.5
    for run in (road.simulated, road.deployed):
        assert perplexity(run([tokens[:, :-1]]), tokens) <= allowed * exact


def test_stories_with_a_cache_that_comes_and_goes(llama, tmp_path):
    model, tokens = llama
    cached = zoo_text.WithCache(model.llama).eval()
    with torch.no_grad():
        layers = model.llama(input_ids=tokens[:2, :20], use_cache=True)[CACHE].layers
        past = tuple(tensor for layer in layers for tensor in (layer.keys, layer.values))
        expected = cached(tokens[:2, 20:21], past)[0]
    example = (tokens[:2, 20:21], past)
    shapes = ({0: "batch"}, tuple({0: "batch", 2: "past"} for _ in past))
    sim = qsdk.quantize(cached, example, qsdk.w8a8(), dynamic_shapes=shapes)
    qsdk.calibrate(sim, [example], progress=False)
    path = tmp_path / "cached.onnx"
    qsdk.export(sim, path)
    report = qsdk.check_parity(sim, path, [example], progress=False)
    assert report.summary["passed"], str(report)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    shorter = (tokens[:2, 12:13], *(tensor[:, :, :12] for tensor in past))
    logits = session.run(None, dict(zip(names, (x.numpy() for x in (tokens[:2, 20:21], *past)), strict=True)))[0]
    assert session.run(None, dict(zip(names, (x.numpy() for x in shorter), strict=True)))[0].shape == logits.shape
    assert cosine(torch.from_numpy(logits[:, 0]), expected[:, 0]) >= 0.98
