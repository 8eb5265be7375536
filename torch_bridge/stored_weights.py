"""Parameters and buffers of a wrapped model: files they lie in, snapshots, the user's own values, recorded writes."""

import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from torch_bridge.torch_values.layers import relu6_bounds, set_relu6_bounds
from torch_bridge.torch_values.parameters import STEPS, stored_tensor
from torch_bridge.workarounds.mapped_pages import limit_pages, mapped_ranges
from torch_bridge.wrapping.wrapped_state import state_of


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


Key = tuple[str, str]


@torch.no_grad()
def copy_tensors(model: nn.Module) -> dict[Key, Tensor]:
    """Return a copy of every parameter and buffer except encodings: (path of the module, name) -> value.

    BatchNorms that were folded and can come back are included.
    """
    return {key: tensor.detach().clone() for key, tensor in state_tensors(model)}


@torch.no_grad()
def restore_tensors(model: nn.Module, held: Mapping[Key, Tensor]) -> None:
    """Copy values into the same parameters and buffers; parameters that are newer keep theirs."""
    there = dict(state_tensors(model))
    for (path, name), value in held.items():
        now = there.get((path, name))
        if now is None or now.shape != value.shape or now.dtype != value.dtype:
            difference = "is gone" if now is None else f"has the shape {tuple(now.shape)} and type {now.dtype}"
            raise ModelError(
                f"{f'{path}.{name}'.lstrip('.')} {difference}, where the snapshot holds {tuple(value.shape)} of "
                f"{value.dtype}; restore it in the model that it was taken of"
            )
    for key, value in held.items():
        there[key].copy_(value)


def state_tensors(model: nn.Module) -> Iterator[tuple[Key, Tensor]]:
    """Yield each tensor of the state once, also where several modules hold it."""
    seen = set()
    folded = [trainable for trainable in state_of(model).trainable_norms if not trainable.is_active]
    for trainable in folded:
        if trainable.own_bias is not None:
            yield (trainable.fold.layer, "bias before folding"), trainable.own_bias
    for path, module in (
        *model.named_modules(),
        *((f"folded {trainable.fold.norm}", trainable.norm) for trainable in folded),
    ):
        quantizers = state_of(module).quantizers
        own = {name for q in quantizers for name in (*q.buffer_names, *q.learned_names)}
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in own and name != STEPS and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (path, name), tensor


#: float dtype -> digest of a tensor's values in it
Digests = Mapping[torch.dtype, bytes]


@dataclass(frozen=True)
class Before:
    """The values that a tensor had before verbs changed it.

    Attributes:
        given: by the user.
        in_float: in the float model that is simulated now, where a verb has written others for the sake of the grid;
            None where what is stored is the float model's.
    """

    given: Tensor
    in_float: Tensor | None = None


class GivenWeights:
    """The store of a tensor's given value, in host memory, from the moment that a verb writes over it.

    What the user writes over a verb's values (a checkpoint, say) is given by the user too: digests of what the verb
    left distinguish the two, also after `.half()` has rounded it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._bounds = relu6_bounds(model)  # of ReLU6 modules
        self._values: dict[Key, tuple[Before, Digests]] = {}
        self._writing: dict[Key, Before] = {}  # of tensors that are being written

    def contents(self) -> Mapping[Key, tuple[Before, Digests]]:
        """Return the current contents, for `restore_contents`."""
        return dict(self._values)

    def restore_contents(self, known: Mapping[Key, tuple[Before, Digests]]) -> None:
        """Restore contents that belong to the values which the tensors have again."""
        self._values = dict(known)

    def given_values(
        self,
        model: nn.Module,
        tensors: Collection[Tensor] | None = None,
        *,
        rounds: bool,
        replaced: Collection[Tensor] = (),
    ) -> dict[Key, Before]:
        """Return what is known of these tensors (None: of all), to pass to `record_changes` later.

        With `rounds`, that holds their values in the float model too, from which what will be written differs for the
        sake of the grid alone. Values are copies, except of tensors whose data will be `replaced` by others.
        """
        wanted = None if tensors is None else {id(tensor) for tensor in tensors}
        kept = {id(tensor) for tensor in replaced}
        result = {}
        for key, tensor in state_tensors(model):
            if (wanted is None or id(tensor) in wanted) and not tensor.is_meta:
                known = self._before(key, tensor)
                if known is None or (rounds and known.in_float is None):
                    own = tensor.data if id(tensor) in kept else _local(tensor).to("cpu", copy=True)
                    known = Before(own if known is None else known.given, own if rounds else None)
                result[key] = known
        return result

    def record_changes(self, model: nn.Module, before: Mapping[Key, Before], *, rounds: bool) -> bool:
        """Store what `given_values` returned for the tensors that have other values now.

        Without `rounds`, what is stored belongs to the float model from here on, unless none of them has changed.
        Returns whether that is so.
        """
        tensors_by_key = dict(state_tensors(model))
        # a model on the meta device has no values to compare
        current = {
            key: _local(tensors_by_key[key]).cpu() if key in tensors_by_key else known.given
            for key, known in before.items()
            if key not in tensors_by_key or not tensors_by_key[key].is_meta
        }
        moved = not rounds and any(self._is_changed(key, x, before[key].given) for key, x in current.items())
        for key, x in current.items():
            given, in_float = before[key].given, None if moved else before[key].in_float
            as_given = _are_equal(given, x)
            if in_float is not None and (as_given if in_float is given else _are_equal(in_float, x)):
                in_float = None
            if as_given and in_float is None:
                self._values.pop(key, None)
            else:
                self._values[key] = Before(given, in_float), _digests(x)
        return moved

    @contextmanager
    def recording_changes(
        self,
        model: nn.Module,
        tensors: Collection[Tensor] | None = None,
        *,
        rounds: bool,
        replaced: Collection[Tensor] = (),
        moved: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Record what the block writes to these tensors of the model, or to any of them; see `given_values`.

        `moved` is called where the float model is another one behind the block.
        """
        outer, before = self._writing, self.given_values(model, tensors, rounds=rounds, replaced=replaced)
        self._writing = {**outer, **(before if rounds else {key: Before(one.given) for key, one in before.items()})}
        try:
            yield
        finally:
            self._writing = outer
            if self.record_changes(model, before, rounds=rounds) and moved is not None:
                moved()

    def end_recording(self, model: nn.Module) -> None:
        """End the recording in a copy that was made while tensors were written."""
        written, self._writing = self._writing, {}
        self.record_changes(model, written, rounds=True)

    def changed(self, model: nn.Module) -> dict[Key, Before]:
        """Return what is known of the tensors that hold values which verbs have written."""
        tensors_by_key = dict(state_tensors(model))
        known = self._values.keys() | self._writing.keys()
        found = {key: self._before(key, tensors_by_key[key]) for key in known if key in tensors_by_key}
        return {key: before for key, before in found.items() if before is not None}

    def originals(self, model: nn.Module) -> dict[Key, Tensor]:
        """Return the given values of the tensors that have others now."""
        return {key: before.given for key, before in self.changed(model).items()}

    def original_bounds(self, model: nn.Module) -> dict[str, float]:
        """Return path -> own bound of each ReLU6 with another bound now."""
        current = relu6_bounds(model)
        return {path: bound for path, bound in self._bounds.items() if current.get(path, bound) != bound}

    def load(self, model: nn.Module, values: Mapping[Key, Before]) -> None:
        """Store what is known of tensors from elsewhere: a file, or the sim that this one replaces."""
        tensors_by_key = dict(state_tensors(model))
        for key, known in values.items():
            shapes = {known.given.shape, *(() if known.in_float is None else (known.in_float.shape,))}
            if key not in tensors_by_key or shapes != {tensors_by_key[key].shape}:
                raise ModelError(f"{'.'.join(key).lstrip('.')} is no tensor of the model, or of another shape")
        self._values = {key: (known, _digests(_local(tensors_by_key[key]).cpu())) for key, known in values.items()}

    def _before(self, key: Key, tensor: Tensor) -> Before | None:
        """Return what is known where a verb's value is stored; None where the user's own is."""
        if key in self._writing:
            return self._writing[key]
        known = self._values.get(key)
        return known[0] if known is not None and _is_one_of(_local(tensor).cpu(), known[1]) else None

    def _is_changed(self, key: Key, current: Tensor, given: Tensor) -> bool:
        """Return whether a tensor holds neither what the last verb has left there nor what was given."""
        known = self._values.get(key)
        return not (_are_equal(given, current) if known is None else _is_one_of(current, known[1]))


@torch.no_grad()
def write_floats(sim: Any, copied: nn.Module) -> None:
    """Write the values of the float model into a copy of a sim's wrapped model."""
    tensors_by_key = dict(state_tensors(copied))
    found = {key: before.in_float for key, before in sim.given.changed(sim.model).items()}
    _write(tensors_by_key, {key: value for key, value in found.items() if value is not None})


@contextmanager
def as_given(sim: Any) -> Iterator[bool]:
    """Put the given values back into a sim inside the block; yield whether any differed."""
    given, opened = sim.given.originals(sim.model), sim.given.original_bounds(sim.model)
    tensors_by_key = dict(state_tensors(sim.model))
    for key, value in given.items():
        if _local(tensors_by_key[key]).shape != value.shape:
            raise ModelError(f"{'.'.join(key).lstrip('.')} is sharded over ranks; gather the model's parameters first")
    current = {key: _local(tensors_by_key[key]).clone() for key in given}
    changed_bounds = {path: bound for path, bound in relu6_bounds(sim.model).items() if path in opened}
    try:
        _write(tensors_by_key, given)
        set_relu6_bounds(sim.model, opened)
        yield bool(given or opened)
    finally:
        _write(tensors_by_key, current)
        set_relu6_bounds(sim.model, changed_bounds)


@torch.no_grad()
def _write(tensors_by_key: Mapping[Key, Tensor], values: Mapping[Key, Tensor]) -> None:
    for key, value in values.items():
        _local(tensors_by_key[key]).copy_(value)


def _local(tensor: Any) -> Tensor:
    """Return a tensor, or the part of it that this rank holds."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and _digest(one) == _digest(other)


def _digest(tensor: Tensor) -> bytes:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return hashlib.blake2b(data, digest_size=16).digest()  # type: ignore[arg-type]


def _digests(tensor: Tensor) -> Digests:
    """Return the digests of a tensor and of what it may become: in half precision, and from float64 in float32."""
    narrower = [torch.float16, torch.bfloat16] if tensor.is_floating_point() else []
    if tensor.dtype == torch.float64:
        narrower.append(torch.float32)
    return {dtype: _digest(tensor.to(dtype)) for dtype in (tensor.dtype, *narrower)}


def _is_one_of(tensor: Tensor, digests: Digests) -> bool:
    """Return whether a tensor holds the values of a digest, in any dtype that holds them exactly."""
    for dtype, known in digests.items():
        narrow = tensor.to(dtype)
        if (dtype == tensor.dtype or torch.equal(narrow.to(tensor.dtype), tensor)) and _digest(narrow) == known:
            return True
    return False


@contextmanager
def writing(
    model: nn.Module, given: GivenWeights, files: WeightFiles | None, tensors: Sequence[Tensor], *, rounds: bool
) -> Iterator[None]:
    """Write to these parameters and buffers inside the block: those that lie in files get new files first.

    With `rounds`, for the sake of the grid alone: the float model stays what it is.
    """
    in_files = [tensor for tensor in tensors if files is not None and files.hold(tensor)]
    with given.recording_changes(model, tensors, rounds=rounds, replaced=in_files):
        for tensor in in_files:
            assert files is not None
            tensor.data = files.empty_like(tensor).copy_(tensor.data)
        yield


@torch.no_grad()
def write_stored(
    model: nn.Module, given: GivenWeights, files: WeightFiles | None, values: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Write values of the same shape, chosen for the grid, into the stored tensors at sites, in place."""
    places: dict[int, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        places.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    written: dict[int, Tensor] = {}
    for site in values:
        stored = stored_tensor(model, site)
        owners = places.get(stored.untyped_storage().data_ptr())
        if owners is None:
            raise ModelError(f"{site} is put together from several parameters, and cannot be written as one")
        written.update((id(owner), owner) for owner in owners)
    for site, value in values.items():
        shape = tuple(stored_tensor(model, site).shape)
        if shape != value.shape:
            raise ModelError(f"what is stored at {site} has the shape {shape}, not {value.shape}")
    with writing(model, given, files, list(written.values()), rounds=True):
        for site, value in values.items():
            stored_tensor(model, site).copy_(torch.from_numpy(np.ascontiguousarray(value)))
