"""Sessions whose kernels for uint8 x int8 are exact on every processor."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import onnxruntime as ort

from onnx_backend.integer.exact_products import products_saturate
from onnx_backend.runtime import user_session

FUSION = "QDQSelectorActionTransformer"


@contextmanager
def exact_sessions() -> Iterator[None]:
    """Open every session without the step that puts those kernels in place of Q/DQ, where they saturate.

    A test compares what this project writes with what a runtime makes of it; what a processor cannot add up is not in
    it. (The runtime's own switch for this, session.x64quantprecision, refuses weights without a zero point.)
    """
    original = ort.InferenceSession.__init__

    def exact(self: ort.InferenceSession, *arguments: Any, **options: Any) -> None:
        options["disabled_optimizers"] = {*(options.get("disabled_optimizers") or ()), FUSION}
        original(self, *arguments, **options)

    opened = user_session._opened  # in the other process
    if products_saturate():
        ort.InferenceSession.__init__ = exact
        user_session._opened = partial(opened, disabled=[FUSION])
    try:
        yield
    finally:
        ort.InferenceSession.__init__, user_session._opened = original, opened
