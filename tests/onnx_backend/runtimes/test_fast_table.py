"""The table of what is fast is derived again from the models that the installed runtime makes."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from runtime_probes import LABELS, Probe

from onnx_backend.profiling.kernels import plain_type
from qsdk.core.planning.fast_table import FAST, LAYERS_ON_CODES

#: a layer whose weight is float gets one of int8 from the runtime; the table of what is wrong has these
STORED = [label for label in LABELS if not label.endswith(("float32", "float16"))]
TO_FLOAT = [f"{label}>" for label in STORED if "/" in label or label == "MatMul"]


def probed(label: str, dtype: str, form: str):
    """The model of a probe as it is exported: weights beside zero points have some, a Softmax has whole steps."""
    model = Probe(label.removesuffix(">") if label in TO_FLOAT else label, dtype, form).model(
        separated=label != "Softmax"
    )
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] == "wq" and form != "output_dtype":
            zeros = np.zeros(stored["ws"].dims, numpy_helper.to_array(stored["wq"]).dtype)
            if label.startswith("Gemm/") and zeros.dtype in (np.int8, np.uint8) and "block_size" not in str(node):
                model.graph.initializer.append(numpy_helper.from_array(zeros, "wz"))
                node.input.append("wz")
    if label == "Softmax":
        stored["s2"].CopyFrom(numpy_helper.from_array(np.float32(1 / 256), "s2"))
    if label in TO_FLOAT:
        del model.graph.node[-2:]
        model.graph.node.append(helper.make_node("Tanh", ["t"], ["y"]))
    return model


def kernel_on_codes(label: str, dtype: str, form: str, folder) -> str | None:
    """The type of the node that stands for the op of a probe, if it reads codes."""
    options = ort.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(folder / "optimized.onnx")
    model = probed(label, dtype, form)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    floats = {name for node in nodes if node.op_type in ("DequantizeLinear", "Sum") for name in node.output}
    op = label.removesuffix(">").partition("/")[0].removesuffix(" linear")
    found = [node for node in nodes if plain_type(node.op_type) == op]
    return found[0].op_type if found and floats.isdisjoint(found[0].input) else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "form"),
    [("uint8", "both"), *(pytest.param(*k, marks=pytest.mark.slow) for k in FAST if k != ("uint8", "both"))],
)
def test_the_table_is_what_the_installed_runtime_runs(dtype, form, tmp_path):
    labels = [label for label in (*STORED, *TO_FLOAT) if label not in ("QuantizeLinear", "Cast", "Clip at 0")]
    found = {label: kernel for label in labels if (kernel := kernel_on_codes(label, dtype, form, tmp_path))}
    assert found == FAST[dtype, form]


def test_the_guide_shows_the_table():
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "fast.md").read_text("utf-8")
    shown = "\n".join(line for line in guide.splitlines() if line.startswith("|"))
    rows = {label.removesuffix(">").partition("/")[0]: kernel for label, kernel in FAST["uint8", "both"].items()}
    for op, kernel in rows.items():
        assert (f"`{kernel}`" if kernel.startswith("Q") else op) in shown, op
    for kernel in re.findall(r"`(Q\w+|MatMul\w+)`", shown):
        assert kernel in FAST["uint8", "both"].values()


def test_layers_on_codes():
    assert {"Conv", "Gemm", "MatMul"} == LAYERS_ON_CODES
