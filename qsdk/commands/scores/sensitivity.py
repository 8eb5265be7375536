"""`qsdk sensitivity`: which layers' quantization costs most, of a float model or a Q/DQ file."""

from argparse import Namespace
from typing import Any

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from onnx_backend.qdq.narrow_regions import is_anything_quantized
from onnx_backend.sim import OnnxSim
from qsdk.commands.batches import batches_of_options
from qsdk.commands.config_of_options import config_of
from qsdk.commands.printing import show
from qsdk.commands.scores.metric import scorer_of_options
from qsdk.core.errors import ConfigError
from qsdk.core.graph.graph import Graph
from qsdk.core.report import Report
from qsdk.core.site import owner_of
from qsdk.verbs.analysis.sensitivity import sensitivity
from qsdk.verbs.quantize import calibrate, quantize


def run(options: Namespace) -> int:
    """Rank the layers; a float model is quantized by the config and calibrated on the data first.

    Raises:
        ConfigError: a config for a file that is quantized already.
    """
    model = load(options.model)
    data = batches_of_options(options, inputs_of(model))
    if is_anything_quantized(model):
        if options.config or options.override or options.skip:
            raise ConfigError(f"{options.model} is quantized already; leave out --config, --override and --skip")
        sim = quantize(options.model)
    else:
        config = config_of(options.config or "w8a8", options.override, options.skip)
        sim = quantize(options.model, next(iter(data), None), config)
        calibrate(sim, data)
    scorer = scorer_of_options(options, data)

    def metric(current: Any) -> float:
        return 0.0 if scorer is None else scorer.main(current.run)

    found = sensitivity(sim, data, metric=None if scorer is None else metric, exact=options.exact, seed=options.seed)
    show(_with_modules(found, sim), as_json=options.json)
    return 0


def _with_modules(report: Report, sim: OnnxSim) -> Report:
    """Return a report with the path of its module beside each layer, where a file that torch exported has other names.

    The layer keeps the name that it has in every report; patterns of `--override` and `--skip` match both.
    """
    paths = _module_paths(sim.graph)
    rows = [{"layer": row["layer"], "module": paths.get(row["layer"], ""), **row} for row in report.rows]
    changed = any(row["module"] not in ("", row["layer"]) for row in rows)
    return Report(report.title, rows, report.summary) if changed else report


def _module_paths(graph: Graph) -> dict[str, str]:
    """Return owner of a site -> path of the module whose op makes the tensor, or reads it where it is stored."""
    found: dict[str, str] = {}
    for op in graph.ops:
        for tensor in (*op.outputs, *(index for index in op.inputs if index is not None)):
            site = graph.tensors[tensor].site
            own = tensor in op.outputs or not (tensor in graph.producer or tensor in graph.inputs)
            if op.module and site is not None and own:
                found.setdefault(owner_of(site), op.module)
    return found
