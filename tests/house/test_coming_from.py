"""The pages for those who come from another tool: every name is there, and every counterpart exists."""

import ast
import re

import pytest
from pages import DOCS

import qsdk
from qsdk.core.run_options import keywords_of

PAGES = sorted((DOCS / "coming_from").glob("*.md"))
TEXT = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
AIMET = """
    QuantizationSimModel compute_encodings set_and_freeze_param_encodings load_encodings load_encodings_to_sim
    encodings_to_onnx_qdq to_onnx_qdq from_onnx_qdq quantizer_state_dict set_percentile_value set_tensor_precision
    exclude_param_from_quantization fold_param_quantizers compute_encodings_for_sims clamp_activation_encodings
    QuantScheme.post_training_tf QuantScheme.post_training_tf_enhanced QuantizationDataType prepare_model ModelValidator
    apply_seq_mse apply_adaround AdaroundParameters AdaScale SpinQuant GPTVQ OmniQuant
    choose_mixed_precision analyze_mixed_precision_sensitivity apply_amp MixedPrecisionConfigurator
    flip_layers_to_higher_precision fold_all_batch_norms fold_all_batch_norms_to_scale fold_all_batch_norms_to_weight
    reestimate_bn_stats equalize_model CrossLayerScaling HighBiasFold QuantAnalyzer analyze_per_layer_sensitivity
    visualize_stats LayerOutputUtil set_blockwise_quantization_for_weights set_lpbq_for_params
    set_grouped_blockwise_quantization_for_weights AutoQuant QuantSimConfigurator _torch.encodings
"""
OTHERS = {
    "torchao": """prepare_pt2e convert_pt2e prepare_qat_pt2e convert_qat prepare_fx XNNPACKQuantizer quantize_ QATConfig
        Int8DynamicActivationInt4WeightConfig IntxWeightOnlyConfig torchao.quantization.pt2e
        torch.ao.quantization.quantize_pt2e""",
    "onnxruntime": """quantize_static quantize_dynamic CalibrationDataReader QuantFormat quant_pre_process QuantizeBias
        DedicatedQDQPair AddQDQPairToWeight CalibMovingAverage CalibTensorRangeSymmetric MinimumRealRange""",
    "brevitas": """QuantConv2d calibration_mode export_onnx_qcdq gptq_mode Int8WeightPerTensorFloat QuantTensor
        Uint8ActPerTensorFloat Int32Bias TruncAvgPool2d""",
    "nncf": """nncf.quantize quantize_with_accuracy_control compress_weights IgnoredScope CompressWeightsMode
        AdvancedQuantizationParameters TargetDevice batch_norm_adaptation nncf.prune""",
    "modelopt": """mtq.quantize auto_quantize INT8_DEFAULT_CFG disable_quantizer enable_quantizer FP8_KV_CFG
        INT8_WEIGHT_ONLY_CFG compute_quantization_mse mtq.compress""",
}


@pytest.mark.parametrize(
    ("page", "name"),
    [("aimet", name) for name in AIMET.split()]
    + [(page, name) for page, names in OTHERS.items() for name in names.split()],
)
def test_a_public_name_of_the_tool_is_on_its_page(page: str, name: str):
    assert name in TEXT[page]


def expressions() -> list[str]:
    """Our side of the tables, what stands between back quotes and is Python that speaks of qsdk, a config or a sim."""
    rows = [line for text in TEXT.values() for line in text.splitlines() if line.startswith("|")]
    ours = {quoted for row in rows for quoted in re.findall(r"`([^`]+)`", "|".join(row.split("|")[2:]))}
    return sorted(quoted for quoted in ours if re.match(r"(with |print\()?(qsdk|sim)\.", quoted))


def parsed(expression: str) -> ast.AST:
    return ast.parse(expression + (": pass" if expression.startswith("with ") else ""))


def owner_of(name: ast.Attribute) -> object:
    """What an attribute is looked up on: qsdk, a config that a call gives, a sim, or nothing known."""
    if isinstance(name.value, ast.Name):
        return {"qsdk": qsdk, "sim": qsdk.QuantSim}.get(name.value.id)
    if isinstance(name.value, ast.Attribute):
        above = owner_of(name.value)
        return getattr(above, name.value.attr, None)
    return qsdk.QuantConfig if isinstance(name.value, ast.Call) else None


@pytest.mark.parametrize("expression", expressions())
def test_a_counterpart_exists_and_takes_what_it_is_given(expression: str):
    nodes = list(ast.walk(parsed(expression)))
    names = [node for node in nodes if isinstance(node, ast.Attribute)]
    assert names
    for name in names:
        owner = owner_of(name)
        if owner not in (None, qsdk.QuantSim) or (owner is qsdk.QuantSim and name.attr not in ("model", "plan")):
            assert hasattr(owner, name.attr), f"{name.attr} of {expression}"
    for call in (node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        owner = owner_of(call.func)
        if owner is not None:
            known = keywords_of(getattr(owner, call.func.attr))
            assert {keyword.arg for keyword in call.keywords} <= set(known), expression


def test_the_tables_hold_many_counterparts():
    assert len(expressions()) > 80
