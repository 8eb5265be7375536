"""The state that wrapping adds to each module of a model."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from qsdk.core.layers.expected_means import FoldedNorm
from torch_bridge.folding.batch_norm import Fold
from torch_bridge.folding.computed_weights import ComputedTensor
from torch_bridge.folding.trainable_batch_norm import TrainableBatchNorm
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.parameters import STATE


class SimBeside:
    """Writes the sim of a model beside a checkpoint of the model; in a copy of the model alone it writes nothing.

    Attributes:
        function: of the sim and the folder.
        sim: held weakly, since it holds the model.
    """

    def __init__(
        self, function: Callable[[Any, str], None] | None = None, sim: Callable[[], object | None] = lambda: None
    ) -> None:
        self.function, self.sim = function, sim

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write the sim, if it still exists."""
        sim = self.sim()
        if sim is not None and self.function is not None:
            self.function(sim, os.fspath(folder))

    def __reduce__(self) -> tuple[Any, ...]:
        return SimBeside, (self.function,)


@dataclass
class ModuleState:
    """The state that wrapping adds to a module: its paths, its runtime and its own quantizers.

    Attributes:
        paths: all paths of the module in the model.
        leaf: whether the module is one op.
        has_output: whether a leaf returns a new tensor.
        runtime: shared by all modules of the sim.
        quantizers: those whose scale and zero point are buffers of this module.
        folds: of the root: the BatchNorms that were folded into layers.
        computed: of the root: the computed tensors that were folded into their values.
        norms: of the root: path of a layer -> statistics of its outputs, known from the BatchNorm folded into it.
        trainable_norms: of the root: the folded BatchNorms that training can bring back.
        frozen_values: of the root: sites whose stored values training does not change.
        active_norm: of a layer and its BatchNorm: the BatchNorm that is being trained with the layer.
        without_norm: of a folded BatchNorm with a forward of its own: `F.batch_norm` is left out of that.
        stays_in_eval: whether `train()` leaves this BatchNorm in eval mode.
        foreign: whether the module came into the model after wrapping.
        own_forward: a forward that was set on the object in place of the class's.
        beside: of the root: what `save_pretrained` writes beside a checkpoint.
    """

    paths: tuple[str, ...]
    leaf: bool
    has_output: bool
    runtime: Runtime
    quantizers: list[Quantizer]
    folds: tuple[Fold, ...] = ()
    computed: tuple[ComputedTensor, ...] = ()
    norms: dict[str, FoldedNorm] = field(default_factory=dict)
    trainable_norms: tuple[TrainableBatchNorm, ...] = ()
    frozen_values: frozenset[str] = frozenset()
    active_norm: TrainableBatchNorm | None = None
    without_norm: bool = False
    stays_in_eval: bool = False
    foreign: bool = False
    own_forward: Callable[..., Any] | None = None
    beside: SimBeside | None = None

    @property
    def path(self) -> str:
        """Return the first path of the module, which names its parameters."""
        return self.paths[0]


def state_of(module: nn.Module) -> ModuleState:
    """Return the state of a wrapped module."""
    state = module.__dict__[STATE]
    assert isinstance(state, ModuleState)
    return state


def is_wrapped(module: nn.Module) -> bool:
    """Return whether a module belongs to a sim."""
    return STATE in module.__dict__


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module of a sim normalizes by its own statistics: it is a BatchNorm that is not folded."""
    state = state_of(module)
    folded = state.without_norm and state.active_norm is None
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not folded
