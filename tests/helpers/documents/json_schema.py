"""Whether a JSON value fits a JSON Schema, as far as the schemas of qsdk go."""

from typing import Any

from qsdk.core.config.json_form import config_schema


def fits(value: Any, schema: Any) -> bool:
    """Whether a value fits a JSON Schema; knows the keywords that ours uses and no other."""
    if schema == {"$ref": "#/$defs/dtype"}:
        return fits(value, config_schema()["$defs"]["dtype"])
    known = {
        "$schema",
        "$defs",
        "title",
        "type",
        "enum",
        "const",
        "anyOf",
        "properties",
        "required",
        "additionalProperties",
    }
    assert set(schema) <= known | {"items", "minItems", "maxItems", "minimum"}, schema
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    whole = type(value) is int or (type(value) is float and value.is_integer())
    is_kind = {
        **{name: isinstance(value, kind) for name, kind in kinds.items()},
        "integer": whole,
        "number": type(value) in (int, float),
    }
    return all(
        (
            not wanted or any(is_kind[kind] for kind in wanted),
            "enum" not in schema or any(is_same(value, each) for each in schema["enum"]),
            "const" not in schema or (value == schema["const"] and type(value) is type(schema["const"])),
            "anyOf" not in schema or any(fits(value, choice) for choice in schema["anyOf"]),
            not isinstance(value, list) or fits_list(value, schema),
            not isinstance(value, dict) or fits_object(value, schema),
            type(value) not in (int, float) or value >= schema.get("minimum", value),
        )
    )


def is_same(value: Any, other: Any) -> bool:
    """Whether two values are one in JSON, where 0 is not false."""
    return bool(value == other) and (type(value) is bool) == (type(other) is bool)


def fits_list(value: list[Any], schema: Any) -> bool:
    inside = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    return inside and all(fits(item, schema.get("items", {})) for item in value)


def fits_object(value: dict[str, Any], schema: Any) -> bool:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not set(schema.get("required", ())) <= set(value):
        return False
    return all(
        fits(item, properties[name]) if name in properties else others is True or (bool(others) and fits(item, others))
        for name, item in value.items()
    )
