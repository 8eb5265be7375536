"""Inputs with known answers for networks whose data no package has: rendered text, and a voice between pauses.

Lines are set in Pillow's own font in random sizes, colours, tilts, blur and noise; images are BGR in -1..1, as PP-OCR
takes them. A voice is a train of pulses through three resonances, in noise.
"""

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Array = np.ndarray
RATE, STEP, CONTEXT = 16_000, 512, 64


def line(text: str, rng: np.random.Generator) -> Image.Image:
    """One line of text that fills its image."""
    font = ImageFont.load_default(int(rng.integers(20, 40)))
    left, top, right, bottom = font.getbbox(text)
    dark, light = rng.integers(0, 90, 3), rng.integers(150, 256, 3)
    ink, paper = (dark, light) if rng.random() < 0.7 else (light, dark)
    margin = int(rng.integers(2, 8))
    size = (round(right - left) + 2 * margin, round(bottom - top) + 2 * margin)
    image = Image.new("RGB", size, tuple(int(v) for v in paper))
    ImageDraw.Draw(image).text((margin - left, margin - top), text, tuple(int(v) for v in ink), font)
    image = image.rotate(
        rng.uniform(-1.5, 1.5), Image.Resampling.BILINEAR, fillcolor=tuple(int(v) for v in paper)
    ).filter(ImageFilter.GaussianBlur(rng.uniform(0.0, 1.8)))
    noisy = np.asarray(image, np.float64) + rng.normal(0, rng.uniform(0, 25), (size[1], size[0], 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def strip(image: Image.Image, width: int) -> Array:
    """A line as a recogniser's input, float32 [3, 48, width]: 48 pixels high, filled up with zeros on the right."""
    wide = min(width, round(48 * image.width / image.height))
    found = np.zeros((3, 48, width), np.float32)
    found[:, :, :wide] = _pixels(image.resize((wide, 48), Image.Resampling.BILINEAR))
    return found


def page(texts: list[str], rng: np.random.Generator, height: int, width: int) -> tuple[Array, Array]:
    """Lines at random places that do not overlap, float32 [3, height, width], and bool [height, width] of their cores.

    A core is a line shrunk as detectors by differentiable binarisation learn it (arXiv:1911.08947, ratio 0.4).
    """
    paper = tuple(int(v) for v in rng.integers(0, 256, 3))
    image, where = Image.new("RGB", (width, height), paper), np.zeros((height, width), bool)
    cores = np.zeros_like(where)
    for text in texts:
        drawn = line(text, rng)
        if drawn.width >= width or drawn.height >= height:
            continue
        left, top = int(rng.integers(width - drawn.width)), int(rng.integers(height - drawn.height))
        if where[max(top - 8, 0) : top + drawn.height + 8, max(left - 8, 0) : left + drawn.width + 8].any():
            continue
        image.paste(drawn, (left, top))
        where[top : top + drawn.height, left : left + drawn.width] = True
        inset = round(drawn.width * drawn.height * (1 - 0.4**2) / (2 * (drawn.width + drawn.height)))
        cores[top + inset : top + drawn.height - inset, left + inset : left + drawn.width - inset] = True
    return _pixels(image), cores


def _pixels(image: Image.Image) -> Array:
    return (np.asarray(image, np.float32)[:, :, ::-1].transpose(2, 0, 1) / 255 - 0.5) / 0.5


def voice(rng: np.random.Generator, frames: int) -> tuple[Array, Array]:
    """A voice that begins and ends within noise, float32 [frames, 576] with context, and bool [frames] where it is."""
    count = frames * STEP
    begin = int(rng.integers(0, count * 3 // 4))
    end = begin + int(rng.integers(count // 6, count // 2))
    time = np.arange(count) / RATE
    pitch = rng.uniform(90, 220) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(1, 4) * time))
    phase = np.cumsum(pitch) / RATE
    spoken = np.diff(np.floor(phase), prepend=0.0)
    for low, high, band in ((300, 800, 90), (900, 2200, 120), (2300, 3000, 170)):
        spoken = _resonance(spoken, rng.uniform(low, high), band)
    spoken *= 0.6 + 0.4 * np.sin(2 * np.pi * rng.uniform(3, 6) * time)
    inside = (np.arange(count) >= begin) & (np.arange(count) < end)
    wave = rng.uniform(0.02, 0.2) * spoken / np.abs(spoken).max() * inside
    wave += rng.uniform(0.001, 0.02) * rng.normal(size=count)
    padded = np.concatenate([np.zeros(CONTEXT), wave])
    cut = np.stack([padded[i * STEP : i * STEP + STEP + CONTEXT] for i in range(frames)])
    return cut.astype(np.float32), inside.reshape(frames, STEP).mean(1) > 0.5


def _resonance(wave: Array, hertz: float, band: float) -> Array:
    """A wave through a resonator, by its impulse response of 50 ms."""
    time = np.arange(RATE // 20) / RATE
    response = np.exp(-np.pi * band * time) * np.sin(2 * np.pi * hertz * time)
    return np.convolve(wave, response)[: len(wave)]
