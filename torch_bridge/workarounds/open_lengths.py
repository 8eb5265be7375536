"""Axes that stay open while torch exports, whatever the example has there. Seen on torch 2.13."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_impls
from torch.fx.experimental import symbolic_shapes

_CONVOLUTION = torch.ops.aten.convolution.default


@contextmanager
def open_lengths() -> Iterator[None]:
    """Let a length that is 1 in the example be open as any other, and convolutions ask for none.

    Of an image whose channels lie last in memory, torch asks which kernel would convolve it, and that asks whether the
    batch is 1: the program then takes no more than 2 images, or no single one.
    """
    table: dict[Any, Any] = getattr(fake_impls, "op_implementations_dict", {})
    convolve = table.get(_CONVOLUTION)

    def without_hints(*args: Any, **options: Any) -> Any:
        with patch.object(symbolic_shapes, "has_guarding_hint", lambda size: not isinstance(size, torch.SymInt)):
            assert convolve is not None
            return convolve(*args, **options)

    replaced = {_CONVOLUTION: without_hints} if convolve and hasattr(symbolic_shapes, "has_guarding_hint") else {}
    oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with patch.dict(table, replaced), oblivious:
        yield
