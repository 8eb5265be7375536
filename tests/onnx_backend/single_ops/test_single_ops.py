"""Norms, rotary embeddings and attention as single operators: the standard's evaluator computes what the sim does."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch
import transformers
from onnx.reference import ReferenceEvaluator
from tiny_decoders import decoder, gpt2, tokens
from torch import nn

import qsdk
from onnx_backend.single_ops.write import write_single_ops

W8 = qsdk.weight_only("int8")
SINGLE = ("Attention", "RMSNormalization", "RotaryEmbedding")


def sim_of(model: nn.Module, example: Any, config: qsdk.QuantConfig) -> qsdk.QuantSim:
    """Return a sim that is calibrated on its example."""
    sim = qsdk.quantize(model, example, config)
    qsdk.calibrate(sim, [example], progress=False)
    return sim


def counted(path: Path) -> dict[str, int]:
    """Return how many of each single operator a file has."""
    found = Counter(node.op_type for node in onnx.load(path).graph.node)
    return {name: found[name] for name in SINGLE if found[name]}


def evaluated(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return the first output as the evaluator of onnx computes it."""
    wanted = {value.name for value in model.graph.input}
    given = {name: np.asarray(x) for name, x in feeds.items() if name in wanted}
    if any(node.op_type == "GatherElements" for node in model.graph.node):  # which fails in it on some sizes
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return ort.InferenceSession(model.SerializeToString(), options).run(None, given)[0]
    with np.errstate(invalid="ignore"):  # of rows in which everything is hidden
        return ReferenceEvaluator(model).run(None, given)[0]


def test_a_llama_of_weights_alone_has_single_operators_that_compute_what_its_sim_does(tmp_path: Path):
    example = {"input_ids": tokens(1)}
    sim = sim_of(decoder("Llama", num_hidden_layers=1), example, W8)
    path = tmp_path / "llama.onnx"
    report = qsdk.export(sim, path, dialect="onnx", opset=23)
    assert report.summary["single_operators"] == {"Attention": 1, "RMSNormalization": 3, "RotaryEmbedding": 2}
    assert counted(path) == report.summary["single_operators"]
    assert "written_out" not in report.summary
    parity = qsdk.check_parity(sim, path, [{"input_ids": tokens(2, batch=3)}], progress=False)
    assert parity.summary["passed"]
    assert parity.summary["weights_max_lsb"] == 0
    assert parity.summary["sqnr_db"] > 120
    assert "nodes written in another way" not in parity.summary
    wanted = sim(**example).logits.numpy(force=True)
    np.testing.assert_allclose(evaluated(onnx.load(path), example), wanted, atol=1e-6)

    again = qsdk.quantize(str(path), None)
    np.testing.assert_allclose(again(example["input_ids"].numpy())[0], wanted, atol=1e-6)
    qsdk.export(again, tmp_path / "again.onnx", dialect="onnx", opset=23)
    assert list(onnx.load(tmp_path / "again.onnx").graph.node) == list(onnx.load(path).graph.node)


def test_below_opset_23_and_for_onnx_runtime_the_nodes_stay(tmp_path: Path):
    sim = sim_of(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), torch.randn(4, 8), W8)
    for options in ({"dialect": "onnx", "opset": 22}, {"dialect": "onnxruntime", "opset": 23}):
        report = qsdk.export(sim, tmp_path / "norm.onnx", **options)
        assert counted(tmp_path / "norm.onnx") == {}
        assert "single_operators" not in report.summary


@pytest.mark.slow
def test_quantizers_inside_keep_attention_written_out_and_integers_go_on(tmp_path: Path):
    example = {"input_ids": tokens(1)}
    sim = sim_of(decoder("Llama", num_hidden_layers=1), example, qsdk.w8a8())
    path = tmp_path / "llama.onnx"
    qsdk.export(sim, path, dialect="onnx", opset=23)
    assert counted(path) == {"RMSNormalization": 3, "RotaryEmbedding": 2}
    parity = qsdk.check_parity(sim, path, [{"input_ids": tokens(2)}], runtime="onnxruntime", progress=False)
    assert parity.summary["passed"]
    assert not [row for row in qsdk.validate(path).rows if row["severity"] == "error"]
    report = qsdk.to_integer(path, tmp_path / "llama.int.onnx")
    assert report.summary["float_tensors"] == 0


def _bert(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    return transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, **sizes, **changes))


def _vit() -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16, "patch_size": 4}
    return transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=1, **sizes))


_PADDED = {"input_ids": tokens(1, 2), "attention_mask": torch.tensor([[1] * 10, [0] * 4 + [1] * 6])}
#: model, example -> the operators of one layer, and of the head
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "llama, padded on the left": (lambda: decoder("Llama", num_hidden_layers=1), _PADDED, {"Attention": 1}),
    "qwen2": (lambda: decoder("Qwen2", num_hidden_layers=1), {"input_ids": tokens(1)}, {"RotaryEmbedding": 2}),
    "qwen3": (lambda: decoder("Qwen3", num_hidden_layers=1), {"input_ids": tokens(1)}, {"RMSNormalization": 5}),
    "gemma": (lambda: decoder("Gemma", num_hidden_layers=1), {"input_ids": tokens(1)}, {"RMSNormalization": 3}),
    "gemma2": (lambda: decoder("Gemma2", num_hidden_layers=1, sliding_window=6), {"input_ids": tokens(1)}, {}),
    "cohere": (lambda: decoder("Cohere", num_hidden_layers=1), {"input_ids": tokens(1)}, {"Attention": 1}),
    "gpt2": (gpt2, {"input_ids": tokens(1)}, {"Attention": 2}),
    "bert, padded": (_bert, _PADDED, {"Attention": 1}),
    "vit": (_vit, {"pixel_values": torch.randn(2, 3, 16, 16)}, {"Attention": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("opset", [23, 25])
def test_the_evaluator_of_onnx_computes_what_the_sim_does(name: str, opset: int, tmp_path: Path):
    make, example, wanted = ARCHITECTURES[name]
    torch.manual_seed(0)
    sim = sim_of(make().eval(), example, W8)
    path = tmp_path / "model.onnx"
    qsdk.export(sim, path, dialect="onnx", opset=opset, check=False)
    assert wanted.items() <= counted(path).items()
    parity = qsdk.check_parity(sim, path, [example], progress=False)
    assert parity.summary["passed"]
    np.testing.assert_allclose(evaluated(onnx.load(path), example), sim(**example)[0].numpy(force=True), atol=2e-6)


@pytest.mark.slow
def test_a_mask_of_the_lowest_number_becomes_an_operator_only_where_onnx_runtime_reads_it_right(tmp_path: Path):
    sim = sim_of(decoder("Llama", num_hidden_layers=1, attn_implementation="eager"), _PADDED, W8)
    path = tmp_path / "llama.onnx"
    report = qsdk.export(sim, path, dialect="onnx", opset=24, check=False)
    assert "Attention" not in counted(path)
    assert report.summary["written_out"] == [
        "Attention: its mask hides by -3.4e+38: where that hides all, ONNX Runtime computes it right from opset 25 on "
        "(1 in the file)"
    ]
    qsdk.export(sim, path, dialect="onnx", opset=25, check=False)
    assert counted(path)["Attention"] == 1
    assert qsdk.check_parity(sim, path, [_PADDED], progress=False).summary["passed"]


# --- single groups, as text ----------------------------------------------------------------------------------------

_NORM = """<ir_version: 11, opset_import: ["" : 23]>
g (float[2,3,4] x) => (float[2,3,4] y) <float[4] gain = {{0.5, 1, 2, 4}}, float two = {{2}}, float one = {{1}},
  float epsilon = {{0.01}}, int64[1] last = {{-1}}> {{
  square = Pow (x, two)
  mean = ReduceMean (square, last)
  sum = Add (mean, epsilon)
  root = Sqrt (sum)
  {body}
}}"""
_TURN = """<ir_version: 11, opset_import: ["" : 23]>
g (float[2,2,3,4] x) => (float[2,2,3,4] y) <float[3,4] cos = {{{cos}}}, float[3,4] sin = {{{sin}}},
  int64[1] zero = {{0}}, int64[1] half = {{2}}, int64[1] end = {{4}}, int64[1] last = {{3}}> {{
  a = Slice (x, zero, half, last)
  b = Slice (x, half, end, last)
  c = Neg (b)
  turned = Concat <axis = -1> (c, a)
  left = Mul (x, cos)
  right = Mul (turned, sin)
  y = Add (left, right)
}}"""


def rewritten(text: str, **feeds: Any) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a model with its groups as single operators, which must compute what the text does, and the facts."""
    model = onnx.parser.parse_model(text)
    before = evaluated(model, feeds)
    facts = write_single_ops(model)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(evaluated(model, feeds), before, rtol=2e-6, atol=2e-6)
    return model, facts


def values(*shape: int) -> np.ndarray[Any, Any]:
    """Return random numbers."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "body",
    [
        "normed = Div (x, root)\n y = Mul (normed, gain)",
        "factor = Reciprocal (root)\n normed = Mul (x, factor)\n y = Mul (gain, normed)",
        "normed = Div (x, root)\n more = Add (gain, one)\n y = Mul (normed, more)",
        "y = Div (x, root)",
    ],
)
def test_every_spelling_of_a_norm_is_one_operator(body: str):
    model, facts = rewritten(_NORM.format(body=body), x=values(2, 3, 4))
    assert facts == {"single_operators": {"RMSNormalization": 1}, "written_out": []}
    assert {node.op_type for node in model.graph.node} <= {"RMSNormalization", "Add"}


def test_a_norm_whose_root_leaves_the_model_stays_written_out():
    text = _NORM.format(body="normed = Div (x, root)\n y = Mul (normed, gain)").replace(
        "float[2,3,4] y)", "float[2,3,4] y, float[2,3,1] root)"
    )
    _, facts = rewritten(text, x=values(2, 3, 4))
    assert facts["single_operators"] == {}


def test_a_rotary_embedding_is_one_operator_only_if_both_halves_turn_by_the_same_angles():
    alike, other = ", ".join("0.1, 0.2, 0.1, 0.2" for _ in range(3)), ", ".join("0.1, 0.2, 0.3, 0.4" for _ in range(3))
    model, facts = rewritten(_TURN.format(cos=alike, sin=alike), x=values(2, 2, 3, 4))
    assert facts["single_operators"] == {"RotaryEmbedding": 1}
    assert "Neg" not in {node.op_type for node in model.graph.node}
    _, facts = rewritten(_TURN.format(cos=alike, sin=other), x=values(2, 2, 3, 4))
    assert facts["single_operators"] == {}
    assert facts["written_out"] == [
        "RotaryEmbedding: nothing shows that its tables have the same angles for both parts (1 in the file)"
    ]


_ATTENTION = """<ir_version: 11, opset_import: ["" : 23]>
g (float[2,4,3,8] q, float[2,2,5,8] k, float[2,2,5,8] v, float[2,1,1,5] bias) => (float[2,4,3,8] y) <
  float factor = {{0.3}}, float cap = {{2}}, float zero = {{0}}, int64[1] two = {{2}},
  int64[5] wide = {{2, 2, 2, 5, 8}}, int64[4] heads = {{2, 4, 5, 8}}> {{
  k1 = Unsqueeze (k, two)
  k2 = Expand (k1, wide)
  k3 = Reshape (k2, heads)
  v1 = Unsqueeze (v, two)
  v2 = Expand (v1, wide)
  v3 = Reshape (v2, heads)
  k4 = Transpose <perm = [0, 1, 3, 2]> (k3)
  k5 = Mul (k4, factor)
  q1 = Mul (q, factor)
  scores = MatMul (q1, k5)
  {body}
}}"""
_SHARES = "shares = Softmax <axis = -1> ({scores})\n nan = IsNaN (shares)\n kept = Where (nan, zero, shares)\n"


@pytest.mark.parametrize("opset", [23, 24, 25])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("capped", [False, True])
def test_attention_with_repeated_heads_a_cap_and_a_mask_is_one_operator(opset: int, masked: bool, capped: bool):
    scores, body = "scores", ""
    if capped:
        body, scores = "share = Div (scores, cap)\n bent = Tanh (share)\n capped = Mul (bent, cap)\n", "capped"
    if masked:
        body, scores = body + f"masked = Add ({scores}, bias)\n", "masked"
    text = _ATTENTION.format(body=body + _SHARES.format(scores=scores) + "y = MatMul (kept, v3)")
    bias = np.array([[0, 0, -np.inf, 1, 2], [-np.inf] * 5], np.float32).reshape(2, 1, 1, 5)
    feeds = {"q": values(2, 4, 3, 8), "k": values(2, 2, 5, 8) + 1, "v": values(2, 2, 5, 8) - 1, "bias": bias}
    model, facts = rewritten(text.replace('["" : 23]', f'["" : {opset}]'), **feeds)
    assert facts["single_operators"] == {"Attention": 1}
    kinds = {node.op_type for node in model.graph.node}
    assert kinds == {"Attention"} | ({"Shape", "Concat", "Expand"} if masked and opset < 25 else set())
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, feeds)[0], evaluated(model, feeds), atol=2e-6)


def test_attention_that_is_nan_where_all_is_hidden_stays_written_out():
    body = "masked = Add (scores, bias)\n shares = Softmax <axis = -1> (masked)\n y = MatMul (shares, v3)"
    feeds = {
        "q": values(2, 4, 3, 8),
        "k": values(2, 2, 5, 8),
        "v": values(2, 2, 5, 8),
        "bias": np.zeros((2, 1, 1, 5), "f"),
    }
    _, facts = rewritten(_ATTENTION.format(body=body), **feeds)
    assert facts["written_out"] == [
        "Attention: its softmax is NaN where its mask hides all, and the operator's is 0 (1 in the file)"
    ]


def test_attention_whose_shares_are_read_elsewhere_stays_written_out():
    body = _SHARES.format(scores="scores") + "y = MatMul (kept, v3)"
    text = _ATTENTION.format(body=body).replace("float[2,4,3,8] y)", "float[2,4,3,8] y, float[2,4,3,5] kept)")
    feeds = {
        "q": values(2, 4, 3, 8),
        "k": values(2, 2, 5, 8),
        "v": values(2, 2, 5, 8),
        "bias": np.zeros((2, 1, 1, 5), "f"),
    }
    _, facts = rewritten(text, **feeds)
    assert facts["single_operators"] == {}
    assert facts["written_out"] == ["Attention: 'kept' inside it leaves the model (1 in the file)"]


def test_what_is_not_float32_throughout_stays_written_out():
    text = _NORM.format(body="normed = Div (x, root)\n y = Mul (normed, gain)").replace("float", "double")
    _, facts = rewritten(text, x=values(2, 3, 4).astype(np.float64))
    assert facts["written_out"] == ["RMSNormalization: it is not computed in float32 throughout (1 in the file)"]
