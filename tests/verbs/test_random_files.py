"""Random networks in an ordinary session of ONNX Runtime: every exported file computes what its sim does."""

from pathlib import Path

import pytest
import torch
from random_files import compared

TOGETHER = 5
IN_EVERY_RUN, NIGHTLY = range(0, 20, TOGETHER), range(20, 1000, TOGETHER)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(
    "first", [*IN_EVERY_RUN, *(pytest.param(first, marks=pytest.mark.nightly) for first in NIGHTLY)]
)
def test_the_files_of_random_networks_are_right_in_an_ordinary_session(first: int, tmp_path: Path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the networks are tiny
    try:
        found = [compared(seed, tmp_path / "model.onnx") for seed in range(first, first + TOGETHER)]
    finally:
        torch.set_num_threads(threads)
    assert [said for verdict, said in found if verdict not in ("agrees", "explained")] == []
