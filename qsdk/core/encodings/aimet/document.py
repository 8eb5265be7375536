"""Typed reading of AIMET's JSON: booleans as strings, and errors that name the key."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qsdk.core.config.json_form import nearest_key
from qsdk.core.errors import ConfigError

_ABSENT = object()
_FLAGS = {"True": True, "False": False}


@dataclass(frozen=True)
class Checked:
    """A value of a JSON document, with its path.

    Attributes:
        value: from the JSON parser.
        key: dotted, from the top of the file.
        source: name of the file.
    """

    value: Any
    key: str
    source: str

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
        return Checked(result, f"{self.key}.{name}" if self.key else name, self.source)

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
            raise ConfigError(f"{self.where} is a list, not {self.value!r}")
        for index, value in enumerate(self.value if self.is_given else ()):
            yield Checked(value, f"{self.key}[{index}]", self.source)

    def require(self, *known: str) -> None:
        """Raise an error for unknown keys.

        Raises:
            ConfigError: names the key and the nearest known one.
        """
        for name in self._mapping():
            if name not in known:
                raise ConfigError(f"{self.where} has the unknown key {name!r}; {nearest_key(name, list(known))}")

    def flag(self, default: bool) -> bool:
        """Return a boolean, also one in AIMET's spelling.

        Raises:
            ConfigError: it is neither.
        """
        if not self.is_given:
            return default
        if isinstance(self.value, bool):
            return self.value
        if not isinstance(self.value, str) or self.value not in _FLAGS:
            raise ConfigError(f'{self.where} is {self.value!r}; write "True" or "False"')
        return _FLAGS[self.value]

    def text(self) -> str:
        """Return a string.

        Raises:
            ConfigError: it is none.
        """
        if not isinstance(self.value, str):
            raise ConfigError(f"{self.where} is a string, not {self._describe()}")
        return self.value

    def number(self) -> float:
        """Return a finite number.

        Raises:
            ConfigError: it is none.
        """
        if type(self.value) not in (int, float) or not math.isfinite(self.value):
            raise ConfigError(f"{self.where} is a number, not {self._describe()}")
        return float(self.value)

    def _mapping(self) -> Mapping[str, Any]:
        if not self.is_given:
            return {}
        if not isinstance(self.value, Mapping):
            raise ConfigError(f"{self.where} is an object, not {self.value!r}")
        return self.value

    def _describe(self) -> str:
        return repr(self.value) if self.is_given else "absent"
