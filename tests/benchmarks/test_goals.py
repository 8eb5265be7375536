"""The table of goals: its rows name benchmarks that exist, and measuring some rows leaves the others alone."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("goals")


def test_rows_name_benchmarks_that_exist_and_works_that_differ(goals):
    rows = [row for group in goals.GROUPS.values() for row in group]
    assert [row.command for row in rows if not (ROOT / "benchmarks" / f"{row.benchmark}.py").exists()] == []
    assert len({row.work for row in rows}) == len(rows)
    assert not any("|" in row.work + row.note + row.goal for row in rows)
    assert all(row.is_met(float(row.goal.split()[1])) for row in rows)
    assert not any(row.is_met(float("nan")) for row in rows)


def test_the_page_lists_the_rows_of_the_data(goals):
    text = goals.DOCUMENT.read_text()
    assert goals.rewritten(text, {}) == text


def test_new_values_replace_only_their_own_rows(goals):
    first, second = [row for group in goals.GROUPS.values() for row in group][:2]
    page = f"above\n\n{goals.START}{goals.END}\n\nbelow\n"
    once = goals.rewritten(page, {first.work: ("7", "one day"), second.work: ("8", "one day")})
    twice = goals.rewritten(once, {second.work: ("0.5", "another day")})
    assert goals.kept(twice) == {first.work: ("7", "one day"), second.work: ("0.5", "another day")}
    assert (twice[:7], twice[-7:]) == ("above\n\n", "\nbelow\n")


def test_a_key_is_found_in_the_last_line_that_has_it(goals):
    lines = [{"a": {"b": 1}}, {"a": {"b": 2.5}}, {"a": 3}, {"a": {"b": "text"}}]
    assert goals.looked_up(lines, ("a", "b")) == 2.5
    assert goals.looked_up(lines, ("a", "c")) is None


def test_an_unknown_benchmark_is_named(goals):
    with pytest.raises(SystemExit, match=r"no goal is measured by colour; name some of .*qat_step"):
        goals.main("colour")
