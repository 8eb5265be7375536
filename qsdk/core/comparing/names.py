"""Names of one tensor in different tools, brought to a common form."""

import re
from collections.abc import Iterable

from qsdk.core.graph.op_facts import VIEWS

#: `/layer1/layer1.0/conv1/Conv_output_0`, as torch's exporter of TorchScript names the results of nodes
_TRACED = re.compile(r"^/?(?P<path>.*?)/?(?P<op>[A-Z][A-Za-z0-9]*)(?:_(?P<call>\d+))?_output_(?P<result>\d+)$")
#: ops that exporters merge and drop, so that their count and their generated names say little
NOT_COUNTED = VIEWS | {"Cast", "Expand", "Gather", "Slice", "Split"}
_WRITTEN = {"concat": "cat"}  # ops that torch calls by another name than ONNX


def plain(name: str) -> str:
    """Return a name with one underscore for each run of other characters than letters and digits.

    Examples:
        >>> plain("/layer1/conv1/Conv_output_0") == plain("_layer1_conv1_Conv_output_0")
        True
    """
    return re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_")


def parts_of_traced_name(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the module path that a traced value's name contains, and the name of the op in that module.

    Examples:
        >>> parts_of_traced_name("/layer1/layer1.0/conv1/Conv_output_0")
        (('layer1.0.conv1',), ('layer1.0.conv1/conv.0',))
    """
    found = _TRACED.match(name)
    if found is None or found["result"] != "0" or not name.startswith("/"):
        return (), ()
    path = ""
    for part in filter(None, found["path"].split("/")):
        path = part if not path or part.startswith(f"{path}.") else f"{path}.{part}"
    call = int(found["call"] or 0)
    modules = (f"{path}@{call}" if call else path,) if path else ()
    return modules, op_names(path, found["op"], call)


def op_names(path: str, op_type: str, call: int) -> tuple[str, ...]:
    """Return the name of a call of a functional op in a module; none for ops that exporters merge and drop."""
    if op_type in NOT_COUNTED:
        return ()
    word = op_type.lower()
    op = f"{_WRITTEN.get(word, word)}.{call}"
    return (f"{path}/{op}" if path else op,)


def common_names(names: Iterable[str]) -> set[str]:
    """Return the plain forms of names, those of modules in traced names, and of sites beside their codes, included."""
    given = list(names)
    found = {re.sub("_(?:de)?quantized$", "", plain(name)) for name in given}
    found |= {plain(module) for name in given for module in parts_of_traced_name(name)[0]}
    return found - {""}
