"""The values that a module or its sim computes, by the names of modules and sites, also taught by another side's."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qsdk.core.comparing.place import Array, Place, owner_names, rounding_noise
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.site import port_of
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, as_example, feed
from torch_bridge.torch_values.parameters import to_float32
from torch_bridge.torch_values.pytree import argument_leaves, floats_of, map_arguments, map_leaves, name_leaves
from torch_bridge.training.training import eval_mode

_STORED = ("weight", "bias")
_NARROW = {name: torch.finfo(getattr(torch, name)).eps for name in ("float16", "bfloat16")}


class ModuleValues:
    """The tensors of an nn.Module or of its sim: results of modules, and a sim's sites.

    A tensor that several modules return (a container that of its last layer, an Identity that of the layer before) is
    one place with all these names. `arguments` holds the tensors of the last call, by the names that an exported file
    gives them.
    """

    def __init__(self, model: nn.Module | QuantSim, forward: Forward | None) -> None:
        self._sim = model if isinstance(model, QuantSim) else None
        self._model = model.model if isinstance(model, QuantSim) else model
        self._encodings = {} if self._sim is None else self._sim.encodings  # before the data is used up
        self._forward = forward
        self._places: list[Place] = []
        self._weight_noise: dict[str, float] = {}
        self.arguments: dict[str, Array] = {}

    @property
    def places(self) -> Sequence[Place]:
        """Return the places in the order of execution, as of the first run."""
        return self._places

    @property
    def teachable(self) -> bool:
        """Return True: hooks can replace what a module returns."""
        return True

    def values(self, batch: Any, where: str) -> Mapping[str, Array]:
        """Return the values at every place, in float32; see `Side`."""
        run = self._run(batch, where, {})
        self._places = self._places or list(run.places())
        return run.values

    def taught(self, batch: Any, where: str, given: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the values where each is computed from the given ones; see `Side`."""
        return self._run(batch, where, given).values

    def _run(self, batch: Any, where: str, given: Mapping[str, Array]) -> "_Run":
        run = _Run(self._sim, self._encodings, self._weight_noise, given)
        batch = map_leaves(batch, lambda _, leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf)
        with eval_mode(self._model), run.watching(self._model), torch.no_grad():
            if self._sim is not None:
                result = feed(self._model, batch, self._sim.example, self._forward, where)
            else:
                example = as_example(batch) if self._forward is None else as_example(())
                result = feed(self._model, batch, example, self._forward, where)
        run.note_outputs(result, caches=self._sim is not None and self._sim.example.has_cache)
        self.arguments = run.arguments
        return run


class _Run:
    """One call of the model, with what was seen in it."""

    def __init__(
        self,
        sim: QuantSim | None,
        encodings: Mapping[str, Encoding],
        weight_noise: dict[str, float],
        given: Mapping[str, Array],
    ) -> None:
        self.sim, self.encodings, self.given = sim, encodings, given
        self.values: dict[str, Array] = {}
        self.arguments: dict[str, Array] = {}
        self._known_noise = weight_noise  # by weight site: weights are the same in every run
        self._noise: dict[str, float] = {}  # of the weights read since the place before
        self._read: dict[str, float] = {}
        self._sites: dict[str, str] = {}
        self._modules: dict[str, list[str]] = {}
        self._inputs: set[str] = set()
        self._outputs: dict[str, int] = {}
        self._epsilons: dict[str, float] = {}
        self._seen: dict[tuple[int, int], str] = {}  # a tensor and its version -> name of its place
        self._alive: list[Tensor] = []  # so that no two tensors have had the same id
        self._calls: Counter[str] = Counter()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the calls of all modules, and the sites of a sim, inside the block."""
        with ExitStack() as stack:
            handle = model.register_forward_pre_hook(self._note_arguments, with_kwargs=True)
            stack.callback(handle.remove)
            for path, module in model.named_modules():
                if path:
                    hook = module.register_forward_hook(self._hook(path))
                    stack.callback(hook.remove)
            if self.sim is not None:
                stack.enter_context(self.sim.runtime.in_phase("visit", self._visit, quantizes=True))
            yield

    def places(self) -> Iterator[Place]:
        """Yield the places seen, in order."""
        for name in self.values:
            site = self._sites.get(name, "")
            module, op = owner_names(site)
            modules = (*module, *self._modules.get(name, ()))
            yield Place(
                name,
                site=site,
                modules=tuple(dict.fromkeys(modules)),
                ops=op,
                encoding=self.encodings.get(site),
                weight_noise=self._noise.get(name, 0.0),
                epsilon=self._epsilons.get(name, 0.0),
                given=name in self._inputs,
                output=self._outputs.get(name),
            )

    def note_outputs(self, result: Any, *, caches: bool) -> None:
        """Note which places leave the model, those in a cache of keys and values if asked."""
        for position, tensor in enumerate(floats_of(result, caches=caches)):
            name = self._seen.get(_key(tensor))
            if name is None:
                name = f"output {position}"
                self.values[name] = _array(tensor)
            self._outputs.setdefault(name, position)

    def _note_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Note the tensors of the call; return its arguments, with what is given in their place."""
        leaves = argument_leaves(module.forward, args, kwargs)
        instead: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunction():
            for name, tensor in name_leaves((path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)).items():
                self.arguments[name] = _array(tensor)
                if tensor.is_floating_point():
                    self.values[name], self._modules[name] = self.arguments[name], [name]
                    self._inputs.add(name)
                    instead[id(tensor)] = self._given_instead(tensor, name)
                    self._remember(instead[id(tensor)], name)
        return map_arguments(module.forward, args, kwargs, lambda _, leaf: instead.get(id(leaf), leaf))

    def _given_instead(self, tensor: Tensor, name: str) -> Tensor:
        """Return the values given for a place, like the tensor that the model computed there, or that one."""
        if name not in self.given:
            return tensor
        values = torch.from_numpy(np.array(self.given[name], np.float32))
        return values.reshape(tensor.shape).to(tensor.device, tensor.dtype)

    def _hook(self, path: str) -> Any:
        def note(module: nn.Module, args: Any, result: Any) -> Any:
            """Note the module's results by name; return them with given values in their place, or None."""
            call = self._calls[path]
            self._calls[path] += 1
            base, position = f"{path}@{call}" if call else path, 0

            def each(_: Any, leaf: Any) -> Any:
                nonlocal position
                if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                    return leaf
                name = f"{base}:output{position}" if position else base
                position += 1
                return self._note(leaf, name)

            with torch._C.DisableTorchFunction():
                noted = map_leaves(result, each, caches=False)
            return noted if self.given else None

        return note

    def _visit(self, site: str, x: Tensor) -> Tensor:
        assert self.sim is not None
        decision, quantizer = self.sim.plan.decisions.get(site), self.sim.runtime.quantizers.get(site)
        result = x if quantizer is None else quantizer(x)
        if decision is not None and decision.kind in _STORED:
            if site in self.encodings and decision.kind == "weight":
                if site not in self._known_noise:
                    self._known_noise[site] = rounding_noise(self.encodings[site], to_float32(x))
                self._read[site] = self._known_noise[site]
            return result
        return self._note(result, site, is_site=True)

    def _note(self, tensor: Tensor, name: str, *, is_site: bool = False) -> Tensor:
        """Note a tensor under a name; return it, or the values that were given in its place."""
        known = self._seen.get(_key(tensor))
        if known is None and not is_site:
            known = self._written_back(tensor, f"{name}:output")
        if known is not None:
            if is_site:
                self._sites.setdefault(known, name)
            else:
                self._modules.setdefault(known, []).append(name)
            return tensor
        self.values[name] = _array(tensor)
        self._noise[name] = sum(self._read.values())
        self._read.clear()
        if is_site:
            self._sites[name] = name
        else:
            self._modules[name] = [name]
        tensor = self._given_instead(tensor, name)
        self._remember(tensor, name)
        spec = None if self.sim is None or name not in self.sim.plan.decisions else self.sim.plan.decisions[name].spec
        if spec is not None and str(spec.dtype) in _NARROW:  # a narrow region: computed in this type, and cast back
            self._epsilons[name] = _NARROW[str(spec.dtype)]
        return tensor

    def _written_back(self, tensor: Tensor, site: str) -> str | None:
        """Return the site whose values an in-place module has written back into its own result, or None."""
        if site not in self._sites or port_of(site) != "output":
            return None
        held = self.given.get(site, self.values[site])
        return site if np.array_equal(held.reshape(tensor.shape), _array(tensor)) else None

    def _remember(self, tensor: Tensor, name: str) -> None:
        self._alive.append(tensor)
        self._epsilons[name] = torch.finfo(tensor.dtype).eps
        self._seen[_key(tensor)] = name


def _key(tensor: Tensor) -> tuple[int, int]:
    """Return what tells a tensor from others, and from itself before it was written in place."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _array(tensor: Tensor) -> Array:
    """Return a copy of the values: float32, or what NumPy has for another kind."""
    known = tensor.detach()
    return np.array((known.float() if known.is_floating_point() else known).cpu().numpy())
