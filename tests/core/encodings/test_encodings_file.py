import json
import random
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schema import fits

from qsdk import Encoding, FileFormatError, bfloat16, float16, int8
from qsdk.core.encodings import qsdk_format
from qsdk.core.encodings.qsdk_format import dumps, loads
from qsdk.core.numerics.dtypes import DTYPES, dtype_named
from qsdk.core.numerics.spec import Kind

SCHEMA = json.loads((Path(qsdk_format.__file__).parent / "encodings.schema.json").read_text("utf-8"))
NAMES = [*(name for name, dtype in DTYPES.items() if dtype.is_quantized), "int8_strict", "int4_strict"]
positive = st.floats(float(np.float32(1e-45)), float(np.finfo(np.float32).max), width=32, allow_subnormal=True)


@st.composite
def encodings(draw):
    dtype = dtype_named(draw(st.sampled_from(NAMES)))
    shape = draw(st.sampled_from([(1,), (3,), (2, 3), (1, 2, 2)]))
    axis = None if shape == (1,) else draw(st.integers(-1, len(shape) - 1))
    block = draw(st.integers(1, 64)) if len(shape) > 1 else None
    count = int(np.prod(shape))
    scale = np.array(draw(st.lists(positive, min_size=count, max_size=count)), np.float32).reshape(shape)
    low, high = (int(dtype.lo), int(dtype.hi)) if dtype.is_integer else (0, 0)
    zero = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    return Encoding(
        dtype, scale, np.array(zero, np.int64).astype(np.int32).reshape(shape), axis, block, draw(st.booleans())
    )


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=20), encodings(), max_size=4))
@settings(deadline=None)
def test_every_digit_survives(given_encodings):
    text = dumps(given_encodings, {"tool": "qsdk", "tags": [1, "zwei"]})
    read = loads(text, "model.encodings.json")
    back, provenance = read.encodings, read.provenance
    assert back == given_encodings
    assert list(back) == list(given_encodings)
    assert [e.frozen for e in back.values()] == [e.frozen for e in given_encodings.values()]
    for site, encoding in back.items():
        assert encoding.scale.tobytes() == given_encodings[site].scale.tobytes()
    assert provenance == {"tool": "qsdk", "tags": [1, "zwei"]}
    assert dumps(back, provenance) == text


def test_the_text_is_one_line_per_site_without_what_goes_without_saying():
    plain = Encoding(int8, np.float32([0.1]), np.int32([0]))
    full = Encoding(int8, np.float32([[0.1], [2]]), np.int32([[3], [0]]), 1, 4, True)
    text = dumps(
        {"a:output": plain, "b:weight": full},
        {},
        {"c:output": float16},
        tensors={"b:weight": "b.weight", "zzz": "z"},
        kinds={"b:weight": "weight", "c:output": "output"},
    )
    data = json.loads(text)
    assert data["encodings"] == {
        "a:output": {"dtype": "int8", "scale": [0.1]},
        "b:weight": {
            "dtype": "int8",
            "scale": [0.1, 2.0],
            "zero_point": [3, 0],
            "shape": [2, 1],
            "axis": 1,
            "block_size": 4,
            "frozen": True,
            "tensor": "b.weight",
            "kind": "weight",
        },
        "c:output": {"dtype": "float16", "kind": "output"},
    }
    assert next(line for line in text.splitlines() if '"a:output"' in line).endswith("},")
    read = loads(text, "m.json")
    assert read.encodings == {"a:output": plain, "b:weight": full}
    assert read.casts == {"c:output": float16}
    assert read.tensors == {"b:weight": "b.weight"}
    assert read.kinds == {"b:weight": "weight", "c:output": "output"}


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_older_versions_are_read(version):
    entry = {"dtype": "int8", "scale": [0.1], "zero_point": [0], "shape": [1], "axis": None, "block_size": None}
    sites = {"a:output": {**entry, "frozen": True}} | ({"b:output": {"dtype": "bfloat16"}} if version == 2 else {})
    data = {"format": "qsdk.encodings", "version": version, "provenance": {"config": "w8a8"}, "encodings": sites}
    read = loads(json.dumps(data), "m.json")
    assert read.encodings == {"a:output": Encoding(int8, np.float32([0.1]), np.int32([0]))}
    assert read.encodings["a:output"].frozen
    assert read.casts == ({"b:output": bfloat16} if version == 2 else None)
    assert read.provenance == {"config": "w8a8"}


# the schema


def test_the_schema_knows_every_dtype_and_kind():
    strict = [f"{dtype.name}_strict" for dtype in DTYPES.values() if dtype.is_integer and dtype.signed]
    entries = SCHEMA["properties"]["encodings"]["additionalProperties"]["anyOf"]
    encoding, cast = (entry["properties"] for entry in entries)
    assert encoding["dtype"]["enum"] == [*(name for name, dtype in DTYPES.items() if dtype.is_quantized), *strict]
    assert cast["dtype"]["enum"] == [float16.name, bfloat16.name]
    assert encoding["kind"]["enum"] == list(get_args(Kind))
    assert set(SCHEMA["properties"]) == set(json.loads(GOOD))
    assert SCHEMA["properties"]["format"]["const"] == json.loads(GOOD)["format"]
    assert SCHEMA["properties"]["version"]["enum"] == [json.loads(GOOD)["version"], qsdk_format.VERSION]


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=20), encodings(), max_size=4))
@settings(deadline=None)
def test_what_is_written_fits_the_schema(given_encodings):
    text = dumps(given_encodings, {}, {"c:output": float16}, tensors=dict.fromkeys(given_encodings, "t"))
    assert fits(json.loads(text), SCHEMA)


JUNK = [
    None,
    True,
    -1,
    0,
    1,
    2.5,
    10**400,
    "int8",
    "int77",
    "float16",
    "",
    [],
    [0.1],
    [1, 2],
    [[1]],
    [None],
    {},
    {"a": 1},
]


@pytest.mark.slow
@given(encoding=encodings(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_a_spoilt_file_is_read_as_the_schema_says_or_refused(encoding, seed):
    """One value or key is changed at random: nothing but FileFormatError, and never more than the schema allows."""
    rng = random.Random(seed)
    data = json.loads(dumps({"a:output": encoding}, {}, {"c:output": float16}, kinds={"a:output": "weight"}))
    spoilt = rng.choice([data, data["encodings"], data["encodings"]["a:output"], data["encodings"]["c:output"]])
    key = rng.choice([*spoilt, "zero_point", "colour", "scale", "tensor", "kind"])
    spoilt[key] = rng.choice(JUNK)
    message = refusal(json.dumps(data))
    assert "m.json" in message or fits(data, SCHEMA) or data["version"] in (1, 2)


def refusal(text: str) -> str:
    try:
        loads(text, "m.json")
    except FileFormatError as error:
        return str(error)
    return ""


GOOD = dumps({"a:output": Encoding(int8, np.float32([0.1, 0.2]), np.int32([3, 0]), 0)}, {"tool": "qsdk"})


@given(st.integers(0, len(GOOD.rstrip()) - 1))
def test_truncated_text_is_an_error_that_names_file_and_place(length):
    with pytest.raises(FileFormatError, match=r"m\.json is truncated or no JSON at line \d+, column \d+"):
        loads(GOOD[:length], "m.json")


def changed(**fields):
    data = json.loads(GOOD)
    data["encodings"]["a:output"].update(fields)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "m.json is no qsdk.encodings file"),
        ("{}", "m.json is no qsdk.encodings file"),
        ("3", "m.json is no qsdk.encodings file"),
        ('{"version": "1.0.0", "activation_encodings": []}', "m.json is no qsdk.encodings file"),
        (GOOD.replace('"version": 3', '"version": 99'), "version 99.*update qsdk"),
        (GOOD.replace('"version": 3', '"version": "1"'), "version '1'"),
        (GOOD.replace('"version": 3', '"version": true'), "version True"),
        (GOOD.replace('"encodings": {', '"encodings": 3, "other": {'), "no mapping under 'encodings'"),
        (GOOD.replace('"provenance": {"tool": "qsdk"}', '"provenance": []'), "no mapping under"),
        (GOOD.replace('"tool"', '"a": 1, "a"'), "names 'a' twice"),
        ("[" * 200_000, "nested too deeply|no JSON"),
        (GOOD.replace("0.1", "1" * 5000), "m.json holds what no file of this kind has: .*digits"),
        (changed(scale=[0.1]), "site 'a:output': 1 scales, 2 zero points"),
        (changed(shape=[3]), "2 scales, 2 zero points and the shape"),
        (changed(shape=[0]), "shape is a list of positive integers"),
        (changed(shape="2"), "shape is a list of positive integers"),
        (changed(frozen=1), "frozen true or false"),
        (changed(scale=[0.1, -0.2]), "site 'a:output': an encoding of int8 needs positive"),
        (changed(scale=[0.1, 1e300]), "needs positive, finite scales"),
        (changed(scale=[0.1, None]), "scale is a list of numbers"),
        (changed(scale=[0.1, True]), "scale is a list of numbers"),
        (changed(scale=0.1), "scale is a list of numbers"),
        (changed(zero_point=[0.5, 0]), "zero_point is a list of numbers"),
        (changed(zero_point=[300, 0]), "outside the grid"),
        (changed(zero_point=[2**40, 0]), "site 'a:output'"),
        (changed(dtype="int99"), "unknown dtype 'int99'"),
        (changed(dtype=8), "site 'a:output'"),
        (changed(dtype=["int8"]), "site 'a:output'"),
        (changed(axis=None), "without an axis"),
        (changed(axis=0.5), "axis is an integer or null"),
        (changed(block_size=0), "block_size is an integer or null"),
        (changed(color="red"), "an entry has the fields"),
        (json.dumps({**json.loads(GOOD), "encodings": {"a:output": {"dtype": "int8"}}}), "scale is a list of numbers"),
        (json.dumps({**json.loads(GOOD), "encodings": {"a:output": {"scale": [1]}}}), "an entry has the fields"),
        (changed(tensor=3), "tensor is a name, not '3'"),
        (changed(kind="wait"), "kind is one of weight, bias, activation, input, output, not 'wait'"),
        (json.dumps({**json.loads(GOOD), "encodings": {"a:output": 3}}), "an entry has the fields"),
        (GOOD.replace("0.1", "NaN"), "needs positive, finite scales"),
    ],
)
def test_foreign_and_inconsistent_text_names_file_and_place(text, message):
    with pytest.raises(FileFormatError, match=message) as caught:
        loads(text, "m.json")
    assert "m.json" in str(caught.value)
