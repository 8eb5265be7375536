"""The tables of other runtimes are derived again on the installed versions."""

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from other_runtime_probes import ALL_LABELS, MORE, NORMS, measured
from torch import nn

import qsdk
from onnx_backend.integer.exact_products import products_saturate
from onnx_backend.parity.teacher import RunOn
from onnx_backend.runtimes import openvino, qnn
from onnx_backend.runtimes.registry import open_in
from onnx_backend.runtimes.tables import PROBED, REFUSED, Fault, RuntimeTable
from onnx_backend.runtimes.validate import validate

#: measured on every run of the tests; all others with the slow ones
FEW = (*NORMS, *MORE, "Add", "Conv/int8", "Conv/int4", "Gather", "MatMul", "Pad", "Softmax", "Cast")
TABLES = {"openvino": (openvino.TABLE, "openvino"), "qnn": (qnn.TABLE, "onnxruntime_qnn")}
CASES = [(runtime, dtype) for runtime, (table, _) in TABLES.items() for dtype in table.refused]
#: what OpenVINO gets wrong on processors without VNNI alone, which whoever runs the file may have
WITHOUT_VNNI = {"MatMul", "ConvTranspose/int8"}
#: int8 kernels of processors that cannot add up 8-bit products are off wherever a sum grows
SATURATING = {"Conv/int8", "ConvTranspose/int8", "Gemm/int8", "MatMul/int8"} if products_saturate() else set()


def table_of(runtime: str) -> RuntimeTable:
    table, package = TABLES[runtime]
    pytest.importorskip(package, reason=f"{package} has no wheel for this system")
    return table


def require_same(table: RuntimeTable, dtype: str, found: dict[str, Fault], labels=None) -> None:
    refused = {label for label, fault in found.items() if fault.steps == REFUSED}
    chosen = set(labels) if labels else set(table.refused[dtype]) | set(table.off[dtype]) | set(found)
    assert refused == table.refused[dtype] & chosen
    by_processor = SATURATING | (WITHOUT_VNNI if table is openvino.TABLE and dtype == "int8" else set())
    off = {label for label, fault in found.items() if fault.steps != REFUSED}
    assert off - by_processor == set(table.off[dtype]) & chosen - by_processor
    for label in off - SATURATING:
        assert found[label].steps <= table.off[dtype][label].steps * 1.25 + 1, (label, found[label])
        assert found[label].where == table.off[dtype][label].where, (label, found[label])
        assert found[label].between_grids or not table.off[dtype][label].between_grids, (label, found[label])


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "dtype"), [case for case in CASES if case[1] in ("uint8", "uint16")])
def test_some_ops_are_what_the_installed_runtime_makes_of_them(runtime, dtype):
    table = table_of(runtime)
    require_same(table, dtype, measured(runtime, dtype, FEW), FEW)


@pytest.mark.nightly
@pytest.mark.parametrize(("runtime", "dtype"), CASES)
def test_the_table_is_what_the_installed_runtime_does(runtime, dtype):
    require_same(table_of(runtime), dtype, measured(runtime, dtype))


@pytest.mark.slow
def test_openvino_multiplies_int8_activations_wrongly_without_vnni():
    """On oneDNN's kernels for AVX2, which any processor with more can be made to run."""
    table_of("openvino")
    measure = f"measured('openvino', 'int8', {sorted(WITHOUT_VNNI)})"
    code = f"from other_runtime_probes import measured; print(sorted({measure}))"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == str(sorted(WITHOUT_VNNI))


def test_the_ops_that_are_known_are_those_that_were_measured():
    assert {label.partition("/")[0].removesuffix(">").split()[0] for label in ALL_LABELS} == PROBED


def shifted(dtype: str) -> ModelProto:
    """Integers moved to the upper end of a type and back, all but one bit, as integer-only files do."""
    np_dtype, bits = np.dtype(dtype), np.iinfo(dtype).bits
    kind = helper.np_dtype_to_tensor_dtype(np_dtype)
    values = [helper.make_tensor_value_info(name, TensorProto.INT32, [None]) for name in ("x", "y")]
    numbers = {"factor": 1 << (bits - 4), "by": bits - 5}
    stored = [numpy_helper.from_array(np.array(value, np_dtype), name) for name, value in numbers.items()]
    nodes = [
        helper.make_node("Cast", ["x"], ["raised"], to=kind),
        helper.make_node("Mul", ["raised", "factor"], ["product"]),
        helper.make_node("BitShift", ["product", "by"], ["quotient"], "shift", direction="RIGHT"),
        helper.make_node("Cast", ["quotient"], ["y"], to=TensorProto.INT32),
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("runtime", TABLES)
def test_integers_that_the_runtime_shifts_wrong_are_named(runtime):
    table, codes = table_of(runtime), np.arange(16, dtype=np.int32)
    types = ("uint8", "uint32", "uint64")  # of uint16 not every runtime has one, and no file of ours
    right = {dtype: (open_in(runtime, shifted(dtype)).run({"x": codes})[0] == 2 * codes).all() for dtype in types}
    assert {dtype for dtype in types if not right[dtype]} == table.shifts
    for dtype in types:
        found = [row for row in validate(shifted(dtype), dialect=runtime).rows if row["node"] == "shift"]
        severity = {"uint64": ["error"], "uint32": ["warning"]}[dtype] if dtype in table.shifts else []
        assert [row["severity"] for row in found] == severity
        assert all('to_integer(target="portable")' in row["remedy"] for row in found)


@pytest.mark.parametrize("target", ["standard", "portable"])
def test_an_integer_only_file_is_right_on_openvino_or_refused(tmp_path, target):
    table_of("openvino")
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    sim = qsdk.quantize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    qsdk.to_integer(tmp_path / "m.onnx", tmp_path / "i.onnx", target=target, progress=False)
    model = onnx.load(tmp_path / "i.onnx")
    wanted, got = (open_in(runtime, model).run({"input": x.numpy()})[0] for runtime in ("onnxruntime", "openvino"))
    refused, is_wrong = validate(model, dialect="openvino").summary["errors"] > 0, np.abs(wanted - got).max() > 0.1
    assert refused == is_wrong == (target == "standard")


def grouped() -> ModelProto:
    """A GroupNormalization in floats."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4, 6, 6]) for name in ("x", "y")]
    stored = [numpy_helper.from_array(np.float32(v), n) for n, v in (("g", [1, 0.5, 2, 0.7]), ("b", [0.1, -1, 0.3, 0]))]
    nodes = [helper.make_node("GroupNormalization", ["x", "g", "b"], ["y"], "norm", num_groups=2)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("runtime", TABLES)
def test_a_group_norm_runs_as_it_stands_also_at_sizes_that_are_fixed_for_a_run(runtime):
    table_of(runtime)
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype(np.float32)
    (wanted,) = RunOn().open(grouped()).run({"x": x})
    tolerance = {"openvino": 1e-5, "qnn": 5e-3}[runtime]  # the HTP has float16
    for runner in (open_in(runtime, grouped()), open_in(runtime, grouped(), whole=False)):
        np.testing.assert_allclose(runner.run({"x": x})[0], wanted, atol=tolerance)
    assert validate(grouped(), dialect=runtime).rows == []


@pytest.mark.spread(1)
@pytest.mark.parametrize("runtime", TABLES)
def test_an_op_that_no_probe_covers_is_named(tmp_path, runtime):
    x = torch.randn(2, 3, 6)

    class Rounded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.round(x + x) * x

    sim = qsdk.quantize(Rounded(), x, qsdk.w8a8().for_dialect(runtime))
    qsdk.calibrate(sim, [x], progress=False)
    summary = qsdk.export(sim, tmp_path / "m.onnx", dialect=runtime).summary
    (named,) = summary["not_probed"]
    assert "not probed on this runtime: Round behind uint8" in named
    assert "computed_otherwise" not in summary
    rows = validate(onnx.load(tmp_path / "m.onnx"), dialect=runtime).rows
    assert [(row["rule"], row["severity"]) for row in rows] == [("not_probed", "warning")]
