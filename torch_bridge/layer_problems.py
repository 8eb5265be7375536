"""Layer problems of a sim: each quantized layer, with its float inputs and those that it meets in the simulation."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qsdk.core.errors import DataError
from qsdk.core.layer_problem import LayerProblem, MomentsLike, NewMoments, PatchGeometry, Solution, Solver, WeightLayout
from qsdk.core.report import Report
from qsdk.core.site import owner_of, port_of
from torch_bridge.batches import Forward, feed, progress_over, require_reiterable
from torch_bridge.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.training import eval_mode
from torch_bridge.wrapper import state_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _ReachedError(Exception):
    """Ends a forward pass at the layer whose input was wanted."""


@dataclass(frozen=True)
class _Layer:
    """A weight site that can be solved."""

    site: str
    module: nn.Module
    quantizer: Quantizer
    layout: WeightLayout
    geometry: PatchGeometry | None

    @property
    def parameter(self) -> nn.Parameter:
        found = self.module._parameters["weight"]
        assert found is not None
        return found


@dataclass
class _Pass:
    """Runs batches through the sim, in float or quantized, and keeps the inputs of a layer."""

    sim: QuantSim
    forward: Forward | None
    originals: dict[nn.Parameter, Tensor]

    def inputs(self, layer: _Layer, batch: Any, number: int, *, quantized: bool, once: bool) -> list[Tensor]:
        """The inputs of a layer's calls, in order; a layer called `once` ends the pass."""
        found: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(args[0] if args else kwargs["input"])
            if once:
                raise _ReachedError

        with self._hooked(layer.module, keep), self._phase(quantized), suppress(_ReachedError):
            feed(self.sim.model, batch, self.sim.example, self.forward, f"batch {number}")
        return found

    @contextmanager
    def _phase(self, quantized: bool) -> Iterator[None]:
        if quantized:
            yield
            return
        # the float model is the one before any weight was rounded
        current = {parameter: parameter.data for parameter in self.originals}
        try:
            _point(self.originals)
            with self.sim.float_phase():
                yield
        finally:
            _point(current)

    @contextmanager
    def _hooked(self, module: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _point(data: dict[nn.Parameter, Tensor]) -> None:
    for parameter, tensor in data.items():
        parameter.data = tensor


def solve_layers(
    sim: QuantSim,
    data: Iterable[Any],
    solver: Solver,
    *,
    new_moments: NewMoments,
    title: str,
    forward: Forward | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Report:
    """Solve the sim's layers in the order they run, each after everything before it, and apply what is found.

    A new encoding is installed; a rounded weight is written into the raw parameter and its encoding frozen, since any
    other grid would round it again. Each layer costs one float and one quantized pass up to it.

    Args:
        sim: calibrated.
        data: batches, read several times.
        solver: of `qsdk.algorithms`.
        new_moments: `qsdk.algorithms.moments.Moments`.
        title: of the report and the progress bar.
        forward: calls the model on a batch.
        progress: shows a bar.
        seed: of the sampling of patches.

    Returns:
        Rows `site`, `error_before`, `error_after` (relative to the float output), `seconds` and `note`, which says why
        a layer was left as it was.

    Raises:
        DataError: no data, data that can be read only once or that the model does not take, or NaN or inf in it.
        CalibrationError: a site has no encoding yet. In every case the sim stays as it was.
    """
    require_reiterable(data, title)
    _ = sim.encodings  # names the sites that have none
    layers, rows = _layers_of(sim)
    generator = torch.Generator().manual_seed(seed)
    with _transaction(sim, layers) as originals, torch.no_grad():
        runs = _Pass(sim, forward, originals)
        calls, batches = _first_pass(sim, data, layers, forward)
        rows += [_row(layer.site, note="no batch calls its module") for layer in layers if layer.site not in calls]
        by_site = {layer.site: layer for layer in layers}
        ordered = [by_site[site] for site in calls]
        solved = []
        for layer in tqdm(ordered, desc=title, disable=not progress, leave=False):
            start = time.perf_counter()
            moments = new_moments(
                layer.layout, layer.geometry, batches=batches, generator=generator, device=layer.parameter.device
            )
            _gather(runs, layer, data, moments, once=calls[layer.site] == 1)
            solution = solver(_problem(layer, moments))
            _apply(layer, solution)
            solved.append(_row(layer.site, solution, time.perf_counter() - start))
    notes = [row for row in solved if not row["note"]]
    return Report(title, [*solved, *rows], {"layers": len(notes), "left": len(solved) + len(rows) - len(notes)})


def _layers_of(sim: QuantSim) -> tuple[list[_Layer], list[dict[str, Any]]]:
    """The layers that can be solved, and rows that say why the other weights cannot."""
    layers, rows = [], []
    readers = _readers(sim.model)
    for site, decision in sim.plan.decisions.items():
        if decision.kind != "weight":
            continue
        owner = owner_of(site)
        module = dict(sim.model.named_modules()).get("" if owner == "self" else owner)
        quantizer = sim.runtime.quantizers.get(site)
        if quantizer is None or not decision.quantized:
            rows.append(_row(site, note=f"float: {decision.reason}"))
        elif decision.spec is None or not decision.spec.dtype.is_integer:
            rows.append(_row(site, note=f"{decision.spec and decision.spec.dtype} is not an integer grid"))
        elif port_of(site) != "weight" or not isinstance(module, (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)):
            what = decision.op_type if module is None else type(module).__mro__[2].__name__
            rows.append(_row(site, note=f"the {port_of(site)} of {what} is not that of a Linear or convolution module"))
        elif not state_of(module).leaf:
            rows.append(_row(site, note=f"{type(module).__mro__[2].__name__} has a forward of its own"))
        elif not quantizer.owns_encoding:
            rows.append(_row(site, note=f"shares the encoding of {decision.tied_to}"))
        elif quantizer.frozen:
            rows.append(_row(site, note="its encoding is frozen"))
        elif len(readers[module.weight]) > 1:
            rows.append(_row(site, note=f"one parameter is read by {', '.join(readers[module.weight])}"))
        else:
            layers.append(_Layer(site, module, quantizer, _layout(module), _geometry(module)))
    return layers, rows


def _readers(model: nn.Module) -> dict[Tensor, list[str]]:
    """Parameter -> its names in the modules that hold it; a module with two paths is one module."""
    readers: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                readers.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
    return readers


def _layout(module: nn.Module) -> WeightLayout:
    parameter = module._parameters["weight"]
    assert parameter is not None
    shape = tuple(parameter.shape)
    if isinstance(module, nn.Linear):
        return WeightLayout("linear", shape)
    assert isinstance(module, nn.modules.conv._ConvNd)
    if isinstance(module, _TRANSPOSED):
        return WeightLayout("conv_transpose", shape, module.groups, channel_axis=1, input_axis=0)
    return WeightLayout("conv", shape, module.groups)


def _geometry(module: nn.Module) -> PatchGeometry | None:
    if not isinstance(module, nn.modules.conv._ConvNd):
        return None
    kernel, dilation = tuple(module.kernel_size), tuple(module.dilation)
    if isinstance(module.padding, str):
        totals = [d * (k - 1) if module.padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple((total // 2, total - total // 2) for total in totals)
    else:
        padding = tuple((pad, pad) for pad in module.padding)
    transposed = isinstance(module, _TRANSPOSED)
    return PatchGeometry(
        kernel,
        tuple(module.stride),
        padding,
        dilation,
        module.groups,
        module.padding_mode,
        transposed,
        tuple(module.output_padding) if transposed else (),
    )


@contextmanager
def _transaction(sim: QuantSim, layers: list[_Layer]) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Give the layers' weights as they are; if the block fails, weights, encodings and mode are put back.

    On success the new values are copied into the old storage, so that whoever shares it sees them.
    """
    originals = {layer.parameter: layer.parameter.data for layer in layers}
    before = [(layer.quantizer, layer.quantizer.frozen, _buffers(layer.quantizer)) for layer in layers]
    try:
        with eval_mode(sim.model):
            yield originals
    except BaseException:
        _point(originals)
        for quantizer, frozen, buffers in before:
            quantizer.frozen = frozen
            quantizer.owner._buffers.update(buffers)
        raise
    for parameter, original in originals.items():
        if parameter.data is not original:
            original.copy_(parameter.data)
    _point(originals)


def _buffers(quantizer: Quantizer) -> dict[str, Tensor | None]:
    return {name: quantizer.owner._buffers[name] for name in quantizer.buffer_names}


def _first_pass(
    sim: QuantSim, data: Iterable[Any], layers: list[_Layer], forward: Forward | None
) -> tuple[dict[str, int], int]:
    """Simulate all batches once: how often a batch calls each layer at most, in order of first calls; their number."""
    calls: dict[str, int] = {}
    current: dict[str, int] = {}

    def counting(site: str) -> Callable[..., None]:
        def count(module: nn.Module, args: Any) -> None:
            current[site] = current.get(site, 0) + 1
            calls[site] = max(calls.get(site, 0), current[site])

        return count

    handles = [layer.module.register_forward_pre_hook(counting(layer.site)) for layer in layers]
    batches = 0
    try:
        for number, batch in progress_over(data, "order of layers", progress=False):
            current.clear()
            feed(sim.model, batch, sim.example, forward, f"batch {number}")
            batches += 1
    finally:
        for handle in handles:
            handle.remove()
    return calls, batches


def _gather(runs: _Pass, layer: _Layer, data: Iterable[Any], moments: MomentsLike, *, once: bool) -> None:
    for number, batch in enumerate(data):
        x_float = runs.inputs(layer, batch, number, quantized=False, once=once)
        x_quantized = runs.inputs(layer, batch, number, quantized=True, once=once)
        try:
            for one, other in zip(x_float, x_quantized, strict=True):
                moments.update(one, other)
        except DataError as error:
            raise DataError(f"{layer.site}, batch {number}: {error}") from error


def _problem(layer: _Layer, moments: MomentsLike) -> LayerProblem:
    spec = layer.quantizer.decision.spec
    assert spec is not None
    weight = layer.layout.to_matrix(layer.parameter.detach().float())
    sums = (moments.g, moments.c, moments.g_quantized)
    return LayerProblem(layer.site, spec, layer.quantizer.encoding(), layer.layout, weight, *sums, moments.rows)


def _apply(layer: _Layer, solution: Solution) -> None:
    if solution.note:
        return
    layer.quantizer.set_encoding(solution.encoding)
    if solution.weight is not None:
        layer.parameter.data = layer.layout.from_matrix(solution.weight).to(layer.parameter)
        layer.quantizer.frozen = True


def _row(site: str, solution: Solution | None = None, seconds: float | None = None, note: str = "") -> dict[str, Any]:
    return {
        "site": site,
        "error_before": solution and solution.error_before,
        "error_after": solution and solution.error_after,
        "seconds": seconds,
        "note": solution.note if solution else note,
    }
