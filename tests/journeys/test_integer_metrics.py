"""What networks are worth at their tasks stays the same on integers only: within 0.2 points of the Q/DQ model."""

import importlib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.nightly]
#: Decisions by network; all have true labels.
NETWORKS = {"demo": 10_000, "ocr_direction": 1_600, "silero_vad": 1_920}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_worth_the_same_on_integers(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("integer_metrics")
    row = benchmark.measured(benchmark.NETWORKS[name](benchmark.w8a8_in(tmp_path)), tmp_path)
    assert row["decisions"] == NETWORKS[name]
    assert min(row["float"], row["qdq"]) >= 80  # a network that guesses would be worth the same in every form
    for form in benchmark.FORMS:
        assert abs(row[f"{form} - qdq"]) <= benchmark.TARGET, row
