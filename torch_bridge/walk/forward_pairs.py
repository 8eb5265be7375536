"""Forwards of all batches side by side, each paused where it is, in float and quantized, with the weights they read."""

import ctypes
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from qsdk.core.errors import ModelError
from qsdk.core.freed_memory import FreedMemory, give_back
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.sims.biases import float_biases
from qsdk.core.site import owner_of, port_of
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.stored_weights import Before
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.torch_values.parameters import (
    direction_suffixes,
    onnx_weight,
    packed_rows,
    stored_tensor,
    to_torch_order,
)
from torch_bridge.training.training import require_folded
from torch_bridge.walk.paused_forward import PausedForward, Scheduler


class LayerWeights:
    """The reader and writer of a sim's stored tensors during a walk; everything written can be undone."""

    def __init__(self, sim: QuantSim) -> None:
        """Start with nothing written."""
        require_folded(sim.model)
        self._sim = sim
        self._modules = dict(sim.model.named_modules())
        self._held: set[str] = set()
        self._cache: dict[str, Tensor] = {}
        self._originals: dict[Tensor, Tensor] = {}
        self._kept: dict[Tensor, Tensor] = {}
        self._before: dict[str, tuple[Quantizer, bool, dict[str, Tensor | None]]] = {}
        self._shifted: dict[str, Tensor] = {}
        self._biases = dict(sim.original_biases)
        self._known, self._given = sim.given.contents(), sim.given.changed(sim.model)

    def set_floats(self, floats: Mapping[str, Any]) -> None:
        """Give the float model other values than those stored at these sites."""
        stored = {site: stored_tensor(self._sim.model, site).detach() for site in floats}
        self._shifted = {site: tensor.clone() for site, tensor in stored.items()}
        for site, value in floats.items():
            stored[site].copy_(torch.as_tensor(value, device=stored[site].device))
        for site, shifted in self._shifted.items():
            self._store(site, shifted)

    def visit(self, site: str, x: Tensor) -> Tensor:
        """Return the tensor that a quantized pass reads at a site.

        A stored tensor is quantized once for all passes until `drop_cache`.
        """
        known = self._cache.get(site)
        if known is not None:
            return known
        result = self._sim.runtime.quantize(site, x)
        quantizer = self._sim.runtime.quantizers.get(site)
        if result is not x and quantizer is not None and quantizer.decision.kind in ("weight", "bias"):
            self._cache[site] = result
        return result

    def drop_cache(self) -> None:
        """Drop the cached fake-quantized tensors, except at the sites that are held."""
        self._cache = {site: x for site, x in self._cache.items() if site in self._held}

    def hold(self, sites: Collection[str]) -> None:
        """Keep the cached tensors of these sites, which may be read long before an op multiplies with them."""
        self._held.update(sites)

    def release(self, sites: Collection[str]) -> None:
        """Stop holding these sites."""
        self._held.difference_update(sites)

    def held_tensors(self) -> dict[str, Tensor]:
        """Return the cached tensors at the held sites, which passes hold and which a write changes in place."""
        return {site: x for site, x in self._cache.items() if site in self._held}

    def cached_tensors(self) -> Collection[Tensor]:
        """Return all cached tensors, which are shared by all passes."""
        return self._cache.values()

    @contextmanager
    def floats(self) -> Iterator[None]:
        """Put the stored tensors back to their float values inside the block."""
        current = {parameter: parameter.data for parameter in self._originals}
        _set_data(self._originals)
        try:
            yield
        finally:
            _set_data(current)

    def original(self, site: str) -> Tensor:
        """Return the stored tensor at a site in the float model, float32."""
        with self.floats():
            return stored_tensor(self._sim.model, site).detach().float()

    def write(self, site: str, *, encoding: Encoding | None, weight: Tensor | None, frozen: bool) -> None:
        """Change what is stored at a site: its encoding, its values, or both."""
        quantizer = self._sim.quantizers[site]
        buffers = {name: quantizer.owner._buffers[name] for name in quantizer.buffer_names}
        self._before.setdefault(site, (quantizer, quantizer.frozen, buffers))
        if encoding is not None:
            quantizer.set_encoding(encoding)
        quantizer.frozen = quantizer.frozen or frozen
        if weight is not None:
            self._store(site, weight)
        self._requantize_cached(quantizer)

    def shift(self, site: str, by: Tensor) -> None:
        """Store the float model's values at a site, plus an offset."""
        stored, exact = stored_tensor(self._sim.model, site), self.original(site)
        self._store(site, (exact + by.reshape(stored.shape).to(exact)).to(stored))
        quantizer = self._sim.quantizers.get(site)
        if quantizer is not None:
            self._requantize_cached(quantizer)

    def keep(self) -> None:
        """Copy what was written into the original storage, so that everything that shares it sees the change.

        A parameter that lies in a file of the checkpoint gets its new file for good.
        """
        files = self._sim.weight_files
        in_files = [p for p, original in self._originals.items() if files is not None and files.hold(original)]
        with self.floats():
            before = self._sim.given.given_values(
                self._sim.model, list(self._originals), rounds=True, replaced=in_files
            )
        held = {id(parameter) for parameter in in_files}
        for parameter, original in self._originals.items():
            if id(parameter) in held:
                continue  # its new values are in a file of their own
            self._kept[original] = original.clone()
            original.copy_(parameter.data)
            parameter.data = original
        for key, known in self._given.items():  # what was known before `set_floats` is not found by digests now
            in_float = known.in_float if known.in_float is not None or key not in before else before[key].in_float
            before[key] = Before(known.given, in_float)
        self._sim.given.record_changes(self._sim.model, before, rounds=True)

    def undo(self) -> None:
        """Restore the state before the first `write`, also where `keep` has begun."""
        for original, before in self._kept.items():
            original.copy_(before)
        _set_data(self._originals)
        for site, shifted in self._shifted.items():
            stored_tensor(self._sim.model, site).detach().copy_(shifted)
        for quantizer, frozen, buffers in self._before.values():
            quantizer.frozen = frozen
            quantizer.owner._buffers.update(buffers)
        self._sim.original_biases = dict(self._biases)
        self._sim.given.restore_contents(self._known)

    def _requantize_cached(self, changed: Quantizer) -> None:
        """Quantize the cached tensors that depend on a quantizer again, in place, because passes hold them."""
        for site, held in self._cache.items():
            quantizer = self._sim.quantizers[site]
            if quantizer is changed or changed in (quantizer.factors or ()):
                held.copy_(quantizer(stored_tensor(self._sim.model, site).detach()))

    def _store(self, site: str, value: Tensor) -> None:
        module = self._modules["" if owner_of(site) == "self" else owner_of(site)]
        port = port_of(site)
        if isinstance(module, nn.RNNBase) and onnx_weight(module, port) is not None:
            for suffix, part in zip(direction_suffixes(module), value, strict=True):
                self._replace(getattr(module, port + suffix), to_torch_order(part, module.mode))
            return
        stored = {**module._parameters, **module._buffers}.get(port)
        if stored is not None:
            self._replace(stored, value)
            return
        name, _, part = port.rpartition("_")
        packed = module._parameters.get(name)
        if packed is None or not isinstance(module, nn.MultiheadAttention):
            raise ModelError(f"nothing is stored at {site} that could be written; quantize the model as it is now")
        changed = packed.data.clone()
        packed_rows(changed, part).copy_(value)
        self._replace(packed, changed)

    def _replace(self, parameter: Tensor, value: Tensor) -> None:
        self._originals.setdefault(parameter, parameter.data)
        files = self._sim.weight_files
        in_file = files is not None and files.hold(parameter.data)
        like = files.empty_like if files is not None and in_file else torch.empty_like
        parameter.data = like(parameter.data).copy_(value)


def _set_data(data: dict[Tensor, Tensor]) -> None:
    for parameter, tensor in data.items():
        parameter.data = tensor


_PRODUCTS = frozenset(
    {functional.linear, torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm}
    | {Tensor.__matmul__, Tensor.bmm, Tensor.matmul, Tensor.mm}
)


class FloatProducts(TorchFunctionMode):
    """A mode in which products of tensors of one of these dtypes on the CPU are made in float32."""

    def __init__(self, dtypes: Iterable[torch.dtype]) -> None:
        super().__init__()
        self._dtypes = frozenset(dtypes)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Widen the operands of a product and round its result; call anything else as it is."""
        given = kwargs or {}
        tensors = [x for x in (*args, *given.values()) if isinstance(x, Tensor)] if func in _PRODUCTS else []
        found = {x.dtype for x in tensors if x.device.type == "cpu"}
        if len(found) != 1 or not found <= self._dtypes or "out" in given:
            return func(*args, **given)
        wide = func(*map(_widened, args), **{name: _widened(x) for name, x in given.items()})
        return wide.to(found.pop())


def float_products(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a `FloatProducts` for the half-precision dtypes of a model that this processor has no kernels for."""
    present = {parameter.dtype for parameter in model.parameters() if parameter.device.type == "cpu"}
    slow = {dtype for dtype in present if not has_kernels(dtype)}
    return FloatProducts(slow) if slow else nullcontext()


def has_kernels(dtype: torch.dtype) -> bool:
    """Return whether torch has fast products of a dtype on this processor; True where it has no oneDNN to ask."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


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
        if len(self._storages) > 2 * self._pruned_at:
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


class ForwardPairs:
    """The float and the quantized forwards of a walk: it starts, resumes and ends them."""

    def __init__(
        self, sim: QuantSim, data: Iterable[Any], forward: Forward | None, max_memory: int | None = None
    ) -> None:
        """Read the first batch; beyond `max_memory` bytes, tensors of forwards go to temporary files."""
        self.weights = LayerWeights(sim)
        self.batches = 0
        self.float_seconds = 0.0
        self._sim, self._forward = sim, forward
        self._batches = progress_over(data, "layers", progress=False)
        self._first = next(self._batches)
        self._scheduler = Scheduler(sim.runtime)
        self._offloader = None if max_memory is None else Offloader(max_memory)
        self._freed = FreedMemory()

    @property
    def running(self) -> PausedForward | None:
        """Return the forward that runs now; None outside of forwards."""
        return self._scheduler.running

    def run_first_batch(self, inside: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run the first batch in float, inside a context, and find what forwards set on modules."""

        def run() -> None:
            with float_products(self._sim.model), inside(), self._sim.float_phase():
                self._feed(*self._first)

        self._scheduler.learn_attributes(self._sim.model, run)

    @contextmanager
    def started(self, modes: dict[bool, TorchFunctionMode] | None = None) -> Iterator[list[PausedForward]]:
        """Start forwards of all batches, run them to their first pauses, and return them; after the block, end them.

        What was written stays if the block succeeds and is undone if it raises. `modes` are entered by every float
        (False) and every quantized forward (True).
        """
        forwards = []
        try:
            self.weights.set_floats(float_biases(self._sim))
            try:
                for number, batch in chain([self._first], self._batches):
                    self.batches += 1
                    for quantized in (False, True):
                        forwards.append(self.add_forward(number, batch, quantized=quantized, modes=modes))
                        self.resume(forwards[-1:])
                yield forwards
            finally:
                self._scheduler.close()
                if self._offloader is not None:
                    self._offloader.close()
            self.weights.keep()
        except BaseException:
            self.weights.undo()
            raise

    def add_forward(
        self,
        number: int,
        batch: Any,
        *,
        quantized: bool,
        modes: dict[bool, TorchFunctionMode] | None = None,
    ) -> PausedForward:
        """Return a forward that starts when it is first resumed."""

        def run() -> None:
            with ExitStack() as stack:
                stack.enter_context(float_products(self._sim.model))  # before the modes that know weights by identity
                if modes is not None:
                    stack.enter_context(modes[quantized])
                if self._offloader is not None:
                    stack.enter_context(self._offloader.tracker_for(paused))
                self._feed(number, batch)

        paused = self._scheduler.add(
            number, run, "visit" if quantized else "float", self.weights.visit if quantized else None
        )
        return paused

    def pause(self, at: Any) -> None:
        """Pause the running forward, from inside it."""
        self._scheduler.pause(at)

    def resume(self, forwards: Sequence[PausedForward]) -> None:
        """Run forwards to their next pauses, first those in float, with the weights as they were."""
        start = time.perf_counter()
        in_float = [one for one in forwards if not one.quantized]
        if in_float:
            with self.weights.floats():
                for one in in_float:
                    self._resume(one)
            self.float_seconds += time.perf_counter() - start
        for one in forwards:
            if one.quantized:
                self._resume(one)

    def end(self, forwards: Sequence[PausedForward]) -> None:
        """End forwards where they are paused: what comes behind is needed no more."""
        for one in forwards:
            self._scheduler.end(one)

    def _resume(self, one: PausedForward) -> None:
        if self._offloader is not None:
            self._offloader.load(one)
        self._scheduler.resume(one)
        if self._offloader is not None:
            self._offloader.after_pause(one, self.weights.cached_tensors())
        self._freed.bound()

    @contextmanager
    def in_memory(self, *forwards: PausedForward) -> Iterator[None]:
        """Keep the tensors of these forwards in memory inside the block; copy what is to last longer."""
        if self._offloader is None:
            yield
            return
        for one in forwards:
            self._offloader.load(one)
        yield
        for one in forwards:
            self._offloader.after_pause(one, self.weights.cached_tensors())

    @property
    def offloads(self) -> bool:
        """Return whether tensors of forwards may be in files."""
        return self._offloader is not None

    def _feed(self, number: int, batch: Any) -> None:
        feed(self._sim.model, batch, self._sim.example, self._forward, f"batch {number}")
