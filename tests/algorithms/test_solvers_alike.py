"""What the solvers of one layer have in common: what they refuse, and what they leave as it is."""

from dataclasses import replace
from typing import Any

import pytest
from random_problems import problem_of

from qsdk import ConfigError, float8e4m3fn, int4
from qsdk.algorithms.solvers import adaround, gptq, seq_mse
from qsdk.core.layers.layer_problem import WeightLayout
from qsdk.core.numerics.spec import PerChannel, Spec

SOLVERS = {"adaround": adaround.solve, "gptq": gptq.solve, "seq_mse": seq_mse.solve}
LINEAR = WeightLayout("linear", (4, 6))


@pytest.mark.parametrize("name", SOLVERS)
def test_frozen_encodings_stay_with_a_note(name: str) -> None:
    problem = problem_of(LINEAR, Spec(int4, PerChannel(0)))
    found = SOLVERS[name](replace(problem, encoding=replace(problem.encoding, frozen=True)))
    assert (found.weight, found.note) == (None, "its encoding is frozen")
    assert found.encoding == replace(problem.encoding, frozen=True)
    assert found.error_after == found.error_before > 0


def test_seq_mse_leaves_the_scales_of_narrow_floats() -> None:
    problem = problem_of(LINEAR, Spec(float8e4m3fn, PerChannel(0)))
    found = seq_mse.solve(problem)
    assert (found.weight, found.encoding) == (None, problem.encoding)
    assert found.note == "the scales of integers are searched, not those of float8e4m3fn"
    assert 0 < found.error_after == found.error_before < 1e-2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adaround", {"damping": 0}, "fc:weight: a damping of 0 is not positive"),
        ("adaround", {"method": "slow"}, "unknown method 'slow' of adaround; choose one of coordinate_descent"),
        ("adaround", {"starts": 0}, "fc:weight: 0 starts and None iterations; give at least 1 and 0"),
        ("adaround", {"iterations": -1}, "fc:weight: 4 starts and -1 iterations; give at least 1 and 0"),
        ("gptq", {"damping": -1}, "fc:weight: a damping of -1 is not positive"),
        ("gptq", {"scales": "free"}, "unknown scales 'free' of gptq; choose one of search, fixed"),
        ("gptq", {"block_size": 0}, "fc:weight: blocks of 0 and 1 sweeps; give at least 1 and 0"),
        ("gptq", {"sweeps": -1}, "fc:weight: blocks of 128 and -1 sweeps; give at least 1 and 0"),
        ("seq_mse", {"candidates": 0}, "0 candidates for fc:weight; give at least 1"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SOLVERS[name](problem_of(LINEAR, Spec(int4, PerChannel(0))), **options)
