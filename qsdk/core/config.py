"""Configs: presets and rules that say what is wanted where. Plain frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qsdk.core.dtypes import DType, dtype_named, float32, int4, int8, int32, uint8, uint16
from qsdk.core.errors import ConfigError
from qsdk.core.site import matches


@dataclass(frozen=True)
class Place:
    """What rules look at.

    Attributes:
        owners: the names that an op, or the supergroup it belongs to, answers to.
        op_types: its ONNX type, or those of the supergroup's members in order.
        dtype: of the tensor in the float model, such as `float32`.
        shape: of the tensor, where known.
    """

    owners: tuple[str, ...]
    op_types: tuple[str, ...] = ()
    dtype: str = "float32"
    shape: tuple[int | str | None, ...] | None = None


@dataclass(frozen=True)
class Rule:
    """Overrides for every owner that `pattern` matches; None leaves a choice as it is."""

    pattern: str
    weight: DType | None = None
    activation: DType | None = None
    bias: DType | None = None
    block_size: int | None = None
    per_channel: bool | None = None
    symmetric_activations: bool | None = None
    tie: bool | None = None

    def __str__(self) -> str:
        said = {name: value for name, value in vars(self).items() if value is not None and name != "pattern"}
        return f"{self.pattern!r} -> {', '.join(f'{name}={value}' for name, value in said.items())}"


@dataclass(frozen=True)
class QuantConfig:
    """What is wanted at every site, and the rules that differ; the last matching rule wins.

    Attributes:
        weight: dtype of weights (embeddings stay at 8 bits where it is narrower).
        activation: dtype of activations, inputs and outputs.
        bias: int32 where input and weight have 8 bits or fewer; float32 leaves every bias float.
        per_channel: one weight scale per output channel, else per tensor.
        block_size: one weight scale per run of input channels; None for no blocks.
        symmetric_activations: fixes the zero points of activations.
        power_of_two: scales are powers of two.
        tie: whether a Concat, or another op that keeps the grid, shares its inputs' encoding; None ties all but a
            Concat of parts of different kinds that leaves the model (boxes and scores of a detector).
        rules: in order.
        layers: class name -> its parameters, for modules that qsdk does not know.
    """

    weight: DType = int8
    activation: DType = uint8
    bias: DType = int32
    per_channel: bool = True
    block_size: int | None = None
    symmetric_activations: bool = False
    power_of_two: bool = False
    tie: bool | None = None
    rules: tuple[Rule, ...] = ()
    layers: Mapping[str, tuple[str, ...]] | None = None

    def override(
        self,
        pattern: str,
        *,
        weight: DType | str | None = None,
        activation: DType | str | None = None,
        bias: DType | str | None = None,
        block_size: int | None = None,
        per_channel: bool | None = None,
        symmetric_activations: bool | None = None,
        tie: bool | None = None,
    ) -> "QuantConfig":
        """Add a rule for the owners that `pattern` (a shell glob) matches; gives a new config.

        Raises:
            ConfigError: an unknown dtype, or a rule that says nothing.
        """
        rule = Rule(
            pattern,
            None if weight is None else dtype_named(weight),
            None if activation is None else dtype_named(activation),
            None if bias is None else dtype_named(bias),
            block_size,
            per_channel,
            symmetric_activations,
            tie,
        )
        if all(value is None for name, value in vars(rule).items() if name != "pattern"):
            raise ConfigError(
                f"the rule for {pattern!r} overrides nothing; give weight=, activation= or another choice"
            )
        if rule.bias is not None and rule.bias.kind != "float" and rule.bias != int32:
            raise ConfigError(f"a bias is int32 or float, not {rule.bias} (rule {pattern!r})")
        return replace(self, rules=(*self.rules, rule))

    def skip(self, pattern: str, dtype: DType | str = float32) -> "QuantConfig":
        """Leave the owners that `pattern` matches in a float dtype; gives a new config.

        Raises:
            ConfigError: dtype is not a float type.
        """
        found = dtype_named(dtype)
        if found.kind != "float":
            raise ConfigError(f"skip({pattern!r}) keeps owners float; {found} is not a float dtype, use override")
        return self.override(pattern, weight=found, activation=found, bias=found)

    def layer(self, class_name: str, *parameters: str) -> "QuantConfig":
        """Declare the parameters of a module class that qsdk does not know, so that they are quantized as weights."""
        return replace(self, layers={**(self.layers or {}), class_name: parameters})

    def at(self, place: Place) -> tuple["QuantConfig", str]:
        """The choices for a place, and the rule that decided last ("default" if none)."""
        chosen, decided = self, "default"
        for rule in self.rules:
            if any(matches(rule.pattern, owner) for owner in place.owners):
                said = {n: v for n, v in vars(rule).items() if v is not None and n != "pattern"}
                chosen, decided = replace(chosen, **said), str(rule)
        return chosen, decided

    def for_owners(self, *owners: str) -> tuple["QuantConfig", str]:
        """The choices for an op known under these owners, and the rule that decided last ("default" if none)."""
        return self.at(Place(owners))

    def names(self, owner: str) -> bool:
        """Whether any rule names this owner by more than a bare `*`."""
        return any(matches(rule.pattern, owner) for rule in self.rules if rule.pattern.strip("*"))


def w8a8(*, block_size: int | None = None, symmetric_activations: bool = False) -> QuantConfig:
    """8-bit weights, 8-bit activations."""
    return QuantConfig(int8, uint8, block_size=block_size, symmetric_activations=symmetric_activations)


def w8a16(*, block_size: int | None = None, symmetric_activations: bool = False) -> QuantConfig:
    """8-bit weights, 16-bit activations."""
    return QuantConfig(int8, uint16, block_size=block_size, symmetric_activations=symmetric_activations)


def w4a8(*, block_size: int | None = None, symmetric_activations: bool = False) -> QuantConfig:
    """4-bit weights, 8-bit activations."""
    return QuantConfig(int4, uint8, block_size=block_size, symmetric_activations=symmetric_activations)


def w4a16(*, block_size: int | None = None, symmetric_activations: bool = False) -> QuantConfig:
    """4-bit weights, 16-bit activations."""
    return QuantConfig(int4, uint16, block_size=block_size, symmetric_activations=symmetric_activations)
