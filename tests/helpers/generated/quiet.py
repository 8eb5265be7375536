"""Journeys over many tiny networks: one thread, and no words of the exporter."""

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """One thread, since the networks are tiny; and no words of the exporter about packages that are not installed."""
    threads, logger = torch.get_num_threads(), logging.getLogger("torch.onnx")
    level = logger.level
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    torch.set_num_threads(threads)
