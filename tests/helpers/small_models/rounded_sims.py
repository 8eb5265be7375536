"""Sims at few bits, and the error of a network."""

import numpy as np
import onnxruntime as ort
import torch
from bias_models import data_of, images, layers, onnx_layers

from qsdk import QuantConfig, calibrate, quantize, w4a8

#: int3 with a layer in blocks, one per tensor of 8 bits, one in float16
MIXED = w4a8().override("*", weight="int3").override("depthwise", weight="int8").skip("mixed*", dtype="float16")


def sim_at(door: str, config: QuantConfig = MIXED):
    sim = quantize(layers(), torch.from_numpy(images(4, 0)), config) if door == "torch" else None
    sim = sim or quantize(onnx_layers(), None, config)
    calibrate(sim, data_of(door), progress=False)
    return sim


def network_error(sim, door: str) -> float:
    """Relative to the float network, on data not seen."""
    x = images(256, 7)
    session = ort.InferenceSession(onnx_layers().SerializeToString(), providers=["CPUExecutionProvider"])
    exact = session.run(None, {"x": x})[0]
    found = sim.run(torch.from_numpy(x)).numpy() if door == "torch" else sim.run(x)[0]
    return float(np.square(found - exact).sum() / np.square(exact).sum())
