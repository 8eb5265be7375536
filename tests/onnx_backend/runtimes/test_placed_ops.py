"""Ops at every rank and axis, behind others and sharing their constants: where a runtime is off, validate says so."""

import pytest
from placed_ops import SHAPES, ops_of
from placed_probes import PLACES, Placed, is_placed, last_grid

from onnx_backend.runtimes.validate import validate
from qsdk import QsdkError

PACKAGES = {"openvino": "openvino", "qnn": "onnxruntime_qnn"}
#: a sum of products may fall to the other side of a tie by more than a step's rounding
STEPS = 1.01
#: not rank 5 on the emulated HTP, whose plug-in ends the process while it compiles some op there
TRIED = [(runtime, rank) for runtime in PACKAGES for rank in SHAPES if (runtime, rank) != ("qnn", 5)]
FEW = ("AveragePool, ceil_mode", "CumSum of -2", "ReduceMean of 1, keepdims=0", "Transpose by (1, 0, 2)")


def silent(runtime: str, rank: int, names: tuple[str, ...] = ()) -> tuple[dict[str, float], set[str]]:
    """What is off and not named, with its steps; and the names of the ops that are off."""
    found, off_ops = {}, set()
    for op in ops_of(rank):
        for front, grids in PLACES if not names or op.name in names else ():
            placed = Placed(op, rank, front, grids, runtime)
            if not is_placed(placed):
                continue
            try:
                off = placed.off()
            except QsdkError:  # ONNX Runtime does not run it, so that nothing is to be compared
                break
            if off <= STEPS:
                continue
            off_ops.add(op.name)
            rows = validate(placed.model(last_grid(placed)), dialect=runtime).rows
            if not any(row["rule"] == "dialect" for row in rows):
                found[str(placed)] = off
    return found, off_ops


@pytest.mark.slow
@pytest.mark.parametrize("runtime", PACKAGES)
def test_a_few_ops_that_are_off_are_named(runtime):
    pytest.importorskip(PACKAGES[runtime], reason=f"{runtime} has no wheel for this system")
    found, off = silent(runtime, 3, FEW)
    assert found == {}
    assert ("AveragePool, ceil_mode" in off) == (runtime == "qnn")
    assert "Transpose by (1, 0, 2)" not in off


@pytest.mark.nightly
@pytest.mark.parametrize(("runtime", "rank"), TRIED)
def test_every_op_that_is_off_is_named(runtime, rank):
    pytest.importorskip(PACKAGES[runtime], reason=f"{runtime} has no wheel for this system")
    found, _ = silent(runtime, rank)
    assert found == {}
