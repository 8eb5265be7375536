"""Batches for the command line: from arrays and pictures in files, or random ones."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnx_backend.proto.inputs import ModelInput
from onnx_backend.runtime.feeds import random_array
from qsdk.commands.data.pictures import PICTURES, Preprocess, preprocess_of_options
from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError, DataError, FileFormatError
from qsdk.core.read_files import read_archive, read_array

Batch = dict[str, Array]


@dataclass(frozen=True)
class FileBatches:
    """Batches that are read from files on demand, at every iteration again.

    A .npy file holds the only input of a model, a .npz file one array per input under its name. Arrays of the rank that
    the model declares are cut along their first axis into batches; arrays of one more are stacks of batches; arrays of
    one less are single samples, as pictures are, and are stacked to batches.

    Attributes:
        inputs: of the model.
        paths: files, in the order in which they are read.
        folders: the names of the folders that files lie in, also of files that `--max-samples` leaves out.
        batch_size: samples per batch, where the model leaves that open.
        preprocess: makes an array of a picture, or of any file for a function of the user.
        reads_all: whether it makes the arrays of every file, .npy and .npz too.
        most: samples to stop after; None for no end.
    """

    inputs: Sequence[ModelInput]
    paths: Sequence[Path]
    folders: frozenset[str]
    batch_size: int
    preprocess: Preprocess | None = None
    reads_all: bool = False
    most: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        return first_samples(self._batches(), self.most, self.fixed_size)

    @property
    def fixed_size(self) -> int | None:
        """Return the batch size that the model fixes, if all its inputs agree on one."""
        fixed = {item.shape[0] for item in self.inputs if item.shape and isinstance(item.shape[0], int)}
        return fixed.pop() if len(fixed) == 1 else None

    def _batches(self) -> Iterator[Batch]:
        waiting: list[Batch] = []  # single samples, of one shape, of the next batch
        size = self.fixed_size or self.batch_size
        for path in self.paths:
            arrays = self._arrays(path)
            single = self._is_sample(arrays)
            if waiting and not (single and _shapes(arrays) == _shapes(waiting[0])):
                yield self._stacked(waiting, path)
                waiting = []
            if not single:
                yield from _cut(arrays, self.inputs, self.batch_size, path)
                continue
            waiting.append(arrays)
            if len(waiting) == size:
                yield self._stacked(waiting, path)
                waiting = []
        if waiting:
            yield self._stacked(waiting, self.paths[-1])

    def _arrays(self, path: Path) -> Batch:
        if self.preprocess is None or not (self.reads_all or path.suffix.lower() in PICTURES):
            return _read(path, self.inputs)
        made = self.preprocess(path)
        return made if isinstance(made, dict) else {self.inputs[0].name: made}

    def _is_sample(self, arrays: Batch) -> bool:
        """Return whether arrays lack the batch axis that the model declares; what was preprocessed has none."""
        ranks = {item.name: None if item.shape is None else len(item.shape) for item in self.inputs}
        of_file = 0 if self.preprocess is None else -1  # where the model does not say
        declared = {name: ranks.get(name) for name in arrays}
        missing = {of_file if (rank := declared[n]) is None else a.ndim - rank for n, a in arrays.items()}
        return missing == {-1}

    def _stacked(self, samples: list[Batch], last: Path) -> Batch:
        fixed = self.fixed_size
        if fixed is not None and len(samples) != fixed:
            raise DataError(
                f"the last {len(samples)} samples, up to {last}, do not fill a batch of {fixed}, which the model "
                "fixes; end before them by --max-samples"
            )
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _shapes(arrays: Batch) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def first_samples(batches: Iterable[Batch], most: int | None, fixed: int | None = None) -> Iterator[Batch]:
    """Yield batches until there are `most` samples, and cut the last one unless the model fixes its size."""
    left = most
    for batch in batches:
        if left is None:
            yield batch
            continue
        if left <= 0:
            return
        lengths = {array.shape[0] if array.ndim else 1 for array in batch.values()}
        length = lengths.pop() if len(lengths) == 1 else 1
        if length <= left or len(lengths) > 1:
            yield batch
        elif fixed is None:
            yield {name: array[:left] for name, array in batch.items()}
        left -= length


def batches_of_options(options: Namespace, inputs: Sequence[ModelInput]) -> FileBatches | list[Batch]:
    """Return the batches for the options `--data` or `--random`."""
    if not options.data:
        return random_batches(inputs, options.random, dict(options.shape), options.seed)
    found = from_files(inputs, options.data, options.batch_size, all_files=bool(options.preprocess))
    most, fixed = options.max_samples, found.fixed_size
    if most is not None and most < (fixed or 1):
        raise ConfigError(f"--max-samples {most} makes no batch; give {fixed or 1} or more")
    pictures = [path for path in found.paths if path.suffix.lower() in PICTURES]
    if not pictures and not options.preprocess:
        return replace(found, most=most)
    paths = found.paths
    if most is not None and most < len(paths):  # from all folders, which are often one per class
        paths = [paths[place * len(paths) // most] for place in range(most)]
    preprocess = preprocess_of_options(options, inputs)
    return replace(found, paths=paths, preprocess=preprocess, reads_all=bool(options.preprocess), most=most)


def source_in_words(options: Namespace, batches: FileBatches | list[Batch]) -> str:
    """Return what the data are, and how arrays are made of them."""
    reader = getattr(batches, "preprocess", None)
    made = f" ({options.preprocess or reader})" if reader is not None else ""
    return ", ".join(options.data or ["random inputs"]) + made


def one_sample(batches: FileBatches | list[Batch]) -> FileBatches | list[Batch]:
    """Return the batches with one sample each, where the model leaves the size of batches open."""
    return replace(batches, batch_size=1) if isinstance(batches, FileBatches) else batches


def from_files(
    inputs: Sequence[ModelInput], given: Sequence[str], batch_size: int, *, all_files: bool = False
) -> FileBatches:
    """Return the batches from files, and from all arrays, or else all pictures, of folders, by name.

    Args:
        inputs: of the model.
        given: files and folders.
        batch_size: samples per batch, where the model leaves that open.
        all_files: take every file of a folder, whatever it is.

    Raises:
        FileFormatError: there is no such file, or none in a folder.
        ConfigError: a batch size below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"a batch size of {batch_size} makes no batches; give 1 or more")
    paths: list[Path] = []
    for path in map(Path, given):
        if not path.exists():
            raise FileFormatError(f"there is no file or folder {path}; check the path")
        paths += _held(path, all_files) if path.is_dir() else [path]
    return FileBatches(inputs, paths, frozenset(path.parent.name for path in paths), batch_size)


def _held(folder: Path, all_files: bool) -> list[Path]:
    """Return the arrays in a folder, or else the pictures in it and its folders, in the order of their names."""
    below = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    if all_files:
        held = below
    else:
        arrays = [path for path in below if path.parent == folder and path.suffix in (".npy", ".npz")]
        held = arrays or [path for path in below if path.suffix.lower() in PICTURES]
    if not held:
        raise FileFormatError(
            f"the folder {folder} holds no .npy or .npz file and no picture; save arrays with numpy.save or savez"
        )
    return held


def random_batches(
    inputs: Sequence[ModelInput], count: int, shapes: Mapping[str, tuple[int, ...]], seed: int
) -> list[Batch]:
    """Return random inputs: normal floats, integers 0 and 1. They show that a model runs, no ranges."""
    unknown = sorted(set(shapes) - {item.name for item in inputs})
    if unknown or count < 1:
        names = ", ".join(item.name for item in inputs)
        raise ConfigError(
            f"--shape names {unknown[0]!r}; the inputs are {names}" if unknown else "--random needs 1 or more"
        )
    rng = np.random.default_rng(seed)
    sizes = {item.name: shapes.get(item.name) or _closed(item) for item in inputs}
    return [{item.name: random_array(rng, item.dtype, sizes[item.name]) for item in inputs} for _ in range(count)]


def _closed(item: ModelInput) -> tuple[int, ...]:
    shape = item.shape
    if shape is None or any(isinstance(size, str) for size in shape[1:]):
        size_text = "undeclared" if shape is None else str([size or "?" for size in shape])
        raise ConfigError(
            f"the shape of the input {item.name!r} is {size_text}; say it by --shape {item.name}=1,3,224,224 "
            "(its own sizes)"
        )
    return tuple(size if isinstance(size, int) else 1 for size in shape)


def _read(path: Path, inputs: Sequence[ModelInput]) -> Batch:
    """Return the arrays of a file by input name."""
    names = [item.name for item in inputs]
    again = "save it with numpy.save or savez"
    if path.suffix == ".npz":
        held = read_archive(path, again, lambda keys: _keys(keys, names, path).values())
        return {name: held[key] for name, key in _keys(list(held), names, path).items()}
    result = read_array(path, again, mapped=True)
    if len(names) != 1:
        raise DataError(
            f"{path} holds one array, the model takes {', '.join(names)}; give an .npz with arrays of those names"
        )
    return {names[0]: result}


def _keys(held: Sequence[str], names: Sequence[str], path: Path) -> dict[str, str]:
    """Return, by input name, the name of the array in a file; the only array may be without a name (`arr_0`)."""
    if len(names) == len(held) == 1 and held[0] == "arr_0":  # the name that numpy.savez gives to an unnamed array
        return {names[0]: held[0]}
    missing = [name for name in names if name not in held]
    if missing:
        raise DataError(f"{path} holds {', '.join(held)}, the model also needs {', '.join(missing)}; name them so")
    surplus = [name for name in held if name not in names]
    if surplus:
        print(f"qsdk: {path}: not used: {', '.join(surplus)}", file=sys.stderr)
    return {name: name for name in names}


def _cut(arrays: Batch, inputs: Sequence[ModelInput], batch_size: int, path: Path) -> Iterator[Batch]:
    declared = {item.name: item.shape for item in inputs}
    above = {array.ndim - len(shape) for n, array in arrays.items() if (shape := declared[n]) is not None} or {0}
    lengths = {len(array) for array in arrays.values() if array.ndim}
    if above == {1} and len(lengths) == 1:
        for index in range(lengths.pop()):
            yield {name: array[index] for name, array in arrays.items()}
        return
    if above != {0}:
        shapes = ", ".join(f"{name} {array.shape} for {declared[name]}" for name, array in arrays.items())
        raise DataError(f"{path} does not fit the model's inputs: {shapes}; stack samples along the first axis")
    fixed = {shape[0] for shape in declared.values() if shape and isinstance(shape[0], int)}
    if len(lengths) != 1 or any(array.ndim == 0 for array in arrays.values()) or fixed == lengths:
        yield arrays  # one whole batch
        return
    count, size = lengths.pop(), max(fixed, default=batch_size)
    if fixed and (len(fixed) > 1 or count % size):
        raise DataError(f"{path} holds {count} samples, which do not cut into batches of {size}, which the model fixes")
    for start in range(0, count, size):
        yield {name: array[start : start + size] for name, array in arrays.items()}
