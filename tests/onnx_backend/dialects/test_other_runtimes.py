"""The tables of other runtimes are derived again on the installed versions."""

import pytest
from other_runtime_probes import measured

from onnx_backend.dialects.other_runtimes import OPENVINO, QNN, REFUSED, Fault, RuntimeTable
from onnx_backend.integer.exact_products import products_saturate

#: measured on every run of the tests; all others with the slow ones
FEW = ("Add", "Conv/int8", "Conv/int4", "Gather", "MatMul", "Pad", "Softmax", "Cast")
TABLES = {"openvino": (OPENVINO, "openvino"), "qnn": (QNN, "onnxruntime_qnn")}
CASES = [(runtime, dtype) for runtime, (table, _) in TABLES.items() for dtype in table.refused]
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
    off = {label for label, fault in found.items() if fault.steps != REFUSED}
    assert off - SATURATING == set(table.off[dtype]) & chosen - SATURATING
    for label in off - SATURATING:
        assert found[label].steps <= table.off[dtype][label].steps * 1.25 + 1, (label, found[label])
        assert found[label].where == table.off[dtype][label].where, (label, found[label])


@pytest.mark.parametrize(("runtime", "dtype"), [case for case in CASES if case[1] in ("uint8", "uint16")])
def test_some_ops_are_what_the_installed_runtime_makes_of_them(runtime, dtype):
    table = table_of(runtime)
    require_same(table, dtype, measured(runtime, dtype, FEW), FEW)


@pytest.mark.nightly
@pytest.mark.parametrize(("runtime", "dtype"), CASES)
def test_the_table_is_what_the_installed_runtime_does(runtime, dtype):
    require_same(table_of(runtime), dtype, measured(runtime, dtype))
