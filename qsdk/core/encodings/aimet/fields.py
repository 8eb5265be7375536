"""Typed reading of the fields of an encodings entry; every error names file and tensor."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import FileFormatError

_MAX_RANK = 8
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fields:
    """The fields of an entry, with its place in the file.

    Raises:
        FileFormatError: the entry is no object.
    """

    entry: Any
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.entry, dict):
            raise FileFormatError(f"{self.where}: an entry is an object, not {_shown(self.entry)}; write it again")

    def require_fields(self, required: Collection[str], known: Collection[str]) -> "Fields":
        """Raise an error for missing or unknown fields, and return the entry.

        Raises:
            FileFormatError: names them.
        """
        missing, unknown = set(required) - set(self.entry), set(self.entry) - set(known)
        if missing or unknown:
            what = f"lacks {', '.join(sorted(missing))}" if missing else f"has the unknown {', '.join(sorted(unknown))}"
            raise FileFormatError(f"{self.where}: the entry {what}; its version has {', '.join(known)}")
        return self

    def text(self, name: str) -> str:
        """Return a string."""
        value = self.entry.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean, also one in the spelling of 0.6.1."""
        value = self.entry.get(name)
        if isinstance(value, str) and value in ("True", "False"):
            return value == "True"
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def whole(self, name: str) -> int:
        """Return a whole number of 32 bits."""
        value = self.entry.get(name)
        if type(value) is not int or not -(2**31) <= value < 2**31:
            raise self._wrong(name, "a whole number")
        return value

    def positive(self, name: str) -> int:
        """Return a whole number from 1."""
        if self.whole(name) < 1:
            raise self._wrong(name, "a whole number from 1")
        return self.whole(name)

    def number(self, name: str) -> float:
        """Return a finite number."""
        value = self.entry.get(name)
        if not _is_number(value):
            raise self._wrong(name, "a finite number")
        return float(value)

    def flat(self, name: str) -> Array:
        """Return a list of numbers."""
        result = numbers(self.entry.get(name), name, self.where)
        if result.ndim != 1:
            raise self._wrong(name, "a list of numbers")
        return result

    def levels(self, name: str) -> Array:
        """Return whole numbers from 1, of any shape but a scalar."""
        result = numbers(self.entry.get(name), name, self.where)
        if result.ndim < 1 or not ((result >= 1) & (result == np.rint(result)) & (result < 2**24)).all():
            raise self._wrong(name, "a list of whole numbers from 1")
        return result

    def require_no_shift(self, name: str, *, whole: bool = False) -> None:
        """Raise an error for a zero point between two codes: a shift that is not 0 (with `whole`: not whole)."""
        if name in self.entry:
            result = numbers(self.entry[name], name, self.where)
            if (result % 1 if whole else result).any():
                raise FileFormatError(f"{self.where}: {name} puts zero between two codes, which ONNX cannot; write it "
                                      "without, from a sim whose zero points are whole")  # fmt: skip

    def _wrong(self, name: str, wanted: str) -> FileFormatError:
        return FileFormatError(f"{self.where}: {name} is {wanted}, not {_shown(self.entry.get(name))}; correct it")


def numbers(value: Any, name: str, where: str) -> Array:
    """Return a finite number or nested lists of them, as float64.

    Raises:
        FileFormatError: it is something else, empty, or ragged.
    """
    shape: list[int] = []
    level = [value]
    while level and isinstance(level[0], list) and len(shape) < _MAX_RANK:
        counts = {len(item) if isinstance(item, list) else -1 for item in level}
        if len(counts) != 1:
            raise FileFormatError(f"{where}: {name} is a ragged list; write the file again")
        shape.append(counts.pop())
        level = [part for item in level for part in item]
    if not level or not all(_is_number(item) for item in level):
        raise FileFormatError(f"{where}: {name} is not made of finite numbers: {_shown(value)}; correct it")
    return np.array(level, np.float64).reshape(shape)


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    return math.isfinite(value) if type(value) is float else abs(value) < 2**63


def _shown(value: Any) -> str:
    return repr(value)[:40]
