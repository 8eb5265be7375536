"""Labelled Fashion-MNIST images that travel with the package (Zalando SE, MIT licence, see LICENSE.fashion-mnist)."""

import lzma
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
# Mean and standard deviation of the training set's pixels, scaled to 0..1.
MEAN, STD = 0.2860, 0.3530


@dataclass(frozen=True)
class DemoData:
    """Images float32 [N, 1, 28, 28], normalised; labels int64 [N], indices into `class_names`.

    The calibration images are the first of the official training set, the test images the whole official
    test set, each in its own order.
    """

    calibration_images: npt.NDArray[np.float32]
    calibration_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...] = CLASS_NAMES


def normalize(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return pixels [N, 28, 28] of 0..255 as the network's input, float32 [N, 1, 28, 28]."""
    images = (pixels[:, None].astype(np.float32) / np.float32(255) - np.float32(MEAN)) / np.float32(STD)
    return images.astype(np.float32, copy=False)


def load() -> DemoData:
    """Return the demo's images and labels, from the file inside the package."""
    with (
        resources.files("qsdk.demo").joinpath("fashion_mnist.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        # xz inside the archive: deflate, the npz's own compression, would cost 0.8 MB more.
        pixels = np.frombuffer(lzma.decompress(arrays["images_xz"].tobytes()), dtype=np.uint8).reshape(-1, 28, 28)
        labels = arrays["labels"].astype(np.int64)
        calibration = int(arrays["calibration_count"])
    return DemoData(
        calibration_images=normalize(pixels[:calibration]),
        calibration_labels=labels[:calibration],
        test_images=normalize(pixels[calibration:]),
        test_labels=labels[calibration:],
    )
