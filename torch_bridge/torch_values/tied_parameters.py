"""Parameters that several modules share, and how each gets a copy of its own."""

from collections.abc import Collection
from typing import Any

from torch import nn


def sharing_paths(model: nn.Module, path: str) -> list[str]:
    """Return the paths of the parameter at a path, that one and all under which other modules hold it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared = parameters.get(path)
    return [] if shared is None else [other for other, held in parameters.items() if held is shared]


def untie(model: nn.Module, paths: Collection[str]) -> None:
    """Give each of these modules a copy of the parameter that it shares, in place.

    A config of transformers that says that embeddings are tied says it no more: else `from_pretrained` would tie them.

    Raises:
        AttributeError: there is no module or parameter at a path.
    """
    for path in paths:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        shared = module.get_parameter(name)
        module.register_parameter(name, nn.Parameter(shared.detach().clone(), shared.requires_grad))
    for module in model.modules() if paths else ():
        config: Any = getattr(module, "config", None)
        if getattr(config, "tie_word_embeddings", None) is True:
            config.tie_word_embeddings = False
