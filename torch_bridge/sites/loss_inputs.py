"""Inputs that the example did not have, such as labels: what is computed from them is no part of the quantized model.

A loss inside of a forward, as models of `transformers` have it, is float: it has no sites, and is in no exported file.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from qsdk.core.errors import ModelError
from qsdk.core.site import owner_of
from torch_bridge.torch_values.pytree import tensors_of

# what a loss does with the results of the model before it holds them against labels: no value changes
_MOVES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "getitem"})


class LaterInputs:
    """The tensors of one forward pass that come from inputs which the example did not have.

    Args:
        inputs: name -> value.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.names = ", ".join(inputs)
        self._tensors = tensors_of(list(inputs.values()))

    def read_by(self, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Whether a call is given any of them."""
        given = tensors_of([*args, *(kwargs or {}).values()])
        return any(x is mine for x in given for mine in self._tensors)

    def make(self, result: Any, site: str | None, sites: Mapping[str, Any]) -> Any:
        """Take in what a call made of them, and give it.

        Raises:
            ModelError: the quantized model computes it as well, without these inputs.
        """
        if site in sites:
            raise ModelError(
                f"{site} depends on {self.names}, which the example did not have; call qsdk.quantize with an example "
                "that has it"
            )
        self._tensors += tensors_of(result)
        return result


def only_moves(site: str) -> bool:
    """Whether the op of a site gives values as they are."""
    return owner_of(site).rpartition("/")[2].partition(".")[0] in _MOVES
