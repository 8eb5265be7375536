"""Time a model in OpenVINO's CPU plug-in, by its own counters."""

import time
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.other_runtimes.openvino_runner import OpenVinoRunner
from onnx_backend.profiling.kernels import Kernel, Profile, precision_of
from onnx_backend.proto.graph_queries import is_quantized
from onnx_backend.proto.model_io import with_weights

_WARM_UP = 3
_NARROW = frozenset({"i8", "u8", "i4", "u4"})  # precisions of kernels that multiply integers
_EDGES = frozenset({"Input", "Output"})


def profile_in_openvino(
    model: ModelProto, feeds: Mapping[str, npt.NDArray[Any]], *, threads: int | None, repeats: int
) -> Profile:
    """Return the layers that the plug-in runs, after its fusions; see `profile_in_onnxruntime`.

    Its counters are averages over all runs, so the time of a layer is the mean of the repeats.

    Raises:
        ConfigError: OpenVINO is not installed.
        ModelError: it cannot compile or run the model.
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


def _text(value: Any) -> str:
    return str(value.astype(str) if hasattr(value, "astype") else value)
