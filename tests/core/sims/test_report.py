"""Reports: tables for the reader, plain dicts for programs."""

import doctest
import json

import numpy as np

from qsdk import Report
from qsdk.core import report


def test_a_table_aligns_numbers_right_and_words_left():
    rows = [{"site": "a", "max_lsb": 10, "error": 0.123456}, {"site": "longer", "max_lsb": 3, "error": 2.0}]
    assert str(Report("Parity", rows, {"passed": True, "sqnr_db": 43.21987})).splitlines() == [
        "Parity",
        "site    max_lsb  error",
        "------  -------  ------",
        "a            10  0.1235",
        "longer        3       2",
        "passed: True",
        "sqnr_db: 43.22",
    ]


def test_absent_values_are_blank_and_lines_have_no_trailing_space():
    text = str(Report("T", [{"a": "x", "b": None}, {"a": "y", "c": "z"}]))
    assert text.splitlines() == ["T", "a  b  c", "-  -  -", "x", "y     z"]


def test_a_column_of_words_and_numbers_is_words():
    assert str(Report("T", [{"a": 1}, {"a": "long"}])).splitlines()[2:] == ["----", "1", "long"]


def test_a_report_without_rows_is_its_title_and_summary():
    assert str(Report("Nothing")) == "Nothing"
    assert str(Report("Nothing", summary={"total": 0})) == "Nothing\ntotal: 0"


def test_to_dict_is_a_copy_in_the_fixed_shape():
    row = {"site": "a"}
    report = Report("T", (row,), {"n": 1})
    found = report.to_dict()
    assert found == {"title": "T", "rows": [{"site": "a"}], "summary": {"n": 1}}
    found["rows"][0]["site"] = "b"
    found["summary"]["n"] = 2
    assert report.to_dict() == {"title": "T", "rows": [{"site": "a"}], "summary": {"n": 1}}


def test_to_dict_holds_plain_values_that_json_can_write():
    rows = [{"max_lsb": np.float32(0.5), "elements": np.int64(3), "ok": np.bool_(True), "scales": np.ones(2)}]
    report = Report("T", rows, {"worst": np.float64(1.5)})
    assert json.loads(json.dumps(report.to_dict())) == {
        "title": "T",
        "rows": [{"max_lsb": 0.5, "elements": 3, "ok": True, "scales": [1.0, 1.0]}],
        "summary": {"worst": 1.5},
    }


def test_numpy_numbers_print_like_numbers():
    assert str(Report("T", [{"a": np.float32(0.123456)}, {"a": np.int64(7)}])).splitlines() == [
        *("T", "a", "------", "0.1235", "     7")
    ]


def test_the_examples_in_the_docstrings_hold():
    failed, tried = doctest.testmod(report)
    assert (failed, tried > 0) == (0, True)
