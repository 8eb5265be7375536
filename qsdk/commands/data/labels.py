"""Labels for the command line: from .npy, .npz and .csv files, or from the folders that pictures lie in."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import ConfigError, DataError, FileFormatError

Array = npt.NDArray[Any]
FOLDERS = "folder-names"


def read_labels(source: str, paths: Sequence[Path], samples: int) -> Array:
    """Return one label per sample.

    Args:
        source: `folder-names`, or a file: `.npy`; `.npz` with an array `labels`; `.csv` with a label per line in the
            order of the samples, or with the name of a file and its label.
        paths: of the samples, where each is a file of its own.
        samples: that were read; labels beyond them are left.

    Raises:
        ConfigError: another kind of file, or folder names for data that are not one file per sample.
        FileFormatError: the file cannot be read.
        DataError: there are fewer labels than samples, or none for a file.
    """
    if source == FOLDERS:
        return _folder_names(paths, samples)
    path = Path(source)
    if not path.is_file():
        raise FileFormatError(f"there is no file of labels {path}; check the path, or give {FOLDERS}")
    if path.suffix == ".csv":
        labels = _from_csv(path, paths, samples)
    elif path.suffix in (".npy", ".npz"):
        labels = _from_arrays(path)
    else:
        raise ConfigError(f"--labels {source} is none of .npy, .npz, .csv and {FOLDERS}")
    if len(labels) < samples:
        raise DataError(f"{path} holds {len(labels)} labels, the data {samples} samples; there must be one for each")
    return labels[:samples]


def _folder_names(paths: Sequence[Path], samples: int) -> Array:
    """Return the place of each sample's folder in the sorted list of folders, as torchvision's ImageFolder does."""
    if len(paths) < samples:
        raise ConfigError(f"--labels {FOLDERS} needs one file per sample, in a folder per class; give a file of labels")
    classes = {name: place for place, name in enumerate(sorted({path.parent.name for path in paths}))}
    if len(classes) == 1:
        raise ConfigError(
            f"--labels {FOLDERS} needs a folder per class, and all files lie in {paths[0].parent}; sort them into "
            "folders, or give a file of labels (.csv: a file's name and its label on each line)"
        )
    return np.array([classes[path.parent.name] for path in paths[:samples]])


def _from_arrays(path: Path) -> Array:
    try:
        held = np.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            with held:
                if "labels" not in held.files:
                    raise DataError(f"{path} has no array 'labels', but {', '.join(held.files)}; name it so")
                return np.asarray(held["labels"])
        return np.asarray(held)
    except DataError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise FileFormatError(f"{path} cannot be read as labels ({error}); save them with numpy.save") from error


def _from_csv(path: Path, paths: Sequence[Path], samples: int) -> Array:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row]
    if rows and not _is_number(rows[0][-1]):
        rows = rows[1:]  # the line of headings
    for number, row in enumerate(rows, start=1):
        if not _is_number(row[-1]):
            raise FileFormatError(f"{path}: {row[-1]!r} in row {number} is no number; labels are indices of classes")
    if all(len(row) == 1 for row in rows) or len(paths) < samples:
        return np.array([float(row[-1]) for row in rows])
    by_name = {Path(row[0]).as_posix(): float(row[-1]) for row in rows}
    return np.array([_label_of(file, by_name, path) for file in paths[:samples]])


def _label_of(file: Path, by_name: dict[str, float], source: Path) -> float:
    """Return the label of a file, which the list may name with any number of its folders."""
    parts = file.parts
    for start in range(len(parts)):
        label = by_name.get("/".join(parts[start:]))
        if label is not None:
            return label
    raise DataError(f"{source} has no label for {file}; add a line '{file.name},label'")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
