"""Reads names of ONNX files, one a line, and says of each what quantizing it came to; run by `mutated_models`."""

import json
import os
import resource
import sys

import numpy as np
import onnxruntime as ort

import qsdk
from onnx_backend.lower import insert
from onnx_backend.proto.model_io import load
from onnx_backend.runtime.feeds import random_feeds
from qsdk import QsdkError
from qsdk.core.planning.plan import Plan

MEMORY = 12 * 2**30


def verdict(path: str) -> str:
    """`refused: ...`, `equal`, `not run: ...`, or what is wrong: `differs`, `accepted`, `raised`."""
    try:
        sim = qsdk.quantize(path, None, qsdk.w8a8())
    except QsdkError as error:
        return f"refused: {type(error).__name__}: {error}"
    found = compared(path, sim)
    feeds = next(random_feeds(load(path)), None)
    if feeds is not None:
        try:
            qsdk.calibrate(sim, [feeds], progress=False)
            sim.run(feeds)
        except QsdkError as error:
            found = f"{found}; then refused: {type(error).__name__}: {error}"
    return found


def compared(path: str, sim) -> str:
    """Whether the opened model gives what the runtime gives for the file itself."""
    original, refusal = session(path)
    opened, ours = session(insert(sim.traced().model, Plan({}), {})[0].SerializeToString())
    if original is None:
        return f"accepted, the runtime refuses: {refusal} | {ours or 'it loads ours'}"
    if opened is None:
        return f"differs: the runtime loads the file, but not ours: {ours}"
    if [v.name for v in original.get_inputs()] != [v.name for v in opened.get_inputs()]:
        return "differs: inputs"
    if [v.name for v in original.get_outputs()] != [v.name for v in opened.get_outputs()]:
        return "differs: outputs"
    for feeds in random_feeds(load(path)):
        try:
            wanted = original.run(None, feeds)
        except Exception:
            continue
        got = opened.run(None, feeds)
        same = all(np.shape(a) == np.shape(b) and close(a, b) for a, b in zip(wanted, got, strict=True))
        return "equal" if same else "differs: values"
    return "not run: no random input fits"


def close(left, right) -> bool:
    if isinstance(left, list):
        return all(close(a, b) for a, b in zip(left, right, strict=True))
    if left.dtype.kind != "f":
        return bool((left == right).all())
    return bool(np.allclose(left, right, rtol=1e-4, atol=1e-5, equal_nan=True))


def session(source):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"]), ""
    except Exception as error:
        return None, str(error)[:200]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the runtime prints is no answer
    for line in sys.stdin:
        try:
            said = verdict(line.strip())
        except Exception as error:
            said = f"raised {type(error).__name__}: {error}"
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
