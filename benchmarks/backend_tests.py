"""How many of ONNX's own node tests pass: in our backend, in onnx's ReferenceEvaluator and in ONNX Runtime.

One JSON line. ONNX Runtime runs them as they are stamped, and stamped down to the newest opset that it knows.
"""

import ctypes
import json
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator

from onnx_backend.backend import prepare
from onnx_backend.proto.opsets import LARGEST_OPSET, opset_of

QUANTIZATION = re.compile("^test_((de|dynamic)?quantizelinear|qlinear(conv|matmul)|convinteger|matmulinteger)(_|$)")
LARGEST_IR = 13  # of the runtime
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


def passes(case: Any, model: ModelProto, make: Callable[[ModelProto], Run]) -> bool:
    """Whether a model runs, and gives what a test wants."""
    try:
        run = make(model)
        found = [run(arrays(given)) for given, _ in case.data_sets]
    except Exception:
        return False
    return agree([arrays(wanted) for _, wanted in case.data_sets], found, case)


def measured(cases: list[Any]) -> dict[str, set[str]]:
    """The tests that pass, by who runs them, and by which of the two in our backend."""
    passed: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        used = []

        def ours(model: ModelProto, used: list[str] = used) -> Run:
            rep = prepare(model)
            used.append(f"ours, in {rep.runs_in}")
            return lambda given: list(rep.run(given))

        for who, make, model in (
            ("ours", ours, case.model),
            ("reference", reference, case.model),
            ("onnxruntime", runtime, case.model),
            ("onnxruntime_stamped_down", runtime, stamped(case.model, min(opset_of(case.model), LARGEST_OPSET))),
        ):
            if passes(case, model, make):
                for name in (who, *(used if who == "ours" else ())):
                    passed[name].add(case.name)
    return passed


def main() -> None:
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    start = time.perf_counter()
    cases = load_model_tests(kind="node")
    passed, names = measured(cases), {case.name for case in cases}
    union = passed["reference"] | passed["onnxruntime"] | passed["onnxruntime_stamped_down"]
    quantization = {name for name in names if QUANTIZATION.match(name)}
    line = {
        "benchmark": "onnx's own node tests",
        "tests": len(names),
        "passed": {who: len(found) for who, found in passed.items()} | {"reference_or_onnxruntime": len(union)},
        "quantization": {who: len(found & quantization) for who, found in passed.items()} | {"of": len(quantization)},
        "failed": sorted(names - passed["ours"]),
        "passed_by_others_only": sorted(union - passed["ours"]),
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
