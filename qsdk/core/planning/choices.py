"""Choices: what a config wants at a place, and which rules said so."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qsdk.core.config.config import QuantConfig
from qsdk.core.config.rules import Matcher, Place, Rule


@dataclass(frozen=True)
class Choice:
    """What is wanted at a place.

    Attributes:
        wanted: the config with every rule that matches applied; its own rules are those of the whole.
        rules: those that match, in order.
    """

    wanted: QuantConfig
    rules: tuple[Rule, ...] = ()

    def decided_by(self, *names: str) -> str:
        """The last rule that said something of one of these choices, or "default"."""
        for rule in reversed(self.rules):
            if any(getattr(rule, name) is not None for name in names):
                return str(rule)
        return "default"

    def is_named(self, name: str) -> bool:
        """Whether a rule that says by more than a bare `*` whom it means makes this choice."""
        return any(getattr(rule, name) is not None and rule.names_somebody for rule in self.rules)


class Resolver:
    """Answers for places; equal sets of matching rules are resolved once."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.matcher = Matcher(config.rules)
        self._found: dict[tuple[int, ...], Choice] = {(): Choice(config)}

    def at(self, place: Place) -> Choice:
        """The choices for a place."""
        matching = self.matcher.matching(place)
        if matching not in self._found:
            rules = tuple(self.config.rules[index] for index in matching)
            self._found[matching] = Choice(_applied(self.config, rules), rules)
        return self._found[matching]


def _applied(config: QuantConfig, rules: Sequence[Rule]) -> QuantConfig:
    wanted = config
    for rule in rules:
        said = rule.said()
        if "activation" in said:  # it covers inputs and outputs too
            said = {"input": None, "output": None, **said}
        wanted = replace(wanted, **said)
    return wanted
