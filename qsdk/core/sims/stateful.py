"""The methods that sims of both sides share: report encodings and reasons, freeze, change precision, plan again."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy.typing as npt

from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import CalibrationError, ConfigError, ModelError
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.missing_names import missing_in_sim
from qsdk.core.numerics.dtypes import DType, ElementType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan, explanation
from qsdk.core.ranges.ranges import Range
from qsdk.core.ranges.unrepresentable import CalibrationResult, Parts, erased_parts, left_float, unrepresentable_sites
from qsdk.core.report import Report
from qsdk.core.sims.biases import OriginalBiases, bias_remarks, with_erased, with_left_float, without_shifts
from qsdk.core.sims.replan import precision_config, precision_report
from qsdk.core.sims.state import Methods, SimState, matched_values, put_back_on_error, with_frozen


class StatefulSim(ABC):
    """A sim whose state can be taken and restored.

    Attributes:
        documented: the names that users may rely on; the reference and `dir(sim)` list them, and all others belong to
            qsdk's own code.
        plan: the decision for every site.
        graph: that it was planned from.
        methods: of the last calibration; the defaults before it.
        original_biases: original values of the biases that layer solvers have shifted.
        frozen_values: sites of stored tensors that no verb changes.
        untied: paths of parameters that were shared in the module that was given, and are copies now (PyTorch side).
    """

    documented: tuple[str, ...] = (
        *("config", "graph", "notes", "plan"),
        *("run", "coverage", "explain", "encodings", "ready"),
        *("set_precision", "replan", "freeze", "unfreeze", "snapshot", "restore"),
    )

    plan: Plan
    graph: Graph
    methods: Methods = Methods()
    original_biases: OriginalBiases
    frozen_values: frozenset[str] = frozenset()
    untied: tuple[str, ...] = ()

    @abstractmethod
    def ready(self) -> dict[str, bool]:
        """Return, for each quantized site, whether it has an encoding."""

    @abstractmethod
    def encodings_where_ready(self) -> dict[str, Encoding]:
        """Return the encodings by site, without the sites that have none yet."""

    @abstractmethod
    def coverage(self) -> Report:
        """List every tensor: quantized, tied to another, or float and why."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(type(self), name):  # a property of that name has failed: its own error counts
                object.__getattribute__(self, name)
            cls = type(self)
            raise AttributeError(missing_in_sim(name, cls.__name__, vars(self).get("model"), cls.documented))

    def __dir__(self) -> list[str]:
        return [*(name for name in super().__dir__() if name.startswith("__")), *self.documented]

    def __repr__(self) -> str:
        counts, ready = self.coverage().summary, self.ready()
        return (
            f"{type(self).__name__}({len(self.graph.ops)} ops: {counts['quantized']} quantized, {counts['tied']} tied, "
            f"{counts['float']} float; {sum(ready.values())} of {len(ready)} quantized sites ready)"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the line of `repr`, and the sites by op type."""
        coverage = self.coverage()
        return Report(repr(self), coverage.summary.get("by_type", ()))._repr_html_()

    def alone(self) -> AbstractContextManager[None]:
        """Keep the sim to this thread while a verb changes it; nothing to do where every run has its own copy.

        Raises:
            ModelError: another thread has it, or is in the middle of a run.
        """
        return nullcontext()

    @abstractmethod
    def snapshot(self, *, weights: bool = False) -> SimState:
        """Return the present config, plan and encodings, and with `weights` the stored tensors."""

    @abstractmethod
    def restore(self, state: SimState) -> None:
        """Go back to the state of a snapshot."""

    def require_still_tied(self, plan: Plan) -> None:
        """Raise an error for the plan of a snapshot in which tensors share an encoding that are apart now.

        Raises:
            ModelError: a rotation has untied them since.
        """
        apart = [f"{owner}:{name}" for owner, _, name in (path.rpartition(".") for path in self.untied)]
        tied = [site for site in apart if site in plan.decisions and plan.decisions[site].tied_to is not None]
        if tied or plan.decisions.keys() != self.plan.decisions.keys():
            raise ModelError(
                "the snapshot was taken before a rotation gave layers copies of a tensor that they shared; take "
                "another one, or quantize anew"
            )

    @abstractmethod
    def planned(self, config: QuantConfig, *, kept_float: Mapping[str, str] | None = None) -> SimState:
        """Return the state that another config leads to, without data; see `qsdk.core.sims.replan.replanned`."""

    @abstractmethod
    def stored_floats(self, sites: Collection[str]) -> dict[str, npt.NDArray[Any]]:
        """Return the float values of the stored tensors at these sites, by site, where there are any."""

    @abstractmethod
    def store_floats(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Store other values of the same shape at sites: the counterpart of `stored_floats`.

        Raises:
            ModelError: nothing is stored at a site, or in another shape; nothing is changed then.
        """

    @abstractmethod
    def stored_by_name(self, name: str) -> npt.NDArray[Any] | None:
        """Return the stored tensor of that name in the graph, with or without a site; None where there is none."""

    @property
    @abstractmethod
    def folded_norms(self) -> dict[str, FoldedNorm]:
        """Return, by the owner of a layer, the BatchNorm that was folded into it, as long as it is still valid."""

    @property
    @abstractmethod
    def folded(self) -> Collection[str]:
        """Return the owners of the BatchNorms that were folded."""

    @property
    @abstractmethod
    def folded_away(self) -> Mapping[str, str]:
        """Return site or tensor that folding has left out -> the site that it is in now."""

    @property
    def encodings(self) -> dict[str, Encoding]:
        """Return the encoding of every quantized site: own, shared or derived.

        Raises:
            CalibrationError: lists the sites that have none.
        """
        missing = [site for site, ready in self.ready().items() if not ready]
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise CalibrationError(f"these sites have no encoding: {shown}; call qsdk.calibrate(sim, batches) first")
        return self.encodings_where_ready()

    def bias_remarks(self) -> dict[str, str]:
        """Return what int32 does to biases beyond rounding, by site: clipped, rounded to 0, or room made for them."""
        if all(decision.bias_of is None for decision in self.plan.decisions.values()):
            return {}
        return bias_remarks(self.snapshot(), self.stored_floats)

    def explain(self, site: str) -> str:
        """Return a sentence that says which rule decided a site and why.

        Raises:
            ConfigError: there is no such site.
        """
        return explanation(self.plan, site)

    def freeze(self, match: str = "*", *, values: bool = False) -> int:
        """Freeze the encodings of all matching sites and return their number. No verb changes a frozen encoding.

        Layer solvers do not round weights whose encoding is frozen. Training still changes their float values.

        Args:
            match: a pattern of owners or sites, a site, `weights` or `activations`; sites that share an encoding
                freeze it for all.
            values: also freeze the values of matching weights and biases, float ones too: they are not trained, and a
                verb that would change them raises an error. They count in the result.

        Raises:
            ConfigError: nothing matches, or only sites without an encoding of their own; with `values`, none of a
                stored tensor.
            CalibrationError: a site that matches has no encoding yet.
        """
        stored = matched_values(self.plan, match) if values else frozenset()
        own = any(self.plan.decisions[site].quantized for site in stored)
        if stored and not own:
            self.frozen_values |= stored  # float: there is no encoding to freeze
            return len(stored)
        state, count = with_frozen(self.snapshot(), match, True)
        if values and not stored:
            raise ConfigError(f"freeze({match!r}, values=True) matches no weight and no bias; leave values= out")
        self.restore(state)
        self.frozen_values |= stored
        return count + len(stored)

    def unfreeze(self, match: str = "*") -> int:
        """Undo `freeze` for all matching sites, values too; return the number of encodings and frozen values.

        Raises:
            ConfigError: nothing matches, or only sites without an encoding of their own.
        """
        stored = matched_values(self.plan, match) & self.frozen_values
        count = 0
        if not stored or any(self.plan.decisions[site].quantized for site in stored):
            state, count = with_frozen(self.snapshot(), match, False)
            self.restore(state)
        self.frozen_values -= stored
        return count + len(stored)

    def set_precision(
        self,
        match: str,
        dtype: DType | str | None = None,
        *,
        weight: ElementType | str | None = None,
        activation: ElementType | str | None = None,
        bias: DType | str | None = None,
    ) -> Report:
        """Change the dtype of all matching sites, as one more rule of the config would.

        Sites with an unchanged spec keep their encodings; the others derive theirs from the range that the old one
        covered (weights from their values), so that the sim can be used at once.

        Args:
            match: a pattern of owners or sites, or a site.
            dtype: applies to whatever it suits: a float dtype to weights, activations and biases; a signed one of 8
                bits or fewer to weights; an unsigned one to activations; float8 and float4 to both. At a site: to it.
            weight: dtype of weights.
            activation: dtype of activations, inputs and outputs.
            bias: int32 or a float dtype.

        Returns:
            Rows `site`, `before`, `after`, `encoding` (found, uncalibrated or none) of the changed sites.

        Raises:
            ConfigError: nothing matches or changes, or the dtype is ambiguous; the sim is unchanged.
        """
        keywords = {"weight": weight, "activation": activation, "bias": bias}
        before = self.snapshot()
        config, chosen = precision_config(before.plan, before.config, match, dtype, keywords, self.folded)
        after = self.planned(config)
        report = precision_report(before, after, match, chosen)
        with put_back_on_error(self), without_shifts(self, rounds=False):
            self.restore(after)
        return report

    def leave_float(
        self,
        report: Report,
        ranges: Mapping[str, Range],
        parts: Parts,
        unreached: Mapping[str, str] = MappingProxyType({}),
    ) -> Report:
        """Make those sites float that no grid of their range can serve: a divisor near 0, an angle of many turns.

        A sim that was opened from a Q/DQ file is unchanged.

        Args:
            report: of the calibration that has just set the encodings.
            ranges: site -> observed range.
            parts: (site of an input, axis) -> largest magnitude at each index.
            unreached: sites that no batch has reached -> why they are to be float.

        Returns:
            The report, with the reason as the note of each of these sites, and a note where a grid erases a part.
        """
        before = self.snapshot()
        observed = CalibrationResult(before.plan, ranges, before.own)
        report = with_erased(report, before.plan, erased_parts(self.graph, observed, parts))
        if before.config is None:
            return report
        reasons = {**unrepresentable_sites(self.graph, observed), **unreached}
        if not reasons:
            return report
        after = self.planned(before.config, kept_float={**left_float(before.plan), **reasons})
        with put_back_on_error(self):
            self.restore(after)
        return with_left_float(report, reasons)

    def replan(self, config: QuantConfig) -> None:
        """Plan again with another config. Sites with an unchanged spec keep their encodings, the others derive theirs.

        A bias that was shifted for the rounding of its weight is restored where the weight gets another encoding.

        Raises:
            ConfigError: a rule matches nothing; the sim stays as it was.
        """
        after = self.planned(config)
        with put_back_on_error(self), without_shifts(self, rounds=False):
            self.restore(after)


def require_sim(given: Any) -> None:
    """Raise an error for anything but a sim.

    Raises:
        ConfigError: names the type, and how to make a sim.
    """
    if isinstance(given, StatefulSim):
        return
    what, remedy = type(given).__name__, "the sim that qsdk.quantize gives comes first"
    if hasattr(given, "state_dict"):
        remedy = "sim = qsdk.quantize(model, example, config) makes a sim of a module; give the sim, not its model"
    elif isinstance(given, str | PathLike):
        what, remedy = f"the path {str(given)!r}", "sim = qsdk.quantize(path, None, config) makes a sim of an ONNX file"
    raise ConfigError(f"expected a sim, got {what}; {remedy}")
