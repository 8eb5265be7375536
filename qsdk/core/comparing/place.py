"""Places: the tensors of one side of a comparison, each with every name it goes by."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qsdk.core.graph.op_facts import VIEWS
from qsdk.core.numerics.encoding import Encoding, storage_type
from qsdk.core.site import owner_of, port_of

Array = npt.NDArray[Any]
#: `/layer1/layer1.0/conv1/Conv_output_0`, as torch's exporter of TorchScript names the results of nodes
_TRACED = re.compile(r"^/?(?P<path>.*?)/?(?P<op>[A-Z][A-Za-z0-9]*)(?:_(?P<call>\d+))?_output_(?P<result>\d+)$")
#: ops that exporters merge and drop, so that their count and their generated names say little
NOT_COUNTED = VIEWS | {"Cast", "Expand", "Gather", "Slice", "Split"}
_WRITTEN = {"concat": "cat"}  # ops that torch calls by another name than ONNX


@dataclass(frozen=True)
class Place:
    """A tensor that one side of a comparison computes.

    Attributes:
        name: by which its values are given, and which a report shows.
        site: of a sim or a file of ours; "" where it has none.
        modules: paths of the modules whose result it is, the innermost first.
        values: names of ONNX values and nodes, or of a file.
        ops: names as of functional ops (`layer1/add.0`): the number is a guess where an exporter merges ops.
        view: whether an op that only moves values makes it.
        encoding: of the grid that it lies on, if it is quantized.
        weight_noise: power of the rounding of the weights read for it, relative to the power of these weights.
        epsilon: of the float type that it is computed in; 0 where that is not known.
        codes: whether its values are integers, whose encoding only the other side knows.
        given: True for an input of the model that is not quantized.
        output: the position among the model's outputs, or None.
    """

    name: str
    site: str = ""
    modules: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    view: bool = False
    encoding: Encoding | None = None
    weight_noise: float = 0.0
    epsilon: float = 0.0
    codes: bool = False
    given: bool = False
    output: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return every name of the place that is not guessed."""
        return tuple(dict.fromkeys(name for name in (self.name, self.site, *self.modules, *self.values) if name))


#: a place of side a and the one of side b
Pair = tuple[Place, Place]


class Side(Protocol):
    """A model that runs on a batch and gives the values at its places."""

    @property
    def places(self) -> Sequence[Place]:
        """Return the places in the order in which they are computed; known after the first run."""
        ...

    @property
    def teachable(self) -> bool:
        """Return whether the model can go on from given values."""
        ...

    def values(self, batch: Any, where: str) -> Mapping[str, Array]:
        """Return the values at every place, by its name.

        Args:
            batch: of the user.
            where: names the batch in messages.
        """
        ...

    def taught(self, batch: Any, where: str, given: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the values where each is computed from the given ones in front of it; arguments as of `values`."""
        ...


def owner_names(site: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the path of the module whose result a site is, and else the name of the functional op; both may be absent.

    Examples:
        >>> owner_names("layer1.conv:output"), owner_names("layer1/add.0:output")
        ((('layer1.conv',), ()), ((), ('layer1/add.0',)))
    """
    owner = module_of_site(site)
    if not site:
        return (), ()
    return ((), (owner,)) if "/" in owner else ((owner,), ())


def module_of_site(site: str) -> str:
    """Return the owner of a site; a further result keeps its port.

    Examples:
        >>> module_of_site("layer1.conv:output"), module_of_site("lstm:output1")
        ('layer1.conv', 'lstm:output1')
    """
    return owner_of(site) if port_of(site) in ("output", "input") else site


def epsilon_of(dtype: Any) -> float:
    """Return the distance of 1 from the next larger number of a float type, of NumPy or of ml_dtypes."""
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def rounding_noise(encoding: Encoding, values: Array) -> float:
    """Return the power of the rounding that a grid causes, relative to the power of the values; 0 where these are 0.

    It is a twelfth of the squared step, as of a uniform error, so that a range that clips does not count as rounding.
    On a float grid the steps are those of the values: a share of them, the type's epsilon.
    """
    if not encoding.dtype.is_integer:
        return epsilon_of(storage_type(encoding.dtype)) ** 2 / 12
    power = float(np.mean(np.asarray(values, np.float64) ** 2)) if values.size else 0.0
    return float(np.mean(encoding.scale.astype(np.float64) ** 2)) / 12 / power if 0 < power < np.inf else 0.0


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
