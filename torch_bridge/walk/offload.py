"""Keeping what suspended forwards hold within a bound: beyond it, their tensors go to temporary files and come back."""

import ctypes
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torch_bridge.walk.paused_forward import Suspended

# glibc keeps what a thread has freed for that thread, and each forward has one of its own
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


class Spill:
    """The tensors that forwards have made and hold where they stand, in memory or in files.

    Forwards are resumed in turns, so the one that stood last is needed last: it is the one whose tensors go.
    """

    def __init__(self, max_memory: int) -> None:
        """Allow so many bytes for all forwards that stand."""
        self._max_memory = max_memory
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._made: dict[Suspended, _Made] = {}
        self._resident: dict[Suspended, int] = {}
        self._files: dict[Suspended, tuple[Path, list[tuple[torch.UntypedStorage, int]]]] = {}
        self._away: dict[int, Suspended] = {}  # address of a storage -> whose file it is in
        self._shared: dict[int, torch.UntypedStorage] = {}
        self._count = 0

    def tracking(self, forward: Suspended) -> TorchDispatchMode:
        """What a forward enters, so that the tensors that it makes are known."""
        self._made[forward] = _Made(self)
        return self._made[forward]

    def stands(self, forward: Suspended, kept: Iterable[Tensor]) -> None:
        """A forward stands again: if memory does not suffice, write its tensors to a file, but for those to keep."""
        if forward.finished:
            self._made.pop(forward, None)
            return
        keep = {x.untyped_storage()._cdata for x in kept} | self._shared.keys()
        storages = [s for s in self._made[forward].storages() if s._cdata not in keep and s.resizable()]
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
            self._away[storage._cdata] = forward
        del storages
        if _TRIM is not None:
            _TRIM(0)

    def bring_back(self, forward: Suspended) -> None:
        """Have all tensors of a forward in memory."""
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
                del self._away[storage._cdata]
        path.unlink()

    def needed(self, storage: torch.UntypedStorage) -> None:
        """A forward reads what another one made: it stays in memory from now on."""
        owner = self._away.get(storage._cdata)
        if owner is not None:
            self._shared[storage._cdata] = storage
            self.bring_back(owner)

    @property
    def any_away(self) -> bool:
        """Whether any tensor is in a file."""
        return bool(self._away)

    def close(self) -> None:
        """Remove the files."""
        self._files.clear()
        self._away.clear()
        if self._folder is not None:
            self._folder.cleanup()


def _on_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    # not by NumPy, which would make the storage one that cannot be resized
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the tensors that a forward has made and that are still alive."""

    def __init__(self, spill: Spill) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spill = spill
        self._made: dict[int, StorageWeakRef] = {}  # while a weak reference stands, its address is not used again
        self._pruned_at = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [x.untyped_storage() for x in (*_tensors(args), *_tensors((kwargs or {}).values()))]
        if self._spill.any_away:
            for storage in given:
                self._spill.needed(storage)
        result = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in given}
        for x in _tensors([result]):
            storage = x.untyped_storage()
            if storage._cdata not in known:
                self._made[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if len(self._made) > 2 * self._pruned_at + 256:
            self._prune()
        return result

    def storages(self) -> list[torch.UntypedStorage]:
        self._prune()
        found = (torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in self._made)
        return [storage for storage in found if storage is not None]

    def _prune(self) -> None:
        self._made = {cdata: held for cdata, held in self._made.items() if not held.expired()}  # type: ignore[no-untyped-call]
        self._pruned_at = len(self._made)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
