"""The sim of an nn.Module: model, plan and quantizers."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch import Tensor, nn

from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ConfigError, DataError, ExportError, QsdkError
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.accumulators import fitted_encoding, limited_layers, require_bits, require_fits
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.exact_sums import on_exact_sums, with_exact_sums
from qsdk.core.numerics.spec import PerBlock
from qsdk.core.numerics.stored_codes import reason_codes_get_lost
from qsdk.core.patterns.experts import tokens_remark
from qsdk.core.planning.plan import Plan, coverage_report
from qsdk.core.report import Report
from qsdk.core.sims.biases import OriginalBiases, with_reasons
from qsdk.core.sims.replan import replanned
from qsdk.core.sims.state import SimState
from qsdk.core.sims.stateful import StatefulSim
from torch_bridge.attach import attach, without_other_callers
from torch_bridge.prepare import PreparedModel
from torch_bridge.quantizers.fake_quant import compiled_kernels
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.runtime import Runtime
from torch_bridge.stored_weights import (
    GivenWeights,
    WeightFiles,
    copy_tensors,
    restore_tensors,
    write_floats,
    write_stored,
)
from torch_bridge.torch_values.batches import Example, as_example, other_dtype
from torch_bridge.torch_values.layers import relu6_bounds, set_relu6_bounds
from torch_bridge.torch_values.parameters import find_stored, main_dtype, to_float32, to_numpy
from torch_bridge.torch_values.sharding import require_not_sharded
from torch_bridge.tracing.trace import Trace, fingerprint, trace_marked
from torch_bridge.training.training import (
    ScheduleState,
    active_norms,
    eval_mode,
    fold_norms,
    guard_values,
    holding_values,
    leave_training,
    parameter_groups,
    reasons_to_stay_folded,
    require_weights_unwritten,
    restore_affine_of_folded,
    temporarily_folded,
    training,
    unfolded_norms,
)
from torch_bridge.wrapping.wrapped_state import link_sim, state_of
from torch_bridge.wrapping.wrapper import float_class, foreign_modules, unwrap_model


class QuantSim(StatefulSim):
    """A simulated quantized model.

    `sim(x)` runs the model as the exported file would; `sim.model` is an ordinary nn.Module.

    Attributes:
        model: the wrapped module.
        graph: the graph read from its trace.
        config (QuantConfig): the config in force.
        plan (Plan): the decision for every site.
        example: the arguments it was quantized with.
        not_exercised: sites that exist only in the traced graph.
        notes: what the exported file will lack of the module, and the BatchNorms that were not folded, with the reason.

    Examples:
        >>> import torch, qsdk
        >>> qsdk.quantize(torch.nn.Linear(4, 2), torch.randn(8, 4))
        QuantSim(Linear: 4 quantized, 0 tied, 0 float; 0 of 4 quantizers ready)
    """

    documented = (*StatefulSim.documented, "model", "example", "not_exercised", "training", "parameter_groups")
    documented = (*documented, "unwrap", "float_phase", "captured", "quantizers")
    _frozen_values: frozenset[str] = frozenset()
    #: site of a stack -> the tokens that each of its experts got in calibration
    tokens_of_experts: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __init__(
        self,
        prepared: PreparedModel,
        graph: Graph,
        config: QuantConfig,
        plan: Plan,
        dead: Sequence[str],
        not_exercised: Sequence[str],
        *,
        traced: Trace,
        fold_batch_norm: bool,
    ) -> None:
        self.model: nn.Module = prepared.model
        self.graph, self.config, self.plan = graph, config, without_other_callers(plan, graph, self.model)
        self.example: Example = prepared.example
        self.dtype_when_quantized = main_dtype(self.model)  # of most of its values
        self.quantized_with, self.fold_batch_norm = config, fold_batch_norm  # they decide what is folded on loading
        self.not_exercised = tuple(not_exercised)
        left = {f"{path} (BatchNorm) not folded": reason for path, reason in prepared.unfolded.items()}
        self.notes = {**left, **prepared.notes, **traced.notes}
        self._dead = tuple(dead)
        self._folded = prepared.folded
        self._unfolded = tuple(prepared.unfolded)
        self.original_biases: OriginalBiases = {}
        self.given = GivenWeights(self.model)  # the user's float values, where verbs have changed them since
        self.weight_files: WeightFiles | None = None  # of a model from a checkpoint folder
        attach(self.model, self.runtime, self.plan, self._dead)
        self._trace, self._traced_as = traced, fingerprint(self.model)

    @property
    def runtime(self) -> Runtime:
        """Return the runtime that the wrapped modules share (a deep copy of the sim has its own)."""
        return state_of(self.model).runtime

    @property
    def frozen_values(self) -> frozenset[str]:
        """The sites of stored tensors that no verb changes; outside of `training` their gradients are refused."""
        return self._frozen_values

    @frozen_values.setter
    def frozen_values(self, sites: frozenset[str]) -> None:
        guard_values(self.model, sites - self._frozen_values, lambda: self._frozen_values)
        self._frozen_values = sites

    @property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """Return site -> quantizer, for every site that does not keep float32."""
        return {site: quantizer for site, quantizer in self.runtime.quantizers.items() if quantizer is not None}

    @property
    def current_example(self) -> Example:
        """Return the example in the model's present dtype and on its device, after any `sim.model.to()`."""
        return self.example.converted(self.dtype_when_quantized, main_dtype(self.model)).placed(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Simulate: the module's own outputs, without gradients.

        Raises:
            DataError: floats of another dtype than the model's, which it does not take.
        """
        try:
            with torch.no_grad():
                return self.model(*args, **kwargs)
        except RuntimeError as error:
            remedy = other_dtype(self.model, Example(args, kwargs))
            if isinstance(error, QsdkError) or not remedy:
                raise
            raise DataError(f"the model does not take the input: {error}; {remedy}") from error

    def run(self, batch: Any) -> Any:
        """Simulate a batch: a tensor, a tuple of arguments or a mapping of keywords."""
        given = as_example(batch)
        return self(*given.args, **given.kwargs)

    def coverage(self) -> Report:
        """List every tensor: quantized, tied to another, or float and why."""
        only = self.runtime.only_training
        report = coverage_report(self.plan, not_exercised=self.not_exercised, dead=self._dead, only_training=only)
        report = with_reasons(with_reasons(report, self.bias_remarks()), self._token_remarks())
        staying = reasons_to_stay_folded(self.model)
        notes = {f"{path} (BatchNorm) stays folded in training": reason for path, reason in staying.items()}
        late = "float, because it came into the model after that was quantized"
        notes |= {f"{path} ({what})": late for path, what in foreign_modules(self.model).items()}
        facts = {"folded": len(self._folded), **self.methods.facts, **notes, **self.notes}
        return Report(report.title, report.rows, {**report.summary, **facts})

    def _token_remarks(self) -> dict[str, str]:
        """Return, by site of a stack, how many tokens of the calibration its experts got, and which got few."""
        result = {}
        for site, counts in self.tokens_of_experts.items():
            spec = self.plan.decisions[site].spec
            by = None if spec is None else spec.granularity
            shape = self.plan.decisions[site].shape
            inputs = shape[by.axis] if isinstance(by, PerBlock) and shape is not None else 1
            result[site] = tokens_remark(counts, inputs if isinstance(inputs, int) else 1)
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        fold_norms(self.model)  # a copy is not in the training block of the original
        leave_training(self.model, list(self.quantizers.values()))
        _write_limited(self)
        self.given.end_recording(self.model)
        guard_values(self.model, self._frozen_values, lambda: self._frozen_values)  # copied tensors have no hooks
        link_sim(self.model, self)

    def __repr__(self) -> str:
        counts = self.coverage().summary
        calibrated = sum(q.calibrated for q in self.quantizers.values())
        left = f"; {len(self._unfolded)} BatchNorm not folded, see sim.notes" if self._unfolded else ""
        return (
            f"QuantSim({float_class(self.model).__name__}: {counts['quantized']} quantized, {counts['tied']} tied, "
            f"{counts['float']} float; {calibrated} of {len(self.quantizers)} quantizers ready{left})"
        )

    def traced(self) -> tuple[bytes, Mapping[str, npt.NDArray[Any]]]:
        """Return the model as it is now, as marked ONNX bytes, and the values of its stored tensors by name.

        It is traced again only if more than values of parameters and buffers has changed since the last time.

        Raises:
            ExportError: torch cannot trace the model any more, or a foreign module is in it.
        """
        require_not_sharded(self.model, "export")
        for path, what in foreign_modules(self.model).items():
            raise ExportError(
                f"{path} ({what}) came into the model after that was quantized, so it has no encodings; take it out "
                "again (merge_and_unload() of adapters does), or quantize the model that has it"
            )
        live = bool(active_norms(self.model))
        with temporarily_folded(self.model):
            if self._traced_as != fingerprint(self.model):
                with eval_mode(self.model):
                    self._trace = trace_marked(self.model, self.runtime, self.current_example)
                self._traced_as = fingerprint(self.model)
            stored = self._trace.stored.values_in(self.model)
            return self._trace.model, {name: x.copy() for name, x in stored.items()} if live else stored

    def ready(self) -> dict[str, bool]:
        """Return site -> whether it has an encoding, for every quantized site."""
        return {site: q.calibrated for site, q in self.quantizers.items() if q.decision.quantized}

    def encodings_where_ready(self) -> dict[str, Encoding]:
        """Return the encodings found so far."""
        return {site: self.quantizers[site].encoding() for site, ready in self.ready().items() if ready}

    def snapshot(self, *, weights: bool = False) -> SimState:
        """Return the state now: config, plan and encodings, and with `weights` all parameters and buffers as well.

        Without weights it costs no more than a dictionary; with them, a copy of the model's tensors on their devices.
        """
        quantizers = self.quantizers.items()
        own = {site: q.encoding() for site, q in quantizers if q.owns_encoding and q.calibrated}
        held: Any = None
        if weights:
            with temporarily_folded(self.model):
                norms, biases = dict(self.folded_norms), dict(self.original_biases)
                held = copy_tensors(self.model), norms, relu6_bounds(self.model), biases
            held = *held, self.given.contents()
        return SimState(self.config, self.plan, own, held, self.methods)

    def restore(self, state: SimState) -> None:
        """Restore a snapshot; weights that it holds are copied into the present parameters.

        Raises:
            ConfigError: inside `training(learn_scales=True)`, where the scales belong to the optimizer.
            ModelError: it holds the weights of another model, or was taken before a rotation untied parameters.
        """
        if any(q.learned_names for q in self.quantizers.values()):
            raise ConfigError("scales are being learned; leave the training block before you change the sim")
        assert state.config is not None
        self.require_still_tied(state.plan)
        if state.stored is not None:
            held, norms, relu6, biases, given = state.stored
            with temporarily_folded(self.model, changes=True):
                restore_tensors(self.model, held)
                set_relu6_bounds(self.model, relu6)
                state_of(self.model).norms, self.original_biases = dict(norms), dict(biases)
            self.given.restore_contents(given)
        before, self.config, self.plan = self.plan, state.config, state.plan
        self.methods = state.methods or self.methods
        if state.plan is not before:
            attach(self.model, self.runtime, state.plan, self._dead)
        for site, quantizer in self.quantizers.items():
            if quantizer.owns_encoding:
                quantizer.replace_encoding(state.own.get(site))

    def planned(self, config: QuantConfig, *, kept_float: Mapping[str, str] | None = None) -> SimState:
        """Return the state that another config leads to, without data.

        Raises:
            ConfigError: a rule matches nothing.
            DataError: NaN or inf in a weight whose encoding is derived again.
        """
        extra = (*self.folded, *self._unfolded)
        stored, methods = self.stored_floats, self.methods
        state = self.snapshot()
        found = replanned(state, self.graph, config, stored, methods=methods, extra_owners=extra, kept_float=kept_float)
        return replace(found, plan=without_other_callers(found.plan, self.graph, self.model))

    @property
    def folded(self) -> Collection[str]:
        """Return the paths of the BatchNorms that were folded."""
        return self._folded

    @property
    def folded_away(self) -> Mapping[str, str]:
        """Return site that folding has left out -> the site that it is in now."""
        return {f"{fold.norm_op}:output": f"{fold.op}:output" for fold in state_of(self.model).folds}

    @property
    def folded_norms(self) -> dict[str, FoldedNorm]:
        """Return path of a layer -> statistics of its outputs, known from the BatchNorm folded into it.

        It is empty once the model was trained.
        """
        return state_of(self.model).norms

    def stored_floats(self, sites: Collection[str]) -> dict[str, npt.NDArray[Any]]:
        """Return site -> float values of the stored tensors at these sites, as far as they are stored."""
        tensors = {site: find_stored(self.model, site) for site in sites}
        return {site: to_float32(x) for site, x in tensors.items() if x is not None}

    def store_floats(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write values of the same shape into the stored tensors at sites, in place.

        Raises:
            ModelError: nothing is stored at a site, or in another shape; nothing is changed then.
        """
        write_stored(self.model, self.given, self.weight_files, values)

    def stored_by_name(self, name: str) -> npt.NDArray[Any] | None:
        """Return the stored tensor of this name in the trace, or None."""
        return self.traced()[1].get(name)

    def stored_paths(self) -> Mapping[str, str]:
        """Return name of a stored tensor in the trace -> path of its parameter or buffer."""
        self.traced()
        return self._trace.stored.state

    @contextmanager
    def training(
        self,
        *,
        learn_scales: bool = False,
        learn_zero_points: bool = False,
        gradient: Literal["lsq", "pact"] = "lsq",
        freeze_bn_after: float | None = None,
        compile_kernels: bool = False,
        schedules: Sequence[Callable[["QuantSim", int], None]] = (),
        accumulator_bits: int | None = None,
        accumulator_tile: int | None = None,
    ) -> Iterator[nn.Module]:
        """Train: inside the block `sim.model` is in train mode; afterwards in eval mode with ranges fixed.

        Weights are trained straight-through. A learned scale is 2**p times the calibrated one, so it stays positive.

        Args:
            learn_scales: scales are learned, see `parameter_groups`.
            learn_zero_points: zero points of asymmetric ranges are learned; they stay whole numbers on the grid.
            gradient: of scales and zero points: `lsq` counts rounding errors too (Esser et al. 2020; LSQ+, Bhalgat et
                al. 2020), `pact` clipped elements alone (Choi et al. 2018), so that only the ends of the range matter.
            freeze_bn_after: optimizer steps for which BatchNorms use batch statistics, 0 and `math.inf` allowed;
                afterwards their running ones. Folded ones are trained with the folding simulated and folded again at
                the end. None leaves these folded, and the others as `model.train()` has them.
            compile_kernels: one flat kernel each for the forward and the backward pass of activations on a CPU, by
                torch.compile (seconds, once per process); where that does not work, a warning, and training goes on
                without. Forward passes are bit-identical. Of no use to a model that is compiled whole.
            schedules: called with the sim and the optimizer steps so far: 0 at the start, and after every step.
            accumulator_bits: weights are read so that no sum of products of a layer with integer inputs leaves a signed
                accumulator of so many bits, for any input on its grid; the bias is added outside of it (A2Q+, Colbert
                et al. 2024). At the start their scales are fitted to that, and at the end the weights are stored as
                they were read, with frozen scales. None for any sum. `qsdk.analysis.accumulators` shows the sums.
            accumulator_tile: products that such an accumulator adds up, whose result goes to a wide one; None for all.

        Raises:
            CalibrationError: a scale or zero point that is to be learned has not been calibrated.
            ConfigError: an unknown gradient, no number of steps, a block inside of another one, or layers that cannot
                have such accumulators.
            ModelError: the forward pass writes over a quantized weight in train mode.
        """
        if isinstance(self.runtime.schedule_state, ScheduleState):
            raise ConfigError(
                "this sim is in a training block already; leave that before you enter another, or give it both options"
            )
        if gradient not in ("lsq", "pact"):
            raise ConfigError(f"gradient={gradient!r} is unknown; choose lsq or pact")
        require_weights_unwritten(self.runtime)
        kernels = compiled_kernels() if compile_kernels else None
        called = [partial(schedule, self) for schedule in schedules]
        state_of(self.model).frozen_values = self.frozen_values
        entering = ExitStack()
        entering.enter_context(self.alone())
        with (
            _limited_sums(self, accumulator_bits, accumulator_tile),
            entering,
            holding_values(self.model, self.frozen_values),
            self.given.recording_changes(self.model, rounds=False, moved=lambda: self.original_biases.clear()),
            unfolded_norms(self.model, freeze_bn_after) as freezing,
            training(
                self.model,
                list(self.quantizers.values()),
                scales=learn_scales,
                zero_points=learn_zero_points,
                clipped_only=gradient == "pact",
                kernels=kernels,
                schedules=[*freezing, *called],
            ) as model,
        ):
            restore_affine_of_folded(self.model)
            self.folded_norms.clear()  # training changes the statistics of the layers' outputs
            entering.close()  # from here on, threads may train together
            yield model
        promised = [d.site for d in self.plan.decisions.values() if d.spec is not None and d.spec.dtype.exact_sums]
        known = self.encodings if promised else {}
        exact = {site: known[site] for site in promised if site in known}
        for site, values in self.stored_floats(exact).items():  # training changes weights and scales
            if exact[site].frozen:
                self.store_floats({site: on_exact_sums(exact[site], values)})
            elif self.quantizers[site].owns_encoding:
                self.quantizers[site].replace_encoding(with_exact_sums(exact[site], values))

    def parameter_groups(self, *, lr: float, scale_lr: float | None = None) -> list[dict[str, Any]]:
        """Return optimizer groups: the model's parameters, and its learned scales at `scale_lr`.

        Raises:
            ConfigError: outside of `training`, where no scale is a parameter yet.
        """
        if not isinstance(self.runtime.schedule_state, ScheduleState):
            raise ConfigError(
                "scales are learned inside of the training block alone; make the optimizer there: "
                "with sim.training(learn_scales=True): optimizer = torch.optim.AdamW(sim.parameter_groups(lr=1e-4))"
            )
        return parameter_groups(self.model, list(self.quantizers.values()), lr=lr, scale_lr=scale_lr)

    def alone(self) -> AbstractContextManager[None]:
        """Keep the sim to this thread for a while, see `Runtime.alone`."""
        return self.runtime.alone()

    @contextmanager
    def float_phase(self) -> Iterator[nn.Module]:
        """Run the model in float inside the block: sites do nothing."""
        with self.runtime.in_phase("float"):
            yield self.model

    @contextmanager
    def captured(self) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Capture fake-quantized values inside the block: every forward pass writes them into the yielded mapping."""
        captured: dict[str, npt.NDArray[Any]] = {}
        quantizers = self.runtime.quantizers

        def keep(site: str, x: Tensor) -> Tensor:
            quantizer = quantizers.get(site)
            result = x if quantizer is None else quantizer(x)
            if quantizer is not None and quantizer.decision.kind not in ("weight", "bias"):
                spec = quantizer.decision.spec
                if spec is None or str(x.dtype) != f"torch.{spec.dtype}":  # a tensor of that type has no site in a file
                    captured[site] = to_numpy(result).copy()
            return result

        with self.runtime.in_phase("visit", keep, quantizes=True):
            yield captured

    def unwrap(self) -> nn.Module:
        """Return the float model that is simulated: a copy in plain classes.

        Its values are the caller's, bit for bit, whatever `calibrate`, `seq_mse`, `adaround`, `gptq`, `tune_blocks`,
        `correct_bias` and `reestimate_batch_norm` have rounded or shifted since. What changes the float model is in it:
        folded BatchNorms, channels that `equalize`, `smooth_quant`, `awq` and `rotate` have scaled or turned, and after
        a `training` block that changed anything all values as they were left. Inside the block they are those of now.
        A folded BatchNorm with a forward of its own normalizes nothing in it, in eval mode alone; to train on, fold
        none.

        Raises:
            ModelError: FSDP2 has sharded the model.
        """
        return plain_copy(self, in_float=True)


def plain_copy(sim: QuantSim, *, in_float: bool) -> nn.Module:
    """Return a copy of a sim's model in plain classes: as the float model is, or with the values that are stored."""
    require_not_sharded(sim.model, "unwrap")
    copied = copy.deepcopy(sim.model)
    if in_float:
        write_floats(sim, copied)
    fold_norms(copied)
    unwrap_model(copied)
    return copied


# --- weights within the limit for accumulators of few bits, while they train (A2Q+) -----------------------------------


@contextmanager
def _limited_sums(sim: QuantSim, bits: int | None, tile: int | None) -> Iterator[None]:
    """Have weights read within the limit for accumulators of some bits inside the block, and stored so at its end.

    Scales that are not frozen are fitted to it first. The gradient passes straight through to the weights, also to
    those that lose their codes.

    Raises:
        ConfigError: a layer that cannot have such accumulators; nothing is changed then.
    """
    require_bits(bits, tile)
    if bits is None:
        yield
        return
    _limit(sim, bits, tile)
    try:
        yield
        _write_limited(sim)
    finally:
        for quantizer in sim.quantizers.values():
            quantizer.limit = None


def _limit(sim: QuantSim, bits: int, tile: int | None) -> None:
    layers = limited_layers(sim, bits, tile)
    for layer, _ in layers.values():
        if reason := reason_codes_get_lost(layer.spec, layer.dtype):
            raise ConfigError(f"{layer.site}: accumulators of {bits} bits cannot be promised: {reason}")
    require_fits(sim, bits, tile, sim.frozen_values)
    encodings, stored = sim.encodings, sim.stored_floats(list(layers))
    for site, (layer, limit) in layers.items():
        if site in sim.frozen_values:
            continue
        quantizer = sim.quantizers[site]
        if site in encodings and not quantizer.is_frozen and quantizer.owns_encoding:
            weight = layer.layout.to_matrix(stored[site])
            quantizer.replace_encoding(fitted_encoding(encodings[site], weight, layer.layout, layer.spec, limit))
        quantizer.limit = layer.layout, limit


def _write_limited(sim: QuantSim) -> None:
    """Store what weights with a limit are read as, and freeze their encodings: others would have other codes."""
    limited = {site: quantizer for site, quantizer in sim.quantizers.items() if quantizer.limit is not None}
    stored = sim.stored_floats(list(limited))
    for site, values in stored.items():
        quantizer = limited[site]
        with torch.no_grad():
            read = quantizer(torch.from_numpy(values).to(quantizer.scale_and_zero_point()[0].device))
        sim.store_floats({site: read.cpu().numpy()})
        quantizer.replace_encoding(replace(quantizer.encoding(), frozen=True))
        quantizer.limit = None
