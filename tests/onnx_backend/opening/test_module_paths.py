"""Rules reach the nodes of a file by the paths of the modules that torch's exporter noted on them."""

import pytest
import torch
from torch import Tensor, nn

import qsdk


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    torch.manual_seed(0)
    found = str(tmp_path_factory.mktemp("modules") / "float.onnx")
    torch.onnx.export(Net().eval(), (torch.randn(4, 6),), found, dynamo=True, verbose=False)
    return found


def weights(sim) -> list[str]:
    return [row["dtype"] for row in sim.coverage().rows if row["kind"] == "weight"]


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head", ["int8", "int8", "int8", "int8", "int4"]),
        ("layers.1.*", ["int8", "int8", "int4", "int4", "int8"]),
        ("layers.*.second", ["int8", "int4", "int8", "int4", "int8"]),
        ("second", ["int8", "int4", "int8", "int4", "int8"]),
    ],
)
def test_rules_name_modules(path, pattern, expected):
    assert weights(qsdk.quantize(path, None, qsdk.w8a8().override(pattern, weight="int4"))) == expected


def test_activations_of_a_module_are_reached_too(path):
    plain, skipped = (qsdk.quantize(path, None, config) for config in (qsdk.w8a8(), qsdk.w8a8().skip("layers.0.first")))
    states = [{row["site"]: row["state"] for row in sim.coverage().rows} for sim in (plain, skipped)]
    assert states[0].keys() == states[1].keys()  # the names of sites are those of nodes, as before
    changed = [site for site, state in states[0].items() if states[1][site] != state]
    assert changed
    assert all(states[1][site] == "float" for site in changed)


def test_a_saved_sim_knows_the_paths_again(path, tmp_path):
    sim = qsdk.quantize(path, None, qsdk.w8a8().override("layers.1.*", weight="int4"))
    qsdk.calibrate(sim, [torch.randn(4, 6).numpy()], progress=False)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    again = qsdk.load(tmp_path / "sim.qsdk")
    again.set_precision("head", weight="int4")
    assert weights(again) == ["int8", "int8", "int4", "int4", "int4"]


def test_a_path_that_is_none_is_refused_with_the_nearest(path):
    with pytest.raises(qsdk.ConfigError, match=r"layers\.0\.second"):
        qsdk.quantize(path, None, qsdk.w8a8().override("layer.0.second", weight="int4"))
