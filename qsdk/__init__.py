"""qsdk quantizes neural networks: an nn.Module or an ONNX file in, standard ONNX and integers out.

    sim = qsdk.quantize(model, example)      # a simulation; the model itself stays as it is
    qsdk.calibrate(sim, batches)             # find the ranges
    qsdk.export(sim, "model.onnx")           # write the file, and its encodings beside it
    print(qsdk.check_parity(sim, "model.onnx", batches))

What there is, by task. `help(qsdk.calibrate)` explains one name; the guides are in docs/.

    enter       quantize quantize_checkpoint inputs_only options demo
    configs     w8a8 w8a16 w4a8 w4a16 block_scaled weight_only QuantConfig load_config
    calibrate   calibrate reestimate_batch_norm
    improve     seq_mse adaround gptq tune_blocks correct_bias rotate equalize smooth_quant awq
    train       distill_loss; in qsdk.train: callbacks Distilled freeze_ranges
                generate_text tune_ranges
    decide      sensitivity mixed_precision autoquant; in qsdk.analysis: accumulators advise
                error_by_position next_token_agreement perplexity profile
    export      export validate session
    prove       check_parity compare report
    integers    to_integer
    files       save load save_encodings load_encodings
                apply_encodings
    classes     QuantSim OnnxSim Report Encoding
    dtypes      int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 float16 bfloat16
                float32 float8e4m3fn float8e5m2 float4e2m1, of the class DType; in qsdk.dtypes:
                BlockFormat float8e4m3fnuz float8e5m2fnuz float8e8m0 mxfp4 mxfp8 mxint8 nvfp4
    errors      QsdkError, above ConfigError ModelError DataError CalibrationError
                ExportError FileFormatError IntegerError

Light to import: neither torch nor onnx is loaded before the first verb is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qsdk.core.aimet_config.load_config import load_config
from qsdk.core.config.config import QuantConfig, block_scaled, w4a8, w4a16, w8a8, w8a16, weight_only
from qsdk.core.errors import (
    CalibrationError,
    ConfigError,
    DataError,
    ExportError,
    FileFormatError,
    IntegerError,
    ModelError,
    QsdkError,
)
from qsdk.core.missing_names import missing_name
from qsdk.core.numerics.dtypes import (
    DType,
    bfloat16,
    float4e2m1,
    float8e4m3fn,
    float8e5m2,
    float16,
    float32,
    int2,
    int4,
    int8,
    int16,
    int32,
    uint2,
    uint4,
    uint8,
    uint16,
)
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report
from qsdk.core.run_options import options

if TYPE_CHECKING:
    from qsdk import analysis as analysis
    from qsdk import demo
    from qsdk import dtypes as dtypes
    from qsdk import train as train
    from qsdk.verbs.analysis.autoquant import autoquant
    from qsdk.verbs.analysis.compare import compare
    from qsdk.verbs.analysis.precision import mixed_precision
    from qsdk.verbs.analysis.report import report
    from qsdk.verbs.analysis.sensitivity import sensitivity
    from qsdk.verbs.apply import apply_encodings
    from qsdk.verbs.bias import correct_bias, reestimate_batch_norm
    from qsdk.verbs.blocks import tune_blocks
    from qsdk.verbs.calibrate import calibrate, inputs_only
    from qsdk.verbs.checkpoints import quantize_checkpoint
    from qsdk.verbs.doors.choose import OnnxSim, QuantSim
    from qsdk.verbs.export import check_parity, export
    from qsdk.verbs.files import load, load_encodings, save, save_encodings
    from qsdk.verbs.integer import to_integer
    from qsdk.verbs.layers import adaround, gptq, seq_mse
    from qsdk.verbs.qdq_files import session, validate
    from qsdk.verbs.quantize import quantize
    from qsdk.verbs.rotate import rotate
    from qsdk.verbs.scaling import awq, equalize, smooth_quant
    from qsdk.verbs.training import distill_loss

__version__ = "0.1.0"

#: file in qsdk/verbs -> the names that it holds, loaded on first use
_FILES = {
    "quantize": "quantize",
    "calibrate": "calibrate inputs_only",
    "checkpoints": "quantize_checkpoint",
    "export": "export check_parity",
    "integer": "to_integer",
    "qdq_files": "validate session",
    "layers": "seq_mse adaround gptq",
    "files": "load_encodings save_encodings save load",
    "apply": "apply_encodings",
    "bias": "correct_bias reestimate_batch_norm",
    "blocks": "tune_blocks",
    "scaling": "equalize smooth_quant awq",
    "rotate": "rotate",
    "training": "distill_loss",
    "analysis.precision": "mixed_precision",
    "analysis.report": "report",
    "analysis.sensitivity": "sensitivity",
    "analysis.autoquant": "autoquant",
    "analysis.compare": "compare",
    "doors.choose": "QuantSim OnnxSim",
}
_VERBS = {name: file for file, names in _FILES.items() for name in names.split()}

#: what few need, by the module that has it
_ELSEWHERE = {
    "analysis": ("accumulators", "advise", "error_by_position", "next_token_agreement", "perplexity", "profile"),
    "dtypes": ("BlockFormat", "float8e4m3fnuz", "float8e5m2fnuz", "float8e8m0", "mxfp4", "mxfp8", "mxint8", "nvfp4"),
    "train": ("Distilled", "callbacks", "freeze_ranges", "generate_text", "tune_ranges"),
}

__all__ = [
    "quantize",
    "quantize_checkpoint",
    "options",
    "calibrate",
    "inputs_only",
    "seq_mse",
    "tune_blocks",
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
    "compare",
    "to_integer",
    "validate",
    "apply_encodings",
    "load_encodings",
    "mixed_precision",
    "report",
    "sensitivity",
    "session",
    "autoquant",
    "distill_loss",
    "save_encodings",
    "save",
    "load",
    "demo",
    "QuantSim",
    "OnnxSim",
    "QuantConfig",
    "load_config",
    "w8a8",
    "w8a16",
    "w4a8",
    "w4a16",
    "block_scaled",
    "weight_only",
    "DType",
    "Encoding",
    "Report",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "float8e4m3fn",
    "float8e5m2",
    "float4e2m1",
    "float16",
    "bfloat16",
    "float32",
    "QsdkError",
    "ConfigError",
    "ModelError",
    "DataError",
    "CalibrationError",
    "ExportError",
    "FileFormatError",
    "IntegerError",
]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(import_module(f"qsdk.verbs.{_VERBS[name]}"), name)
    if name == "demo" or name in _ELSEWHERE:
        return import_module(f"qsdk.{name}")
    moved = {name: f"{module}.{name}" for module, names in _ELSEWHERE.items() for name in names}
    moved |= {"load_pretrained": "load", "convert_encodings": "save_encodings"}
    raise AttributeError(missing_name(name, __all__, moved))


def __dir__() -> list[str]:
    return sorted([*__all__, *_ELSEWHERE])
