"""Weights of int8 that the 8-bit kernels of every processor multiply exactly with uint8 activations: `int8_exact`.

x86 without VNNI adds two neighbouring products in 16 bits, saturating (vpmaddubsw): 255 times two codes of one sign is
exact while they add up to at most 128. A scale that leaves room for it is at most twice that of int8 and hardly ever
more than 1.4 times, where 7 bits always take twice. ONNX Runtime's kernels (MLAS) have neighbours along the
input channels, and those of a convolution within each position of its kernel: found by running every pair of weights
on an emulated Haswell (onnxruntime 1.32, matrix products and convolutions, grouped ones too).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics.encoding import Encoding, FloatArray

LARGEST_SUM = 128


def largest_sums(values: npt.NDArray[Any], axis: int | None) -> npt.NDArray[Any]:
    """Return the largest magnitude of two neighbours of one sign in each channel of weights or codes.

    Without an axis of output channels, whichever may have them counts, and the result has shape (1,).
    """
    if axis is None:
        return np.asarray([max(largest_sums(values, at).max() for at in _axes(values))])
    pairs = _in_pairs(values, axis)
    above, below = (np.maximum(sign * pairs, 0).sum(-1).max(-1, initial=0) for sign in (1, -1))
    return np.asarray(np.maximum(above, below))


def least_scale(values: npt.ArrayLike, axis: int | None) -> FloatArray:
    """Return the least scales that keep sums of neighbours exact, whichever way each weight is rounded."""
    sums = largest_sums(np.asarray(values, np.float32), axis) / np.float32(LARGEST_SUM - 1)
    return np.asarray(sums, np.float32)


def with_exact_sums(encoding: Encoding, values: npt.ArrayLike) -> Encoding:
    """Return the encoding of a weight, with larger scales where sums of neighbours would not be exact otherwise."""
    if not encoding.dtype.exact_sums:
        return encoding
    return replace(encoding, scale=np.maximum(encoding.scale, least_scale(values, encoding.axis)))


def on_exact_sums(encoding: Encoding, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return weights whose codes add up to no more than is exact; those that do already stay as they are."""
    codes = encoding.quantize(values)
    exact = made_exact(codes, encoding.axis)
    return np.where(exact == codes, values, encoding.dequantize(exact)).astype(values.dtype)


def are_exact(codes: npt.NDArray[Any], axis: int | None) -> bool:
    """Return whether no sum of two products of codes and uint8 activations saturates."""
    return bool((largest_sums(codes.astype(np.int32), axis) <= LARGEST_SUM).all())


def made_exact(codes: npt.NDArray[Any], axis: int | None) -> npt.NDArray[Any]:
    """Return codes in which neighbours that add up to too much are both smaller, by the same steps."""
    result = codes.astype(np.int32)
    for at in _axes(codes) if axis is None else (axis,):
        pairs = _in_pairs(result, at)
        one_sign = (np.sign(pairs) == np.sign(pairs[..., :1])).all(-1)
        excess = np.where(one_sign, np.abs(pairs.sum(-1)) - LARGEST_SUM, 0).clip(0)
        rows = pairs - np.sign(pairs) * np.stack([(excess + 1) // 2, excess // 2], axis=-1)
        channels = _channels(result, at)
        channels[...] = rows.reshape(len(rows), -1)[:, : channels[0].size].reshape(channels.shape)
    return result.astype(codes.dtype)


def _axes(values: npt.NDArray[Any]) -> tuple[int, ...]:
    return (0, values.ndim - 1) if values.ndim > 1 else (0,)


def _channels(values: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    """Return a view of weights with the output channels first; of a kernel [out, in, ...], the input channels last."""
    return np.moveaxis(values, 1, -1) if values.ndim > 2 and axis % values.ndim == 0 else np.moveaxis(values, axis, 0)


def _in_pairs(values: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    """Return the values of each channel as the kernels add them, [channels, pairs, 2]."""
    channels = _channels(values, axis)
    rows = channels.reshape(len(channels), -1)
    return np.pad(rows, ((0, 0), (0, rows.shape[1] % 2))).reshape(len(rows), -1, 2)
