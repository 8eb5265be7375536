"""Memory limit for paused forwards: beyond it, their tensors are written to temporary files and read back."""

import ctypes
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from qsdk.core.freed_memory import give_back
from torch_bridge.walk.paused_forward import PausedForward


class Offloader:
    """The tensors that paused forwards have made and still hold, in memory or in files.

    Forwards are resumed in turns, so the one that paused last is resumed last: its tensors are written first.
    """

    def __init__(self, max_memory: int) -> None:
        """Set the bytes that all paused forwards together may hold in memory."""
        self._max_memory = max_memory
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._trackers: dict[PausedForward, _TensorTracker] = {}
        self._resident: dict[PausedForward, int] = {}
        self._files: dict[PausedForward, tuple[Path, list[tuple[torch.UntypedStorage, int]]]] = {}
        self._offloaded: dict[int, PausedForward] = {}  # address of a storage -> whose file it is in
        self._shared: dict[int, torch.UntypedStorage] = {}
        self._count = 0

    def tracker_for(self, forward: PausedForward) -> TorchDispatchMode:
        """Return the mode that a forward enters, so that the tensors that it makes are known."""
        self._trackers[forward] = _TensorTracker(self)
        return self._trackers[forward]

    def after_pause(self, forward: PausedForward, kept: Iterable[Tensor]) -> None:
        """Write the tensors of a paused forward to a file, except `kept`, if memory does not suffice."""
        if forward.finished:
            self._trackers.pop(forward, None)
            return
        keep = {x.untyped_storage()._cdata for x in kept} | self._shared.keys()
        storages = [s for s in self._trackers[forward].storages() if s._cdata not in keep and s.resizable()]
        live = sum(storage.nbytes() for storage in storages)
        if live + sum(self._resident.values()) <= self._max_memory:
            self._resident[forward] = live
            return
        self._count += 1
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="qsdk-walk-", ignore_cleanup_errors=True)
        path = Path(self._folder.name, str(self._count))
        with path.open("wb") as file:
            for storage in storages:
                file.write(_bytes_of(_on_cpu(storage)))
        self._files[forward] = path, [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
            self._offloaded[storage._cdata] = forward
        del storages
        give_back()

    def load(self, forward: PausedForward) -> None:
        """Read all tensors of a forward back into memory."""
        self._resident.pop(forward, None)
        path, storages = self._files.pop(forward, (None, []))
        if path is None:
            return
        with path.open("rb") as file:
            for storage, size in storages:
                storage.resize_(size)
                there = _on_cpu(storage)
                file.readinto(_bytes_of(there))
                if there is not storage:
                    storage.copy_(there)
                del self._offloaded[storage._cdata]
        path.unlink()

    def before_read(self, storage: torch.UntypedStorage) -> None:
        """Load a tensor of another forward before it is read; it stays in memory from now on."""
        owner = self._offloaded.get(storage._cdata)
        if owner is not None:
            self._shared[storage._cdata] = storage
            self.load(owner)

    @property
    def has_offloaded(self) -> bool:
        """Return whether any tensor is in a file."""
        return bool(self._offloaded)

    def close(self) -> None:
        """Remove the files."""
        self._files.clear()
        self._offloaded.clear()
        if self._folder is not None:
            self._folder.cleanup()


def _on_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    # not by NumPy, which would make the storage one that cannot be resized
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


class _TensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode that knows the tensors which a forward has made and which are still alive."""

    def __init__(self, offloader: Offloader) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._offloader = offloader
        self._storages: dict[int, StorageWeakRef] = {}  # while a weak reference exists, its address is not used again
        self._pruned_at = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [x.untyped_storage() for x in (*_tensors(args), *_tensors((kwargs or {}).values()))]
        if self._offloader.has_offloaded:
            for storage in given:
                self._offloader.before_read(storage)
        result = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in given}
        for x in _tensors([result]):
            storage = x.untyped_storage()
            if storage._cdata not in known:
                self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if len(self._storages) > 2 * self._pruned_at + 256:
            self._prune()
        return result

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the storages that are still alive."""
        self._prune()
        storages = (torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in self._storages)
        return [storage for storage in storages if storage is not None]

    def _prune(self) -> None:
        self._storages = {cdata: held for cdata, held in self._storages.items() if not held.expired()}  # type: ignore[no-untyped-call]
        self._pruned_at = len(self._storages)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
