"""Fixed point between quantizers as a value: an integer tensor and its static facts."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class FixedPoint:
    """Fixed point between quantizers: `value = integers * scale + constant`, with static bounds and errors.

    Attributes:
        name: an int32 (`narrow`) or int64 tensor of the integer model.
        scale: float64, broadcasts against the tensor; its sign is free.
        lo: smallest value the integers can have.
        hi: largest value the integers can have.
        constant: float64 addend that broadcasts against the tensor.
        narrow: True if the tensor is int32.
        error: bound of the difference between the integers and the real value, in units of `scale`.
        relative: bound of a further difference, as a share of the integer's magnitude.
        masked: a bool tensor, true where the value is `floor` for any integers; empty if nowhere.
        floor: the masked value: minus infinity, or a number so low that it swallows any number added to it.
        infinite: where a division by 0 is possible, the least magnitude that means infinity; else 0.
        missing: True if the value is NaN where a whole row is masked; the integers are 0 there.
        typed: True if the bounds are those of an integer type, which no number should reach: where bits run out,
            larger integers saturate.
        source: name of the node that computed it, for the certificate.
    """

    name: str
    scale: Array
    lo: int
    hi: int
    constant: Array = field(default_factory=lambda: np.zeros(()))
    narrow: bool = False
    error: float = 0.0
    relative: float = 0.0
    masked: str = ""
    floor: float = 0.0
    infinite: float = 0.0
    missing: bool = False
    typed: bool = False
    source: str = ""
