"""Checkpoints of a pass over layers: a folder with the identity of the run, and one file of solutions per step."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from zipfile import ZipFile

import numpy as np
import torch

from qsdk.algorithms import ranks
from qsdk.core.atomic_files import write_atomically, write_text
from qsdk.core.errors import ConfigError, FileFormatError
from qsdk.core.layers.layer_problem import Solution
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.read_files import first_line_of, read_text, require_modest_size, require_readable

#: Tolerance for means of the same data, as a share of the largest: the rounding depends on the number of threads.
SAME = 1e-3


class CheckpointSource(Protocol):
    """The identity of a run: its sites, their weights (an empty array for none) and encodings."""

    @property
    def layers(self) -> Sequence[Any]:
        """Return all sites; each has a `site` and a `spec`."""

    def weight(self, site: str) -> Any:
        """Return the stored weight."""

    def encoding(self, site: str) -> Encoding:
        """Return the present encoding."""


class SiteMeans(Protocol):
    """A site of a step, with means of its input that identify the data."""

    @property
    def site(self) -> str:
        """Return its name."""

    @property
    def mean(self) -> Any:
        """Return the mean of the float input."""

    @property
    def mean_quantized(self) -> Any:
        """Return the mean of the quantized input."""


class Checkpoint:
    """The solutions of the steps of one run, stored as they are found; with several ranks, by the first."""

    def __init__(self, folder: str | os.PathLike[str], walk: CheckpointSource, options: Mapping[str, Any]) -> None:
        """Open a folder, or create it."""
        self._folder, self._step = Path(folder), 0
        identity = {"options": {name: str(value) for name, value in options.items()}, "layers": _identities(walk)}
        failure = ranks.all_gather(self._open(identity) if ranks.rank() == 0 else None)[0]
        if failure is not None:
            raise ConfigError(failure)

    def has_next(self) -> bool:
        """Return whether the next step was solved before."""
        result: bool = ranks.all_gather(self._path().exists())[0]
        return result

    def replay(self, problems: Sequence[SiteMeans]) -> list[Solution]:
        """Return the stored solutions of the next step."""
        result: Any = ranks.all_gather(_read_or_failure(self._path()) if ranks.rank() == 0 else None)[0]
        if isinstance(result, str):
            raise FileFormatError(result)
        stored, facts = result
        sites = [problem.site for problem in problems]
        if [fact["site"] for fact in facts] != sites:
            result = ", ".join(fact["site"] for fact in facts)
            raise self._other_run_error(f"step {self._step} solved {result} there and is about {', '.join(sites)} here")
        for index, problem in enumerate(problems):
            for what, mean in (("float", problem.mean), ("quantized", problem.mean_quantized)):
                kept = stored[f"{index}.{what}"]
                if _means_differ(kept, _array(mean)):
                    raise self._other_run_error(f"the {what} input of {problem.site} is not the same: other data")
        self._step += 1
        return [_solution(stored, index, fact) for index, fact in enumerate(facts)]

    def keep(self, problems: Sequence[SiteMeans], solutions: Sequence[Solution]) -> None:
        """Write the solutions of a step, all or nothing."""
        if ranks.rank() == 0:
            arrays: dict[str, Any] = {}
            facts = []
            for index, (problem, solution) in enumerate(zip(problems, solutions, strict=True)):
                facts.append(_facts(problem.site, solution))
                arrays |= {f"{index}.{name}": values for name, values in _arrays(problem, solution).items()}

            text = json.dumps(facts)

            def write(path: Path) -> None:
                with path.open("wb") as file:
                    np.savez(file, facts=np.array(text), digest=np.array(_digest(text, arrays)), **arrays)

            write_atomically(self._path(), write)
        self._step += 1

    def _open(self, identity: dict[str, Any]) -> str | None:
        manifest, remedy = self._folder / "run.json", "give a folder for checkpoints, or a path where none is yet"
        if self._folder.exists() and not self._folder.is_dir():
            return f"checkpoint={self._folder} is no folder; {remedy}"
        if not manifest.exists():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                return f"cannot make the folder {self._folder}: {error.strerror}; {remedy}"
            write_text(manifest, json.dumps(identity, indent=1) + "\n")
            return None
        try:
            stored = json.loads(read_text(manifest, "delete the folder, and the run starts anew"))
            known = all(isinstance(stored[part], dict) for part in identity)
        except (FileFormatError, LookupError, TypeError, ValueError, RecursionError):
            known = False
        if not known:
            return f"{manifest} is damaged, so nobody knows which run it is of; delete {self._folder}, or give another"
        different = [
            f"{name}: {stored[part].get(name, 'none')} there, {identity[part].get(name, 'none')} here"
            for part in ("options", "layers")
            for name in sorted({*stored[part], *identity[part]})
            if stored[part].get(name) != identity[part].get(name)
        ]
        return str(self._other_run_error("; ".join(different[:5]))) if different else None

    def _other_run_error(self, what: str) -> ConfigError:
        return ConfigError(
            f"the checkpoint {self._folder} is that of another run: {what}; repeat that run, or give another folder"
        )

    def _path(self) -> Path:
        return self._folder / f"step-{self._step:05}.npz"


def _identities(walk: CheckpointSource) -> dict[str, str]:
    """Return the identity of each layer: its spec, and digests of its weight and encoding."""
    result = {}
    for layer in walk.layers:
        encoding = walk.encoding(layer.site)
        parts = (_array(walk.weight(layer.site)), encoding.scale, encoding.zero_point)
        digests = (hashlib.sha256(np.ascontiguousarray(part).tobytes()).hexdigest()[:12] for part in parts)
        result[layer.site] = f"{layer.spec}, weight {next(digests)}, scale {next(digests)}, zero point {next(digests)}"
    return result


def _facts(site: str, solution: Solution) -> dict[str, Any]:
    encoding = solution.encoding
    return {
        "site": site,
        "dtype": encoding.dtype.name,
        "axis": encoding.axis,
        "block_size": encoding.block_size,
        "frozen": encoding.frozen,
        "errors": [solution.error_before, solution.error_after],
        "note": solution.note,
    }


def _arrays(problem: SiteMeans, solution: Solution) -> dict[str, Any]:
    result = {
        "float": _array(problem.mean),
        "quantized": _array(problem.mean_quantized),
        "scale": solution.encoding.scale,
        "zero_point": solution.encoding.zero_point,
    }
    optional = {"weight": solution.weight, "bias_shift": solution.bias_shift}
    return result | {name: _array(values) for name, values in optional.items() if values is not None}


def _solution(stored: Mapping[str, Any], index: int, fact: Mapping[str, Any]) -> Solution:
    scale, zero_point = stored[f"{index}.scale"], stored[f"{index}.zero_point"]
    encoding = Encoding(dtype_named(fact["dtype"]), scale, zero_point, fact["axis"], fact["block_size"])
    weight, shift = (stored.get(f"{index}.{name}") for name in ("weight", "bias_shift"))
    return Solution(
        replace(encoding, frozen=fact["frozen"]),
        None if weight is None else torch.from_numpy(weight),
        float(fact["errors"][0]),
        float(fact["errors"][1]),
        str(fact["note"]),
        None if shift is None else torch.from_numpy(shift),
    )


def _read_or_failure(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]] | str:
    """Return the arrays and facts of a step, or the reason for a failure, which every rank must learn."""
    try:
        size = require_readable(path, "").stat().st_size
        with ZipFile(path) as archive:
            require_modest_size(archive, size, path.name)
        with np.load(path, allow_pickle=False) as file:
            stored: dict[str, Any] = dict(file)
        text, digest = str(stored.pop("facts")), str(stored.pop("digest"))
        facts = json.loads(text)
        if digest != _digest(text, stored):
            raise ValueError("its values are not those that were written")
        return stored, [{**fact, "site": str(fact["site"])} for fact in facts]
    except Exception as error:  # NumPy, zipfile and json raise many types
        return _damaged(path, error)


def _means_differ(kept: Any, mean: Any) -> bool:
    if kept.shape != mean.shape:
        return True
    return bool(np.abs(kept - mean).max(initial=0) > SAME * np.abs(kept).max(initial=0))


def _damaged(path: Path, error: BaseException) -> str:
    why = first_line_of(error)
    return f"the checkpoint {path} is damaged ({why}); delete it, and from this step on all is solved again"


def _digest(facts: str, arrays: Mapping[str, Any]) -> str:
    result = hashlib.sha256(facts.encode())
    for name, values in sorted(arrays.items()):
        array = np.ascontiguousarray(values)
        result.update(f"{name} {array.dtype} {array.shape}".encode())
        result.update(array.tobytes())
    return result.hexdigest()


def _array(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
