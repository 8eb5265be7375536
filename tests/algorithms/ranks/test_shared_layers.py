"""Ranks that share data and layers make the sim that one process makes, to the last bit, from either side."""

from pathlib import Path
from typing import Any

import pytest
from started_ranks import started

CASES = [f"{door} {verb}" for door in ("torch", "onnx") for verb in ("seq_mse", "gptq", "adaround")]


@pytest.mark.slow
def test_two_and_four_ranks_make_the_sim_of_one(tmp_path: Path) -> None:
    (alone,) = started("shared_layers_worker.py", 1, tmp_path)
    several: list[dict[str, Any]] = [
        facts for size in (2, 4) for facts in started("shared_layers_worker.py", size, tmp_path)
    ]
    assert [*alone] == CASES
    for case, facts in alone.items():
        assert facts["digest"] != facts["before"], case
        for other in several:
            assert other[case] == facts, case
