"""How many of ONNX's own node tests pass: in our backend, in onnx's ReferenceEvaluator and in ONNX Runtime.

One JSON line. ONNX Runtime runs them as they are stamped, and stamped down to the newest opset that it knows.
`on_runtime` says whether `onnx_backend.evaluator.program.ON_RUNTIME` is what `derived_table` measures.
"""

import ctypes
import json
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator

from onnx_backend.evaluator.backend import prepare
from onnx_backend.evaluator.control_flow import CONTROL_FLOW
from onnx_backend.evaluator.kernels import KERNELS
from onnx_backend.evaluator.one_node import newest_alike
from onnx_backend.evaluator.program import ON_RUNTIME
from onnx_backend.proto.opsets import LARGEST_OPSET, opset_of

QUANTIZATION = re.compile("^test_((de|dynamic)?quantizelinear|qlinear(conv|matmul)|convinteger|matmulinteger)(_|$)")
LARGEST_IR = 13  # of the runtime
LEAST_OPSET = 7
PLAIN = "biufcOUS"  # the kinds of NumPy arrays that a session takes and gives; ml_dtypes' are others
Run = Callable[[list[Any]], list[Any]]


def arrays(items: Any) -> list[Any]:
    found = [numpy_helper.to_array(item) if isinstance(item, TensorProto) else item for item in items]
    return [np.asarray(item) if isinstance(item, np.generic) else item for item in found]


def named(model: ModelProto, given: list[Any]) -> dict[str, Any]:
    return dict(zip([value.name for value in model.graph.input], given, strict=True))


def reference(model: ModelProto) -> Run:
    evaluator = ReferenceEvaluator(model)
    return lambda given: list(evaluator.run(None, named(model, given)))


def runtime(model: ModelProto) -> Run:
    """ONNX Runtime: arrays its Python interface does not know go in as stored tensors and come out as bytes."""

    def run(given: list[Any]) -> list[Any]:
        stored, plain = ModelProto(), {}
        stored.CopyFrom(model)
        del stored.graph.input[:]
        for value, array in zip(model.graph.input, given, strict=True):
            if isinstance(array, np.ndarray) and (array.dtype.kind not in PLAIN or "float8" in array.dtype.name):
                stored.graph.initializer.append(numpy_helper.from_array(array, value.name))
            else:
                stored.graph.input.append(value)
                plain[value.name] = array
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        session = ort.InferenceSession(stored.SerializeToString(), options, providers=["CPUExecutionProvider"])
        if all(value.type.tensor_type.elem_type < TensorProto.BFLOAT16 for value in model.graph.output):
            return list(session.run(None, plain))
        tensors = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in plain.items()}
        return [decoded(found) for found in session.run_with_ort_values(None, tensors)]

    return run


def decoded(found: ort.OrtValue) -> np.ndarray:
    data = ctypes.string_at(found.data_ptr(), found.tensor_size_in_bytes())
    return numpy_helper.to_array(TensorProto(dims=found.shape(), data_type=found.element_type(), raw_data=data))


def stamped(model: ModelProto, opset: int) -> ModelProto:
    found = ModelProto()
    found.CopyFrom(model)
    for entry in found.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = opset
    found.ir_version = min(found.ir_version, LARGEST_IR)
    return found


def agree(expected: list[list[Any]], found: list[list[Any]], case: Any) -> bool:
    try:
        for wanted, outputs in zip(expected, found, strict=True):
            Runner.assert_similar_outputs(wanted, outputs, case.rtol, case.atol)
    except Exception:
        return False
    return True


def outputs_of(case: Any, model: ModelProto, make: Callable[[ModelProto], Run]) -> list[list[Any]] | None:
    """What a model gives on the inputs of a test, or None where it does not run."""
    try:
        run = make(model)
        return [run(arrays(given)) for given, _ in case.data_sets]
    except Exception:
        return None


def passes(case: Any, model: ModelProto, make: Callable[[ModelProto], Run]) -> bool:
    found = outputs_of(case, model, make)
    return found is not None and agree([arrays(wanted) for _, wanted in case.data_sets], found, case)


def versions(op_type: str) -> Iterator[int]:
    """The versions of an op that the runtime knows, from the newest on."""
    schemas = onnx.defs.get_all_schemas_with_history()
    found = {s.since_version for s in schemas if s.domain == "" and s.name == op_type and not s.deprecated}
    for version in sorted(found, reverse=True):
        if version <= LARGEST_OPSET and newest_alike(op_type, version) >= LEAST_OPSET:
            yield version


def is_valid(model: ModelProto) -> bool:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def derived_table(cases: list[Any]) -> set[tuple[str, int]]:
    """The versions of ops that belong to ONNX Runtime.

    The judge of a test with one node is the runtime, if it passes it at the newest version of the op that it knows.
    Then every version that the test is valid at is run at that version: where ReferenceEvaluator does not run, or gives
    something else than the runtime (at the newest version: than the test wants), the version is in the table.
    """
    found = set()
    for case in cases:
        (node, *others), opset = case.model.graph.node, opset_of(case.model)
        if others or node.domain not in ("", "ai.onnx") or node.op_type in KERNELS:
            continue
        expected: list[list[Any]] | None = None
        for version in versions(node.op_type):
            first, _ = CONTROL_FLOW.get(node.op_type, (LARGEST_OPSET + 1, None))
            model = stamped(case.model, newest_alike(node.op_type, version))
            if version >= first or version > opset or not is_valid(model):
                continue
            by_runtime = outputs_of(case, model, runtime)
            if expected is None:
                expected = [arrays(wanted) for _, wanted in case.data_sets]
                if by_runtime is None or not agree(expected, by_runtime, case):
                    break
            elif by_runtime is None:
                continue
            else:
                expected = by_runtime
            by_reference = outputs_of(case, model, reference)
            if by_reference is None or not agree(expected, by_reference, case):
                found.add((node.op_type, version))
    return found


def measured(cases: list[Any]) -> dict[str, Any]:
    """The tests that pass, by who runs them, and which evaluator of ours ran which nodes."""
    passed: dict[str, set[str]] = defaultdict(set)
    ran: Counter[tuple[str, str]] = Counter()
    for case in cases:
        kept = []

        def ours(model: ModelProto, kept: list[Any] = kept) -> Run:
            kept.append(prepare(model))
            return lambda given: list(kept[0].run(given))

        for who, make, model in (
            ("ours", ours, case.model),
            ("reference", reference, case.model),
            ("onnxruntime", runtime, case.model),
            ("onnxruntime_stamped_down", runtime, stamped(case.model, min(opset_of(case.model), LARGEST_OPSET))),
        ):
            if passes(case, model, make):
                passed[who].add(case.name)
        for rep in kept:
            ran.update(rep.ran)
    return {"passed": passed, "ran": ran}


def main() -> None:
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    start = time.perf_counter()
    cases = load_model_tests(kind="node")
    found = measured(cases)
    passed, names = found["passed"], {case.name for case in cases}
    union = passed["reference"] | passed["onnxruntime"] | passed["onnxruntime_stamped_down"]
    quantization = {name for name in names if QUANTIZATION.match(name)}
    nodes: Counter[str] = Counter()
    for (evaluator, _), count in found["ran"].items():
        nodes[evaluator] += count
    kernels = {evaluator for evaluator, op_type in found["ran"] if op_type in KERNELS}
    table = derived_table(cases)
    line = {
        "benchmark": "onnx's own node tests",
        "tests": len(names),
        "passed": {who: len(found) for who, found in passed.items()} | {"reference_or_onnxruntime": len(union)},
        "quantization": {who: len(found & quantization) for who, found in passed.items()} | {"of": len(quantization)},
        "quantization_ops_run_by": sorted(kernels),
        "nodes_run_by": dict(nodes),
        "failed": sorted(names - passed["ours"]),
        "passed_by_others_only": sorted(union - passed["ours"]),
        "on_runtime": {"as_measured": table == ON_RUNTIME, "table": sorted(table)},
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
