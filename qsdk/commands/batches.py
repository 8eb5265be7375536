"""Batches for the command line: from .npy and .npz files, or random ones."""

import sys
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_backend.proto.inputs import ModelInput
from onnx_backend.runtime.random_feeds import random_array
from qsdk.core.errors import ConfigError, DataError, FileFormatError

Array = npt.NDArray[Any]
Batch = dict[str, Array]


@dataclass(frozen=True)
class FileBatches:
    """Batches that are read from files on demand, at every iteration again.

    A .npy file holds the only input of a model, a .npz file one array per input under its name. Arrays of the rank that
    the model declares are cut along their first axis into batches; arrays of one more are stacks of batches.

    Attributes:
        inputs: of the model.
        paths: files, in the order in which they are read.
        batch_size: samples per batch, where the model leaves that open.
    """

    inputs: Sequence[ModelInput]
    paths: Sequence[Path]
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        for path in self.paths:
            yield from _cut(_read(path, self.inputs), self.inputs, self.batch_size, path)


def batches_of_options(options: Namespace, inputs: Sequence[ModelInput]) -> FileBatches | list[Batch]:
    """Return the batches for the options `--data` or `--random`."""
    if options.data:
        return from_files(inputs, options.data, options.batch_size)
    return random_batches(inputs, options.random, dict(options.shape), options.seed)


def from_files(inputs: Sequence[ModelInput], given: Sequence[str], batch_size: int) -> FileBatches:
    """Return the batches from files, and from all .npy and .npz files of folders, by name.

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
        held = sorted(p for p in path.iterdir() if p.suffix in (".npy", ".npz")) if path.is_dir() else [path]
        if not held:
            raise FileFormatError(f"the folder {path} holds no .npy or .npz file; save arrays with numpy.save or savez")
        paths += held
    return FileBatches(inputs, paths, batch_size)


def random_batches(
    inputs: Sequence[ModelInput], count: int, shapes: Mapping[str, tuple[int, ...]], seed: int
) -> list[Batch]:
    """Return random inputs: normal floats, integers 0 and 1. They show that a model runs, and nothing about its ranges.

    Args:
        inputs: of the model.
        count: number of batches.
        shapes: of inputs whose dimensions are open; the first open one is 1 where none is given.
        seed: of the generator.

    Raises:
        ConfigError: an open dimension without a shape, or a shape of an input that does not exist.
    """
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
    try:
        if path.suffix == ".npz":
            if not zipfile.is_zipfile(path):
                raise ValueError("it is truncated or no .npz file")
            with np.load(path, allow_pickle=False) as held:
                return {name: held[key] for name, key in _keys(held.files, names, path).items()}
        result = np.load(path, mmap_mode="r", allow_pickle=False)
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FileFormatError(
            f"{path} cannot be read as an array ({error}); save it with numpy.save or savez"
        ) from error
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
