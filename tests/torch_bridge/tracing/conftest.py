"""Settings of the tests of tracing."""

import pytest


@pytest.fixture(autouse=True)
def shared_traces() -> None:
    """Every test here traces for itself, whatever the others share."""
