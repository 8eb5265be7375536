"""Targets: what a runtime or a chip can compute in integers, as a file of facts. New ones need no code."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from qsdk.core.config.aimet_target import target_of_aimet
from qsdk.core.config.json_form import FLAG, JsonType, is_names, read_fields
from qsdk.core.config.rules import as_fixed_range
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import BLOCK_FORMATS, DTYPES, dtype_named
from qsdk.core.read_files import parse_json, read_text

_SHIPPED = Path(__file__).parent / "targets"
Names = tuple[str, ...]
Dtypes = frozenset[str]
Instead = Mapping[str, str]
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Target:
    """The facts of one target; the keys of its TOML file have these names, and what is left out is unrestricted.

    Attributes:
        name: as `for_dialect` and `--dialect` take it.
        title: for messages, such as "AMD Ryzen AI (XINT8)".
        pages: addresses of the documents that the rules come from.
        tried: what the rules were tried on; what no device has shown is said here.
        activations: dtypes of activations that it has; None for all but `no_activations`.
        no_activations: dtypes that it has not, where the others are not listed.
        activations_instead: a dtype that it has not -> the one in its place.
        weights: as `activations`, for weights and formats of weights.
        no_weights: as `no_activations`.
        weights_instead: as `activations_instead`.
        per_channel: whether weights can have a scale per output channel.
        block_sizes: that weights can have; () for no blocks, None for any.
        symmetric_activations: zero points of activations are 0.
        symmetric_weights: zero points of weights are 0.
        scale_bits: significant binary digits of every scale, 1 for powers of two; None for any.
        weight_scale_bits: of scales of weights alone, and of their products with zero points.
        float_biases: globs over op types whose biases stay float.
        only_linear: only linear layers are quantized.
        integer_ops: ONNX types with an integer kernel; what none of them reads or writes stays float. None for all.
        float_results: ONNX types whose results stay float.
        one_scale_ops: ONNX types whose weights have one scale where others have one per channel.
        supergroups: what it computes as one, such as `Conv+Relu`; None for all that qsdk knows.
        tied_ops: ONNX types whose inputs and output have one encoding.
        fixed_ranges: ONNX type -> the range that its result has whatever the data.
        fused_slopes: whether a LeakyRelu or PRelu is one op with the layer in front of it; None as in ONNX Runtime.
        weights_by_processor: kind of processor -> the dtype of int8 weights beside uint8 with which it is exact.
        hardware: a name of `qsdk.core.planning.hardware`, for rules that only code can say.
        placements: of pairs, the default first; with `all` in place of it, no hardware is named.
        int8_inputs: layers whose weights alone are quantized are fastest on inputs rounded to int8.
        kv_cache: dtype of keys and values of configs that choose none for what a decoder carries from step to step.
        zero_points: every QuantizeLinear and DequantizeLinear has a zero-point tensor and no `output_dtype`.
        fixed_sizes: it compiles for one size of every input.
        opsets: the lowest and the highest that it reads.
    """

    name: str
    title: str = ""
    pages: Names = ()
    tried: str = ""
    activations: Dtypes | None = None
    no_activations: Dtypes = frozenset()
    activations_instead: Instead = field(default_factory=dict)
    block_activations: Names = ()
    weights: Dtypes | None = None
    no_weights: Dtypes = frozenset()
    weights_instead: Instead = field(default_factory=dict)
    per_channel: bool = True
    block_sizes: tuple[int, ...] | None = None
    symmetric_activations: bool = False
    symmetric_weights: bool = False
    scale_bits: int | None = None
    weight_scale_bits: int | None = None
    float_biases: Names = ()
    only_linear: bool = False
    integer_ops: Names | None = None
    float_results: Names = ()
    one_scale_ops: Names = ()
    supergroups: Names | None = None
    tied_ops: Names = ()
    fixed_ranges: Ranges = field(default_factory=dict)
    fused_slopes: bool | None = None
    weights_by_processor: Instead = field(default_factory=dict)
    hardware: str | None = None
    placements: Names = ("all",)
    int8_inputs: bool = False
    kv_cache: str | None = None
    zero_points: bool = True
    fixed_sizes: bool = False
    opsets: tuple[int, int] = (13, 25)

    def has(self, weight: bool, dtype: str) -> bool:
        """Return whether weights, or else activations, can have a dtype or a format of weights, given by name.

        A narrower grid that is stored in a dtype which it has, such as int7, can be had too.
        """
        allowed, refused = (self.weights, self.no_weights) if weight else (self.activations, self.no_activations)
        if dtype in BLOCK_FORMATS and not weight:
            return dtype in self.block_activations
        stored = dtype if dtype in BLOCK_FORMATS else dtype_named(dtype).container
        return dtype not in refused and (allowed is None or not allowed.isdisjoint((dtype, stored)))

    def require(self, choice: str, dtype: str) -> None:
        """Raise a ConfigError if a choice of a config, such as `activation`, names a dtype that it has not."""
        weight = choice == "weight"
        if self.has(weight, dtype) or (dtype in DTYPES and DTYPES[dtype].kind == "float"):
            return
        allowed = self.weights if weight else self.activations
        others = "choose another dtype" if allowed is None else f"it has {', '.join(sorted(allowed)) or 'float types'}"
        raise ConfigError(f"{choice}={dtype} cannot be had in the dialect {self.name}; {others}")


def _dtypes(names: list[str]) -> Dtypes:
    return frozenset(name if name in BLOCK_FORMATS else dtype_named(name).name for name in names)


def _instead(table: Mapping[str, str]) -> Instead:
    return {old: dtype_named(new).name for old, new in table.items()}


def _is_table(value: Any, of: type) -> bool:
    return isinstance(value, dict) and all(isinstance(item, of) for item in value.values())


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item > 0 for item in value)


def _is_interval(value: Any) -> bool:
    return _are_counts(value) and len(value) == 2 and bool(value[0] <= value[1])


_TEXT = JsonType({}, "a string", lambda value: isinstance(value, str))
_NAMES = JsonType({}, "a list of strings", is_names, tuple)
_DTYPES = JsonType({}, 'a list of dtypes, such as ["int8"]', is_names, _dtypes)
#: type of a field of `Target` -> what its key may hold
_KINDS: Mapping[Any, JsonType] = {
    str: _TEXT,
    str | None: _TEXT,
    bool: FLAG,
    bool | None: FLAG,
    int | None: JsonType({}, "a whole number from 1", lambda value: type(value) is int and value > 0),
    Names: _NAMES,
    Names | None: _NAMES,
    Dtypes: _DTYPES,
    Dtypes | None: _DTYPES,
    Instead: JsonType({}, 'a table of dtypes, such as { uint8 = "int8" }', lambda v: _is_table(v, str), _instead),
    Ranges: JsonType(
        {},
        "a table of ranges, such as { Softmax = [0.0, 1.0] }",
        lambda value: _is_table(value, list),
        lambda table: {op: as_fixed_range(pair) for op, pair in table.items()},
    ),
    tuple[int, ...] | None: JsonType({}, "a list of whole numbers from 1", _are_counts, tuple),
    tuple[int, int]: JsonType({}, "two whole numbers, the lower one first", _is_interval, tuple),
}
_KEYS: Mapping[str, JsonType] = {name: _KINDS[kind] for name, kind in get_type_hints(Target).items()}


def shipped_targets() -> Names:
    """Return the names of the targets that come with qsdk."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.toml")))


def is_target_file(dialect: str | os.PathLike[str]) -> bool:
    """Return whether a dialect is given as the path of a target's file, or of an AIMET config."""
    return Path(dialect).suffix.lower() in (".toml", ".json")


def load_target(dialect: str | os.PathLike[str]) -> Target:
    """Return a target by its name, or from its TOML file; a ConfigError names the key that is wrong."""
    if is_target_file(dialect):
        return _read_target(Path(dialect))
    return _shipped(os.fspath(dialect))


@cache
def _shipped(name: str) -> Target:
    if name not in (known := shipped_targets()):
        raise ConfigError(
            f"unknown dialect {name!r}; choose one of {', '.join(known)}, or name a .toml file that describes a target"
        )
    return _read_target(_SHIPPED / f"{name}.toml")


def _read_target(path: Path) -> Target:
    """Read a target's file; a ConfigError names the key that is wrong."""
    text = read_text(path, "name a .toml file that describes a target")
    if path.suffix.lower() == ".json":
        content = parse_json(text, str(path), "correct it, or name a .toml file that describes a target")
        return Target(**read_fields(target_of_aimet(content, path.stem, str(path)), _KEYS, str(path)))
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    values = read_fields(data, _KEYS, str(path))
    if not values.get("name"):
        raise ConfigError(f'{path} has no "name"; give the one that reports are to show, such as name = "my-chip"')
    return Target(**values)
