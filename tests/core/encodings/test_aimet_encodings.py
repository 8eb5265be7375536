"""AIMET's encodings files: read, written, and what each version cannot say.

The files in `aimet_files` are what AIMET 2.42 itself writes of `tiny()`: 8-bit weights and a float16 tensor (plain),
4-bit weights in blocks of 2, and the same with two-level scales.
"""

import copy
import functools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from aimet_documents import FILES, entries, named, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import qsdk
from onnx_backend.opening.read_graph import read_graph
from qsdk import ConfigError, Encoding, ExportError, FileFormatError, bfloat16, float16, int2, int4, int8, int32, uint8
from qsdk.core.encodings.aimet_write import WRITTEN, dumps_aimet
from qsdk.core.encodings.formats import read_any
from qsdk.core.encodings.tensors import TensorFacts, tensor_facts
from qsdk.core.numerics.dtypes import DTYPES, dtype_named


@functools.cache
def facts() -> tuple[TensorFacts, ...]:
    return tuple(tensor_facts(read_graph(tiny())))


def written(stored, version, tensors=None, **options):
    at = {tensor.site: tensor for tensor in (facts() if tensors is None else tensors)}
    return dumps_aimet(stored.encodings, stored.casts or {}, at, version=version, producer="0.1.0", **options)


# what AIMET writes


@named
def test_what_aimet_writes_is_read_and_written_again_to_the_last_digit(path):
    text = path.read_text()
    stored = read_any(text, path.name, facts())
    assert stored.misfits == {}
    version = path.stem.partition(".")[2]
    if version not in WRITTEN:
        with pytest.raises(ConfigError):
            written(stored, version)
        return
    again, rows = written(stored, version)
    assert entries(json.loads(again)) == entries(json.loads(text))
    assert not any(row["loss"].startswith("left out") for row in rows)


def test_values_of_the_plain_files():
    for version in ("0.6.1", "1.0.0", "2.0.0"):
        path = next(p for p in FILES if p.stem == f"plain.{version}")
        stored = read_any(path.read_text(), path.name, facts())
        scales = np.float32([0.0023622047156095505, 0.006953124888241291, 0.007734375074505806])
        assert stored.encodings["conv:weight"] == Encoding(int8, scales, 0, 0)
        assert stored.encodings["mm1:weight"].axis == 1
        assert stored.encodings["x:input"] == Encoding(uint8, np.float32([0.013921568440456016]), np.int32([111]))
        assert stored.casts == (None if version == "2.0.0" else {"mm1:output": float16})
        assert stored.tensors["mm1:weight"] == "m1"


@pytest.mark.parametrize("form", ["blocks", "two_level"])
def test_every_version_of_blocks_says_the_same(form):
    found = [read_any(p.read_text(), p.name, facts()).encodings for p in FILES if p.stem.startswith(form)]
    assert len(found) >= 2
    for site in ("mm1:weight", "mm2:weight", "conv:weight", "x:input"):
        assert all(encodings[site] == found[0][site] for encodings in found)
    assert found[0]["mm1:weight"].scale.shape == (3, 4)
    assert (found[0]["mm1:weight"].axis, found[0]["mm1:weight"].block_size) == (0, 2)
    if form == "blocks":
        # the largest of |m1[0:2, 0]| is 0.49, at the end of the grid -8..7
        np.testing.assert_allclose(found[0]["mm1:weight"].scale[0, 0], 0.49 / 7, rtol=1e-6)
    else:
        assert found[0]["mm2:weight"].scale[1, 1] == np.float32(13) * np.float32(0.009464285203388758)


# from encodings to each version and back

TENSORS = {
    "tensor": TensorFacts("t:output", "t", False, ("n", 6)),
    "channel": TensorFacts("c:weight", "c.weight", True, (3, 4, 2), 0, 1),
    "matrix": TensorFacts("m:weight", "m", True, (6, 4), 1, 0),
    "conv": TensorFacts("v:weight", "v", True, (3, 4, 2, 2), 0, 1),
}
scales = st.floats(2.0**-100, 2.0**100, width=32)


@st.composite
def encodings(draw):
    """Tensor and encoding, of every dtype and granularity that AIMET knows."""
    kind = draw(st.sampled_from([*TENSORS]))
    tensor = TENSORS[kind]
    known = [name for name, d in DTYPES.items() if d.is_quantized and not d.exact_sums]  # that is int8 in these files
    dtype = dtype_named(draw(st.sampled_from(known)))
    shape, axis, block = {
        "tensor": ((1,), None, None),
        "channel": ((3,), 0, None),
        "matrix": ((3, 4), draw(st.sampled_from([0, -2])), 2),
        "conv": ((3, 2, 1, 1), 1, 2),
    }[kind]
    count = int(np.prod(shape))
    low, high = (int(dtype.lo), int(dtype.hi)) if dtype.is_integer else (0, 0)
    symmetric = draw(st.booleans())
    scale = np.float32(draw(st.lists(scales, min_size=count, max_size=count))).reshape(shape)
    zero = [0 if symmetric else draw(st.integers(low, high)) for _ in range(count)]
    zero_point = np.array(zero, np.int64).astype(np.int32).reshape(shape)
    if kind == "conv":
        full = (3, 2, 2, 2)
        scale, zero_point = np.broadcast_to(scale, full), np.broadcast_to(zero_point, full)
    return tensor, Encoding(dtype, scale, zero_point, axis, block)


@pytest.mark.slow
@given(drawn=encodings(), version=st.sampled_from(WRITTEN))
@settings(deadline=None, max_examples=200)
def test_an_encoding_survives_every_version_up_to_its_listed_losses(drawn, version):
    tensor, encoding = drawn
    planned = replace(tensor, wanted=encoding.dtype)
    legacy = version == "1.0.0"
    unsayable = legacy and (not encoding.dtype.is_integer or (encoding.dtype == int32 and not encoding.symmetric))
    text, rows = dumps_aimet(
        {tensor.site: encoding}, {}, {tensor.site: tensor}, version=version, producer="", allow_loss=True
    )
    back = read_any(text, "e.json", [planned])
    assert back.misfits == {}
    assert rows[0]["loss"].startswith("left out") == unsayable
    if unsayable:
        assert back.encodings == {}
        return
    found = back.encodings[tensor.site]
    axis = None if encoding.axis is None else encoding.axis % len(tensor.shape)
    assert (found.axis if found.axis is None else found.axis % len(tensor.shape)) == axis
    assert replace(found, axis=axis) == replace(encoding, axis=axis)
    assert found.scale.tobytes() == encoding.scale.tobytes()
    lost_sign = legacy and encoding.dtype.signed and not encoding.symmetric
    assert ("sign" in rows[0]["loss"]) == lost_sign
    if not lost_sign:
        assert read_any(text, "e.json", [tensor]).encodings[tensor.site].dtype == encoding.dtype
    # without the model, a version with axes says the same
    if not legacy and tensor.site != "v:weight":
        assert replace(read_any(text, "e.json").encodings[tensor.name], axis=axis) == replace(encoding, axis=axis)


def test_the_sign_of_a_dtype_is_a_matter_of_codes():
    """-100 steps below 0 and 155 above are uint8 with zero point 100, and int8 with -28."""
    tensor = TENSORS["tensor"]
    text, rows = dumps_aimet(
        {tensor.site: Encoding(int8, np.float32([0.5]), np.int32([-28]))},
        {},
        {tensor.site: tensor},
        version="1.0.0",
        producer="",
    )
    (entry,) = json.loads(text)["activation_encodings"]
    assert (entry["is_sym"], entry["offset"]) == (False, [-100])
    assert rows[0]["loss"] == "sign (the same values in an unsigned dtype)"
    unsigned = read_any(text, "e.json", [tensor]).encodings[tensor.site]
    assert unsigned == Encoding(uint8, np.float32([0.5]), np.int32([100]))
    signed = read_any(text, "e.json", [replace(tensor, wanted=int8)]).encodings[tensor.site]
    assert signed == Encoding(int8, np.float32([0.5]), np.int32([-28]))
    codes = np.float32([-60, -50, 0, 3, 77.5, 90])
    assert np.array_equal(signed.fake_quantize(codes), unsigned.fake_quantize(codes))


def test_losses_are_listed():
    tensor = TENSORS["channel"]
    frozen = Encoding(int2, np.float32([1, 2, 3]), np.int32(0), 0, None, True)
    for version, loss in (("1.0.0", "frozen, axis (the reader's model gives it)"), ("2.0.0", "frozen")):
        _, rows = dumps_aimet({tensor.site: frozen}, {}, {tensor.site: tensor}, version=version, producer="")
        assert rows == [{"site": "c:weight", "tensor": "c.weight", "dtype": "int2", "form": "channel", "loss": loss}]
    for version, loss in (("1.0.0", ""), ("2.0.0", "left out: versions from 2.0.0 have no casts")):
        _, rows = dumps_aimet({}, {tensor.site: float16}, {tensor.site: tensor}, version=version, producer="")
        assert [row["loss"] for row in rows] == [loss]


STRICT, RAGGED = dtype_named("int8_strict"), TensorFacts("m:weight", "m", True, (7, 4), 1, 0)


@pytest.mark.parametrize(
    ("tensor", "found", "versions", "message"),
    [
        (TENSORS["tensor"], Encoding(STRICT, np.float32([1]), 0), WRITTEN, "has a grid that AIMET has no name for"),
        (
            TENSORS["tensor"],
            Encoding(qsdk.float8e4m3fn, np.float32([1]), 0),
            WRITTEN[:1],
            "no float8e4m3fn; write version 2",
        ),
        (
            TENSORS["tensor"],
            Encoding(int32, np.float32([1]), 3),
            WRITTEN[:1],
            "no int32 with zero points; write version 2",
        ),
        (TENSORS["tensor"], bfloat16, WRITTEN[:1], "it has no bfloat16; use float16"),
        (RAGGED, Encoding(int4, np.ones((4, 4)), 0, 0, 2), WRITTEN, "blocks of 2 do not divide the 7 elements"),
        (
            TENSORS["conv"],
            Encoding(int4, np.arange(1, 25).reshape(3, 2, 2, 2), 0, 1, 2),
            WRITTEN,
            "its block scales differ along axis 2",
        ),
        (None, Encoding(int8, np.float32([1]), 0), WRITTEN, "no tensor of the model plays its part"),
    ],
)
def test_what_a_version_cannot_say_is_refused_by_name_or_left_out(tensor, found, versions, message):
    other = {"o:output": Encoding(uint8, np.float32([1]), np.int32([3]))}
    tensors = {"o:output": TensorFacts("o:output", "o")} | ({} if tensor is None else {"s:weight": tensor})
    both = {"s:weight": found} if isinstance(found, Encoding) else {}
    casts = {} if both else {"s:weight": found}
    for version in versions:
        with pytest.raises(
            ExportError, match=rf"version {version} cannot say .*s:weight \(.*{message}.*allow_loss=True"
        ):
            dumps_aimet({**both, **other}, casts, tensors, version=version, producer="")
        text, rows = dumps_aimet({**both, **other}, casts, tensors, version=version, producer="", allow_loss=True)
        losses = {row["site"]: row["loss"] for row in rows}
        assert message in losses["s:weight"]
        assert losses["o:output"] == ""
        assert [*read_any(text, "e.json", [*tensors.values()]).encodings] == ["o:output"]


def test_an_unknown_version_is_refused():
    with pytest.raises(ConfigError, match=r"no AIMET version '0\.6\.1' can be written; choose one of 1\.0\.0, 2"):
        dumps_aimet({}, {}, {}, version="0.6.1", producer="")


# files that cannot be meant


def file_with(version, **changed):
    """A golden file of a version in which the fields of one entry are changed; None deletes."""
    stems = {"0.6.1": ("plain", "m2"), "1.0.0": ("plain", "m2"), "2.0.0": ("plain", "m2"), "LPBQ": ("two_level", "m2")}
    stem, name = stems[version]
    number = "1.0.0" if version == "LPBQ" else version
    data = json.loads(next(p for p in FILES if p.stem == f"{stem}.{number}").read_text())
    if version == "0.6.1":
        entry = data["param_encodings"][name][1]
    else:
        part = data["encodings"] if version == "2.0.0" else data["param_encodings"]
        entry = next(e for e in part if e["name"] == name)
    entry.update(changed)
    for key in [key for key, value in changed.items() if value is None]:
        del entry[key]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (file_with("0.6.1", bitwidth=4), "its channels have different types"),
        (file_with("0.6.1", offset=-127.0), "min contradicts scale and offset"),
        (file_with("0.6.1", max=9.0), "max contradicts scale and offset"),
        (file_with("0.6.1", scale=None), "lacks scale"),
        (file_with("0.6.1", scale="1"), "scale is a finite number"),
        (file_with("0.6.1", is_symmetric="yes"), "is_symmetric is true or false"),
        (file_with("1.0.0", offset=[-128.0]), "3 scales and 1 offsets per channel"),
        (file_with("1.0.0", offset=[-128.5] * 3), "a zero point is no whole number"),
        (file_with("1.0.0", offset=[1e300] * 3), "a zero point is no whole number"),
        (file_with("1.0.0", offset=[1.0] * 3), "outside the grid -128..127 of int8"),
        (file_with("1.0.0", scale=[0.1, -0.1, 0.1]), "not a positive, finite float32"),
        (file_with("1.0.0", scale=[0.1, 1e300, 0.1]), "not a positive, finite float32"),
        (file_with("1.0.0", scale=[0.1, [0.2], 0.1]), "not made of finite numbers|ragged"),
        (file_with("1.0.0", scale=[10**400, 1, 1]), "not made of finite numbers"),
        (file_with("1.0.0", enc_type="PER_BLOCK"), "lacks block_size"),
        (file_with("1.0.0", enc_type="VECTOR"), "no encodings of the kind 'VECTOR'"),
        (file_with("1.0.0", zero_point_shift=[0.5] * 3), "zero_point_shift puts zero between two codes"),
        (file_with("1.0.0", colour="red"), "has the unknown colour"),
        (file_with("1.0.0", bw=77), "unknown dtype 'int77'"),
        (file_with("1.0.0", dtype="FLOAT"), "neither INT nor a FLOAT of 16 bits"),
        (file_with("1.0.0", bw=2**40), "bw is a whole number"),
        (file_with("LPBQ", per_block_int_scale=[1, 2]), "2 block scales for 3 channels"),
        (file_with("LPBQ", per_block_int_scale=[0, 1, 2, 3, 4, 5]), "whole numbers from 1"),
        (file_with("LPBQ", offset=[-8] * 3), "symmetric, with the offset -128"),
        (file_with("LPBQ", block_size=0), "block_size is a whole number from 1"),
        (file_with("2.0.0", axis=None), "3 scales without an axis"),
        (file_with("2.0.0", block_size=2), "scales per block have the tensor's rank"),
        (file_with("2.0.0", y_zero_point=[1, 2]), "y_zero_point and y_scale have different shapes"),
        (file_with("2.0.0", y_zero_point=[0.5, 0, 0]), "y_zero_point puts zero between two codes"),
        (file_with("2.0.0", output_dtype="float32"), "float32 has no scale"),
        (file_with("2.0.0", output_dtype="int99"), "unknown dtype 'int99'"),
        (
            file_with("2.0.0", y_scale={"x": [[1]], "x_scale": [1, 2]}),
            "two levels of scales have shapes that do not fit",
        ),
        (file_with("2.0.0", y_scale={"x": [[1]]}), "y_scale: the entry lacks x_scale"),
        (file_with("2.0.0", bw=8), "has the unknown bw"),
        ('{"version": "3.0.0", "encodings": []}', "the AIMET version '3.0.0'"),
        ('{"version": ["1.0.0"], "encodings": []}', "the AIMET version"),
        ('{"version": "1.0.0", "param_encodings": {}}', "param_encodings is a list"),
        ('{"version": "0.6.1", "param_encodings": []}', "param_encodings is an object"),
        ('{"version": "0.6.1", "activation_encodings": {"conv": {"inputs": {}}}}', "module 'conv'"),
        ('{"version": "2.0.0", "encodings": [{"output_dtype": "int8"}]}', r"encodings\[0\] has no name"),
        ('{"version": "2.0.0", "encodings": [3]}', r"encodings\[0\] has no name"),
        ('{"encodings": {}}', "is no qsdk.encodings file, nor one of AIMET"),
        ("[1]", "is no qsdk.encodings file, nor one of AIMET"),
    ],
)
def test_foreign_and_contradictory_files_name_file_and_tensor(text, message):
    with pytest.raises(FileFormatError, match=message) as caught:
        read_any(text, "e.json", facts())
    assert "e.json" in str(caught.value)


def test_one_entry_per_tensor():
    twice = {"version": "2.0.0", "encodings": [{"name": "x", "output_dtype": "int8", "y_scale": 1.0}] * 2}
    with pytest.raises(FileFormatError, match="tensor 'x' has two entries"):
        read_any(json.dumps(twice), "e.json", facts())
    for name in ("mm1:weight", "mm1.weight"):
        pair = [twice["encodings"][0] | {"name": n, "y_scale": s} for n, s in (("m1", 1.0), (name, 2.0))]
        file = {"version": "2.0.0", "encodings": pair}
        assert read_any(json.dumps(file), "e.json", facts()).misfits == {
            name: "another entry says what mm1:weight is: m1"
        }


def test_blocks_of_a_tensor_without_channels_need_a_version_that_says_their_axes():
    path = next(p for p in FILES if p.stem == "blocks.1.0.0")
    one = [replace(tensor, channel_axis=None) if tensor.site == "mm1:weight" else tensor for tensor in facts()]
    (words,) = read_any(path.read_text(), path.name, one).misfits.values()
    assert words == "it has no channels that blocks could divide; use a version with axes, 2.0.0"


def test_names_and_counts_that_fit_nothing_are_listed():
    text = file_with("1.0.0", scale=[0.1, 0.2], offset=[-128] * 2).replace('"conv.weight"', '"conv.wait"')
    stored = read_any(text, "e.json", facts())
    assert stored.misfits == {
        "conv.wait": "no tensor has this name; the nearest: conv.weight",
        "mm2:weight": "2 scales do not fit the 3 channels (axis 1) of [4, 3]",
    }
    assert "mm1:weight" in stored.encodings


def test_without_a_model_an_older_version_lacks_its_axes():
    for stem, what in (("plain.1.0.0", "channel"), ("plain.0.6.1", "channel"), ("blocks.1.0.0", "channel")):
        path = next(p for p in FILES if p.stem == stem)
        with pytest.raises(FileFormatError, match=f"tensor 'conv.weight': this version has no {what} axis.*model="):
            read_any(path.read_text(), path.name)


JUNK = [None, True, -1, 0, 1, 3, 0.5, 1e300, 10**400, "int8", "INT", "", [], [1], [[1, 2]], [1, [2]], {}, {"x": [1]}]


def spoilt(value, rng):
    """A copy with one place, anywhere inside, replaced, deleted or doubled."""
    value = copy.deepcopy(value)
    places, todo = [], [value]
    while todo:
        part = todo.pop()
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        places += [(part, key) for key in keys]
        todo += [part[key] for key in keys if isinstance(part[key], dict | list)]
    part, key = rng.choice(places)
    action = rng.choice(["replace", "replace", "delete", "double"])
    if action == "delete":
        del part[key]
    elif action == "double" and isinstance(part, list):
        part.append(part[key])
    else:
        part[key] = rng.choice(JUNK)
    return value


@given(seed=st.integers(0, 2**32 - 1), path=st.sampled_from(FILES), with_model=st.booleans())
@settings(deadline=None, max_examples=300)
def test_a_spoilt_file_is_read_or_refused_by_name(seed, path, with_model):
    rng = random.Random(seed)
    data = json.loads(path.read_text())
    for _ in range(rng.randint(1, 3)):
        data = spoilt(data, rng) if data else data
    try:
        read_any(json.dumps(data), "e.json", facts() if with_model else None)
    except FileFormatError as error:
        message = str(error)
    else:
        message = "e.json"
    assert "e.json" in message


@given(length=st.integers(0, 800))
def test_a_truncated_file_is_refused(length):
    text = FILES[0].read_text()
    with pytest.raises(FileFormatError, match=r"e\.json is truncated or no JSON at line \d+"):
        read_any(text[:length], "e.json", facts())


def test_a_file_without_a_version_goes_by_its_shape():
    """AdaRound in AIMET writes parameters alone, and no version."""
    for stem in ("plain.0.6.1", "plain.1.0.0", "plain.2.0.0"):
        data = json.loads(next(p for p in FILES if p.stem == stem).read_text())
        del data["version"]
        data.pop("activation_encodings", None)
        stored = read_any(json.dumps(data), "e.json", facts())
        assert stored.encodings["mm2:weight"].dtype == int8
        assert stored.provenance["format"] == f"AIMET {stem.partition('.')[2]}"


def test_a_bias_has_its_own_int32_grid():
    tensor = TensorFacts("b:bias", "b", True, (3,), 0)
    bias = Encoding(int32, np.float32([1e-5, 2e-5, 3e-5]), 0, 0)
    for version in WRITTEN:
        text, _ = dumps_aimet({"b:bias": bias}, {}, {"b:bias": tensor}, version=version, producer="")
        assert read_any(text, "e.json", [tensor]).encodings == {"b:bias": bias}
    assert json.loads(text)["encodings"] == [
        {"name": "b", "output_dtype": "int32", "y_scale": [float(s) for s in bias.scale], "axis": 0}
    ]
