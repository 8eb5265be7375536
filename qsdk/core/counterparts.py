"""What the names of other quantization tools are called in qsdk, for whoever types one of them."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

_RANGES = 'qsdk.calibrate(sim, batches, method=...) takes "min_max", "mse", "tf_enhanced", "percentile", "entropy"'
_PREPARED = "qsdk.quantize(model, example) takes the model as it is, functional ops included"
_DTYPES = 'a dtype is an attribute such as qsdk.int8, or its name "int8"'
_TRAIN = "qsdk.quantize and qsdk.calibrate, then train inside `with sim.training(learn_scales=True)`"
_CONFIG = "a config such as qsdk.w8a8(), with .override(pattern, weight=...) and .skip(pattern)"
_PLAIN = "plain modules such as nn.Conv2d: qsdk.quantize(model, example) quantizes what they read and give"
_BLOCKS = "qsdk.w4a16(block_size=32), or .override(pattern, block_size=32, two_level_scales=True) for LPBQ"

_FLOAT8 = 'qsdk.w8a8(symmetric_activations=True).override("*", weight="float8e4m3fn", activation="float8e4m3fn")'
_DYNAMIC_INT4 = 'qsdk.w4a8(block_size=32).override("*", dynamic_activations=True)'

_AIMET = {
    "QuantSimConfigurator": 'qsdk.load_config("htp_v81"), or the path of a config file',
    "save_encodings_to_json": "qsdk.save_encodings(sim, path)",
    "QuantizationSimModel": "qsdk.quantize(model, example, qsdk.w8a8()) returns the sim",
    "compute_encodings": "qsdk.calibrate(sim, batches)",
    "set_and_freeze_param_encodings": 'qsdk.load_encodings(sim, path, freeze="weights")',
    "load_encodings_to_sim": "qsdk.load_encodings(sim, path, strict=False)",
    "encodings_to_onnx_qdq": "qsdk.apply_encodings(model, encodings, out)",
    "to_onnx_qdq": "qsdk.export(sim, path)",
    "from_onnx_qdq": "qsdk.quantize(path, None) opens a Q/DQ file with its own encodings",
    "QuantScheme": f'{_RANGES}; "post_training_tf", "post_training_tf_enhanced" and "post_training_percentile" too',
    "QuantizationDataType": _DTYPES,
    "apply_seq_mse": "qsdk.seq_mse(sim, batches)",
    "SequentialMse": "qsdk.seq_mse(sim, batches)",
    "SeqMseParams": "qsdk.seq_mse(sim, batches) takes them as keywords",
    "Adaround": "qsdk.adaround(sim, batches)",
    "AdaroundParameters": "qsdk.adaround(sim, batches) takes them as keywords",
    "apply_adaround": "qsdk.adaround(sim, batches)",
    "AdaScale": "qsdk.tune_blocks(sim, batches)",
    "apply_adascale": "qsdk.tune_blocks(sim, batches)",
    "SpinQuant": "qsdk.rotate(sim)",
    "apply_spinquant": "qsdk.rotate(sim)",
    "choose_mixed_precision": "qsdk.mixed_precision(sim, batches, metric, max_drop=0.01)",
    "analyze_mixed_precision_sensitivity": "qsdk.sensitivity(sim, batches, metric=metric)",
    "apply_amp": "qsdk.mixed_precision(sim, batches, metric, max_drop=0.01)",
    "flip_layers_to_higher_precision": "qsdk.mixed_precision(sim, batches, metric, max_drop=0.01)",
    "MixedPrecisionConfigurator": 'sim.set_precision("head", weight="int8") on the sim of qsdk.quantize',
    "fold_all_batch_norms": "qsdk.quantize(model, example) folds BatchNorms itself (fold_batch_norm=True)",
    "fold_all_batch_norms_to_weight": "qsdk.quantize(path, None) folds BatchNorms itself (fold_batch_norm=True)",
    "fold_all_batch_norms_to_scale": "leaving the block of sim.training() folds live BatchNorms; see qsdk.quantize",
    "reestimate_bn_stats": "qsdk.reestimate_batch_norm(sim, batches)",
    "equalize_model": "qsdk.equalize(sim, batches)",
    "CrossLayerScaling": "qsdk.equalize(sim, batches)",
    "HighBiasFold": "qsdk.equalize(sim, batches)",
    "QuantAnalyzer": "qsdk.sensitivity(sim, batches), and qsdk.report(sim, path) for a page with histograms",
    "analyze_per_layer_sensitivity": "qsdk.sensitivity(sim, batches)",
    "analyze_per_quantizer_sensitivity": "qsdk.sensitivity(sim, batches)",
    "visualize_stats": "qsdk.report(sim, path, data=batches)",
    "LayerOutputUtil": "qsdk.compare(a, b, batches), or sim.captured() for the tensors",
    "set_blockwise_quantization_for_weights": _BLOCKS,
    "set_grouped_blockwise_quantization_for_weights": _BLOCKS,
    "set_lpbq_for_params": _BLOCKS,
    "set_tensor_precision": 'sim.set_precision("head", weight="int8") on the sim of qsdk.quantize',
    "clamp_activation_encodings": "qsdk.w8a8().override(pattern, fixed_range=(low, high))",
    "prepare_model": _PREPARED,
    "ModelPreparer": _PREPARED,
    "ModelValidator": _PREPARED,
    "save_checkpoint": "qsdk.save(sim, path)",
    "AutoQuant": "qsdk.autoquant(model, example, batches, metric, max_drop=0.01)",
    "load_checkpoint": "qsdk.load(path, model)",
    "compute_encodings_for_sims": "qsdk.calibrate(sim, batches), once for each sim",
    "fold_given_batch_norms": "qsdk.quantize(model, example) folds BatchNorms itself (fold_batch_norm=True)",
    "exclude_param_from_quantization": 'qsdk.w8a8().override(pattern, weight="float32")',
    "quantizer_state_dict": "qsdk.save_encodings(sim, path)",
    "apply_omniquant": "qsdk.tune_blocks(sim, batches)",
    "OmniQuant": "qsdk.tune_blocks(sim, batches)",
    "export_per_layer_encoding_min_max_range": "qsdk.report(sim, path, data=batches)",
    "export_per_layer_stats_histogram": "qsdk.report(sim, path, data=batches)",
    "export_per_layer_mse_loss": "qsdk.sensitivity(sim, batches)",
    "set_percentile_value": 'qsdk.calibrate(sim, batches, method="percentile", percentile=99.9)',
    "fold_param_quantizers": "qsdk.export(sim, path) stores weights as integers by itself",
    "GPTVQ": "none; qsdk.gptq(sim, batches) is the nearest",
    "ArchChecker": _PREPARED,
    "QuantizationMixin": "qsdk.QuantConfig.layer, where the traced graph does not say enough about a class",
}

_TORCH = {
    "prepare_pt2e": "qsdk.quantize(model, example), without torch.export before it",
    "convert_pt2e": "qsdk.export(sim, path)",
    "prepare_qat_pt2e": _TRAIN,
    "prepare_fx": "qsdk.quantize(model, example)",
    "prepare_qat_fx": _TRAIN,
    "convert_fx": "qsdk.export(sim, path)",
    "prepare_qat": _TRAIN,
    "convert_qat": "qsdk.export(sim, path) after the block of sim.training()",
    "quantize_": "qsdk.quantize(model, example, qsdk.weight_only()) returns a sim and leaves the model as it is",
    "fuse_modules": "qsdk.quantize(model, example) finds Conv, BatchNorm and Relu itself",
    "QConfigMapping": _CONFIG,
    "QConfig": _CONFIG,
    "XNNPACKQuantizer": _CONFIG,
    "X86InductorQuantizer": _CONFIG,
    "get_default_qconfig": _CONFIG,
    "Int8WeightOnlyConfig": 'qsdk.weight_only("int8")',
    "Int4WeightOnlyConfig": 'qsdk.weight_only("int4", block_size=32)',
    "IntxWeightOnlyConfig": 'qsdk.weight_only("int3"), with block_size=32 for groups',
    "Int8DynamicActivationInt4WeightConfig": _DYNAMIC_INT4,
    "Int8DynamicActivationIntxWeightConfig": _DYNAMIC_INT4,
    "Int8StaticActivationInt8WeightConfig": "qsdk.w8a8(symmetric_activations=True)",
    "Float8WeightOnlyConfig": 'qsdk.weight_only("float8e4m3fn")',
    "Float8DynamicActivationFloat8WeightConfig": _FLOAT8,
    "int8_weight_only": 'qsdk.weight_only("int8")',
    "int4_weight_only": 'qsdk.weight_only("int4", block_size=32)',
    "int8_dynamic_activation_int8_weight": 'qsdk.w8a8().override("*", dynamic_activations=True)',
    "PerGroup": 'block_size= of a config: qsdk.weight_only("int4", block_size=32)',
    "PerAxis": 'the default; qsdk.w8a8().override("*", per_channel=False) turns it off',
    "prepare": "qsdk.quantize(model, example)",
    "convert": "qsdk.export(sim, path)",
    **dict.fromkeys(("QuantStub", "DeQuantStub", "QuantWrapper"), _PREPARED),
    **dict.fromkeys(("get_default_qconfig_mapping", "get_default_qat_qconfig"), _CONFIG),
    **dict.fromkeys(("FqnToConfig", "ModuleFqnToConfig"), _CONFIG),
    **dict.fromkeys(("QATConfig", "IntxFakeQuantizeConfig", "Int8DynActInt4WeightQATQuantizer"), _TRAIN),
    "Int8DynamicActivationInt8WeightConfig": 'qsdk.w8a8().override("*", dynamic_activations=True)',
    "MovingAverageMinMaxObserver": 'qsdk.calibrate(sim, batches, method="moving_average")',
    "PerChannelMinMaxObserver": _RANGES,
    "FakeQuantize": "qsdk.quantize(model, example) puts one wherever the config wants it",
    "MinMaxObserver": _RANGES,
    "HistogramObserver": _RANGES,
    "enable_observer": "qsdk.observing(sim), or qsdk.observe_ranges(steps) as a schedule of training",
    "disable_observer": "qsdk.freeze_ranges(after) as a schedule of training",
}

_ONNXRUNTIME = {
    "quantize_static": "qsdk.quantize(path, None), qsdk.calibrate(sim, batches), qsdk.export(sim, out)",
    "quantize_dynamic": 'qsdk.quantize(path, None, qsdk.w8a8().override("*", dynamic_activations=True))',
    "CalibrationDataReader": "qsdk.calibrate(sim, batches) takes any iterable of arrays or mappings",
    "CalibrationMethod": _RANGES,
    "QuantFormat": "qsdk.export(sim, path) writes Q/DQ; qsdk.to_integer writes integer operators",
    "QuantType": _DTYPES,
    "quant_pre_process": "qsdk.quantize(path, None) infers shapes, raises old opsets and folds by itself",
    "StaticQuantConfig": _CONFIG,
    "get_qdq_config": _CONFIG,
    "DynamicQuantConfig": 'qsdk.w8a8().override("*", dynamic_activations=True)',
    "TensorQuantOverrides": 'qsdk.w8a8().override("node:weight", weight="int4")',
    "MinMaxCalibrater": 'qsdk.calibrate(sim, batches, method="min_max")',
    "get_qnn_qdq_config": 'qsdk.w8a8().for_dialect("qnn"), and qsdk.export(sim, path, dialect="qnn")',
    "create_calibrator": "qsdk.calibrate(sim, batches)",
    "collect_activations": "qsdk.compare(a, b, batches)",
    "compute_activation_error": "qsdk.compare(a, b, batches)",
    "MatMul4BitsQuantizer": "qsdk.quantize(path, None, qsdk.weight_only(qsdk.int4, block_size=32))",
    "MatMulNBitsQuantizer": "qsdk.quantize(path, None, qsdk.weight_only(qsdk.int4, block_size=32))",
}

_OTHERS = {
    **dict.fromkeys(("QuantConv2d", "QuantLinear", "QuantReLU", "QuantIdentity", "QuantMultiheadAttention"), _PLAIN),
    **dict.fromkeys(("QuantEltwiseAdd", "QuantCat", "QuantLSTM", "QuantEmbedding", "QuantSigmoid"), _PLAIN),
    **dict.fromkeys(("TruncAvgPool2d", "TruncAdaptiveAvgPool2d"), _PLAIN),
    "QuantTensor": "an ordinary tensor; the scales are in sim.encodings of what qsdk.quantize returns",
    "Int8WeightPerTensorFloat": 'qsdk.w8a8().override("*", weight="int8_strict", per_channel=False)',
    "Int8WeightPerChannelFloat": 'qsdk.w8a8(); its grid from -127 to 127 is .override("*", weight="int8_strict")',
    "Uint8ActPerTensorFloat": "qsdk.w8a8(symmetric_activations=True)",
    "Int8ActPerTensorFloat": 'qsdk.w8a8(symmetric_activations=True).override("*", activation="int8")',
    "ShiftedUint8ActPerTensorFloat": "qsdk.w8a8(), whose activations have zero points",
    "Int32Bias": "qsdk.w8a8(), whose biases are int32",
    "preprocess_for_quantize": _PREPARED,
    "layerwise_quantize": _PREPARED,
    "quantize_model": _PREPARED,
    "activation_equalization_mode": "qsdk.smooth_quant(sim, batches)",
    "graph_equalization_mode": "qsdk.equalize(sim, batches)",
    "EqualizeGraph": "qsdk.equalize(sim, batches)",
    "GraphRotationEqualization": "qsdk.rotate(sim)",
    "export_torch_qcdq": "qsdk.export(sim, path)",
    "create_compressed_model": _TRAIN,
    "export_onnx_qcdq": "qsdk.export(sim, path)",
    "calibration_mode": "qsdk.calibrate(sim, batches)",
    "bias_correction_mode": "qsdk.correct_bias(sim, batches)",
    "gptq_mode": "qsdk.gptq(sim, batches)",
    "learned_round_mode": "qsdk.adaround(sim, batches)",
    "batch_norm_adaptation": "qsdk.reestimate_batch_norm(sim, batches)",
    "CompressWeightsMode": 'qsdk.weight_only("int4", block_size=32)',
    "TargetDevice": 'qsdk.w8a8().for_dialect("openvino")',
    "AdvancedQuantizationParameters": _CONFIG,
    "Dataset": "any iterable of batches; qsdk.inputs_only(loader) drops labels",
    "QuantizationPreset": "qsdk.w8a8(symmetric_activations=True) for PERFORMANCE, qsdk.w8a8() for MIXED",
    "ModelType": "none needed; for outliers of a transformer see qsdk.rotate and qsdk.smooth_quant",
    "OverflowFix": 'qsdk.w8a8().override("*", weight="int7")',
    "BackupMode": 'qsdk.weight_only("int4").override("head", weight="int8")',
    "strip": "qsdk.export(sim, path), or sim.unwrap() for the module",
    "gpfq_mode": "qsdk.gptq(sim, batches)",
    "norm_correction_mode": "qsdk.reestimate_batch_norm(sim, batches)",
    "export_qonnx": "none; qsdk.export(sim, path) writes standard ONNX",
    "Int8WeightPerTensorFixedPoint": 'qsdk.w8a8().override("*", scale_bits=1)',
    "INT8_DEFAULT_CFG": "qsdk.w8a8(symmetric_activations=True)",
    "INT8_SMOOTHQUANT_CFG": "qsdk.w8a8(symmetric_activations=True), then qsdk.smooth_quant(sim, batches)",
    "INT8_WEIGHT_ONLY_CFG": 'qsdk.weight_only("int8")',
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG": 'qsdk.weight_only("int4", block_size=128)',
    "INT4_AWQ_CFG": 'qsdk.weight_only("int4", block_size=128), then qsdk.awq(sim, batches)',
    "FP8_DEFAULT_CFG": _FLOAT8,
    "FP8_KV_CFG": 'qsdk.w8a8().override("*", kv_cache="float8e4m3fn")',
    "NVFP4_DEFAULT_CFG": 'qsdk.weight_only("nvfp4"), for weights',
    "MXFP4_DEFAULT_CFG": 'qsdk.weight_only("mxfp4"), for weights',
    "MXFP8_DEFAULT_CFG": 'qsdk.weight_only("mxfp8"), for weights',
    "fold_weight": "qsdk.export(sim, path) stores weights as integers by itself",
    "postprocess_amax": "qsdk.w8a8().override(pattern, fixed_range=(low, high))",
    "export_hf_checkpoint": 'qsdk.export(sim, folder, format="compressed-tensors")',
    **dict.fromkeys(
        ("set_quantizer_attribute", "set_quantizer_by_cfg"),
        'sim.set_precision("layer1", weight="int4") on the sim of qsdk.quantize',
    ),
    "AdvancedSmoothQuantParameters": "qsdk.smooth_quant(sim, batches, alpha=0.5)",
    "AdvancedBiasCorrectionParameters": "qsdk.correct_bias(sim, batches)",
    "compute_quantization_mse": "qsdk.sensitivity(sim, batches)",
    "enable_quantizer": 'qsdk.w8a8().override("head", weight="int8"): a rule that comes later wins',
    "quantize_with_accuracy_control": "qsdk.autoquant(model, example, batches, metric, max_drop=0.01)",
    "compress_weights": "qsdk.quantize(model, example, qsdk.weight_only())",
    "IgnoredScope": 'qsdk.w8a8().skip("layer1.*")',
    "auto_quantize": "qsdk.autoquant(model, example, batches, metric, max_drop=0.01)",
    "disable_quantizer": 'qsdk.w8a8().skip("layer1.*"), or sim.set_precision(match, ...)',
    "print_quant_summary": "print(sim.coverage()) on the sim of qsdk.quantize",
}

#: the functions of the face whose first argument is a sim
TAKE_A_SIM = frozenset(
    [
        "calibrate",
        "seq_mse",
        "tune_blocks",
        "tune_ranges",
        "adaround",
        "gptq",
        "correct_bias",
        "reestimate_batch_norm",
        "equalize",
        "smooth_quant",
        "awq",
        "rotate",
        "export",
        "check_parity",
        "load_encodings",
        "mixed_precision",
        "advise",
        "report",
        "sensitivity",
        "observing",
        "distill_loss",
        "save_encodings",
        "save",
    ]
)

#: a name of AIMET, torch, onnxruntime.quantization, Brevitas, NNCF or ModelOpt -> what to write instead
COUNTERPARTS: Mapping[str, str] = MappingProxyType(_AIMET | _TORCH | _ONNXRUNTIME | _OTHERS)


#: where AIMET keeps the quantizers of a module
OF_MODULES = ("param_quantizers", "input_quantizers", "output_quantizers")


def quantizers_of(name: str, path: str) -> str:
    """Return what to use in place of the quantizers that AIMET keeps on a module."""
    kind, dtype = ("weight", "int4") if name.startswith("param") else ("activation", "uint16")
    site = f"{path or 'self'}:{'weight' if kind == 'weight' else 'output'}"
    return (
        f"a module of a sim has no {name}; its sites have encodings: sim.encodings[{site!r}] reads one, "
        f"config.override({site!r}, {kind}={dtype!r}) or sim.set_precision changes its dtype, and sim.freeze({site!r}) "
        "keeps it as it is"
    )


def missing_name(name: str, known: Iterable[str]) -> str:
    """Return the text of the AttributeError for a name that qsdk does not have."""
    if name in COUNTERPARTS:
        return f"qsdk has no {name}; its counterpart: {COUNTERPARTS[name]}"
    if other_widths(name):
        return f"qsdk has no preset {name}; {other_widths(name)}"
    spelled = {candidate.replace("_", "").lower(): candidate for candidate in known}
    near = get_close_matches(name.replace("_", "").lower(), spelled, n=1, cutoff=0.75)
    remedy = f"did you mean qsdk.{spelled[near[0]]}?" if near else "help(qsdk) lists its names by task"
    return f"module 'qsdk' has no attribute {name!r}; {remedy}"


def other_widths(name: str) -> str:
    """Return how to write a config of widths that no preset has, such as `w4a4kv8`; "" for a name of another kind."""
    widths = re.fullmatch(r"w([2-9]|1[0-6])a([2-9]|1[0-6])(?:kv([48]))?", name.lower())
    if widths is None:
        return ""
    cache = f', kv_cache="int{widths[3]}"' if widths[3] else ""
    preset = f"w{widths[1]}a{widths[2]}"
    if preset in ("w8a8", "w8a16", "w4a8", "w4a16"):
        return f"write it as qsdk.{preset}({cache[2:]})"
    return f'write it as qsdk.w8a8().override("*", weight="int{widths[1]}", activation="uint{widths[2]}"{cache})'


def other_config(name: str) -> str:
    """Return how to write a config that is named by its widths or by one dtype, such as `int8`; "" for another name."""
    if other_widths(name):
        return other_widths(name)
    if re.fullmatch(r"u?int[2-9]|u?int1[0-6]", name):
        bits = name.partition("int")[2]
        preset = {"4": "w4a8", "16": "w8a16"}.get(bits, "w8a8")
        return f'"{preset}" quantizes all, qsdk.weight_only("int{bits}") weights alone'
    if re.fullmatch(r"fp8|float8\w*", name):
        known = re.fullmatch(r"float8(e5m2|e4m3fnuz|e5m2fnuz)", name)
        return f"write it as {_FLOAT8.replace('float8e4m3fn', name) if known else _FLOAT8}"
    return ""


def missing_in_sim(name: str, cls: str, model: object, known: Iterable[str]) -> str:
    """Return the text of the AttributeError for a name that a sim does not have.

    Args:
        name: that was asked for.
        cls: name of the sim's class.
        model: the wrapped module, None for a sim of an ONNX model.
        known: names that the sim has.
    """
    text = f"{cls!r} object has no attribute {name!r}"
    if name in TAKE_A_SIM:
        return f"{text}; it is a function: qsdk.{name}(sim, ...)"
    if name in COUNTERPARTS:
        return f"{text}; its counterpart: {COUNTERPARTS[name]}"
    if name == "train" and model is not None:
        return f"{text}; train inside `with sim.training() as model:`"
    if not name.startswith("_") and model is not None and hasattr(type(model), name):
        return f"{text}; the module has it: sim.model.{name}"
    near = get_close_matches(name, known, n=1, cutoff=0.75)
    return f"{text}; did you mean sim.{near[0]}?" if near else text
