"""What a sim of either door can do: tell its encodings and reasons, freeze, change precision, plan again."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

import numpy.typing as npt

from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import CalibrationError, ConfigError
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.folded_norms import FoldedNorm
from qsdk.core.numerics.dtypes import DType, WeightType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.coverage import explanation
from qsdk.core.planning.plan import Plan
from qsdk.core.ranges.ranges import Range
from qsdk.core.ranges.too_coarse import Observed, left_float, too_coarse
from qsdk.core.report import Report
from qsdk.core.sims.bias_remarks import bias_remarks, with_left_float
from qsdk.core.sims.corrected_biases import OriginalBiases, without_shifts
from qsdk.core.sims.methods import Methods
from qsdk.core.sims.replan import precision_config, precision_report
from qsdk.core.sims.state import SimState, matched_values, put_back_on_error, with_frozen


class StatefulSim(ABC):
    """A sim that gives its state and takes another one.

    Attributes:
        plan: what was decided for every site.
        graph: that it was planned from.
        methods: how it was calibrated the last time; the defaults where it was not.
        original_biases: what biases were that layer solvers have shifted.
        frozen_values: sites of stored tensors that no verb changes.
    """

    plan: Plan
    graph: Graph
    methods: Methods = Methods()
    original_biases: OriginalBiases
    frozen_values: frozenset[str] = frozenset()

    @abstractmethod
    def ready(self) -> dict[str, bool]:
        """Quantized site -> whether there is an encoding to quantize with."""

    @abstractmethod
    def encodings_where_ready(self) -> dict[str, Encoding]:
        """Site -> encoding, without the sites that have none yet."""

    @abstractmethod
    def snapshot(self, *, weights: bool = False) -> SimState:
        """The state as it is: config, plan and encodings, and with `weights` the stored tensors as well."""

    @abstractmethod
    def restore(self, state: SimState) -> None:
        """Be again what a snapshot says."""

    @abstractmethod
    def planned(self, config: QuantConfig, *, coarse: Mapping[str, str] | None = None) -> SimState:
        """The state that another config leads to, without data; see `qsdk.core.sims.replan.replanned`."""

    @abstractmethod
    def stored_floats(self, sites: Collection[str]) -> dict[str, npt.NDArray[Any]]:
        """Site -> float values of the stored tensors at these sites, as far as they are stored."""

    @abstractmethod
    def store_floats(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Give the stored tensors at sites other values of the same shape: the counterpart of `stored_floats`.

        Raises:
            ModelError: nothing is stored at a site, or in another shape; nothing is changed then.
        """

    @abstractmethod
    def stored_by_name(self, name: str) -> npt.NDArray[Any] | None:
        """The stored tensor that the graph calls so, with or without a site; None where there is none."""

    @property
    @abstractmethod
    def folded_norms(self) -> dict[str, FoldedNorm]:
        """Owner of a layer -> what the BatchNorm said that was folded into it, as far as it is still true."""

    @property
    @abstractmethod
    def folded(self) -> Collection[str]:
        """The owners of the BatchNorms that were folded."""

    @property
    def encodings(self) -> dict[str, Encoding]:
        """Site -> encoding for every quantized site: own, shared and derived.

        Raises:
            CalibrationError: lists the sites that have none.
        """
        missing = [site for site, ready in self.ready().items() if not ready]
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise CalibrationError(f"these sites have no encoding: {shown}; call qsdk.calibrate(sim, batches) first")
        return self.encodings_where_ready()

    def bias_remarks(self) -> dict[str, str]:
        """Site -> what its int32 grid does to a bias beyond rounding it: clipped, rounded to 0, or room made for it."""
        return bias_remarks(self.snapshot(), self.stored_floats)

    def explain(self, site: str) -> str:
        """Say which rule decided a site and why.

        Raises:
            ConfigError: there is no such site.
        """
        return explanation(self.plan, site)

    def freeze(self, match: str = "*", *, values: bool = False) -> int:
        """Freeze the encodings of all sites that match: neither calibrated, trained nor searched; gives their number.

        What layer solvers round, they leave where the encoding is frozen. Training goes on to change the weights.

        Args:
            match: a pattern of owners or sites, a site, `weights` or `activations`; sites that share an encoding
                freeze it for all.
            values: freeze the values of weights and biases that match as well, float ones too: they are not trained,
                and a verb that cannot leave them is refused. Gives their number too.

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
        """Take `freeze` back for all sites that match, values too; gives the number of encodings and frozen values.

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
        weight: WeightType | str | None = None,
        activation: DType | str | None = None,
        bias: DType | str | None = None,
    ) -> Report:
        """Change the dtype of all sites that match, as one more rule of the config would.

        Sites whose spec stays keep their encodings; the others derive theirs from the range that the old one covered
        (weights from their values), so that the sim can be used at once.

        Args:
            match: a pattern of owners or sites, or a site.
            dtype: for what it fits: a float dtype for weights, activations and biases; a signed one of 8 bits or fewer
                for weights; an unsigned one for activations; float8 and float4 for both. At a site: for that site.
            weight: dtype of weights.
            activation: dtype of activations, inputs and outputs.
            bias: int32 or a float dtype.

        Returns:
            Rows `site`, `before`, `after`, `encoding` (found, uncalibrated or none) of what changed.

        Raises:
            ConfigError: nothing matches or changes, or a dtype that could mean two things; the sim stays as it was.
        """
        keywords = {"weight": weight, "activation": activation, "bias": bias}
        before = self.snapshot()
        config, chosen = precision_config(before.plan, before.config, match, dtype, keywords, self.folded)
        after = self.planned(config)
        report = precision_report(before, after, match, chosen)
        with put_back_on_error(self), without_shifts(self, rounds=False):
            self.restore(after)
        return report

    def leave_coarse_float(self, report: Report, ranges: Mapping[str, Range]) -> Report:
        """Leave float what no grid of its range serves, for what reads it: a divisor near 0, an angle of many turns.

        A sim that was opened from a Q/DQ file keeps what that file quantizes.

        Args:
            report: of the calibration that has just set the encodings.
            ranges: site -> what was seen there.

        Returns:
            The report, with the reason as the note of each of these sites.
        """
        before = self.snapshot()
        if before.config is None:
            return report
        coarse = too_coarse(self.graph, Observed(before.plan, ranges, before.own))
        if not coarse:
            return report
        after = self.planned(before.config, coarse={**left_float(before.plan), **coarse})
        with put_back_on_error(self):
            self.restore(after)
        return with_left_float(report, coarse)

    def replan(self, config: QuantConfig) -> None:
        """Plan again with another config; sites whose spec stays keep their encodings, the others derive theirs.

        A bias that was shifted for the rounding of its weight is what it was where the weight gets another encoding.

        Raises:
            ConfigError: a rule matches nothing; the sim stays as it was.
        """
        after = self.planned(config)
        with put_back_on_error(self), without_shifts(self, rounds=False):
            self.restore(after)


def require_sim(given: Any) -> None:
    """Refuse what is given in the place of a sim.

    Raises:
        ConfigError: says what it is, and where a sim comes from.
    """
    if isinstance(given, StatefulSim):
        return
    what, remedy = type(given).__name__, "the sim that qsdk.quantize gives comes first"
    if hasattr(given, "state_dict"):
        remedy = "sim = qsdk.quantize(model, example, config) makes a sim of a module; give the sim, not its model"
    elif isinstance(given, str | PathLike):
        what, remedy = f"the path {str(given)!r}", "sim = qsdk.quantize(path, None, config) makes a sim of an ONNX file"
    raise ConfigError(f"expected a sim, got {what}; {remedy}")
