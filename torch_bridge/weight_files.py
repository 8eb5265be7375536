"""The files that a model's weights lie in, so that it may be larger than memory, and those of changed weights."""

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from qsdk.core.errors import ModelError
from torch_bridge.workarounds.mapped_pages import limit_pages, mapped_ranges


class WeightFiles:
    """The files of a model whose weights are read from disk when they are needed.

    torch maps the files of a checkpoint into memory: a parameter is a view of its file, and the system reads a page
    when it is touched. Weights that a verb changes go to files of their own, without a name, so that they too need no
    memory and are gone with the process. `resident` bytes of the folder may be in memory at a time; changed weights go
    to `scratch`, or to the system's temporary folder.
    """

    def __init__(self, folder: Path, *, resident: int, scratch: Path | None = None) -> None:
        self._scratch = os.path.realpath(scratch if scratch is not None else tempfile.gettempdir())
        # the files that the hub downloads are links to another folder, under whose name the system maps them
        files = {os.path.dirname(os.path.realpath(file)) for file in folder.glob("*.safetensors")}
        self._folders = (*sorted({os.path.realpath(folder), *files}), self._scratch)
        limit_pages(self, self._folders, resident)

    def __deepcopy__(self, memo: object) -> "WeightFiles":
        return self  # copied weights are in memory; these files serve what is written in either sim

    def hold(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a view of a file, of the checkpoint or of changed weights."""
        if tensor.device.type != "cpu" or tensor.is_meta or not tensor.numel():
            return False
        at = tensor.data_ptr()
        return any(first <= at < last for first, last in mapped_ranges(self._folders))

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor of this shape and dtype in a file of its own, filled with zeros."""
        size = tensor.numel() * tensor.element_size()
        try:
            with tempfile.TemporaryFile(dir=self._scratch) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would end the process later
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ModelError(
                f"no room for {size:,} bytes of changed weights in {self._scratch}: {error.strerror}; point TMPDIR to "
                "a folder with room for the weights"
            ) from error
        return torch.frombuffer(mapped, dtype=tensor.dtype).reshape(tensor.shape)
