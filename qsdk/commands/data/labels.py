"""Labels for the command line: from .npy, .npz and .csv files, or from the folders that pictures lie in."""

import csv
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError, DataError, FileFormatError
from qsdk.core.read_files import read_archive, read_array, read_text

FOLDERS = "folder-names"


def read_labels(source: str, paths: Sequence[Path], folders: Collection[str], samples: int) -> Array:
    """Return one label per sample.

    Args:
        source: `folder-names`, or a file: `.npy`; `.npz` with an array `labels`; `.csv` with a label per line in the
            order of the samples, or with the name of a file and its label.
        paths: of the samples, where each is a file of its own.
        folders: the names of all folders, one per class.
        samples: that were read; labels beyond them are left.

    Raises:
        ConfigError: another kind of file, or folder names for data that are not one file per sample.
        FileFormatError: the file cannot be read.
        DataError: there are fewer labels than samples, or none for a file.
    """
    if source == FOLDERS:
        return _folder_names(paths, folders, samples)
    path = Path(source)
    if not path.is_file():
        raise FileFormatError(f"there is no file of labels {path}; check the path, or give {FOLDERS}")
    if path.suffix == ".csv":
        labels = _from_csv(path, paths, samples)
    elif path.suffix in (".npy", ".npz"):
        labels = _from_arrays(path)
    else:
        raise ConfigError(f"--labels {source} is none of .npy, .npz, .csv and {FOLDERS}")
    if not labels.ndim:
        raise DataError(f"{path} holds a single number; labels are an array, one for each sample")
    if len(labels) < samples:
        raise DataError(f"{path} holds {len(labels)} labels, the data {samples} samples; there must be one for each")
    return labels[:samples]


def folder_classes(folders: Collection[str]) -> dict[str, int]:
    """Return folder -> class: its place in the sorted list of folders, as torchvision's ImageFolder has it."""
    names = sorted(folders)
    if len(names) == 1:
        raise ConfigError(
            f"--labels {FOLDERS} needs a folder per class, and all files lie in {names[0]!r}; sort them into folders, "
            "or give a file of labels (.csv: a file's name and its label on each line)"
        )
    if all(name.isdecimal() for name in names) and names != (by_number := sorted(names, key=int)):
        first = next(name for name, other in zip(names, by_number, strict=True) if name != other)
        raise ConfigError(
            f"--labels {FOLDERS} counts folders in the order of their names, where {first!r} comes before "
            f"{by_number[names.index(first)]!r}; write the numbers with equally many digits, or give a file of labels"
        )
    return {name: place for place, name in enumerate(names)}


def require_all_classes(folders: Collection[str], outputs: int) -> None:
    """Refuse folders that are fewer or more than the model's classes: which folder is which class would be a guess."""
    names = folder_classes(folders)
    if len(names) != outputs:
        raise DataError(
            f"there are {len(names)} folders ({', '.join(list(names)[:5])} ...) and {outputs} classes in the model, so "
            f"--labels {FOLDERS} cannot tell which is which; add the folders that are missing (they may not be empty), "
            "or give a file of labels"
        )


def _folder_names(paths: Sequence[Path], folders: Collection[str], samples: int) -> Array:
    if len(paths) < samples:
        raise ConfigError(f"--labels {FOLDERS} needs one file per sample, in a folder per class; give a file of labels")
    classes = folder_classes(folders)
    return np.array([classes[path.parent.name] for path in paths[:samples]])


def _from_arrays(path: Path) -> Array:
    def labels(names: Sequence[str]) -> Sequence[str]:
        if "labels" not in names:
            raise DataError(f"{path} has no array 'labels', but {', '.join(names)}; name it so")
        return ["labels"]

    again = "save the labels again"
    return read_array(path, again) if path.suffix == ".npy" else read_archive(path, again, labels)["labels"]


def _from_csv(path: Path, paths: Sequence[Path], samples: int) -> Array:
    lines = read_text(path, "save it in UTF-8").splitlines()
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, strict=True) if row]
    except csv.Error as error:  # a quote that does not end, a cell of megabytes
        raise FileFormatError(f"{path} cannot be read as a table ({error}); write it again") from error
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
