"""Typed reading of JSON: booleans also in AIMET's spelling, and errors that name the key."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.config.json_form import nearest_key
from qsdk.core.errors import ConfigError, QsdkError

_ABSENT = object()
_MAX_RANK = 8
_FLAGS = {"True": True, "False": False}


@dataclass(frozen=True)
class Checked:
    """A value of a JSON document, with its path.

    Attributes:
        value: from the JSON parser.
        key: dotted, from the top of the file.
        source: name of the file, or of the place in it where keys begin.
        error: the class of what is raised where the value is of another kind than it is read as.
    """

    value: Any
    key: str
    source: str
    error: type[QsdkError] = ConfigError

    @property
    def is_given(self) -> bool:
        """Return whether the file has the value."""
        return self.value is not _ABSENT

    @property
    def where(self) -> str:
        """Return the place of the value, for messages."""
        return f"{self.source}: {self.key or 'the file'}"

    @property
    def shown(self) -> str:
        """Return the value in a few words."""
        if not self.is_given:
            return "(absent)"
        if isinstance(self.value, Mapping):
            return ", ".join(f"{name} {Checked(value, '', '').shown}" for name, value in self.value.items())
        if isinstance(self.value, list):
            return "; ".join(Checked(value, "", "").shown for value in self.value)
        return str(self.value)

    def part(self, name: str) -> "Checked":
        """Return the value of a key; absent if there is none."""
        result = self._mapping().get(name, _ABSENT)
        return replace(self, value=result, key=f"{self.key}.{name}" if self.key else name)

    def given(self, name: str) -> Iterator["Checked"]:
        """Yield the value of a key, if there is one."""
        part = self.part(name)
        if part.is_given:
            yield part

    def parts(self) -> Iterator[tuple[str, "Checked"]]:
        """Yield every key with its value."""
        yield from ((str(name), self.part(name)) for name in self._mapping())

    def items(self) -> Iterator["Checked"]:
        """Yield the members of a list; none where it is absent."""
        if self.is_given and not isinstance(self.value, list):
            raise self._wrong("a list")
        for index, value in enumerate(self.value if self.is_given else ()):
            yield replace(self, value=value, key=f"{self.key}[{index}]")

    def require(self, *known: str) -> None:
        """Raise an error for unknown keys, which names the nearest known one."""
        for name in self._mapping():
            if name not in known:
                raise self.error(f"{self.where} has the unknown key {name!r}; {nearest_key(name, list(known))}")

    def flag(self, default: bool) -> bool:
        """Return a boolean, also one in AIMET's spelling; the default where it is absent."""
        if not self.is_given:
            return default
        if isinstance(self.value, bool):
            return self.value
        if not isinstance(self.value, str) or self.value not in _FLAGS:
            raise self._wrong('true or false ("True" or "False")')
        return _FLAGS[self.value]

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self._wrong("a string")
        return self.value

    def whole(self, least: int = -(2**31)) -> int:
        """Return a whole number of 32 bits."""
        if type(self.value) is not int or not least <= self.value < 2**31:
            raise self._wrong("a whole number" + (f" from {least}" if least > 0 else ""))
        return self.value

    def number(self) -> float:
        """Return a finite number."""
        if not _is_number(self.value):
            raise self._wrong("a finite number")
        return float(self.value)

    def array(self, rank: int | None = None) -> npt.NDArray[np.float64]:
        """Return finite numbers in nested lists, or one alone; with `rank`, of so many axes."""
        shape: list[int] = []
        level = [self.value]
        while level and isinstance(level[0], list) and len(shape) < _MAX_RANK:
            counts = {len(item) if isinstance(item, list) else -1 for item in level}
            if len(counts) != 1:
                raise self.error(f"{self.where} is a ragged list; write the file again")
            shape.append(counts.pop())
            level = [part for item in level for part in item]
        if not level or not all(_is_number(item) for item in level):
            raise self.error(f"{self.where} is not made of finite numbers: {self._describe()}; correct it")
        if rank not in (None, len(shape)):
            raise self._wrong("a list of numbers")
        return np.array(level, np.float64).reshape(shape)

    def levels(self) -> npt.NDArray[np.float64]:
        """Return whole numbers from 1, of any shape but a scalar."""
        result = self.array()
        if result.ndim < 1 or not ((result >= 1) & (result == np.rint(result)) & (result < 2**24)).all():
            raise self._wrong("a list of whole numbers from 1")
        return result

    def _mapping(self) -> Mapping[str, Any]:
        if not self.is_given:
            return {}
        if not isinstance(self.value, Mapping):
            raise self._wrong("an object")
        return self.value

    def _wrong(self, wanted: str) -> QsdkError:
        return self.error(f"{self.where} is {wanted}, not {self._describe()}; correct it")

    def _describe(self) -> str:
        return repr(self.value)[:40] if self.is_given else "absent"


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    return math.isfinite(value) if type(value) is float else abs(value) < 2**63
