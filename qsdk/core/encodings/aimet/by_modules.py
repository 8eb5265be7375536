"""AIMET's `*_torch.encodings` files, which go by modules rather than tensors, in the form of version 0.6.1.

`QuantizationSimModel.export` of aimet-torch writes one beside the ONNX model, whatever version it is set to:
`{module: {"input" | "output": {index: entry}}}` for activations, and parameters by path.
"""

from collections.abc import Mapping
from typing import Any

from qsdk.core.encodings.tensor_facts import read_by
from qsdk.core.errors import FileFormatError

SECTIONS = ("activation_encodings", "param_encodings")


def is_by_modules(data: Mapping[str, Any]) -> bool:
    """Return whether JSON data of AIMET name modules, or are objects under a version that has lists."""
    parts = [data[name] for name in SECTIONS if data.get(name)]
    if not parts or not all(isinstance(part, dict) for part in parts):
        return False
    modules = data.get(SECTIONS[0]) or {}
    return data.get("version") == "1.0.0" or any(isinstance(entry, dict) for entry in modules.values())


def by_tensors(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the same content by tensors: results of modules by site, arguments as `tensor_facts.read_by` names them.

    Raises:
        FileFormatError: a module has something else than inputs and outputs; names it.
    """
    activations: dict[str, Any] = {}
    for module, ports in (data.get(SECTIONS[0]) or {}).items():
        if not isinstance(ports, dict) or not all(
            port in ("input", "output") and isinstance(entries, dict) for port, entries in ports.items()
        ):
            raise FileFormatError(
                f"{where}, module {module!r}: a file that goes by modules has input and output of each, with entries "
                "by index; write it again"
            )
        for port, entries in ports.items():
            for index, entry in entries.items():
                name = read_by(module, index) if port == "input" else f"{module}:output" + str(index) * (index != "0")
                activations[name] = entry if isinstance(entry, list) else [entry]
    return {**data, "version": "0.6.1", SECTIONS[0]: activations}
