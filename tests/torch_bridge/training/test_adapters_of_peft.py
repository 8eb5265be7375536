"""LoRA of peft beside a quantized base: float adapters, ranges for all, training, and inputs of the file."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import qsdk

NAMES = ("red", "blue")
DATA = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def _adapted(**changes: Any) -> Any:
    """Return a network with two adapters of different ranks and scalings."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    sizes = {"target_modules": ["0", "2"], "init_lora_weights": False}
    model = get_peft_model(base, LoraConfig(r=4, **sizes, **changes), adapter_name="red")
    model.add_adapter("blue", LoraConfig(r=2, lora_alpha=4, **{**sizes, "target_modules": ["0"]}))
    return model.eval()


def _with_each(model: Any, batch: Tensor) -> None:
    for name in reversed(NAMES):
        model.set_adapter(name)
        model(batch)


def _sim(config: qsdk.QuantConfig | None = None) -> Any:
    sim = qsdk.quantize(_adapted(), DATA[0], config)
    qsdk.calibrate(sim, DATA, forward=_with_each, progress=False)
    return sim


@pytest.mark.parametrize("config", [qsdk.w8a8(), qsdk.weight_only("int4", block_size=8)], ids=["w8a8", "int4"])
def test_one_file_computes_what_the_sim_does_with_each_adapter(config: qsdk.QuantConfig, tmp_path: Path) -> None:
    sim = _sim(config)
    paths = qsdk.export(sim, tmp_path / "model.onnx", adapters="inputs").summary["paths"]
    assert {Path(path).name for path in paths} >= {f"model.{name}.onnx_adapter" for name in NAMES}
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", DATA, progress=False).summary["passed"]
    session, results = qsdk.session(tmp_path / "model.onnx"), []
    for name in NAMES:
        adapter, options = ort.LoraAdapter(), ort.RunOptions()
        adapter.Load(str(tmp_path / f"model.{name}.onnx_adapter"))
        options.add_active_adapter(adapter)
        sim.model.set_adapter(name)
        results.append(session.run(None, {session.get_inputs()[0].name: DATA[1].numpy()}, options)[0])
        # blue leaves the last layer alone, whose sum with zeros the file rounds once more
        encoding = sim.encodings.get("base_model.model.2/add.0:output")
        step = 0.0 if encoding is None or name == "red" else float(encoding.scale[0]) / 2
        with torch.no_grad():
            np.testing.assert_allclose(results[-1], sim(DATA[1]).numpy(), atol=step + 2e-6)
    assert np.abs(results[0] - results[1]).max() > 0.1
    plain = session.run(None, {session.get_inputs()[0].name: DATA[1].numpy()})[0]
    assert np.array_equal(plain, results[0])  # the active adapter is the default


def test_adapters_are_float_and_ranges_hold_what_each_of_them_makes() -> None:
    sim, alone = _sim(), qsdk.quantize(_adapted(), DATA[0])
    qsdk.calibrate(alone, DATA, progress=False)
    rows = {row["site"]: row for row in sim.coverage().rows}
    assert rows["base_model.model.0.base_layer:weight"]["dtype"] == "int8"
    matrix = rows["base_model.model.0.lora_A.red:weight"]
    assert (matrix["state"], "lora_" in matrix["reason"]) == ("float", True)
    site = "base_model.model.0/mul.0:output"
    assert float(sim.encodings[site].high[0]) > float(alone.encodings[site].high[0])


def test_rules_for_everything_leave_adapters_float_and_those_that_name_them_decide() -> None:
    fast = qsdk.w8a8().for_dialect("onnxruntime")
    named = fast.override("*.lora_A.*", weight="int8")
    matrix = "base_model.model.0.lora_A.red:weight"
    for config, dtype in ((fast, "float32"), (named, "int8_exact")):
        rows = {row["site"]: row["dtype"] for row in qsdk.quantize(_adapted(), DATA[0], config).coverage().rows}
        assert rows[matrix] == dtype


def test_training_changes_the_adapter_alone() -> None:
    sim = _sim()
    before = {name: value.clone() for name, value in sim.model.named_parameters()}
    with sim.training() as trained:
        optimizer = torch.optim.Adam([one for one in trained.parameters() if one.requires_grad], lr=1e-2)
        trained(DATA[0]).square().mean().backward()
        optimizer.step()
    changed = {name for name, value in sim.model.named_parameters() if not torch.equal(value, before[name])}
    assert len(changed) == 4
    assert all(".lora_" in name and ".red." in name for name in changed)


def test_what_cannot_be_inputs_is_refused(tmp_path: Path) -> None:
    sim = _sim()
    sim.model.set_adapter("blue")
    with pytest.raises(qsdk.ExportError, match=r"the adapter 'red' changes base_model.model.2, for which the file has"):
        qsdk.export(sim, tmp_path / "model.onnx", adapters="inputs")
    with pytest.raises(qsdk.ConfigError, match=r"adapters='file'; choose 'inputs'"):
        qsdk.export(sim, tmp_path / "model.onnx", adapters="file")  # type: ignore[arg-type]
    plain = qsdk.quantize(nn.Linear(16, 4), DATA[0])
    qsdk.calibrate(plain, DATA, progress=False)
    with pytest.raises(qsdk.ConfigError, match="the model has no adapters of peft"):
        qsdk.export(plain, tmp_path / "model.onnx", adapters="inputs")
    twisted = qsdk.quantize(_adapted(use_dora=True), DATA[0])
    qsdk.calibrate(twisted, DATA, progress=False)
    with pytest.raises(qsdk.ExportError, match=r"base_model.model.0 has a variant of LoRA \(such as DoRA\)"):
        qsdk.export(twisted, tmp_path / "model.onnx", adapters="inputs")
    assert not list(tmp_path.iterdir())
