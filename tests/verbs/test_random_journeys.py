"""Whole journeys of random networks at both doors, each with a random config: nothing breaks, nothing differs."""

import random
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from compared_plans import compare_plans
from quiet import quiet  # noqa: F401  # a fixture
from random_networks import RandomNetwork, random_network
from torch import Tensor
from torch_models import seeded

from onnx_backend.qdq.narrow_regions import as_simulated
from onnx_backend.runtime.session import simulation_session
from qsdk import (
    ConfigError,
    IntegerError,
    OnnxSim,
    QuantConfig,
    QuantSim,
    calibrate,
    check_parity,
    export,
    load,
    quantize,
    save,
    to_integer,
    w4a8,
    w8a8,
    w8a16,
)
from qsdk.core.planning.graph_matching import match_graphs
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.site import owner_of
from qsdk.verbs.doors.choose import Sim

IN_CI, NIGHTLY = range(1), range(1, 64)
METHODS = ["min_max", "percentile", "mse", "tf_enhanced", "entropy"]
OP_TYPES = ["Conv", "Gemm", "MatMul", "Add", "Mul", "Concat", "Relu", "Softmax", "LayerNormalization"]
CHANGES = [{"weight": "int4"}, {"activation": "uint16"}, {"dtype": "float16"}, {"dtype": "float32"}]


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in IN_CI),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in NIGHTLY),
    ],
)
def test_a_random_network_makes_the_whole_journey_at_both_doors(seed: int, tmp_path: Path):
    config = random_config(random.Random(seed))
    module = module_journey(seed, tmp_path, config)
    file = file_journey(seed, tmp_path, config)
    require_same_plan(module, file, config)


def random_config(rng: random.Random) -> QuantConfig:
    """A preset with options, and rules by op type."""
    preset = rng.choice([w8a8, w8a8, w8a8, w4a8, w8a16])
    config = preset(block_size=rng.choice([None, None, None, 2]), symmetric_activations=rng.random() < 0.25)
    if rng.random() < 0.25:
        config = config.override("*", per_channel=False)
    if rng.random() < 0.25:
        config = replace(config, tie=False)
    for _ in range(rng.choice([0, 0, 1, 2])):
        op_type = rng.choice(OP_TYPES)
        if rng.random() < 0.5:
            config = config.override("*", op_type=op_type, activation=rng.choice(["uint16", "int8"]), optional=True)
        else:
            config = config.skip("*", rng.choice(["float16", "float32"]), op_type=op_type, optional=True)
    return config.layer("Own", "own")


# --- the doors -----------------------------------------------------------------------------------------------------


def module_journey(seed: int, folder: Path, config: QuantConfig) -> QuantSim:
    rng = random.Random(seed + 1000)
    net, example = random_network(seed)
    data = batches(example)
    layers = dict(net.named_children())
    live = [
        s.layer for s in net.live_steps() if s.layer and isinstance(getattr(layers[s.layer], "weight", None), Tensor)
    ]
    live = [name for name in live if not name.startswith(("bn", "norm"))]  # a BatchNorm that a rule names is not folded
    if live and rng.random() < 0.5:
        config = config.skip(rng.choice(live), rng.choice(["float16", "float32"]))
    sim = quantize(net, example, config)
    assert isinstance(sim, QuantSim)
    calibrate(sim, data, method=rng.choice(METHODS), progress=False)
    require_explained(sim)
    change_precision(sim, data, rng)
    require_file(sim, folder / "module.onnx", data)
    save(sim, folder / "sim.qsdk")
    back = load(folder / "sim.qsdk", random_network(seed)[0])
    assert isinstance(back, QuantSim)
    assert back.encodings == sim.encodings
    assert same(back.run(data[0]), sim.run(data[0]))
    return sim


def file_journey(seed: int, folder: Path, config: QuantConfig) -> OnnxSim:
    rng = random.Random(seed + 2000)
    net, example = random_network(seed)
    data = [as_arrays(batch) for batch in batches(example)]
    sim = quantize(float_file(net, example, folder / "float.onnx"), data[0], config)
    assert isinstance(sim, OnnxSim)
    calibrate(sim, data, method=rng.choice(METHODS), progress=False)
    require_explained(sim)
    require_file(sim, folder / "file.onnx", data)
    save(sim, folder / "sim.qsdk")
    back = load(folder / "sim.qsdk")
    assert back.encodings == sim.encodings
    assert same(back.run(data[0]), sim.run(data[0]))
    return sim


def float_file(net: RandomNetwork, example: Any, path: Path) -> Path:
    """What torch exports of the plain float module."""
    args: tuple[Tensor, ...] = (
        () if isinstance(example, dict) else example if isinstance(example, tuple) else (example,)
    )
    axes: Any = tuple({0: "batch"} for _ in args)
    if isinstance(example, dict):
        axes = {name: {0: "batch"} for name in example}
    elif net.takes_any:
        axes = (axes,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kwargs = example if isinstance(example, dict) else None
        program = torch.onnx.export(
            net, args, kwargs=kwargs, dynamo=True, opset_version=21, verbose=False, dynamic_shapes=axes
        )
    assert program is not None
    onnx.save(program.model_proto, path)
    return path


def change_precision(sim: QuantSim, data: list[Any], rng: random.Random) -> None:
    """Change one random owner; where nothing is left to change, the error says so and the sim stays as it was."""
    owner, choice = rng.choice(sorted({owner_of(site) for site in sim.plan.decisions})), rng.choice(CHANGES)
    before, refused = sim.snapshot(), ""
    try:
        sim.set_precision(owner, **choice)  # type: ignore[arg-type]
    except ConfigError as error:
        refused = str(error)
    if refused:
        assert re.search("reaches nothing|changes nothing|stays", refused), refused
        assert sim.snapshot() == before
    if not all(sim.ready().values()):  # what was float has no range to start from
        calibrate(sim, data, progress=False)


# --- what must hold --------------------------------------------------------------------------------------------------


def require_explained(sim: Sim) -> None:
    """Every row of the coverage says why."""
    for row in sim.coverage().rows:
        assert row["reason"].strip(" []"), row
        assert row["state"] in ("quantized", "tied", "float"), row


def require_file(sim: Sim, path: Path, data: list[Any]) -> None:
    """An exported file runs, agrees with its sim at every site, opens as what it was, and becomes integer-only."""
    export(sim, path)
    names = [value.name for value in onnx.load(path).graph.input]
    feeds = dict(zip(names, as_arrays(data[0]), strict=True))
    wanted = flat(sim.run(data[0]))
    for found, array in zip(ort.InferenceSession(path).run(None, feeds), wanted, strict=True):
        assert found.shape == array.shape
        assert np.isfinite(found).all()
    report = check_parity(sim, path, data, progress=False)
    assert report.summary["passed"], [row for row in report.rows if row["max_lsb"] > 0]
    back = quantize(path, None, None)
    assert back.encodings == sim.encodings
    # of islands in float16 as they are simulated: in a file as it stands, the runtime drops their roundings
    assert same(back.run(feeds), simulation_session(as_simulated(onnx.load(path))).run(None, feeds))
    export(back, path.with_name("again.onnx"))
    again = quantize(path.with_name("again.onnx"), None, None)
    assert again.encodings == sim.encodings
    assert same(again.run(feeds), back.run(feeds))
    require_integers(path, feeds)


def require_integers(path: Path, feeds: dict[str, np.ndarray]) -> None:
    """A file becomes integer-only, every operation within 1 LSB, or is refused with the nodes and their remedy."""
    out = path.with_name("integer.onnx")
    try:
        report = to_integer(path, out, data=[feeds])
    except IntegerError as error:
        graph = onnx.load(path).graph
        known = (
            {node.name for node in graph.node} | {value.name for value in graph.input} | {v.name for v in graph.output}
        )
        first, *lines = str(error).splitlines()
        assert re.match(r"\d+ nodes? cannot be made integer-only", first)
        assert lines
        if not lines[-1].startswith("  "):
            assert lines.pop().startswith("qsdk has left tensors of this file float")
        for line in lines:
            named = re.match(r"  .+? '(.+?)': .+; .+", line)
            assert named, line
            assert named[1] in known, line
        assert not out.exists()
        return
    assert report.summary["reference_equal"]
    assert report.summary["float_tensors"] == 0
    assert report.summary["operations_max_lsb"] <= 1


def require_same_plan(module: QuantSim, file: OnnxSim, config: QuantConfig) -> None:
    """Both graphs are planned alike; two Transposes that the exporter joined differ where each has its own encoding."""
    if any(row["reason"].startswith("dead") for row in module.coverage().rows):
        return  # what reaches no output stands in the way of a fold in the module, and is not in the file
    config = replace(config, tie=None)
    plans = make_plan(module.graph, config), make_plan(file.graph, config)
    found = compare_plans(module.graph, plans[0], file.graph, plans[1], match_graphs(module.graph, file.graph))
    assert not found, "\n".join(str(one) for one in found)


# --- the data --------------------------------------------------------------------------------------------------------


def batches(example: Any) -> list[Any]:
    """Three batches shaped like the example, itself among them; as the module takes them."""

    def fresh(x: Tensor, seed: int, place: int) -> Tensor:
        return x if seed == 0 else seeded(*x.shape, seed=1000 + 10 * seed + place)

    if isinstance(example, dict):
        return [{n: fresh(x, seed, i) for i, (n, x) in enumerate(example.items())} for seed in range(3)]
    if isinstance(example, tuple):
        return [tuple(fresh(x, seed, i) for i, x in enumerate(example)) for seed in range(3)]
    return [fresh(example, seed, 0) for seed in range(3)]


def as_arrays(batch: Any) -> tuple[np.ndarray, ...]:
    """The tensors of a batch in the order of the module's inputs."""
    given = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else [batch]
    return tuple(np.asarray(x) for x in given)


def flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, Tensor | np.ndarray):
        return [np.asarray(value)]
    return [x for item in (value.values() if isinstance(value, dict) else value) for x in flat(item)]


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(flat(left), flat(right), strict=True))
