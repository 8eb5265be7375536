"""Every verb on every kind of network, config, form of data and door: it does its work, or says why it does not."""

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from architectures import ARCHITECTURES, model_of
from every_verb import (
    BIASES,
    CONFIGS,
    GRADIENTS,
    LAYERS,
    SCALINGS,
    VERBS,
    arrays,
    as_generator,
    as_loader,
    everything,
    float_outputs,
    with_labels,
    zoo_sim,
)
from torch_models import seeded
from zoo_models import ZOO

import qsdk
from qsdk import ModelError, QsdkError, QuantConfig, QuantSim, Report
from qsdk.verbs.doors.choose import Sim


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run beside these, and `everything` lists the temporary files of verbs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


# a packed Linear that is split, blocks of scales; recurrent weights, some of them float16; depthwise convolutions
QUICK = [("cnn", "w4a8", "torch"), ("lstm", "float16 layers", "onnx")]
IN_CI = [("gpt", "blocks", "torch"), ("mobile", "per tensor", "onnx")]
NAMES, KINDS = list(ZOO), list(CONFIGS)
# each network with two configs, each config with a network or two
SLOW = [
    (name, KINDS[(place + 9 * turn) % len(KINDS)], door)
    for place, name in enumerate(NAMES)
    for turn in range(2)
    for door in ("torch", "onnx")
]
TRANSFORMERS = {
    "bert": "w4a8",
    "gpt2": "blocks",
    "llama": "weight only",
    "t5": "two levels",
    "whisper": "w4a16",
    "vit": "per tensor",
    "swin": "4 scale bits",
    "wav2vec2": "int2",
    "mobilenet_v2": "weight only",  # its last layers see one pixel, padded: inputs that hardly vary
}
WEIGHTS_OF_FOUR_BITS = ("mxfp4", "nvfp4")  # ONNX Runtime has no kernel for them


@pytest.fixture(autouse=True)
def _one_thread():
    """The networks are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "config", "door"),
    [
        *QUICK,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in IN_CI),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in SLOW if one not in (*QUICK, *IN_CI)),
    ],
)
def test_every_verb_on_networks_of_all_kinds(name: str, config: str, door: str, tmp_path: Path):
    sim, data = zoo_sim(name, config, door)
    require_all(sim, data, None if config in WEIGHTS_OF_FOUR_BITS else tmp_path / "model.onnx")


@pytest.mark.nightly
@pytest.mark.parametrize("door", ["torch", "onnx"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_verb_on_transformers(name: str, door: str, tmp_path: Path):
    sim, data = transformer(name, CONFIGS[TRANSFORMERS[name]](), door, tmp_path)
    require_all(sim, data, tmp_path / "model.onnx")


def transformer(name: str, config: QuantConfig, door: str, folder: Path) -> tuple[Sim, list[Any]]:
    """A calibrated sim of a class of transformers; at the ONNX door of the file that the PyTorch door exports."""
    architecture = ARCHITECTURES[name]
    data: list[Any] = [architecture.inputs(seed, 2, 9) for seed in range(5)]
    if door == "torch":
        sim = qsdk.quantize(model_of(name), data[0], config, dynamic_shapes=architecture.dynamic_shapes())
    else:
        path = folder / "float.onnx"
        plain = qsdk.quantize(model_of(name), data[0], QuantConfig().skip("*"))
        qsdk.export(plain, path)
        names = [value.name for value in onnx.load(path).graph.input]
        data = [tuple(batch[name].numpy() for name in names) for batch in data]
        sim = qsdk.quantize(path, None, config)
    qsdk.calibrate(sim, data, progress=False)
    return sim, data


def require_all(sim: Sim, data: list[Any], path: Path | None) -> None:
    """Each verb after the other, each on the same sim, with another form of data each time."""
    start = sim.snapshot(weights=True)
    before, exact = everything(sim), float_outputs(sim, data[0])
    forms = [lambda d: (d, None), as_generator, as_loader]
    if isinstance(sim, QuantSim):
        forms.append(with_labels)
    for place, (name, verb) in enumerate(VERBS.items()):
        # what looks and calibrates again reads its data twice
        batches, forward = forms[0 if name in SCALINGS else place % len(forms)](data)
        options = {"progress": False} | ({} if forward is None else {"forward": forward})
        try:
            report = verb(sim, batches, **options)
        except QsdkError as error:
            require_refusal(name, sim, error)
            assert everything(sim) == before, name
            continue
        require_report(name, report)
        require_sim(name, sim, data[0], report, exact)
        if path is not None and name in ("gptq", "awq"):
            qsdk.export(sim, path)
            assert qsdk.check_parity(sim, path, data[:1], progress=False).summary["passed"], name
        sim.restore(start)
        assert everything(sim) == before, name


def require_refusal(name: str, sim: Sim, error: QsdkError) -> None:
    """The only verbs that cannot do their work here, in words that tell what to do instead."""
    assert name in GRADIENTS, error
    if isinstance(sim, QuantSim):
        assert name == "tune_ranges", error
        assert re.search("no activation has a range that may be learned", str(error))
    else:
        assert isinstance(error, ModelError)
        assert re.search("needs gradients.*quantize the nn.Module", str(error))


def require_report(name: str, report: Report) -> None:
    """Every row has errors that did not rise, or says why it is left; it prints."""
    assert str(report)
    for row in report.rows:
        before, after = row.get("error_before"), row.get("error_after")
        assert row.get("note") or row.get("reason") or len(row) > 2, row
        if before is None or after is None:
            continue
        assert np.isfinite([before, after]).all(), row
        if name in LAYERS or name in ("analytic", "tune_blocks"):
            assert after <= before * (1 + 1e-5) + 1e-9, row
        if name == "correct_bias":  # the errors are of a sample, the correction is of all rows
            assert after <= before * 1.001 + 1e-9, row


def require_sim(name: str, sim: Sim, batch: Any, report: Report, exact: list[np.ndarray]) -> None:
    """The sim runs; scalings leave the float model, and rounded weights are on their grids and frozen there."""
    assert all(np.isfinite(x).all() for x in arrays(sim.run(batch)))
    if name in SCALINGS or name == "tune_ranges":
        for x, y in zip(exact, float_outputs(sim, batch), strict=True):
            np.testing.assert_allclose(y, x, rtol=0, atol=1e-5 * float(np.abs(x).max()), err_msg=name)
    if name in LAYERS and not name.startswith("seq_mse"):
        done = [row["site"] for row in report.rows if not row["note"]]
        for site, weight in sim.stored_floats(done).items():
            encoding = sim.encodings[site]
            assert encoding.frozen, site
            np.testing.assert_array_equal(encoding.fake_quantize(weight), weight, err_msg=f"{name} {site}")


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("seq_mse")])
def test_a_layer_whose_inputs_never_vary_is_rounded(name: str):
    first, second = torch.nn.Linear(6, 24), torch.nn.Linear(24, 4)
    with torch.no_grad():
        first.weight.zero_()
        first.bias.copy_(torch.linspace(3, 31, 24).sqrt())
    data = [seeded(64, 6, seed=seed) for seed in range(8)]
    sim = qsdk.quantize(torch.nn.Sequential(first, second), data[0], CONFIGS["int2"]())
    qsdk.calibrate(sim, data, progress=False)
    report = LAYERS[name](sim, data, progress=False)
    require_report(name, report)
    assert [row["site"] for row in report.rows if not row["note"]] == ["0:weight", "1:weight"]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["torch", "onnx"])
def test_frozen_encodings_and_weights_stay_as_they_are(door: str):
    sim, data = zoo_sim("unet", "some frozen", door)
    start = sim.snapshot(weights=True)
    frozen = [site for site, encoding in start.own.items() if encoding.frozen]
    weights = sim.stored_floats(frozen)
    assert len(frozen) >= 3
    for name, verb in {**LAYERS, **BIASES, **SCALINGS}.items():
        report = verb(sim, data, progress=False)
        for site in frozen:
            assert sim.snapshot().own[site] == start.own[site], (name, site)
            np.testing.assert_array_equal(sim.stored_floats([site])[site], weights[site], err_msg=name)
        if name in LAYERS:
            left = {row["site"] for row in report.rows if row["note"] == "its encoding is frozen"}
            assert left == set(frozen)
        sim.restore(start)
