"""Writes `fashion_mnist.npz`, the labelled images of the demo, from Fashion-MNIST's four idx .gz files.

    python scripts/make_demo_data.py --data DIR

The files come with Debian's package dataset-fashion-mnist, or from github.com/zalandoresearch/fashion-mnist.
"""

import argparse
import gzip
import lzma
from pathlib import Path

import numpy as np
import numpy.typing as npt

DEMO = Path(__file__).parent.parent / "qsdk" / "demo"
CALIBRATION_COUNT = 1024
IMAGES_MAGIC, LABELS_MAGIC = 0x0803, 0x0801


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Returns the array of one gzipped idx file of bytes, in the shape its header names."""
    raw = gzip.decompress(path.read_bytes())
    magic = int.from_bytes(raw[:4], "big")
    if magic not in (IMAGES_MAGIC, LABELS_MAGIC):
        raise ValueError(f"{path.name}: not an idx file of bytes (magic number {magic:#010x})")
    rank = magic & 0xFF
    shape = np.frombuffer(raw, dtype=">u4", count=rank, offset=4)
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)


def read_split(folder: Path, split: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Returns images [N, 28, 28] and labels [N] of a split, `train` or `t10k`."""
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz")
    if len(images) != len(labels):
        raise ValueError(f"{folder.name}: {len(images)} {split} images but {len(labels)} labels")
    return images, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the four idx .gz files")
    parser.add_argument("--out", type=Path, default=DEMO / "fashion_mnist.npz")
    options = parser.parse_args()

    train_images, train_labels = read_split(options.data, "train")
    test_images, test_labels = read_split(options.data, "t10k")
    images = np.concatenate([train_images[:CALIBRATION_COUNT], test_images])
    labels = np.concatenate([train_labels[:CALIBRATION_COUNT], test_labels])
    packed = lzma.compress(images.tobytes(), preset=9 | lzma.PRESET_EXTREME)
    np.savez_compressed(
        options.out,
        images_xz=np.frombuffer(packed, dtype=np.uint8),
        labels=labels,
        calibration_count=np.int64(CALIBRATION_COUNT),
    )
    print(f"{options.out.name}: {CALIBRATION_COUNT} + {len(test_images)} images, {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
