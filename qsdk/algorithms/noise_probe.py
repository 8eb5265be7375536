"""The noise that quantization at each site causes at a model's outputs, from one backward pass per batch.

To first order, a rounding error d at a site changes the outputs by J d, where J is the Jacobian of the outputs with
respect to the site. For a vector v of random signs, `E[(v' J d)^2] = |J d|^2` (Hutchinson 1990), and `v' J` is the
gradient of `v' y`: one backward pass gives that of every site. The examples of a batch do not influence one another,
so each one is an estimate of its own; so is each channel of an activation, since its rounding errors are its own.

A weight has the same errors in every example. Where there are enough of these, its errors are carried forward to the
next site (forward-mode differentiation), where their products with gradients are known per example. Else each of its
channels is an estimate, which leaves out how errors of channels add up over the same examples: at 3 bits that makes
several decibels. With many passes there is no need for it.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import forward_ad

#: returns the values of a site on its grid, or None where the site stays as it is
Quantize = Callable[[str, Tensor], Tensor | None]


#: estimates that a batch has to give for the noise of a weight, if each is of an example and a backward pass
_ENOUGH = 8


class UnclearError(RuntimeError):
    """The errors of weights arrive at a site in a way that does not tell whose they are."""


@dataclass(frozen=True)
class _Visit:
    """What was noted at a site, and the gradients that arrive there.

    Attributes:
        site: whose error it is.
        error: of the values there.
        gradients: of the outputs with respect to them, one for each time that the values were read.
        carried: whether the error is that of a weight, carried forward.
    """

    site: str
    error: Tensor
    gradients: list[Tensor]
    carried: bool = False


@dataclass
class NoiseProbe:
    """What visits every site of a float forward pass, and measures in a backward pass.

    Attributes:
        quantize: of a site, without gradients.
        channel_axes: site -> channel axis, of stored tensors; all other sites hold activations.
        seed: of the random signs.
        weights: the sites of stored tensors that errors may be carried forward from.
        noise: site -> power of its noise at the outputs, summed over all batches.
        variance: site -> of that estimate, since signs are random: of the square of a sum of many random signs, it is
            two thirds of the fourth power.
        unreached: sites with an error that no gradient reached.
    """

    quantize: Quantize
    channel_axes: Mapping[str, int]
    seed: int = 0
    weights: Collection[str] = ()
    noise: dict[str, float] = field(default_factory=dict)
    variance: dict[str, float] = field(default_factory=dict)
    unreached: set[str] = field(default_factory=set)
    _flat: set[str] = field(default_factory=set)
    _errors: dict[str, Tensor] = field(default_factory=dict)
    _waiting: list[_Visit] = field(default_factory=list)
    _carries: bool = False
    _underway: list[str] = field(default_factory=list)

    def visit(self, site: str, x: Tensor) -> Tensor:
        """Note the rounding error at a site, and return its float values, from which gradients are taken."""
        arrived: list[tuple[str, Tensor, bool]] = []
        if self._carries and site not in self.channel_axes:
            x, tangent = _parts_of_dual(x)
            arrived = [] if tangent is None else [self._arrival(tangent)]
        error = self._errors.get(site)
        if error is None:
            with torch.no_grad():
                on_grid = self.quantize(site, x.detach())
                if on_grid is None:
                    return self._tapped(x, arrived) if arrived else x
                error = _finite(on_grid.float() - x).to(torch.bfloat16)
            if site in self.channel_axes:
                self._errors[site] = error  # the same for every batch
        if not torch.is_grad_enabled():  # inside a part of the model that forbids them
            self._waiting.append(_Visit(site, error, []))
            return x
        if self._carries and site in self.weights:
            self._underway.append(site)
            return _dual(x.detach(), error.to(x.dtype))
        return self._tapped(x, [*arrived, (site, error, False)], stored=site in self.channel_axes)

    def _arrival(self, tangent: Tensor) -> tuple[str, Tensor, bool]:
        """Return what has arrived of the error of the weight that was read last."""
        if len(self._underway) != 1:
            raise UnclearError(f"errors of {self._underway or 'a weight that was read before'} arrive together")
        return self._underway.pop(), _finite(tangent.detach()).to(torch.bfloat16), True

    def _tapped(self, x: Tensor, errors: Sequence[tuple[str, Tensor, bool]], *, stored: bool = False) -> Tensor:
        """Return values whose gradients will meet the errors."""
        gradients: list[Tensor] = []
        self._waiting += [_Visit(site, error, gradients, carried) for site, error, carried in errors]
        tapped = x if x.requires_grad and not stored else _leaf(x)
        tapped.register_hook(gradients.append)  # type: ignore[no-untyped-call]
        return tapped

    @contextmanager
    def watch(self, estimates: int, *, carries: bool) -> Iterator[None]:
        """Let a model visit its sites in the block; `estimates`: the batch's examples, times backward passes."""
        self._carries = carries and estimates >= _ENOUGH
        with _dual_level() if self._carries else nullcontext():
            yield
        if self._underway:
            raise UnclearError(f"the errors of {self._underway} arrive at no site")

    def measure(self, outputs: Sequence[Tensor], weights: Sequence[float], passes: int = 1) -> None:
        """Take the gradients of the outputs of the batch that was visited, and add the noise of every site.

        The power of each output counts for its weight. Of several backward passes, each with other signs, the mean is
        added.
        """
        reached = [(y, weight**0.5) for y, weight in zip(outputs, weights, strict=True) if y.requires_grad]
        for left in reversed(range(passes)):
            generator = torch.Generator().manual_seed(self.seed)
            self.seed += 1
            slopes = [_random_signs(y, generator).mul_(unit).to(y.dtype) for y, unit in reached]
            if reached:
                torch.autograd.backward([y for y, _ in reached], slopes, retain_graph=left > 0)
            self._add_noise(outputs[0].shape[0] if outputs and outputs[0].dim() else 1, passes)
        self._waiting.clear()

    def _add_noise(self, examples: int, passes: int) -> None:
        """Add the noise of every site that the gradients of one backward pass show, for one of several passes."""
        shared: dict[str, Tensor] = {}
        for visit in self._waiting:
            site, error = visit.site, visit.error
            if not visit.gradients:
                if error.any():
                    self.unreached.add(site)
                continue
            slopes = sum(visit.gradients[1:], start=visit.gradients[0]).float()
            axis, products = None if visit.carried else self.channel_axes.get(site), slopes * error
            by_channel = passes == 1 and not visit.carried
            parts = _by_part(products, axis, examples, by_channel)
            if not torch.isfinite(parts.sum()):  # the check of all products would take as long as the sums
                parts = _by_part(_finite(products), axis, examples, by_channel)
            if not parts.any() and error.any() and not slopes.any():
                self._flat.add(site)
            if axis is not None and not by_channel:
                parts = parts.sum(0, keepdim=True)
            if site in self.channel_axes:  # read more than once, it has the same errors each time
                shared[site] = shared[site] + parts if site in shared else parts
            else:
                self._add(site, parts, passes)
        for visit in self._waiting:
            visit.gradients.clear()
        for site, parts in shared.items():
            self._add(site, parts, passes)

    def unknown(self) -> set[str]:
        """Return the sites of whose noise gradients say nothing: none reached them, or all were 0, as of a rounding."""
        return self.unreached | {site for site in self._flat if not self.noise[site]}

    def forget(self) -> None:
        """Drop what was noted of a batch that the model did not take to its end."""
        self._waiting.clear()
        self._underway.clear()

    def _add(self, site: str, parts: Tensor, passes: int) -> None:
        powers = parts.double().square()
        self.noise[site] = self.noise.get(site, 0.0) + float(powers.sum()) / passes
        self.variance[site] = self.variance.get(site, 0.0) + float(powers.square().sum()) * 2 / 3 / passes**2


@contextmanager
def _dual_level() -> Iterator[None]:
    """Allow dual tensors in the block."""
    with forward_ad.dual_level():
        with warnings.catch_warnings():
            # the first one loads what torch warns of itself: a DeprecationWarning until 2.14, a FutureWarning since
            warnings.filterwarnings("ignore", message=r".*torch\.jit\.")
            _dual(torch.zeros(1), torch.zeros(1))
        yield


def _dual(x: Tensor, tangent: Tensor) -> Tensor:
    found: Tensor = forward_ad.make_dual(x, tangent)  # type: ignore[no-untyped-call]
    return found


def _parts_of_dual(x: Tensor) -> tuple[Tensor, Tensor | None]:
    primal, tangent = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return primal, tangent


def _random_signs(y: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random sign for every value of a tensor, 0 where that is not finite."""
    octets = torch.randint(0, 256, (-(-y.numel() // 8), 1), generator=generator, dtype=torch.uint8)
    bits = octets.bitwise_right_shift(torch.arange(8, dtype=torch.uint8)).bitwise_and_(1)  # a draw for each is slow
    signs = bits.flatten()[: y.numel()].reshape(y.shape).to(y.device, torch.float32).mul_(2).sub_(1)
    finite = torch.isfinite(y.detach())
    return signs if finite.all() else signs.mul_(finite)


def _by_part(products: Tensor, axis: int | None, examples: int, by_channel: bool) -> Tensor:
    """Return the sums of products per channel of a stored tensor, or per example of an activation, and its channel."""
    if axis is not None:
        return products.movedim(axis, 0).reshape(products.shape[axis], -1).sum(1) if products.dim() else products
    rows = examples if products.dim() and products.shape[0] % max(examples, 1) == 0 else 1
    if by_channel and rows == products.shape[:1].numel():
        return products.sum(tuple(range(2, products.dim()))) if products.dim() > 2 else products
    return products.reshape(rows, -1).sum(1)


def _leaf(x: Tensor) -> Tensor:
    """Return a tensor of the same values that gradients end at, in the layout that torch wants of one that adds up."""
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    dense = dense and 0 not in x.stride()  # as an axis of length one may have
    return (x.detach() if dense else x.detach().clone(memory_format=torch.contiguous_format)).requires_grad_()


def _finite(x: Tensor) -> Tensor:
    """Return a tensor with 0 in place of NaN and infinities, which masks have."""
    return x if torch.isfinite(x.detach().sum()) else torch.where(torch.isfinite(x), x, 0.0)
