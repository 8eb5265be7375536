"""Programs of `export(format="pt2e")` in ExecuTorch, beside those of torchao's PT2E flow with its XNNPACKQuantizer.

The networks of `pt2e_networks.py`, in two ways: by qsdk (`w8a8().for_dialect("xnnpack")`), and by `prepare_pt2e`,
the same batches and `convert_pt2e` with `XNNPACKQuantizer`, weights per channel. Install the two libraries beside qsdk:
`.venv/bin/pip install --no-deps --target FOLDER executorch==1.5.1 torchao==0.18.0 ruamel.yaml tabulate`, then
`PYTHONPATH=FOLDER .venv/bin/python benchmarks/pt2e.py`. `--only bert,vit` chooses networks, `--out rows.jsonl` keeps
the row of each (a network that has one there is not measured again), `--short` leaves out 4 bits, training, `adaround`.

One JSON line. `rows`, by network: `weights_lsb` and `activations_lsb` of the loaded program at its sites; the larger of
both, `trained_lsb`, of a sim after two steps of QAT; `pte_db`, how far ExecuTorch's runtime is off the sim on five
batches of other inputs with another number of rows; where codes differ, `pte_lsb` is by how many steps at most at a
site that is fed with the sim's values, and `first` the first one that is more than one off; `float_db` and
`theirs_db`, how far qsdk's and torchao's programs
are off the float model there, `rounded_db` qsdk's after `adaround`, and `float_db4`, `theirs_db4` with weights of 4
bits (qsdk after `adaround`); `delegated`, `theirs_delegated`, shares of ops of the model (all but quantize and
dequantize ops) that the partitioner gives to XNNPACK, and `integer`,
`theirs_integer`, of those that compute there between dequantize and quantize ops; `ops`, how many there are, and
`outside`, which of them XNNPACK does not get (and `theirs_`). `ours_error`,
`theirs_error`: what kept a flow from its end. The summary counts networks.
"""

import argparse
import contextlib
import io
import json
import logging
import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from pt2e_networks import Network, Positional, networks
from torch import Tensor, fx
from torch.export import Dim

import qsdk

SEEDS, TESTS, ROWS = range(4), range(20, 25), 3
_FUSED = ("aten.relu.", "aten.hardtanh.", "aten.clamp.")  # into the layer in front of them
NOISE_OF_FLOATS = 100.0  # dB: less is a code that differs
Row = dict[str, Any]


def decibels(wanted: Tensor, found: Tensor) -> float:
    """Return the signal-to-noise ratio in dB, at most 200."""
    noise, signal = (float(x.double().square().sum()) for x in (wanted - found, wanted))
    return 200.0 if noise == 0 else round(min(10 * math.log10(max(signal, 1e-300) / noise), 200.0), 1)


def lowered(program: torch.export.ExportedProgram) -> Any:
    """Return a program in which XNNPACK has what its partitioner takes."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    return to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])


def _is(node: fx.Node, start: str) -> bool:
    return node.op == "call_function" and f"{start}_per" in str(node.target)


def _is_work(node: fx.Node) -> bool:
    skipped = ("quantize_per", "getitem", "sym_size", "executorch_call_delegate", "alloc")
    return node.op == "call_function" and not any(name in str(node.target) for name in skipped)


def shares(edge: Any, row: Row, whose: str = "") -> None:
    """Note the shares of a program's ops that XNNPACK has, and that compute in integers there, and the ops outside."""
    module = edge.exported_program().graph_module
    inside: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.name.startswith("lowered_module"):
            inside += filter(_is_work, getattr(module, str(node.target)).original_module.graph.nodes)
    outside = [node for node in module.graph.nodes if _is_work(node)]
    whole = max(len(inside) + len(outside), 1)
    integer: list[fx.Node] = []
    for node in inside:
        fused = any(name in str(node.target) for name in _FUSED) and node.all_input_nodes[0] in integer
        given = node.all_input_nodes[1:]
        first = bool(node.all_input_nodes) and _is(node.all_input_nodes[0], "dequantize")
        if fused or (first and all(_is(x, "dequantize") or x.op == "placeholder" for x in given)):
            integer.append(node)
    row |= {f"{whose}delegated": round(len(inside) / whole, 3), f"{whose}integer": round(len(integer) / whole, 3)}
    row |= {f"{whose}outside": dict(Counter(str(node.target) for node in outside)), f"{whose}ops": whole}


def in_runtime(edge: Any) -> Callable[..., Tensor]:
    """Return a function that runs a program in ExecuTorch's runtime, for its first output."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(edge.to_executorch().buffer)
    method = program.load_method("forward")

    def run(*given: Tensor) -> Tensor:
        assert program is not None  # what it holds lives as long as it does
        found: Tensor = method.execute(list(given))[0]
        return found.clone()

    return run


def tests_of(network: Network) -> list[tuple[Tensor, ...]]:
    """Return the test batches: memory is planned for no more rows than the example has."""
    return [network.batch(seed, ROWS - 1 if network.fewer else ROWS) for seed in TESTS]


def on_tests(run: Callable[..., Tensor], network: Network) -> Tensor:
    """Return the outputs of the test batches."""
    with torch.no_grad():
        return torch.cat([run(*test) for test in tests_of(network)])


def theirs(model: torch.nn.Module, network: Network, bits: int) -> torch.export.ExportedProgram:
    """Return the program of torchao's flow."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    low = -(2 ** (bits - 1))
    config = get_symmetric_quantization_config(is_per_channel=True, weight_qmin=low, weight_qmax=-low - 1)
    given = network.batch(0, ROWS)
    axes = ({0: Dim.DYNAMIC},) * len(given)
    nested = (axes,) if isinstance(model, Positional) else axes  # `*given` is one argument, but not of what comes out
    module = torch.export.export(model, given, dynamic_shapes=nested, strict=False).module(check_guards=False)
    prepared = prepare_pt2e(module, XNNPACKQuantizer().set_global(config))
    for seed in SEEDS:
        prepared(*network.batch(seed, ROWS))
    return torch.export.export(convert_pt2e(prepared), given, dynamic_shapes=axes, strict=False)


def calibrated(model: torch.nn.Module, network: Network, config: qsdk.QuantConfig) -> Any:
    """Return a sim of a network."""
    sim = qsdk.quantize(model, network.batch(0, ROWS), config)
    qsdk.calibrate(sim, [network.batch(seed, ROWS) for seed in SEEDS], progress=False)
    return sim


def train(sim: Any, network: Network) -> None:
    """Take two steps towards smaller outputs, with scales that learn."""
    with sim.training(learn_scales=True):
        optimizer = torch.optim.SGD(sim.model.parameters(), lr=1e-3)
        for seed in SEEDS[:2]:
            optimizer.zero_grad()
            sim.model(*network.batch(seed, ROWS)).float().square().mean().backward()
            optimizer.step()


def measure_ours(model: torch.nn.Module, network: Network, row: Row, folder: Path, *, short: bool) -> None:
    """Fill in what is about qsdk's programs."""
    wanted, data = on_tests(model, network), [network.batch(seed, ROWS) for seed in SEEDS]
    sim = calibrated(model, network, qsdk.w8a8().for_dialect("xnnpack"))
    summary = qsdk.export(sim, folder / "m.pt2", format="pt2e").summary
    row |= {name: summary[f"{name.removesuffix('_lsb')}_max_lsb"] for name in ("weights_lsb", "activations_lsb")}
    simulated = on_tests(sim, network)
    row["float_db"] = decibels(wanted, simulated)
    edge = lowered(torch.export.load(folder / "m.pt2"))
    shares(edge, row)
    row["pte_db"] = decibels(simulated, on_tests(in_runtime(edge), network))
    if row["pte_db"] < NOISE_OF_FLOATS:
        tests = tests_of(network)
        parity = qsdk.check_parity(sim, folder / "m.pt2", tests, runtime="executorch", progress=False).summary
        row |= {"pte_lsb": parity["activations_max_lsb"], "first": parity.get("first_off", "")}
    if short:
        return
    qsdk.adaround(sim, data, progress=False)
    row["rounded_db"] = decibels(wanted, on_tests(sim, network))
    train(sim, network)
    trained = qsdk.export(sim, folder / "m.pt2", format="pt2e").summary
    row["trained_lsb"] = max(trained["weights_max_lsb"], trained["activations_max_lsb"])
    sim = calibrated(model, network, qsdk.w4a8().for_dialect("xnnpack"))
    qsdk.adaround(sim, data, progress=False)
    row["float_db4"] = decibels(wanted, on_tests(sim, network))


def measure_theirs(model: torch.nn.Module, network: Network, row: Row, *, short: bool) -> None:
    """Fill in what is about torchao's programs."""
    wanted = on_tests(model, network)
    for bits, name in ((8, "theirs_db"), (4, "theirs_db4"))[: 1 if short else 2]:
        with torch.no_grad():
            program = theirs(model, network, bits)
        row[name] = decibels(wanted, on_tests(program.module(check_guards=False), network))
        if bits == 8:
            edge = lowered(program)
            shares(edge, row, "theirs_")


def measure(name: str, network: Network, *, short: bool) -> Row:
    """Return the row of a network; a step that fails is named with its error."""
    row: Row = {"network": name}
    torch.manual_seed(0)
    model = network.make()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for part in ("ours", "theirs"):
            try:
                if part == "ours":
                    measure_ours(model, network, row, Path(folder), short=short)
                else:
                    measure_theirs(model, network, row, short=short)
            except Exception as error:  # other projects' code, which raises what it likes
                row[f"{part}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
    return row


def agrees(row: Row) -> bool:
    """Return whether the runtime is closer to the sim than half of the noise that quantizing makes."""
    return "pte_db" in row and row["pte_db"] >= row["float_db"] + 6.0


def summary(rows: list[Row]) -> Row:
    """Return counts over networks, and means where both flows have a number."""
    both = [row for row in rows if "theirs_delegated" in row and "delegated" in row]
    compared = {"delegated": "theirs_delegated", "integer": "theirs_integer"}
    accuracy = {"float_db": "theirs_db", "rounded_db": "theirs_db", "float_db4": "theirs_db4"}
    sites = [row for row in rows if max(row.get("weights_lsb", 9), row.get("activations_lsb", 9)) <= 1]
    found: Row = {
        "networks": len(rows),
        "sites within a step": len(sites),
        "trained sites within a step": sum(row.get("trained_lsb", 9) <= 1 for row in rows),
        "reach pte": sum("pte_db" in row for row in rows),
        "agree in the runtime": sum(map(agrees, rows)),
        "in both flows": len(both),
    }
    for ours, other in {**compared, **accuracy}.items():
        pairs = [(row[ours], row[other]) for row in both if ours in row and other in row]
        if not pairs:
            continue
        slack = 0.0 if ours in compared else 0.5
        found[f"{ours} at least theirs"] = sum(a >= b - slack for a, b in pairs)
        found[f"{ours}, mean of both"] = [round(mean(x), 3) for x in zip(*pairs, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="networks, with commas between them")
    parser.add_argument("--out", type=Path, help="a file of one row a line, which is added to")
    parser.add_argument("--short", action="store_true", help="leave out 4 bits, training and adaround")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = [name for name in options.only.split(",") if name]
    rows = (
        [json.loads(line) for line in options.out.read_text().splitlines()]
        if options.out and options.out.exists()
        else []
    )
    done = {row["network"] for row in rows}
    for name, network in networks():
        if name in done or (chosen and name not in chosen):
            continue
        rows.append(measure(name, network, short=options.short))
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(json.dumps({"benchmark": "pt2e", "summary": summary(rows), "rows": rows}))


if __name__ == "__main__":
    main()
