"""Sites: names, and the patterns that match their owners."""

import doctest

import pytest

from qsdk.core import site
from qsdk.core.site import matches, nearest_in_words, nearest_owners, owner_of, port_of, site_name


@pytest.mark.parametrize(
    ("owner", "port"),
    [("layer1.0.conv1", "weight"), ("layer1.0/add.0", "output"), ("x", "input"), ("node:0", "output")],
)
def test_a_site_is_an_owner_and_a_port(owner: str, port: str):
    site = site_name(owner, port)
    assert site == f"{owner}:{port}"
    assert (owner_of(site), port_of(site)) == (owner, port)


def test_the_model_itself_is_an_owner():
    assert site_name("", "output") == "self:output"


@pytest.mark.parametrize(
    ("pattern", "owner"),
    [
        ("bn*", "layer1.0.bn1"),
        ("layer1.0.bn1", "layer1.0.bn1"),
        ("0.bn1", "layer1.0.bn1"),
        ("layer1.*", "layer1.0.bn1"),
        ("*", "anything"),
        ("bn?", "bn1"),
        ("conv[12]", "block.conv2"),
        ("add.*", "layer1.0/add.0"),
        ("add.0", "layer1.0/add.0"),
        ("layer1.*", "layer1.0/add.0"),
        ("0/add.0", "layer1.0/add.0"),
        ("layer1.0", "layer1.0/add.0"),
        ("conv1", "conv1@1"),
        ("add.0", "block/add.0@2"),
        ("/model/conv/Conv", "/model/conv/Conv"),
    ],
)
def test_patterns_match_the_owner_or_a_dotted_suffix(pattern: str, owner: str):
    assert matches(pattern, owner)


@pytest.mark.parametrize(
    ("pattern", "owner"),
    [
        ("bn", "layer1.0.bn1"),
        ("layer1", "layer1.0.bn1"),
        ("n1", "layer1.0.bn1"),
        ("BN*", "layer1.0.bn1"),
        ("conv[12]", "conv3"),
        ("mul.*", "layer1.0/add.0"),
        ("", "conv1"),
        ("conv1:weight", "conv1"),
    ],
)
def test_patterns_that_do_not_match(pattern: str, owner: str):
    assert not matches(pattern, owner)


def test_the_nearest_owners_are_like_the_pattern():
    owners = ["layer1.conv1", "layer1.bn1", "layer2.conv1", "head"]
    assert nearest_owners("hed*", owners)[0] == "head"
    assert set(nearest_owners("conv2", owners)) >= {"layer1.conv1", "layer2.conv1"}
    assert len(nearest_owners("conv", [f"conv{i}" for i in range(9)], count=2)) == 2


def test_the_examples_in_the_docstrings_hold():
    failed, tried = doctest.testmod(site)
    assert (failed, tried > 0) == (0, True)


def test_only_owners_that_are_near_are_called_so():
    owners = ["layer1.conv1", "layer1.bn1", "layer2.conv1", "head"]
    assert nearest_owners("zzz*", owners) == []
    said = "none is like it; there are 4, such as layer1.conv1, layer1.bn1, layer2.conv1"
    assert nearest_in_words("zzz*", owners) == said
    assert nearest_in_words("hed", owners) == "the nearest are: head"
