"""The weights of a sim while its layers are solved: as they were for float passes, as they are for quantized ones."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.site import owner_of, port_of
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.parameters import (
    direction_suffixes,
    onnx_weight,
    packed_rows,
    stored_tensor,
    to_torch_order,
)
from torch_bridge.training.batch_norm_training import require_folded


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
        self._known, self._given = sim.given.contents(), sim.given.originals(sim.model)

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
            before = self._sim.given.given_values(self._sim.model, list(self._originals), replaced=in_files)
        held = {id(parameter) for parameter in in_files}
        for parameter, original in self._originals.items():
            if id(parameter) in held:
                continue  # its new values are in a file of their own
            self._kept[original] = original.clone()
            original.copy_(parameter.data)
            parameter.data = original
        self._sim.given.record_changes(self._sim.model, {**before, **self._given})

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
