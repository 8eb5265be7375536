"""The protocol of layer walks: both sides provide one, in float and quantized side by side, for the solvers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qsdk.core.layers.activation import Activation
from qsdk.core.layers.layer_problem import PatchGeometry, WeightLayout
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec


@dataclass(frozen=True)
class Layer:
    """A stored weight that inputs are multiplied with.

    Attributes:
        site: of the weight.
        spec: of that site.
        layout: maps the stored weight to a matrix.
        geometry: of a convolution, None for a linear layer.
        bias: site of the bias that is added to the product, `""` where there is none.
        activation: the function right behind the layer, if there is one and it is known.
        dtype: the float dtype in which the weight is stored.
    """

    site: str
    spec: Spec
    layout: WeightLayout
    geometry: PatchGeometry | None = None
    bias: str = ""
    activation: Activation | None = None
    dtype: str = "float32"


class WalkStep(Protocol):
    """One stop of a walk: layers that read one input and are solved together.

    Attributes:
        layers: at least one.
        reached: numbers of the batches that call them.
    """

    @property
    def layers(self) -> Sequence[Layer]:
        """Return the layers that read this input."""

    @property
    def reached(self) -> Sequence[int]:
        """Return the numbers of the batches that call these layers, each as often as the others, in order."""

    def inputs(self) -> Iterable[tuple[Any, Any]]:
        """Return the input of the layers, call by call: in the float model, and in the quantized one as it is now.

        Float32 arrays of one shape, NumPy or torch, [..., groups * K] for a layer without geometry and
        [N, C, *spatial] for a convolution; of an embedding its integer indices, twice.
        The quantized input is what the layer multiplies, fake-quantized. May be iterated more than once.
        """


class Walk(Protocol):
    """The layers of a sim in the order in which they run; each step sees the solutions that were written before it.

    Attributes:
        layers: all layers of the walk.
        left: weight site -> why it is no layer here ("float: ...", "its encoding is frozen").
        batches: number of batches.
        float_seconds: time spent in the float model so far, so that costs can be given in float passes.
    """

    @property
    def layers(self) -> Sequence[Layer]:
        """Return all layers, in order."""

    @property
    def left(self) -> Mapping[str, str]:
        """Return the weight sites that cannot be solved, and why."""

    @property
    def batches(self) -> int:
        """Return the number of batches in the data."""

    @property
    def float_seconds(self) -> float:
        """Return the seconds spent in the float model so far."""

    def __iter__(self) -> Iterator[WalkStep]:
        """Yield the steps; each next step runs with the solutions that were written."""

    def weight(self, site: str) -> Any:
        """Return the stored weight in the float model, float32, of its stored shape."""

    def bias(self, site: str) -> Any | None:
        """Return the float model's bias of the layer with this weight, float32 [out channels]; None for none."""

    def encoding(self, site: str) -> Encoding:
        """Return the present encoding of a weight."""

    def write(
        self, site: str, *, encoding: Encoding | None = None, weight: Any | None = None, bias_shift: Any | None = None
    ) -> None:
        """Change the quantized model at a layer.

        Args:
            site: of the layer's weight.
            encoding: its new encoding.
            weight: its new values, of the stored shape and on the encoding's grid; the encoding is then frozen, since
                any other grid would round them again.
            bias_shift: the layer's new bias less that of the float model, [out channels].
        """
