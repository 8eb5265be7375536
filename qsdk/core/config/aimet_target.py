"""An AIMET quantsim config as a target: what the chip that it was written for has, under the keys of a target's file.

Its defaults are choices, which `load_config` reads whole, key by key; here they become limits. Of its keys, those that
say which tensors are quantized at all (`is_quantized`, `model_input`, `model_output`, `supported_kernels` of one op
type) are no limits of a chip and are left to `load_config`.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from qsdk.core.errors import ConfigError
from qsdk.core.graph.op_facts import LINEAR

_SECTIONS = ("defaults", "params", "op_type", "supergroups", "supergroup_pass_list", "model_input", "model_output")
#: AIMET's name of a pass -> qsdk's supergroup
PASSES: Mapping[str, str] = MappingProxyType(
    {"LayerNormalization": "LayerNorm", "RMSNormalization": "RMSNorm", "MaskedSoftmax": "MaskedSoftmax"}
    | {"MatmulAdd": "MatMul+Add"}
)
#: versions of the Hexagon processor that have rules of their own, and the name of those of every other chip
VERSIONS, GENERIC = ("v66", "v68", "v69", "v73", "v75", "v79", "v81", "v85"), "aimet"
#: what ONNX moves without a new encoding: `is_output_quantized` does not make the result of these float
_MOVES = frozenset({"DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "MaxPool"})
_MOVES |= {"Pad", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "TopK", "Transpose", "Unsqueeze"}


def target_of_aimet(data: Any, name: str, where: str) -> dict[str, Any]:
    """Return the keys of a target from the content of an AIMET config.

    Args:
        data: from the JSON parser.
        name: of the target.
        where: the file, for messages.

    Raises:
        ConfigError: it is no such config, or a value is none that AIMET has there; the key is named.
    """
    if not isinstance(data, Mapping) or not {"defaults", "params", "op_type"}.intersection(data):
        raise ConfigError(f"{where} is no AIMET config; a target of your own is a .toml file")
    unknown = sorted(set(data) - {*_SECTIONS})
    if unknown:
        raise ConfigError(f"{where} has the unknown section {unknown[0]!r}; AIMET has {', '.join(_SECTIONS)}")
    defaults, ops = _part(data, "defaults", where), _part(data, "op_type", where)
    made = {op: _part(ops, op, f"{where}: op_type") for op in ops}
    found: dict[str, Any] = {"name": name, "title": f"AIMET config {name}"}
    choices = {key: _part(defaults, key, where) for key in ("ops", "params")}
    symmetric = {key: _flag(part, "is_symmetric", f"{where}: defaults.{key}") for key, part in choices.items()}
    if symmetric["ops"]:
        found["activations_instead"] = {f"uint{bits}": f"int{bits}" for bits in (4, 8, 16)}
    if _flag(defaults, "strict_symmetric", where):
        found["weights_instead"] = {"int8": "int8_strict", "int4": "int4_strict"}
    found |= _dtypes(defaults.get("supported_kernels", []), f"{where}: defaults.supported_kernels", symmetric["ops"])
    found["symmetric_activations"] = symmetric["ops"]
    free = [op for op, part in made.items() if not _weight_symmetric(part, f"{where}: op_type.{op}")]
    found["symmetric_weights"] = symmetric["params"] and not free
    default = _flag(defaults, "per_channel_quantization", where)
    channels = {
        op: _flag(made.get(op, {}), "per_channel_quantization", f"{where}: {op}", default) for op in sorted(LINEAR)
    }
    found["per_channel"] = any(channels.values())
    if found["per_channel"] and not all(channels.values()):
        found["one_scale_ops"] = [op for op, given in channels.items() if not given]
    floats = [op for op, part in made.items() if not _flag(part, "is_output_quantized", f"{where}: {op}", True)]
    found["float_results"] = [op for op in floats if op not in _MOVES]
    found["fixed_ranges"] = dict(_ranges(made, where))
    passes = data.get("supergroup_pass_list", [])
    found["supergroups"] = [*_chains(data, where), *(PASSES[name] for name in passes if name in PASSES)]
    version = str(defaults.get("hw_version", "")).lower()
    return {**found, "hardware": version if version in VERSIONS else GENERIC}


def _part(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = data.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: {key} is a table, not {found!r}; correct it")
    return found


def _flag(data: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    found = data.get(key, default)
    known = {"True": True, "False": False, True: True, False: False}
    if not isinstance(found, str | bool) or found not in known:
        raise ConfigError(f"{where}: {key} is True or False, not {found!r}; correct it")
    return known[found]


def _weight_symmetric(part: Mapping[str, Any], where: str) -> bool:
    return _flag(_part(_part(part, "params", where), "weight", where), "is_symmetric", where, True)


def _dtypes(kernels: Any, where: str, signed: bool) -> dict[str, Any]:
    """Return the dtypes that the kernels take, as a target lists them."""
    found: dict[str, list[str]] = {"activation": [], "param": []}
    if not isinstance(kernels, list):
        raise ConfigError(f"{where} is a list, not {kernels!r}; correct it")
    for kernel in kernels:
        for key, names in found.items():
            part = _part(kernel, key, where) if isinstance(kernel, Mapping) else {}
            kind, bits = part.get("dtype"), part.get("bitwidth")
            if kind == "int" and bits in (4, 8, 16):
                both = (f"int{bits}",) if signed and key == "activation" else (f"int{bits}", f"uint{bits}")
                names += [name for name in both if name not in names]
            elif (kind, bits) not in (("float", 16), ("float", 32), ("int", 32)) and part:
                raise ConfigError(f"{where}: int 4, 8, 16 or 32, or float 16 or 32, not {kind} {bits}; correct it")
    listed = {"activations": found["activation"], "weights": found["param"]}
    return {key: names for key, names in listed.items() if names}


def _ranges(made: Mapping[str, Mapping[str, Any]], where: str) -> Iterator[tuple[str, list[float]]]:
    for op, part in made.items():
        ends = _part(part, "encoding_constraints", f"{where}: op_type.{op}")
        if {"min", "max"} <= ends.keys():
            yield op, [ends["min"], ends["max"]]


def _chains(data: Mapping[str, Any], where: str) -> Iterator[str]:
    groups = data.get("supergroups", [])
    for at, group in enumerate(groups if isinstance(groups, list) else [groups]):
        chain = group.get("op_list") if isinstance(group, Mapping) else None
        if not isinstance(chain, list) or len(chain) < 2 or not all(isinstance(op, str) for op in chain):
            raise ConfigError(f"{where}: supergroups[{at}] needs an op_list of two op types or more; correct it")
        yield "+".join(chain)
