"""A check of a model against its trace: writes in place must reach only the names of a tensor that the trace knows."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from torch_bridge.sites.calls import Visitor
from torch_bridge.sites.runtime import Runtime


def require_traceable_writes(runtime: Runtime, run: Callable[[], list[Tensor]], places: Sequence[str]) -> None:
    """Compare a pass whose sites return new tensors, as in a trace, with one whose sites return their input.

    Raises:
        ModelError: a tensor that is written in place is read through a name that the trace does not know.
    """

    def results(visitor: Visitor) -> list[Tensor]:
        with runtime.in_phase("visit", visitor), torch.no_grad():
            return run()

    def same(site: str, x: Tensor) -> Tensor:
        return x

    def another(site: str, x: Tensor) -> Tensor:
        return x if isinstance(x, nn.Parameter) else x.clone()

    want = results(same)
    # two passes of a model that draws random numbers differ anyway
    if _are_close(want, results(another)) or not _are_close(want, results(same)):
        return
    raise ModelError(
        f"a tensor that is written in place ({'; '.join(dict.fromkeys(places))}) is read through another name in a way "
        "that cannot be followed, so an exported file would miss what is written; compute a new tensor there with "
        "torch.cat, torch.where or the op that is not in place"
    )


def _are_close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether results are equal, but for the rounding of other kernels."""
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.is_floating_point():
            size = float(a.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
            error = max(torch.finfo(a.dtype).eps * 64, 1e-5)
            if not torch.allclose(a, b, rtol=error, atol=error * size, equal_nan=True):
                return False
        elif not torch.equal(a, b):
            return False
    return True
