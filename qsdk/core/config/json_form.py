"""Configs as JSON: one table of fields for the schema, the writing and the typed reading."""

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import groupby
from typing import Any, get_type_hints

from qsdk.core.config.rules import (
    ALLOWED,
    CONDITIONS,
    TENSOR_DTYPES,
    CacheScales,
    Choices,
    Compute,
    FixedRange,
    as_fixed_range,
    make_rule,
    require_bias,
)
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import BLOCK_FORMATS, DTYPES, DType, ElementType, dtype_named, element_type_named
from qsdk.core.numerics.spec import Dynamic

FORMAT = "qsdk.config"
VERSION = 1


@dataclass(frozen=True)
class JsonType:
    """One type of value as it appears in JSON."""

    schema: Mapping[str, Any]
    expected: str
    accepts: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_names(value: Any) -> bool:
    """Return whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_layers(value: Any) -> bool:
    return isinstance(value, dict) and all(is_names(item) for item in value.values())


def _is_range(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2 and all(_is_number(end) for end in value)
    return pair or value == "observed"


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(item is None or type(item) in (int, str) for item in value)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_STRICT = tuple(d.strict.name for d in DTYPES.values() if d.is_integer and d.signed)
_DTYPE_NAMES = (*(d.name for d in DTYPES.values() if d.kind != "scale"), *_STRICT)
_STRINGS = {"type": "array", "items": {"type": "string"}}
_PAIR = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}

_DTYPE = JsonType(
    {"$ref": "#/$defs/dtype"},
    'the name of a dtype, such as "int8"',
    lambda value: isinstance(value, str),
    dtype_named,
    lambda dtype: dtype.name if isinstance(dtype, DType) else dtype,
)
_WEIGHT = JsonType(
    {"anyOf": [{"$ref": "#/$defs/dtype"}, {"enum": list(BLOCK_FORMATS)}]},
    'the name of a dtype, such as "int8", or of a format of blocks, such as "mxfp4"',
    lambda value: isinstance(value, str),
    element_type_named,
    lambda given: given if isinstance(given, str) else given.name,
)
FLAG = JsonType({"type": "boolean"}, "true or false", lambda value: type(value) is bool)
_COUNT = JsonType(
    {"type": "integer", "minimum": 1}, "a whole number from 1", lambda value: type(value) is int and value > 0
)
_TEXT = JsonType({"type": "string"}, "a string", lambda value: isinstance(value, str))
_NAMES = JsonType(_STRINGS, "a list of strings", is_names, tuple, list)
_RANGE = JsonType(
    {"anyOf": [_PAIR, {"const": "observed"}]}, '[low, high] or "observed"', _is_range, as_fixed_range, _as_list
)
_PATTERNS = JsonType(
    {"anyOf": [{"type": "string"}, {**_STRINGS, "minItems": 1}]},
    "a string, or a list of strings",
    lambda value: isinstance(value, str) or (is_names(value) and bool(value)),
)
_SHAPE = JsonType(
    {"type": "array", "items": {"type": ["integer", "string", "null"]}},
    "a list of dimensions, null for any",
    _is_shape,
    tuple,
    list,
)


def _one_of(values: Sequence[Any], expected: str | None = None) -> JsonType:
    kinds = [(type(value), value) for value in values]
    return JsonType(
        {"enum": list(values)},
        expected or f"one of {', '.join(values)}",
        lambda value: isinstance(value, Hashable) and (type(value), value) in kinds,
    )


_LAYERS = JsonType(
    {"type": "object", "additionalProperties": _STRINGS},
    "an object of lists of strings",
    _is_layers,
    lambda value: {name: tuple(parameters) for name, parameters in value.items()},
    lambda value: {name: list(parameters) for name, parameters in value.items()},
)

_POWER_OF_TWO = "power_of_two"  # the name of scale_bits = 1 in older files

_BY_TYPE: Mapping[Any, JsonType] = {
    ElementType | str | None: _WEIGHT,
    DType | str | None: _DTYPE,
    int | None: _COUNT,
    bool | None: FLAG,
    FixedRange | None: _RANGE,
    CacheScales | None: _one_of(ALLOWED["kv_cache_scales"]),
    Compute | None: _one_of(ALLOWED["compute"]),
    Dynamic | None: _one_of(ALLOWED["dynamic_activations"], 'true, false, "token" or a format of blocks'),
}
_CHOICE_TYPES: Mapping[str, JsonType] = {name: _BY_TYPE[kind] for name, kind in get_type_hints(Choices).items()}
_RULE_TYPES: Mapping[str, JsonType] = {
    "pattern": _PATTERNS,
    "op_type": _NAMES,
    "shape": _SHAPE,
    "tensor_dtype": _one_of(TENSOR_DTYPES),
    "optional": FLAG,
    **_CHOICE_TYPES,
}
_CONFIG_TYPES: Mapping[str, JsonType] = {
    **_CHOICE_TYPES,
    _POWER_OF_TWO: FLAG,
    "supergroups": _NAMES,
    "hardware": _TEXT,
    "layers": _LAYERS,
    "only_linear": FLAG,
    "integer_ops": _NAMES,
    "exact_weights": _DTYPE,
}


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a config file; `config.schema.json` beside this module holds the same."""
    rule = {
        "type": "object",
        "properties": {name: dict(kind.schema) for name, kind in _RULE_TYPES.items()},
        "required": ["pattern"],
        "additionalProperties": False,
    }
    head = {"$schema": {"type": "string"}, "format": {"const": FORMAT}, "version": {"const": VERSION}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "qsdk quantization config",
        "type": "object",
        "properties": {
            **head,
            **{name: dict(kind.schema) for name, kind in _CONFIG_TYPES.items()},
            "rules": {"type": "array", "items": rule},
        },
        "required": ["format", "version"],
        "additionalProperties": False,
        "$defs": {"dtype": {"enum": list(_DTYPE_NAMES)}},
    }


def to_json(config: Any) -> dict[str, Any]:
    """Return a config's fields, and its rules, as values for JSON; fields that are None are left out."""
    made = {field.name: getattr(config, field.name) for field in fields(config) if field.name in _CONFIG_TYPES}
    rules = [
        {"pattern": rule.pattern, **rule.choices, **{name: getattr(rule, name) for name in CONDITIONS}}
        | ({"optional": True} if rule.optional else {})
        for rule in config.rules
    ]
    head = {"format": FORMAT, "version": VERSION}
    return {**head, **_written(made, _CONFIG_TYPES), "rules": _joined(_written(rule, _RULE_TYPES) for rule in rules)}


def _written(values: Mapping[str, Any], types: Mapping[str, JsonType]) -> dict[str, Any]:
    return {name: types[name].write(value) for name, value in values.items() if value is not None}


def _joined(rules: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rules with those that follow one another and differ in their patterns alone as one, with a list."""
    joined: list[dict[str, Any]] = []
    for choices, run in groupby(rules, lambda rule: {name: value for name, value in rule.items() if name != "pattern"}):
        patterns = [rule["pattern"] for rule in run]
        joined.append({"pattern": patterns[0] if len(patterns) == 1 else patterns, **choices})
    return joined


def read_object(data: Any, where: str) -> dict[str, Any]:
    """Return a config's fields, rules included, read from JSON values."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ConfigError(f'{where} is no {FORMAT}: it lacks "format": "{FORMAT}"; write one with config.save(path)')
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ConfigError(f"{where} has version {version!r}, this qsdk reads up to {VERSION}; update qsdk")
    rules = data.get("rules", [])
    if not isinstance(rules, list):
        raise ConfigError(f"{where}.rules is a list of objects, not {_describe(rules)}")
    if not isinstance(data.get("$schema", ""), str):
        raise ConfigError(f"{where}.$schema is a string, not {_describe(data['$schema'])}")
    head = ("$schema", "format", "version", "rules")
    result = read_fields({n: v for n, v in data.items() if n not in head}, _CONFIG_TYPES, where, head)
    if result.pop(_POWER_OF_TWO, False):
        result.setdefault("scale_bits", 1)
    require_bias(result.get("bias"), where)
    found = [rule for index, given in enumerate(rules) for rule in _rules(given, f"{where}.rules[{index}]")]
    return {**result, "rules": tuple(found)}


def _rules(data: Any, where: str) -> list[Any]:
    """Return the rules of an entry: one for each of its patterns."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} is an object, not {_describe(data)}")
    result = read_fields(data, _RULE_TYPES, where)
    if "pattern" not in result:
        raise ConfigError(f'{where} has no "pattern"; give a glob, "*" for every owner')
    patterns, optional = result.pop("pattern"), result.pop("optional", False)
    try:
        return [
            make_rule(pattern, result, optional=optional)
            for pattern in ([patterns] if isinstance(patterns, str) else patterns)
        ]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_fields(
    data: Mapping[str, Any], types: Mapping[str, JsonType], where: str, others: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the values of an object, each read by its type; `others` are keys that may stand beside those of types."""
    result = {}
    for name, value in data.items():
        kind = types.get(name)
        if kind is None:
            raise ConfigError(f"{where} has the unknown key {name!r}; {nearest_key(name, [*types, *others])}")
        if value is None:
            raise ConfigError(f"{where}.{name} is null; leave the key out where it is not meant")
        result[name] = read_value(value, kind, f"{where}.{name}")
    return result


def read_choice(name: str, text: str, where: str) -> Any:
    """Return a choice that was written as text: `int8`, `32`, `true`."""
    if name not in _CHOICE_TYPES:
        raise ConfigError(f"{where}: {name!r} is none of {', '.join(_CHOICE_TYPES)}; write for example weight=int8")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return read_value(value, _CHOICE_TYPES[name], f"{where}: {name}")


def read_value(value: Any, kind: JsonType, where: str) -> Any:
    """Return one value, read from JSON."""
    if not kind.accepts(value):
        remedy = f"; write {value.lower()} without quotes" if kind is FLAG and value in ("True", "False") else ""
        raise ConfigError(f"{where} is {kind.expected}, not {_describe(value)}{remedy}")
    try:
        return kind.read(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def nearest_key(name: Any, known: list[str]) -> str:
    """Return a remedy for an unknown key: the most similar one, else all of them."""
    near = get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def _describe(value: Any) -> str:
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return repr(value)[:60] if not isinstance(value, dict | list) else type(value).__name__
