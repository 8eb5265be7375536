"""The config that applies at a place, and the rules that it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qsdk.core.config.config import QuantConfig
from qsdk.core.config.rules import Place, Rule, RuleMatcher


@dataclass(frozen=True)
class ResolvedConfig:
    """The config at one place.

    Attributes:
        wanted: the config with every matching rule applied; its own `rules` are still all rules of the config.
        rules: those that match, in order.
    """

    wanted: QuantConfig
    rules: tuple[Rule, ...] = ()

    def decided_by(self, *names: str) -> str:
        """Return the last rule that makes one of these choices, or "default"."""
        for rule in reversed(self.rules):
            if any(getattr(rule, name) is not None for name in names):
                return str(rule)
        return "default"

    def is_named(self, name: str) -> bool:
        """Return whether a rule with more than a bare `*` makes this choice."""
        return any(getattr(rule, name) is not None and rule.is_specific for rule in self.rules)


class Resolver:
    """The config by place; equal sets of matching rules are resolved once."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.matcher = RuleMatcher(config.rules)
        self._found: dict[tuple[int, ...], ResolvedConfig] = {(): ResolvedConfig(config)}

    def at(self, place: Place) -> ResolvedConfig:
        """Return the config at a place."""
        matching = self.matcher.matching(place)
        if matching not in self._found:
            rules = tuple(self.config.rules[index] for index in matching)
            self._found[matching] = ResolvedConfig(_applied(self.config, rules), rules)
        return self._found[matching]


def _applied(config: QuantConfig, rules: Sequence[Rule]) -> QuantConfig:
    wanted = config
    for rule in rules:
        changes = rule.choices()
        if "activation" in changes:  # it covers inputs and outputs too
            changes = {"input": None, "output": None, **changes}
        wanted = replace(wanted, **changes)
    return wanted
