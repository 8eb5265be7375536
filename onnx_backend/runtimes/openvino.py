"""OpenVINO on the CPU: what it reads, misreads and refuses, and how it is run and timed (2026.4, measured)."""

import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from onnx_backend.profiling.kernels import Kernel, Profile, precision_of
from onnx_backend.proto.graph_queries import is_quantized
from onnx_backend.proto.inputs import open_inputs
from onnx_backend.proto.model_io import with_weights
from onnx_backend.proto.nodes import node_label
from onnx_backend.readers import Readers, pair_before
from onnx_backend.runtimes.runner import SizedModel, installed_package
from onnx_backend.runtimes.runtime import Runtime
from onnx_backend.runtimes.tables import RuntimeTable, labels, off, ranges_at_run_time, wrong_readers, wrong_shift
from onnx_backend.validation.scope import Finding, error, warning
from onnx_backend.workarounds.openvino import (
    RECURRENT,
    is_behind_constants,
    is_wrong_on_codes,
    keep_constants_apart,
    keep_off_codes,
    kept_signal_stack,
)
from qsdk.core.arrays import Array
from qsdk.core.config.target import load_target
from qsdk.core.errors import ModelError

_WARM_UP = 3
_NARROW = frozenset({"i8", "u8", "i4", "u4"})  # precisions of kernels that multiply integers
_EDGES = frozenset({"Input", "Output"})

#: types of activations whose pairs it removes
_REMOVED = frozenset({"uint16", "int16"})
TABLE = RuntimeTable(
    "OpenVINO 2026.4 (CPU)",
    {
        "uint8": labels("Conv", "uint8"),
        "int8": labels("Conv", "uint8"),
        **dict.fromkeys(("uint16", "int16", "uint4"), frozenset[str]()),
    },
    {
        "uint8": {},
        # without VNNI, products of two int8 activations overflow and a ConvTranspose of them saturates
        "int8": off(255, "anywhere", labels("MatMul")) | off(11, "anywhere", labels("ConvTranspose", "int8")),
        # computed in float32: the rounding to float16 in between is dropped
        "uint16": off(28, "anywhere", labels("Cast")),
        "int16": off(14, "anywhere", labels("Cast")),
        "uint4": off(5, "input", labels("Gemm MatMul", "int8, uint8")),
    },
    shifts=frozenset({"uint32", "uint64"}),
)

#: Without the first, processors with bfloat16 compute the float parts in it. Without the second, processors with VNNI
#: quantize what Linears with stored integers for weights read, in groups of 32 and while the model runs.
AS_WRITTEN = MappingProxyType({"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})


class OpenVinoRunner:
    """A model in OpenVINO on the CPU: float parts in float32, nothing quantized that the model does not quantize.

    Before the first run, `compiled` and `request` (OpenVINO's own, which holds the counters of `PERF_COUNT`) are None.
    """

    def __init__(self, model: ModelProto, *, fixed_sizes: bool = False, **options: Any) -> None:
        """Keep a model until its first run; `options` are OpenVINO's own properties to compile it with.

        It is compiled once, as it is written, with its open axes; with fixed sizes for those that it is run on.
        """
        self.openvino = installed_package("openvino", "openvino")
        self.version = self.openvino.__version__.split("-")[0]
        self.title = f"OpenVINO {self.version}"
        self.sized, self.fixed_sizes = SizedModel(model), fixed_sizes
        self.options = {**AS_WRITTEN, **options}
        self.compiled: Any = None
        self.request: Any = None

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        given = self.sized.given(feeds)
        fixed = self.sized.for_sizes_of(given) if self.fixed_sizes else None
        if fixed is not None or self.compiled is None:
            self.compiled = self._compiled(fixed or self.sized.model)
            self.request = self.compiled.create_infer_request()
        known = {name for port in self.compiled.inputs for name in port.get_names()}
        try:
            found = self.request.infer({name: value for name, value in given.items() if name in known})
        except Exception as error:  # its exceptions are bare RuntimeErrors
            raise ModelError(f"{self.title} cannot run the model: {_in_short(error)}") from error
        return [np.array(found[port]) for port in self.compiled.outputs]

    def _compiled(self, model: ModelProto) -> Any:
        try:
            core = self.openvino.Core()
            with kept_signal_stack():
                return core.compile_model(core.read_model(model.SerializeToString()), "CPU", self.options)
        except Exception as error:  # the runtime's exceptions have no common type
            raise ModelError(f"{self.title} cannot compile the model: {_in_short(error)}") from error


def _text(value: Any) -> str:
    return str(value.astype(str) if hasattr(value, "astype") else value)


def _in_short(error: Exception) -> str:
    """Return the lines of an error that are no places in OpenVINO's sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Exception from", "Check '")))[:600]


def _profile(model: ModelProto, feeds: Mapping[str, Array], threads: int | None, repeats: int) -> Profile:
    """Return the layers that the plug-in runs, after its fusions.

    Its counters are averages over all runs, so the time of a layer is the mean of the repeats.
    """
    options: dict[str, Any] = {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
    runner = OpenVinoRunner(with_weights(model), PERF_COUNT=True, **options)
    for _ in range(_WARM_UP):
        runner.run(feeds)
    before = _average_times(runner)
    waits = []
    for _ in range(repeats):
        start = time.perf_counter()
        runner.run(feeds)
        waits.append(1e3 * (time.perf_counter() - start))
    after = _average_times(runner)
    runs = _WARM_UP + repeats
    times = {name: max(0.0, (runs * ms - _WARM_UP * before.get(name, 0.0)) / repeats) for name, ms in after.items()}
    layers = runner.compiled.get_runtime_model().get_ordered_ops()
    return Profile(runner.title, tuple(waits), _kernels(layers, times, is_quantized(model)))


def _average_times(runner: OpenVinoRunner) -> dict[str, float]:
    """Return layer -> milliseconds, a mean over all runs since the model was compiled.

    Layers of less than half a microsecond are said to be not run.
    """
    return {layer.node_name: 1e3 * layer.real_time.total_seconds() for layer in runner.request.get_profiling_info()}


def _kernels(layers: list[Any], times: Mapping[str, float], quantized: bool) -> tuple[Kernel, ...]:
    found = []
    makes: dict[str, set[str]] = {}  # layer -> types of its results
    once: set[str] = set()  # layers that are computed when the model is compiled
    for layer in layers:
        name, facts = layer.get_friendly_name(), {key: _text(value) for key, value in layer.get_rt_info().items()}
        makes[name] = set(facts["outputPrecisions"].split(","))
        inputs = tuple(port.get_source_output().get_node().get_friendly_name() for port in layer.inputs())
        if facts["layerType"] == "Const" or (inputs and once.issuperset(inputs)):
            once.add(name)
        if name in once or facts["layerType"] in _EDGES:
            continue
        precision = precision_of(
            facts["layerType"],
            {made for source in inputs for made in makes[source]},
            makes[name],
            from_codes=quantized,  # sizes are computed when the model is compiled
            in_integers=facts["runtimePrecision"] in _NARROW,
        )
        origins = tuple(filter(None, facts["originalLayersNames"].split(",")))
        found.append(Kernel(name, facts["layerType"], inputs, (name,), origins, precision, times.get(name, 0.0)))
    return tuple(found)


def _findings(model: ModelProto) -> Iterator[Finding]:
    known = Readers(model.graph)
    yield from _quantized_by_the_runtime(model, known)
    yield from _behind_constants(model, known)
    for node in model.graph.node:
        yield from ranges_at_run_time(node)
        if is_wrong_on_codes(node, known) and pair_before(node, known) is not None:
            problem = f"the runtime computes {node.op_type} on codes, wrong for some sizes and forms of pairs"
            yield error(node_label(node), "dialect", problem, 'export with dialect="openvino", which keeps it apart')
        if node.op_type in RECURRENT and pair_before(node, known) is not None:
            problem = f"the runtime does not compile {node.op_type} behind 8 bits, or computes it wrong without a word"
            remedy = 'give it and what it reads 16 bits, .override("its name", activation="uint16"), or leave it float'
            yield error(node_label(node), "dialect", problem, remedy)
        yield from wrong_shift(node, known, TABLE)
        if node.op_type == "QuantizeLinear" and known.dtype(node) in _REMOVED:
            yield from _unclipped(node, known)
        yield from wrong_readers(node, known, TABLE)


def _quantized_by_the_runtime(model: ModelProto, known: Readers) -> Iterator[Finding]:
    """Yield one warning for all Linears with stored integers for weights that do not run in integers."""
    found = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm") and _is_decompressed(node, known)]
    if found:
        problem = (
            f"by default the runtime quantizes to 8 bits what this layer reads ({len(found)} such layers in the file), "
            "in groups of 32 and while it runs, on processors with VNNI"
        )
        remedy = 'compile the model with {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}, as check_parity does'
        yield warning(node_label(found[0]), "session", problem, remedy)


def _behind_constants(model: ModelProto, known: Readers) -> Iterator[Finding]:
    """Yield one warning for all pairs behind biases and other constants in a file with open axes."""
    found = [node for node in model.graph.node if node.op_type == "QuantizeLinear" and is_behind_constants(node, known)]
    if found and (opened := open_inputs(model)):
        problem = (
            f"{', '.join(opened)} has open axes, with which the runtime may add the first of several biases or "
            f"constants in front of this pair for all channels, without a word ({len(found)} such pairs in the file)"
        )
        remedy = 'export with dialect="openvino", which keeps them apart, or with shapes={"name": sizes}'
        yield warning(node_label(found[0]), "dialect", problem, remedy)


def _is_decompressed(layer: NodeProto, known: Readers) -> bool:
    """Return True if the runtime turns a Linear's stored integers into floats: they, or the inputs, are not 8 bits."""
    weight = known.weight(layer.input[1]).removesuffix(" blocks")
    return weight in ("int4", "uint4") or (weight in ("int8", "uint8") and pair_before(layer, known) is None)


def _unclipped(quantize: NodeProto, known: Readers) -> Iterator[Finding]:
    maker = known.makers.get(quantize.input[0])
    if maker is None or maker.op_type != "Clip":
        problem = f"the runtime removes pairs of {known.dtype(quantize)}, and values beyond their range then pass"
        yield error(node_label(quantize), "clip", problem, 'export with dialect="openvino", which clips them')


def _keep_constants_apart(model: ModelProto) -> None:
    if open_inputs(model):
        keep_constants_apart(model)


OPENVINO = Runtime(
    load_target("openvino"),
    "2026.4",
    clipped=_REMOVED,
    finish=keep_off_codes,
    with_sizes=_keep_constants_apart,
    findings=_findings,
    table=TABLE,
    open=OpenVinoRunner,
    open_part=lambda model: OpenVinoRunner(model, fixed_sizes=True),
    time=_profile,
)
