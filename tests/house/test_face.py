"""The face: what `help(qsdk)` begins with, and what it says to names that other tools have."""

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import qsdk
from qsdk.core.missing_names import TAKE_A_SIM


def test_the_first_screen_of_help_groups_every_name():
    lines = qsdk.__doc__.splitlines()
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 100
    words = set(re.findall(r"\w+", qsdk.__doc__))
    assert [name for name in qsdk.__all__ if name not in words] == []
    assert [name for name in qsdk.__all__ if not hasattr(qsdk, name)] == []
    for module in (qsdk.analysis, qsdk.dtypes, qsdk.train):
        assert [name for name in module.__all__ if name not in words] == []


def test_a_name_in_another_spelling_is_recognised():
    with pytest.raises(AttributeError, match=r"no attribute 'SeqMSE'; did you mean qsdk\.seq_mse\?"):
        _ = qsdk.SeqMSE
    with pytest.raises(AttributeError, match=r"no attribute 'calibrat'; did you mean qsdk\.calibrate\?"):
        _ = qsdk.calibrat
    with pytest.raises(
        AttributeError,
        match=r"^module 'qsdk' has no attribute 'nothing'; help\(qsdk\) .*docs/coming_from those of",
    ):
        _ = qsdk.nothing
    with pytest.raises(AttributeError, match=r"no attribute 'load_pretrained'; it is qsdk\.load$"):
        _ = qsdk.load_pretrained
    for module in (qsdk.analysis, qsdk.dtypes, qsdk.train):
        for name in module.__all__:
            with pytest.raises(AttributeError, match=rf"it is {module.__name__}\.{name}$"):
                getattr(qsdk, name)


def test_a_config_shows_what_became_of_a_foreign_file():
    shown = str(qsdk.load_config("htp_v73"))
    assert "hardware=v73" in shown
    assert "rule: '*' with op_type=Conv -> per_channel=True" in shown
    assert re.search(r"taken over: \d+\nholds already: \d+\nno counterpart: \d+\n", shown)
    assert str(qsdk.w4a8().override("head", weight="int8")) == (
        "config: weight=int4, activation=uint8\nrule: 'head' -> weight=int8"
    )


def test_the_demo_network_knows_its_images():
    data = qsdk.demo.data()
    logits = qsdk.demo.network()(torch.from_numpy(data.test_images[:500]))
    assert (logits.argmax(1).numpy() == data.test_labels[:500]).mean() > 0.9


def test_the_reference_has_every_function_and_class():
    pages = (Path(__file__).parents[2] / "docs" / "reference").glob("*.md")
    shown = set(re.findall(r"^::: qsdk\.([\w.]+)$", "\n".join(page.read_text() for page in pages), re.MULTILINE))
    dtypes = {name for name, value in public().items() if isinstance(value, qsdk.DType | qsdk.dtypes.BlockFormat)}
    assert set(public()) - dtypes - {"demo"} == shown


def public() -> dict[str, Any]:
    """Return what users may call, by its name behind `qsdk.`."""
    own = {name: getattr(qsdk, name) for name in qsdk.__all__}
    modules = {"analysis": qsdk.analysis, "dtypes": qsdk.dtypes, "train": qsdk.train}
    return own | {f"{at}.{name}": getattr(module, name) for at, module in modules.items() for name in module.__all__}


def functions_and_classes() -> list[str]:
    """Return the names of the face that can have an example: all but dtypes, the demo and the errors."""
    named = public()
    made = {name: thing for name, thing in named.items() if inspect.isfunction(thing) or inspect.isclass(thing)}
    return [name for name, thing in made.items() if not (inspect.isclass(thing) and issubclass(thing, Exception))]


@pytest.mark.parametrize("name", functions_and_classes())
def test_a_name_of_the_face_has_an_example_that_runs(name: str, request: pytest.FixtureRequest):
    thing = inspect.unwrap(public()[name])
    found = doctest.DocTestParser().get_examples(thing.__doc__ or "")
    assert found, f"help(qsdk.{name}) shows no example: give its docstring one"
    assert not any(doctest.SKIP in one.options for one in found)
    # pytest runs every example of the docstrings in these folders
    assert request.config.getoption("doctestmodules")
    folder = Path(inspect.getfile(thing)).relative_to(request.config.rootpath).parts[0]
    assert folder in request.config.getini("testpaths")


@pytest.mark.parametrize("cls", [qsdk.QuantSim, qsdk.OnnxSim])
def test_the_reference_documents_what_users_may_rely_on_in_a_sim(cls: type[Any]):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "sims.md").read_text()
    entry = re.search(rf"^::: qsdk\.{cls.__name__}\n(.*?)(?=^:::|\Z)", page, re.MULTILINE | re.DOTALL)
    assert entry is not None
    shown = set(re.findall(r"^ +- (\w+)$", entry[1], re.MULTILINE))
    attributes = set(re.findall(r"^        (\w+)(?: \(.+\))?: ", cls.__doc__.partition("Attributes:")[2], re.MULTILINE))
    assert shown | attributes == set(cls.documented)
    for name in shown:
        entry = inspect.getattr_static(cls, name)
        assert (entry.fget if isinstance(entry, property) else entry).__doc__, f"{cls.__name__}.{name} says nothing"


def test_completion_shows_what_users_may_rely_on():
    sim = qsdk.quantize(torch.nn.Linear(4, 2), x := torch.randn(2, 4))
    qsdk.calibrate(sim, [x], progress=False)
    assert {name for name in dir(sim) if not name.startswith("_")} == set(qsdk.QuantSim.documented)
    assert [name for name in dir(sim) if not hasattr(sim, name)] == []


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("train", "train inside `with sim.training() as model:`"),
        ("state_dict", "the module has it: sim.model.state_dict"),
        ("export", "it is a function: qsdk.export(sim, ...)"),
        ("encoding", "did you mean sim.encodings?"),
    ],
)
def test_a_name_that_a_sim_lacks_is_answered_with_where_it_is(name: str, remedy: str):
    sim = qsdk.quantize(torch.nn.Linear(4, 2), torch.randn(2, 4))
    with pytest.raises(AttributeError, match=f"'QuantSim' object has no attribute '{name}'; {re.escape(remedy)}$"):
        getattr(sim, name)
    with pytest.raises(AttributeError, match=r"^'QuantSim' object has no attribute 'nothing'$"):
        _ = sim.nothing


def test_every_function_that_takes_a_sim_is_known_as_one():
    found = {name: getattr(qsdk, name) for name in qsdk.__all__}
    first = {
        name: next(iter(inspect.signature(item).parameters), "")
        for name, item in found.items()
        if inspect.isfunction(item)
    }
    assert {name for name, parameter in first.items() if parameter in ("sim", "sim_or_file")} == TAKE_A_SIM


def test_an_error_in_a_property_of_a_sim_is_its_own():
    sim = qsdk.quantize(torch.nn.Linear(4, 2), torch.randn(2, 4))
    del sim.__dict__["model"]
    with pytest.raises(AttributeError, match="'QuantSim' object has no attribute 'model'"):
        _ = sim.runtime


def test_widths_that_no_preset_has_are_answered_with_the_config():
    with pytest.raises(AttributeError, match=r'no preset w4a4; write it as .*weight="int4", activation="uint4"'):
        _ = qsdk.w4a4
    assert "\nrule: '*' -> weight=int4, activation=uint4" in str(
        qsdk.w8a8().override(weight="int4", activation="uint4")
    )
