"""Pictures as inputs of a model: sized, normalised and laid out as it was trained with."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backend.proto.inputs import ModelInput
from qsdk.commands.data.user_functions import load_function
from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError, DataError, FileFormatError

#: makes one sample of a file: an array for the only input of a model, or one per input by name
Preprocess = Callable[[Path], Any]
PICTURES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which most networks are trained with
_SIZE = 224
_CHANNELS = (1, 3)


@dataclass(frozen=True)
class PictureReader:
    """The steps from a file to an array, as torchvision's evaluation transforms do them.

    Attributes:
        dtype: of the input. One of bytes takes pixels as they are, 0 to 255; others take `(pixel / 255 - mean) / std`.
        height: of the array.
        width: of the array.
        channels: 3 for RGB, 1 for grey.
        shorter: the shorter side is resized to this before the centre is cut out; None squeezes the whole picture.
        mean: one per channel.
        std: one per channel.
        channels_last: channels are the last axis, else the first.
    """

    dtype: np.dtype[Any]
    height: int
    width: int
    channels: int
    shorter: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels_last: bool

    def __call__(self, path: Path) -> Array:
        """Return the array of a picture, without a batch axis."""
        pillow = _pillow()
        try:
            with pillow.open(path) as opened:
                picture = self._sized(opened.convert("RGB" if self.channels == 3 else "L"), pillow.Resampling.BILINEAR)
                pixels = np.asarray(picture).reshape(self.height, self.width, self.channels)
        except (OSError, ValueError, SyntaxError) as error:  # pillow's own, for damaged files
            raise FileFormatError(f"{path} cannot be read as a picture ({error}); take it out of the folder") from error
        if self.dtype.kind == "f":
            mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
            pixels = ((pixels.astype(np.float32) / 255.0 - mean) / std).astype(self.dtype)
        else:
            pixels = pixels.astype(self.dtype)
        return pixels if self.channels_last else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _sized(self, picture: Any, resampling: Any) -> Any:
        if self.shorter is None:
            return picture.resize((self.width, self.height), resampling)
        factor = self.shorter / min(picture.size)
        width, height = (round(side * factor) for side in picture.size)
        left, top = (width - self.width) // 2, (height - self.height) // 2
        resized = picture.resize((width, height), resampling)
        return resized.crop((left, top, left + self.width, top + self.height))

    def __str__(self) -> str:
        fit = "squeezed" if self.shorter is None else f"shorter side {self.shorter}, centre cut"
        values = f"mean {self.mean}, std {self.std}" if self.dtype.kind == "f" else "0 to 255"
        order = "nhwc" if self.channels_last else "nchw"
        return f"{self.height}x{self.width}, {fit}, {values}, {order}"


def preprocess_of_options(options: Namespace, inputs: Sequence[ModelInput]) -> Preprocess:
    """Return the function that makes a sample of a file: the user's own, or a reader of pictures."""
    if options.preprocess:
        return _checked(load_function(options.preprocess, "--preprocess"), options.preprocess)
    sizes = _picture_sizes(inputs)
    last = options.layout == "nhwc" if options.layout else sizes[1] not in _CHANNELS and sizes[3] in _CHANNELS
    channels, *sides = (sizes[3], *sizes[1:3]) if last else sizes[1:]
    channels = channels if isinstance(channels, int) else 3
    if channels not in _CHANNELS:
        raise ConfigError(
            f"the input {inputs[0].name!r} has {channels} channels; pictures have 3 or 1: --layout nchw or nhwc says "
            "where they are, and --preprocess FILE.py:function reads anything else"
        )
    height, width = options.image_size or (side if isinstance(side, int) else _SIZE for side in sides)
    largest = max(height, width)
    shorter = None if options.resize else options.crop or round(largest * 8 / 7)
    if shorter is not None and shorter < largest:
        raise ConfigError(f"--crop {shorter} is less than the {largest} pixels that are cut out; give that or more")
    mean = _per_channel(options.mean, channels, _MEAN, 0.0, "--mean")
    std = _per_channel(options.std, channels, _STD, 1.0, "--std")
    return PictureReader(inputs[0].dtype, height, width, channels, shorter, mean, std, last)


def _picture_sizes(inputs: Sequence[ModelInput]) -> tuple[int | str, ...]:
    """Return the four declared sizes of the only input; RGB of any size, channels first, where none are declared."""
    if len(inputs) != 1:
        raise DataError(
            f"pictures are for models with one input, this one takes {', '.join(item.name for item in inputs)}; "
            "give --preprocess FILE.py:function, which returns a mapping of arrays by input name"
        )
    shape = inputs[0].shape
    if shape is not None and len(shape) != 4:
        raise DataError(
            f"the input {inputs[0].name!r} is {list(shape)}, no pictures; give --preprocess FILE.py:function"
        )
    return shape or ("", 3, "", "")


def _per_channel(
    given: tuple[float, ...] | None, channels: int, of_colours: tuple[float, ...], of_grey: float, option: str
) -> tuple[float, ...]:
    if given is None:
        return of_colours if channels == 3 else (of_grey,)
    if len(given) not in (1, channels):
        raise ConfigError(f"{option} has {len(given)} numbers for {channels} channels; give 1 or {channels}")
    if option == "--std" and 0.0 in given:
        raise ConfigError("--std holds 0, by which nothing can be divided; leave it out for the default")
    return given * channels if len(given) == 1 else given


def _checked(function: Callable[..., Any], text: str) -> Preprocess:
    """Return the user's function with errors that name it and the file it was called with."""

    def call(path: Path) -> Any:
        try:
            found = function(str(path))
        except Exception as error:  # whatever the user's function does
            raise DataError(f"--preprocess {text} raises {type(error).__name__} on {path}: {error}") from error
        if isinstance(found, Mapping):
            return {name: np.asarray(value) for name, value in found.items()}
        return np.asarray(found)

    return call


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError("pictures are read by pillow, which is not installed: pip install 'qsdk[images]'") from error
