"""Settings of the tests of tracing."""

from collections.abc import Iterator

import pytest
from shared_translations import own_translations


@pytest.fixture(autouse=True, scope="module")
def own_traces() -> Iterator[None]:
    """Every test here traces for itself, whatever the others share."""
    with own_translations():
        yield
