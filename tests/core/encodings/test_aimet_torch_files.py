"""Files of aimet-torch: those that go by modules, and those whose weights have other scales than the config."""

import json

import numpy as np
import pytest
import torch

import qsdk
from qsdk import FileFormatError

X = torch.linspace(-1, 2, 256).reshape(4, 1, 8, 8)


class Net(torch.nn.Module):
    """A convolution and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.conv, self.relu, self.flat = torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten()
        self.fc1, self.fc2 = torch.nn.Linear(144, 6), torch.nn.Linear(6, 3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2

    def forward(self, x):
        return self.fc2(self.fc1(self.flat(self.relu(self.conv(x)))))


def sim_of(config: qsdk.QuantConfig):
    return qsdk.quantize(Net().eval(), X, config)


def calibrated(config: qsdk.QuantConfig):
    sim = sim_of(config)
    qsdk.calibrate(sim, [X], progress=False)
    return sim


def in_0_6_1(sim, path) -> dict:
    """The encodings of a sim by tensor, in the form that AIMET wrote at first."""
    qsdk.save_encodings(sim, path, version="1.0.0")
    data = json.loads(path.read_text())
    return {"version": "0.6.1"} | {
        section: {
            entry["name"]: [
                {
                    "bitwidth": entry["bw"],
                    "dtype": "int",
                    "is_symmetric": str(entry["is_sym"]),
                    "scale": scale,
                    "offset": offset,
                    "min": offset * scale,
                    "max": (offset + 2 ** entry["bw"] - 1) * scale,
                }
                for scale, offset in zip(entry["scale"], entry["offset"], strict=True)
            ]
            for entry in data[section]
        }
        for section in ("activation_encodings", "param_encodings")
    }


def by_modules(sim, path) -> dict:
    """What `QuantizationSimModel.export` writes beside the ONNX model: activations by module, parameters by path."""
    flat = in_0_6_1(sim, path)
    entry = {name: entries[0] for name, entries in flat["activation_encodings"].items()}
    modules = {
        "conv": {"input": {"0": entry["x"]}},
        "relu": {"output": {"0": entry["relu"]}},
        "fc1": {"input": {"0": entry["relu"]}, "output": {"0": entry["linear"]}},
        "fc2": {"output": {"0": entry["linear_1"]}},
    }
    parts = {"activation_encodings": modules, "param_encodings": flat["param_encodings"]}
    return {"version": "1.0.0", "excluded_layers": [], "quantizer_args": {"quant_scheme": "min_max"}, **parts}


def test_a_file_by_modules_loads_whole(tmp_path):
    config = qsdk.load_config("htp_v81")
    sim, path = calibrated(config), tmp_path / "net_torch.encodings"
    path.write_text(json.dumps(by_modules(sim, path)))
    again = sim_of(config)
    report = qsdk.load_encodings(again, path, freeze="weights")
    assert (report.summary["missing"], report.summary["unexpected"], report.summary["different"]) == (0, 0, 0)
    assert again.encodings == sim.encodings
    np.testing.assert_array_equal(again(X).detach(), sim(X).detach())


def test_a_file_of_parameters_by_path_loads(tmp_path):
    config = qsdk.load_config("htp_v81")
    sim, path = calibrated(config), tmp_path / "net_torch.encodings"
    path.write_text(json.dumps(by_modules(sim, path) | {"activation_encodings": {}}))
    again = sim_of(config)
    assert qsdk.load_encodings(again, path, strict=False).summary["loaded"] == 3
    own = again.snapshot().own
    assert {site: sim.encodings[site] for site in own} == own


def test_modules_and_entries_that_do_not_fit_are_named(tmp_path):
    sim, path = calibrated(qsdk.load_config("htp_v81")), tmp_path / "net_torch.encodings"
    data = by_modules(sim, path)
    entries = data["activation_encodings"]
    entries["fc1"]["input"]["0"] = entries["conv"]["input"]["0"]  # not what relu gives
    entries["norm"] = {"output": {"0": entries["relu"]["output"]["0"]}}
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError) as caught:
        qsdk.load_encodings(sim, path)
    assert "1 unexpected: norm:output" in str(caught.value)
    assert "1 different: flat:output (it follows from relu:output here, whose entries say otherwise)" in str(
        caught.value
    )
    data["activation_encodings"] = {"conv": {"inputs": {"0": {}}}}
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match="module 'conv': a file that goes by modules has input and output"):
        qsdk.load_encodings(sim, path)


@pytest.mark.parametrize(
    ("theirs", "remedy"),
    [
        ({"op_type": "Linear", "per_channel": False}, '.override("*", op_type="Gemm", per_channel=False)'),
        ({"op_type": "Conv", "per_channel": False}, '.override("conv", per_channel=False)'),
        ({"weight": "int4"}, '.override("conv", weight="int4").override("*", op_type="Gemm", weight="int4")'),
        (
            {"op_type": "Linear", "block_size": 3, "weight": "int4"},
            '.override("*", op_type="Gemm", weight="int4", block_size=3)',
        ),
    ],
)
@pytest.mark.parametrize("name", ["htp_v81", "htp_v73"])
def test_weights_of_another_form_are_refused_with_the_config_that_takes_them(name, theirs, remedy, tmp_path):
    config, path = qsdk.load_config(name), tmp_path / "e.json"
    theirs = calibrated(config.override("*", **theirs))
    qsdk.save_encodings(theirs, path, version="1.0.0")
    sim = sim_of(config)
    with pytest.raises(FileFormatError) as caught:
        qsdk.load_encodings(sim, path)
    assert f"for its weights yours with {remedy}, or pass strict=False" in str(caught.value)
    assert qsdk.load_encodings(sim, path, strict=False).summary["config for the file"] == remedy
    again = sim_of(eval(f"config{remedy}"))
    qsdk.load_encodings(again, path)
    assert again.encodings == theirs.encodings


def test_no_remedy_is_made_up_where_a_file_only_lacks_entries(tmp_path):
    config, path = qsdk.load_config("htp_v81"), tmp_path / "e.json"
    data = in_0_6_1(calibrated(config), path)
    data["param_encodings"].pop("fc2.weight")
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match="1 not in the file: fc2:weight") as caught:
        qsdk.load_encodings(sim_of(config), path)
    assert "for its weights" not in str(caught.value)
