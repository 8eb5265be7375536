"""Passes over the data: values at sites and by names, outputs, the tensors that parity compares, and stored ones."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsdk.core.arrays import Floats
from qsdk.core.comparing.place import Array, Place, owner_names, rounding_noise
from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.site import port_of
from torch_bridge.sim import QuantSim
from torch_bridge.stored_weights import writing
from torch_bridge.torch_values.batches import Forward, as_example, as_step, feed, progress_over
from torch_bridge.torch_values.module_state import snapshot_of, tensors_in
from torch_bridge.torch_values.parameters import to_float32, to_numpy
from torch_bridge.torch_values.pytree import (
    argument_leaves,
    floats_of,
    map_arguments,
    map_leaves,
    name_leaves,
    tensors_of,
)
from torch_bridge.training.training import eval_mode, fixed_parameters, require_folded


def captures(
    sim: QuantSim, data: Iterable[Any], *, forward: Forward | None, progress: bool
) -> Iterator[tuple[dict[str, Array], list[Array]]]:
    """Yield per batch: site or input name -> NumPy values as simulated, and the outputs in order."""
    with _noted_inputs(sim) as seen:
        for number, batch in progress_over(data, "parity", progress, skip_empty=False):
            with sim.captured() as captured:
                outputs = _run(sim, batch, forward, f"batch {number}", seen, captured)
            yield {**seen, **captured}, outputs


def run_once(sim: QuantSim, batch: Any) -> tuple[dict[str, Array], list[Array]]:
    """Run a sim on a batch; return input name -> values, and the outputs in order."""
    with _noted_inputs(sim) as seen:
        outputs = _run(sim, batch, None, "the example", seen, {})
        return dict(seen), outputs


@contextmanager
def _noted_inputs(sim: QuantSim) -> Iterator[dict[str, Array]]:
    """Yield a mapping into which every call of the model writes its inputs, by name."""
    seen: dict[str, Array] = {}

    def note_inputs(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves = argument_leaves(module.forward, args, kwargs)
        given = name_leaves((path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor))
        seen.update({name: to_numpy(tensor) for name, tensor in given.items()})

    handle = sim.model.register_forward_pre_hook(note_inputs, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _run(
    sim: QuantSim, batch: Any, forward: Forward | None, where: str, seen: dict[str, Array], captured: dict[str, Array]
) -> list[Array]:
    with eval_mode(sim.model), torch.no_grad():
        whole = batch if forward is not None else _with_cache(sim, batch)
        seen.clear()
        captured.clear()  # what filled the cache was a call of its own
        outputs = feed(sim.model, whole, sim.example, forward, where)
    return [to_numpy(tensor) for tensor in tensors_of(outputs, caches=sim.example.has_cache)]


def _with_cache(sim: QuantSim, batch: Any) -> Any:
    """Return a batch as the file takes it: tokens alone become a step with a cache, as `quantize` makes one."""
    given = as_example(batch)
    if not sim.example.has_cache or given.has_cache or given.args or "input_ids" not in given.kwargs:
        return batch
    return dict(as_step(sim.model, given).kwargs)


def outputs(
    sim: QuantSim, batches: Iterable[Any], forward: Forward | None, *, in_float: bool
) -> Iterator[list[Floats]]:
    """Yield the floating-point outputs of each batch, in order, of the simulation or in float."""
    for number, batch in enumerate(batches):
        with eval_mode(sim.model), torch.no_grad(), sim.float_phase() if in_float else nullcontext():
            result = feed(sim.model, batch, sim.example, forward, f"batch {number}")
            tensors = floats_of(result, caches=sim.example.has_cache)
        yield [y.float().cpu().numpy() for y in tensors]


def stored_by_name(sim: QuantSim) -> LazyArrays:
    """Return the float32 value of each float parameter and buffer by its name in the graph, where it has only one."""
    tensors = _tensors(sim)
    return LazyArrays(tensors, lambda name: to_float32(tensors[name]))


@torch.no_grad()
def change_stored(sim: QuantSim, values: Mapping[str, Array]) -> None:
    """Copy values of the same shape into the parameters and buffers of these names, also in the float model."""
    tensors = _tensors(sim)
    with writing(sim.model, sim.given, sim.weight_files, [tensors[name] for name in values], rounds=False):
        for name, value in values.items():
            tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(value, np.float32)))


def _tensors(sim: QuantSim) -> dict[str, Tensor]:
    require_folded(sim.model)
    paths = sim.stored_paths()
    state = {
        path: tensor
        for path, tensor in (
            *sim.model.named_parameters(remove_duplicate=False),
            *sim.model.named_buffers(remove_duplicate=False),
        )
        if path in set(paths.values()) and tensor.is_floating_point()
    }
    by_name = {name: state[path] for name, path in paths.items() if path in state}
    places = [tensor.data_ptr() for tensor in by_name.values()]
    return {name: tensor for name, tensor in by_name.items() if places.count(tensor.data_ptr()) == 1}


def visit_sites(
    sim: QuantSim,
    data: Iterable[Any],
    each: Callable[[str, Array], None],
    *,
    title: str,
    sites: Collection[str] | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> None:
    """Run the float model and call `each(site, values)`, values as float32, batch by batch.

    Where `sites` is None, all that are computed are visited.
    """
    stored = {site for site, decision in sim.plan.decisions.items() if decision.kind in ("weight", "bias")}

    def visit(site: str, x: Tensor) -> Tensor:
        if site not in stored if sites is None else site in sites:
            each(site, x.detach().float().cpu().numpy())
        return x

    with eval_mode(sim.model), sim.runtime.in_phase("visit", visit), torch.no_grad():
        for number, batch in progress_over(data, title, progress):
            feed(sim.model, batch, sim.example, forward, f"batch {number}")


def visit_tensors(
    sim: QuantSim,
    batch: Any,
    visitor: Callable[[str, Tensor], Tensor],
    forward: Forward | None,
    where: str,
    *,
    everywhere: bool = False,
) -> list[Tensor]:
    """Return the floating-point outputs of the float model for a batch, with the graph of their gradients.

    What the visitor returns goes on in place of the values, and the sim's parameters get no gradients. With
    `everywhere`, gradients also go through what the model runs under `torch.no_grad`; what it does there, such as
    writing to a tensor that a gradient needs, may be an error then.
    """
    through = _Gradients() if everywhere else nullcontext()
    with (
        eval_mode(sim.model),
        sim.runtime.in_phase("visit", visitor),
        fixed_parameters(sim.model),
        _without_graphs_in(sim.model),
        torch.enable_grad(),
        through,
    ):
        return floats_of(feed(sim.model, batch, sim.example, forward, where), caches=sim.example.has_cache)


class _Gradients(TorchFunctionMode):
    """The function mode in which gradients cannot be switched off, as `torch.no_grad` does."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, unless it switches gradients off."""
        if func is torch._C._set_grad_enabled and not args[0]:
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_graphs_in(model: nn.Module) -> Iterator[None]:
    """Put back the modules that have kept a tensor with a graph in the block, such as a table that grows on demand."""
    before = {module: snapshot_of(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, image in before.items():
            if any(tensor.grad_fn is not None for tensor in tensors_in(vars(module))):
                image.restore()
        for buffer in model.buffers():
            if buffer.grad_fn is not None:  # written in place
                buffer.detach_()


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
