"""Settings of every test session."""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from _pytest.doctest import DoctestModule
from exact_products import exact_sessions
from hypothesis import HealthCheck, settings
from processor_time import ProcessorTime
from shared_translations import shared_translations
from spread import spread_parametrizations

# A loaded machine is slow, not wrong. In CI the same examples are drawn every time, so that a run can be repeated.
settings.register_profile(
    "house",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("house")

# Processes that tests start find the same helpers.
_HELPERS = [str(folder) for folder in sorted((Path(__file__).parent / "helpers").iterdir())]
os.environ["PYTHONPATH"] = os.pathsep.join([*_HELPERS, *filter(None, [os.environ.get("PYTHONPATH")])])

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores
    # in the processes that they start as well: threads that wait for one another take many times as long there
    os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all is collected: what imports make stays to the end, so the collector need not look at it


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that shows what the tests cost, and the one that keeps the pages true."""
    parser.addoption("--processor-time", action="store_true", help="show what each folder of tests costs (with -n0)")
    parser.addoption("--write-pages", action="store_true", help="pages of the documentation take what they print")


def pytest_configure(config: pytest.Config) -> None:
    """Measure if asked."""
    if config.getoption("--processor-time"):
        config.pluginmanager.register(ProcessorTime())


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in the docstrings of the package alone: those of tests hold none."""
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


def pytest_collection_finish() -> None:
    """Leave what imports and collection have made out of every later collection of garbage."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)  # tests of the exporter make many short-lived objects


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is nightly too, and the parametrizations that the default run leaves out."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
    spread_parametrizations(items)


@pytest.fixture(autouse=True, scope="session")  # before the fixtures of modules, which trace most
def shared_traces() -> Iterator[None]:
    """Tests that capture equal programs share their translation to ONNX; tests of tracing itself do not."""
    with shared_translations():
        yield


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Sessions whose integer products are exact on every processor, for tests that compare numbers at default level."""
    with exact_sessions():
        yield
