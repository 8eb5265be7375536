"""Inputs that the example did not have, such as labels: what is computed from them is not part of the quantized model.

A loss inside of a forward, as in models of `transformers`, is float: it has no sites, and is in no exported file.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from qsdk.core.errors import ModelError
from qsdk.core.site import owner_of
from torch_bridge.torch_values.pytree import map_leaves, tensors_of

# ops that a loss applies to the model's results before comparing them with labels; no value changes
_MOVES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "getitem"})


class LossInputs:
    """The tensors of one forward pass that come from inputs which the example did not have.

    Args:
        inputs: name -> value.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.names = ", ".join(inputs)
        self._tensors = tensors_of(list(inputs.values()))
        self._constants: list[Tensor] = []

    def is_read_by(self, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Return whether any of these tensors is among the arguments of a call."""
        given = tensors_of([*args, *(kwargs or {}).values()])
        return any(x is mine for x in given for mine in self._tensors)

    def reads_floats(self, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Return whether any of these tensors that is an argument of a call has floating-point values."""
        given = [x for x in tensors_of([*args, *(kwargs or {}).values()]) if x.is_floating_point()]
        return any(x is mine for x in given for mine in self._tensors if not _is_among(x, self._constants))

    def add_constant(self, result: Tensor) -> Tensor:
        """Add floats that were chosen by these tensors, such as the 0 and -inf of a mask, and return them."""
        self._tensors.append(result)
        self._constants.append(result)
        return result

    def add_result(self, result: Any, site: str | None, sites: Mapping[str, Any]) -> Any:
        """Add what a call computed from these tensors, and return it.

        Raises:
            ModelError: the quantized model computes the same without these inputs.
        """
        if site in sites:
            raise ModelError(
                f"{site} depends on {self.names}, which the example did not have; call qsdk.quantize with an example "
                "that has it"
            )
        self._tensors += tensors_of(result)
        return result


def own_tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs whose tensors are no other input's: the tokens of a text are often given as its labels too."""
    result: dict[str, Any] = map_leaves(dict(inputs), lambda _, x: x.view_as(x) if isinstance(x, Tensor) else x)
    return result


def _is_among(x: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(x is one for one in tensors)


def moves_values_only(site: str) -> bool:
    """Return whether the op of a site returns the values that it gets."""
    return op_of_site(site) in _MOVES


def op_of_site(site: str) -> str:
    """Return the name of the op that a site belongs to: `cat` of `layers.0/cat.2:output`."""
    return owner_of(site).rpartition("/")[2].partition(".")[0]
