"""Fixed point between quantizers as a value: an integer tensor and what is known about it statically."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Wide:
    """Fixed point between quantizers: `value = integers * scale + constant`, with what is known about it statically.

    Attributes:
        name: an int32 (`narrow`) or int64 tensor of the integer model.
        scale: float64, broadcasts against the tensor; its sign is free.
        lo: smallest value the integers can have.
        hi: largest value the integers can have.
        constant: float64 addend that broadcasts against the tensor.
        narrow: whether the tensor is int32.
        error: bound of what the integers differ from the real value, in units of `scale`.
        relative: bound of a further difference, as a share of the integer's magnitude.
        masked: a bool tensor that is true where the value is `floor` whatever the integers are; empty if nowhere.
        floor: the masked value: minus infinity, or a number so low that it swallows what it is added to.
        infinite: where a division by 0 is possible, the least magnitude that stands for infinity; else 0.
        missing: whether the value is NaN where a whole row is masked; the integers are 0 there.
        typed: whether the bounds are those of an integer type, which no number is meant to reach: where room runs out,
            what is beyond it saturates.
        source: name of the node that made it, for the certificate.
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
