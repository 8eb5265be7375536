"""The whole road of a network: module -> sim -> ONNX file -> ONNX Runtime, and the file simulated again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import Tensor, nn

import qsdk
from onnx_backend.runtime.session import simulation_session
from qsdk import QuantSim, Report

Batch = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Road:
    """What a network became.

    Attributes:
        model: the caller's, in float.
        sim: calibrated.
        path: of the exported file.
        exported: the report of the export.
    """

    model: nn.Module
    sim: QuantSim
    path: Path
    exported: Report

    def in_float(self, batches: Sequence[Batch]) -> Tensor:
        """The float model's first output."""
        with torch.no_grad():
            return torch.cat([first(self.model(**b) if isinstance(b, Mapping) else self.model(b)) for b in batches])

    def simulated(self, batches: Sequence[Batch]) -> Tensor:
        """The sim's first output."""
        return torch.cat([first(self.sim.run(batch)) for batch in batches])

    def deployed(self, batches: Sequence[Batch], *, optimised: bool = True) -> Tensor:
        """The file's first output in ONNX Runtime: as it is deployed, or without optimisations that change values."""
        session = (
            ort.InferenceSession(self.path, providers=["CPUExecutionProvider"])
            if optimised
            else simulation_session(onnx.load(self.path))
        )
        names = [value.name for value in session.get_inputs()]
        return torch.from_numpy(np.concatenate([session.run(None, fed(batch, names))[0] for batch in batches]))

    def parity(self, batches: Sequence[Batch]) -> Report:
        """The report of `check_parity`."""
        return qsdk.check_parity(self.sim, self.path, batches, progress=False)


def travelled(
    model: nn.Module, batches: Sequence[Batch], config: qsdk.QuantConfig, folder: Path, **options: Any
) -> Road:
    """Quantize, calibrate on the batches and export; the options are those of `quantize`."""
    sim = qsdk.quantize(model, batches[0], config, **options)
    qsdk.calibrate(sim, batches, progress=False)
    path = folder / "model.onnx"
    return Road(model, sim, path, qsdk.export(sim, path))


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def fed(batch: Batch, names: Sequence[str]) -> dict[str, np.ndarray]:
    given = batch if isinstance(batch, Mapping) else {names[0]: batch}
    return {name: given[name].numpy() for name in names}


def sqnr(reference: Tensor, other: Tensor) -> float:
    """The signal-to-noise ratio of a tensor against a reference, in dB."""
    noise = float((reference.double() - other.double()).square().sum())
    return float(10 * np.log10(float(reference.double().square().sum()) / noise)) if noise else float("inf")


def require_whole_road(road: Road, batches: Sequence[Batch]) -> None:
    """Assert what holds on every road: reasons for float, parity site by site, and the file gives the sim back."""
    rows = road.sim.coverage().rows
    assert [row["site"] for row in rows if row["state"] == "float" and not row["reason"]] == []
    assert [row["site"] for row in rows if row["state"] == "quantized" and row["kind"] == "weight"] != []
    report = road.parity(batches)
    assert report.summary["passed"], str(report)
    assert report.summary["weights_max_lsb"] == 0
    assert report.summary["activations_max_lsb"] <= 1
    sites = {site for site, decision in road.sim.plan.decisions.items() if decision.spec is not None}
    assert {row["site"] for row in report.rows} == sites
    again = qsdk.quantize(road.path, None, None)
    assert again.encodings == road.sim.encodings
    given = batches[0]
    feeds: Any = {k: v.numpy() for k, v in given.items()} if isinstance(given, Mapping) else given.numpy()
    np.testing.assert_array_equal(again.run(feeds)[0], road.deployed([given], optimised=False).numpy())
