"""The quantizer: the object that fake-quantizes the tensor at one site, with scales that may be learned.

A learned scale is the calibrated one times 2**p, so it stays positive; p starts at 0. A scale of few digits is rounded
to them, and a power of two is thus learned as its exponent (Jain et al. 2020, TQT, section 3.2). A zero point is the
calibrated one plus p ranges, rounded within the grid, so that the range keeps containing 0. The gradients pass through
both roundings. Checkpoints with learned values load into trained and untrained sims alike.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsdk.core.errors import CalibrationError
from qsdk.core.layers.layer_problem import WeightLayout
from qsdk.core.numerics import affine
from qsdk.core.numerics.block_scales import EXPONENT_BITS, last_place
from qsdk.core.numerics.dtypes import BlockFormat, DType, float8e4m3fn, float8e8m0, int8
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec, axis_of, block_size_of
from qsdk.core.numerics.sum_limits import SumLimit
from qsdk.core.planning.plan import WHOLE, Decision
from torch_bridge.quantizers.fake_quant import (
    CompiledKernels,
    FakeQuantGrid,
    cast,
    cast_straight_through,
    clip,
    fake_quantize,
    fake_quantize_bias,
    fake_quantize_minifloat,
    in_place_of,
    runs_per_tensor,
)
from torch_bridge.torch_values.sharding import full_tensor_of

_LOG2_FACTORS = (-20.0, 20.0)


def learned_scale(base: Tensor, log2: Tensor, spec: Spec) -> Tensor:
    """Return `base * 2**log2`, rounded to the number of significant binary digits of the spec's scales."""
    digits = spec.scale_bits if spec.scale_dtype is None else 1
    if torch.is_grad_enabled() and log2.requires_grad:
        return _RoundedPowerOfTwo.apply(base, log2, digits)  # type: ignore[no-any-return, no-untyped-call]
    return _rounded_power_of_two(base, log2, digits)


def learned_zero_point(base: Tensor, shift: Tensor, lo: float, hi: float) -> Tensor:
    """Return the integer of the grid that is nearest to `base + shift * (hi - lo)`."""
    moved = clip(base + shift * (hi - lo), lo, hi)  # one at an end of the grid, as behind a ReLU, is learned too
    result: Tensor = _RoundStraightThrough.apply(moved)  # type: ignore[no-untyped-call]
    return result


class _RoundStraightThrough(torch.autograd.Function):
    """Straight-through rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _RoundedPowerOfTwo(torch.autograd.Function):
    """A power of two times a number, rounded to significant binary digits; as one operation it costs half as much."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, log2: Tensor, digits: int | None) -> Tensor:
        scale = _rounded_power_of_two(base, log2, digits)
        ctx.save_for_backward(log2, scale)
        return scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log2, scale = ctx.saved_tensors
        low, high = _LOG2_FACTORS
        inside = torch.ops.aten.hardtanh_backward(grads[0], log2, low, high)
        return None, inside.mul_(scale).mul_(math.log(2)), None


def _rounded_power_of_two(base: Tensor, log2: Tensor, digits: int | None) -> Tensor:
    # the clamp keeps scales, and their product for a bias, positive and finite whatever the optimizer does
    scale = base * torch.exp2(log2.detach().clamp(*_LOG2_FACTORS))
    if digits is None:
        return scale
    mantissa, exponent = torch.frexp(scale)
    places = (exponent - last_place(digits)).clamp(0, digits)
    return torch.ldexp(torch.ldexp(mantissa, places).round().clamp_(min=1), exponent - places)


_PIECE = 1 << 22  # elements of bfloat16 or float16 that are there in float32 at a time


class Quantizer:
    """The object that fake-quantizes the tensor at one site.

    Its scale and zero point are buffers of the module that owns the site (so that state_dict, `.to()` and parallel
    wrappers carry them). A tied quantizer reads those of another one, and a bias multiplies the scales of input and
    weight.

    Attributes:
        decision: the plan's decision on this site, which is not float32.
        spec: the decision's.
        owner: the module that holds the buffers.
        model: the whole model.
        tied_to: the quantizer whose encoding this one shares, or None.
        factors: for a bias, the quantizers of its input and its weight.
        frozen: whether calibration, training and searches leave it as it is.
        clipped_only: whether its gradients come from clipped elements alone (`FakeQuantGrid.clipped_only`).
        kernels: compiled kernels to use while it is trained (`FakeQuantGrid.kernels`).
        keeps_result: whether nothing writes over its result (`FakeQuantGrid.keeps_result`).
        copies_input: whether the backward pass needs a copy of what it gets, because that is written over later.
        gives_float32: whether what it makes of bfloat16 and float16 is float32, as the model is run then.
        limit: of the sums of a weight's codes, with its layout, while it is trained; None for none.
    """

    def __init__(self, decision: Decision, owner: nn.Module, prefix: str, model: nn.Module) -> None:
        assert decision.spec is not None
        self.decision, self.spec = decision, decision.spec
        self.owner, self.model = owner, model
        self.tied_to: Quantizer | None = None
        self.factors: tuple[Quantizer, Quantizer] | None = None
        self.frozen = self.clipped_only = self.keeps_result = self.copies_input = self.gives_float32 = False
        self.kernels: CompiledKernels | None = None
        self.limit: tuple[WeightLayout, SumLimit] | None = None
        shape = None if decision.kind in ("weight", "bias") else decision.shape
        # taken from the example's shape, because not every activation has the batch in front
        self._features = None if shape is None else math.prod([n for n in shape[1:] if isinstance(n, int)])
        self._scale_name, self._zero_name = f"{prefix}_scale", f"{prefix}_zero_point"
        if self.owns_encoding:
            owner.register_buffer(self._scale_name, None)
            owner.register_buffer(self._zero_name, None)

    @property
    def site(self) -> str:
        """Return the site's name."""
        return self.decision.site

    @property
    def owns_encoding(self) -> bool:
        """Return whether scale and zero point are this quantizer's own (not tied, derived or a float cast)."""
        return self.decision.quantized and self.decision.tied_to is None and self.decision.bias_of is None

    @property
    def scales_are_free(self) -> bool:
        """Return whether any positive float32 can be its scale: none of a narrow dtype, none with few digits."""
        return self.spec.scales_are_free

    @property
    def scales_are_fine(self) -> bool:
        """Return whether its scales can be learned in small steps."""
        return self.spec.scales_are_fine

    @property
    def can_learn_scale(self) -> bool:
        """Return whether training may change its scales, and each on its own."""
        own = self.spec.scale_dtype in (None, float8e8m0)  # not a small number times one factor per channel or tensor
        return self.owns_encoding and not self.frozen and own and not self.spec.dynamic

    @property
    def can_learn_zero_point(self) -> bool:
        """Return whether training may change its zero points."""
        return self.owns_encoding and not self.frozen and not self.spec.symmetric and not self.spec.dynamic

    @property
    def buffer_names(self) -> tuple[str, str]:
        """Return the names of the owner's buffers for scale and zero point."""
        return self._scale_name, self._zero_name

    @property
    def log_scale_name(self) -> str:
        """Return the name of the owner's parameter for a learned scale: log2 of the factor on the scale."""
        return f"{self._scale_name}_log2"

    @property
    def shift_name(self) -> str:
        """Return the name of the owner's parameter for a learned zero point: its shift, in ranges."""
        return f"{self._zero_name}_shift"

    @property
    def learned_names(self) -> tuple[str, ...]:
        """Return the names of the owner's parameters that are learned for this site now."""
        return tuple(name for name in (self.log_scale_name, self.shift_name) if name in self.owner._parameters)

    @property
    def calibrated(self) -> bool:
        """Return whether there is an encoding to quantize with."""
        if not self.decision.quantized:
            return True
        if self.factors is not None:
            return all(factor.calibrated for factor in self.factors)
        if self.tied_to is not None:
            return self.tied_to.calibrated
        return self.owner._buffers[self._scale_name] is not None

    def scale_and_zero_point(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point as float tensors of the encoding's shape."""
        if self.tied_to is not None:
            return self.tied_to.scale_and_zero_point()
        if self.factors is not None:
            with torch.no_grad():  # no gradient of a bias reaches a scale
                scale = self.factors[0].scale_and_zero_point()[0] * self.factors[1].scale_and_zero_point()[0]
                return scale, torch.zeros_like(scale)
        scale_or_none, zero_point = (self.owner._buffers[name] for name in self.buffer_names)
        if scale_or_none is None or zero_point is None:
            raise CalibrationError(f"the site {self.site} has no encoding yet; call qsdk.calibrate(sim, batches) first")
        spec, stored = self.spec, self.owner._parameters
        if (factor := stored.get(self.log_scale_name)) is not None:
            scale_or_none = learned_scale(scale_or_none, full_tensor_of(factor), spec)
        if (shift := stored.get(self.shift_name)) is not None:
            zero_point = learned_zero_point(zero_point, full_tensor_of(shift), spec.dtype.lo, spec.dtype.hi)
        return scale_or_none, zero_point

    def __call__(self, x: Tensor) -> Tensor:
        """Return x on the site's grid."""
        spec = self.spec
        if self.decision.passes_through:
            return x
        if self.copies_input and torch.is_grad_enabled():
            x = x.clone()
        if not spec.dtype.is_quantized:
            return cast_straight_through(x, spec.dtype)
        in_blocks = self._in_blocks(x)
        if x.dtype != torch.float32:
            # as in the file, where QuantizeLinear and DequantizeLinear compute in float32 whatever they are given
            result = self._by_rows(x) if in_blocks is None else in_blocks
            return result if self.gives_float32 else result.to(x.dtype)
        if in_blocks is not None:
            return in_blocks
        if spec.dynamic:
            return self._with_own_ranges(x)
        scale, zero_point = self.scale_and_zero_point()
        if spec.dtype.kind == "minifloat":
            return fake_quantize_minifloat(x, self._align(scale, x), spec.dtype)
        dtype = spec.dtype
        if self.limit is not None:
            layout, limit = self.limit
            matrix, scales = (layout.to_matrix(t.detach()) for t in (x, self._align(scale, x).expand_as(x)))
            x = in_place_of(x, layout.from_matrix(limit.within(matrix, scales, dtype.lo, dtype.hi)))
        if self.factors is not None:
            return fake_quantize_bias(x, self._align(scale, x), dtype.lo, dtype.hi)
        grid = self._grid(self._elements(x) / scale.numel(), dtype)
        if runs_per_tensor(x, scale):
            return fake_quantize(x, scale.to(x.dtype), zero_point.to(x.dtype), grid)
        return fake_quantize(x, self._align(scale, x), self._align(zero_point, x), grid)

    def _by_rows(self, x: Tensor) -> Tensor:
        """Return narrow x on its grid, float32: a large table on one grid a few rows at a time."""
        spec = self.spec
        apart = spec.dtype.is_integer and not spec.dynamic and self.factors is None and self.limit is None
        if x.numel() <= _PIECE or torch.is_grad_enabled() or not apart or self.scale_and_zero_point()[0].numel() > 1:
            return self(x.float())
        result, rows = torch.empty_like(x, dtype=torch.float32), max(_PIECE * len(x) // x.numel(), 1)
        for first in range(0, len(x), rows):
            result[first : first + rows] = self(x[first : first + rows].float())
        return result

    def _in_blocks(self, x: Tensor) -> Tensor | None:
        """Return x of any float type on the grids of whole blocks, float32; None where those are others' to compute.

        The numbers of a block get an axis of their own, so that its scale is not repeated. A weight in bfloat16 is read
        as it is, a few rows at a time: in float32 it would be twice as large, and there once more.
        """
        spec = self.spec
        axis, size = axis_of(spec.granularity), block_size_of(spec.granularity)
        others = spec.dynamic or not spec.dtype.is_integer or self.factors is not None or self.limit is not None
        if axis is None or size is None or others or not x.numel() or x.shape[axis] % size or x.dtype == torch.float64:
            return None
        scale, zero_point = self.scale_and_zero_point()
        if scale.numel() == 1 or (torch.is_grad_enabled() and any(t.requires_grad for t in (x, scale, zero_point))):
            return None
        axis %= x.ndim
        of_block, zero = (t.unsqueeze(axis + 1) for t in (scale, zero_point))
        apart = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        grid = self._grid(self._elements(x) / scale.numel(), spec.dtype)
        return fake_quantize(apart, of_block, zero, grid).flatten(axis, axis + 1)

    def _with_own_ranges(self, x: Tensor) -> Tensor:
        """Return x on grids whose ranges are found now."""
        if self.spec.blocks is not None:
            peak = self.scale_and_zero_point()[0] * self.spec.dtype.hi if self.decision.quantized else None
            return fake_quantize_dynamic_blocks(x, self.spec.blocks, peak)
        return _fake_quantize_tokens(x, self.spec.dtype) if self.spec.dynamic == "token" else _fake_quantize_dynamic(x)

    def quantize_relu(self, x: Tensor, ceiling: float) -> Tensor | None:
        """Return `x.clamp(0, ceiling)` on the site's grid, computed by one operation; None where that takes two.

        It is used only while gradients are computed, where it saves the backward pass of the ReLU as well.
        """
        spec = self.spec
        if spec.dynamic or not spec.dtype.is_integer or self.decision.passes_through:
            return None
        if x.dtype != torch.float32 or not x.requires_grad:
            return None
        if x._is_view():
            return None  # a view may be written over by another name, and the backward pass reads x
        scale, zero_point = self.scale_and_zero_point()
        if not torch.is_grad_enabled() or not runs_per_tensor(x, scale) or zero_point.requires_grad:
            return None  # the zero point's gradient would mix the grid's clipping with the ReLU's
        grid = self._grid(self._elements(x), spec.dtype)._replace(fuses_relu=True, ceiling=ceiling)
        return fake_quantize(x, scale.to(x.dtype), zero_point.to(x.dtype), grid)

    def _elements(self, x: Tensor) -> int:
        """Return the elements of a weight, or of one example of an activation: parts of a batch add up to the whole."""
        return x.numel() if self._features is None else self._features

    def _grid(self, elements_per_scale: float, dtype: DType) -> FakeQuantGrid:
        gain = 1.0 / max(elements_per_scale * dtype.hi, 1.0) ** 0.5
        return FakeQuantGrid(dtype.lo, dtype.hi, gain, self.clipped_only, self.keeps_result, kernels=self.kernels)

    def encoding(self) -> Encoding:
        """Return the encoding of this site (the shared or derived one where it has none of its own)."""
        scale, zero_point = (t.detach().cpu().numpy() for t in self.scale_and_zero_point())
        granularity = self.spec.granularity
        return Encoding(
            self.spec.dtype,
            scale.astype(np.float32),
            zero_point.astype(np.int32),
            axis_of(granularity),
            block_size_of(granularity),
            self.is_frozen,
        )

    @property
    def is_frozen(self) -> bool:
        """Return whether the encoding is frozen: its own, the shared one, or both from which a bias derives."""
        if self.factors is not None:
            return all(factor.is_frozen for factor in self.factors)
        return self.frozen if self.tied_to is None else self.tied_to.is_frozen

    def replace_encoding(self, encoding: Encoding | None) -> None:
        """Set the encoding and whether it is frozen; None makes the quantizer uncalibrated."""
        self.frozen = encoding is not None and encoding.frozen
        if encoding is None:
            self.owner._buffers.update(dict.fromkeys(self.buffer_names))
        elif not self.calibrated or self.encoding() != encoding:
            self.set_encoding(encoding)

    def set_encoding(self, encoding: Encoding) -> None:
        """Write an encoding into the owner's buffers, on the device of the owner or else of the model."""
        assert self.owns_encoding, self.site
        tensors = (t for module in (self.owner, self.model) for t in (*module.parameters(), *module.buffers()))
        place = next(tensors, torch.empty(0)).device
        for name, value in zip(self.buffer_names, (encoding.scale, encoding.zero_point), strict=True):
            self.owner._buffers[name] = torch.from_numpy(value.astype(np.float32)).to(place)

    def shape_error(self, parameter: Tensor) -> str | None:
        """Return why a scale or zero point does not fit this site, or None."""
        granularity = self.spec.granularity
        shape = tuple(n for n in self.decision.shape or () if isinstance(n, int))
        try:
            affine.align(parameter, shape, axis_of(granularity), block_size_of(granularity))
        except ValueError as error:
            return str(error)
        return None

    def _align(self, parameter: Tensor, x: Tensor) -> Tensor:
        granularity = self.spec.granularity
        shaped: Tensor = affine.align(parameter, tuple(x.shape), axis_of(granularity), block_size_of(granularity))
        return shaped.to(x.dtype)


def _fake_quantize_tokens(x: Tensor, dtype: DType) -> Tensor:
    """Fake-quantize each row along the last axis with its own range."""
    if x.numel() == 0 or x.ndim == 0:
        return x
    scale = affine.token_scale(x.detach().abs().amax(-1, keepdim=True), dtype.hi)
    return fake_quantize(x, scale, torch.zeros_like(scale), FakeQuantGrid(dtype.lo, dtype.hi))


def fake_quantize_blocks(x: Tensor, block: int) -> Tensor:
    """Fake-quantize each run of `block` elements along the last axis to int8 with its own range; see `WHOLE`."""
    if block == WHOLE:
        return _fake_quantize_dynamic(x)
    if x.dtype != torch.float32:
        return fake_quantize_blocks(x.float(), block).to(x.dtype)
    return _in_blocks(x, block, int8, affine.block_scale)


def fake_quantize_dynamic_blocks(x: Tensor, form: BlockFormat, peak: Tensor | None) -> Tensor:
    """Fake-quantize each block along the last axis with the scale that a format finds for it.

    `peak` is the largest absolute value that NVFP4's scales are made for, of one element; None for the other formats.
    """
    if peak is None:
        return _in_blocks(x, form.block_size, form.dtype, lambda top: _power_of_two_scale(top, form.dtype))
    divisor = affine.float8_divisor(peak.detach())

    def scale_of(top: Tensor) -> Tensor:
        scale: Tensor = affine.float8_codes(top / form.dtype.hi, divisor, lambda x: cast(x, float8e4m3fn)) / divisor
        return scale

    return _in_blocks(x, form.block_size, form.dtype, scale_of)


def _power_of_two_scale(peak: Tensor, dtype: DType) -> Tensor:
    scale: Tensor = affine.power_of_two_scale(peak, dtype, _floor_power)
    return scale


def _floor_power(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & EXPONENT_BITS).view(torch.float32)


def _in_blocks(x: Tensor, block: int, dtype: DType, scale_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Fake-quantize each block along the last axis with the scale of its largest absolute value; the last is filled.

    The gradient passes straight through, for the largest of a block too: its scale is rounded, and follows it.
    """
    if x.numel() == 0 or x.ndim == 0:
        return x
    channels, plain = x.shape[-1], x.detach()
    whole = functional.pad(plain, (0, -channels % block)) if channels % block else plain
    blocks = whole.reshape(*whole.shape[:-1], -1, block)
    scale = scale_of(blocks.abs().amax(-1, keepdim=True))
    if dtype.is_integer:
        rounded = fake_quantize(blocks, scale, torch.zeros_like(scale), FakeQuantGrid(dtype.lo, dtype.hi))
    else:
        rounded = fake_quantize_minifloat(blocks, scale, dtype)
    return in_place_of(x, rounded.flatten(-2)[..., :channels])


def _fake_quantize_dynamic(x: Tensor) -> Tensor:
    """Fake-quantize a tensor with its own range."""
    if x.numel() == 0:
        return x
    low, high = x.detach().aminmax()
    return fake_quantize(x, *affine.dynamic_parameters(low, high), FakeQuantGrid(0, 255))


def adapt_learned_state(quantizer: Quantizer, state_dict: dict[str, Any], prefix: str) -> None:
    """Adapt a checkpoint to the keys that a module has for a site.

    Where nothing is learned now, learned values are merged into the encoding; where something is, a checkpoint without
    learned values gets zeros.
    """
    if not quantizer.owns_encoding:
        return
    spec = quantizer.spec
    scale, zero_point = (prefix + name for name in quantizer.buffer_names)
    log2, shift = prefix + quantizer.log_scale_name, prefix + quantizer.shift_name
    now = [prefix + name for name in quantizer.learned_names]
    with torch.no_grad():
        if log2 in state_dict and log2 not in now and scale in state_dict:
            state_dict[scale] = learned_scale(state_dict[scale], state_dict.pop(log2), spec)
        if shift in state_dict and shift not in now and zero_point in state_dict:
            lo, hi = spec.dtype.lo, spec.dtype.hi
            state_dict[zero_point] = learned_zero_point(state_dict[zero_point], state_dict.pop(shift), lo, hi)
    for key, base in ((log2, scale), (shift, zero_point)):
        if key in now and key not in state_dict and isinstance(state_dict.get(base), Tensor):
            state_dict[key] = torch.zeros_like(state_dict[base])


@contextmanager
def keeping_float32(owner: nn.Module, quantizers: Iterable[Quantizer]) -> Iterator[None]:
    """Keep the dtype and the digits of a module's encodings and learned values inside the block.

    The block may move them to another device. Learned values keep their gradients too, so that an optimizer goes on
    with them.
    """
    names = [name for quantizer in quantizers for name in (*quantizer.buffer_names, *quantizer.learned_names)]
    before = {}
    for name in names:
        tensor = owner._buffers.get(name, owner._parameters.get(name))
        if tensor is not None:
            before[name] = tensor.detach(), None if tensor.grad is None else tensor.grad.detach()
    yield
    for name, (value, gradient) in before.items():
        moved = owner._buffers.get(name, owner._parameters.get(name))
        assert moved is not None
        if moved.dtype != value.dtype:
            moved.grad = None  # torch checks a gradient against the dtype that its tensor has
            moved.data = value.to(moved.device)
            moved.grad = None if gradient is None else gradient.to(moved.device)


def prepare_buffers(
    module: nn.Module, quantizer: Quantizer, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> None:
    """Make buffers for the encodings of a state_dict; half an encoding, or one that does not fit, is an error."""
    if not quantizer.owns_encoding:
        return
    present = [name for name in quantizer.buffer_names if prefix + name in state_dict]
    if len(present) == 1:
        absent = next(name for name in quantizer.buffer_names if name not in present)
        error_msgs.append(f"the encoding of {quantizer.site} is uninitialised: {prefix}{absent} is missing")
        state_dict.pop(prefix + present[0])
        return
    misfit = next((m for name in present if (m := quantizer.shape_error(state_dict[prefix + name]))), None)
    if misfit is not None:
        error_msgs.append(f"the encoding of {quantizer.site} does not fit: {misfit}")
        for name in present:
            state_dict.pop(prefix + name)
        return
    for name in present:
        module._buffers[name] = torch.empty_like(state_dict[prefix + name], dtype=torch.float32)
