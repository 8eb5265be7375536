"""Few bits after training: accuracy lost by rounding, by AdaRound and by blocks, in the papers' form.

`python benchmarks/few_bits.py demo --bits=W4A8,W4A4,W3A3,W2A4` prints one JSON line: for each pair of bits and each
method `drop`, the points of accuracy on the test images below the float network, `sqnr_db` of the logits, `changed`,
the share of images in % whose class is another than float's, and `passes`, the processor time of the verb in float
passes over the calibration data. Every method starts from ranges by `mse` for activations and by min-max for weights;
the first and the last layer have 8 bits, as in the papers. Networks: `demo`, and `resnet14` and `mobile`, which
`ptq_networks.py` trains. `--methods="adaround;blocks, dropping"` measures a few; `--images=256` calibrates on fewer
than 512 images, `--test=2000` tests on fewer than 10,000, `--iterations=100` is fewer steps per block than 200.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ptq_measure import float_pass, one_thread, outputs, seconds
from ptq_networks import calibration, trained
from ptq_seeds import compared
from torch import nn

import qsdk
from qsdk.core.planning.plan import Decision
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

Work = Callable[[Any, list[Any]], object]
BITS = {"W4A8": (4, 8), "W4A4": (4, 4), "W3A3": (3, 3), "W2A4": (2, 4)}


def verb(name: str, **how: Any) -> Work:
    """Return a verb with its options."""
    return lambda sim, batches: getattr(qsdk, name)(sim, batches, progress=False, **how)


def both(scales: str) -> Work:
    """Return `seq_mse` and then `adaround`."""
    first, second = verb("seq_mse"), verb("adaround", scales=scales)
    return lambda sim, batches: (first(sim, batches), second(sim, batches))


def methods(iterations: int) -> dict[str, Work]:
    """Return what is compared."""
    blocks = partial(verb, "tune_blocks", iterations=iterations)
    return {
        "nearest": lambda sim, batches: None,
        "gptq": verb("gptq"),
        "adaround": verb("adaround"),
        "seq_mse, adaround": both("search"),
        "adaround, fixed ranges": verb("adaround", scales="fixed"),
        "seq_mse, adaround, fixed ranges": both("fixed"),
        "blocks": blocks(),
        "blocks, dropping": blocks(drop=0.5),
        "blocks, Fisher": blocks(weighting="fisher"),
        "blocks, dropping, Fisher": blocks(drop=0.5, weighting="fisher"),
        "blocks, all": blocks(learn="all"),
        "blocks, all, dropping": blocks(learn="all", drop=0.5),
    }


def config(model: nn.Module, example: Any, weight: int, activation: int) -> qsdk.QuantConfig:
    """Return so many bits, but 8 for the layers whose weights are used first and last."""
    few = qsdk.w4a8().override("*", weight=f"int{weight}", activation=f"uint{activation}")
    plan = qsdk.quantize(model, example, few).plan.decisions.values()
    weights: list[Decision] = [d for d in plan if d.kind == "weight" and d.quantized]
    ends = [d.site.rpartition(":")[0] for d in (weights[0], weights[-1])]
    first = few.override(ends[0], weight="int8").override(ends[1], weight="int8")
    inputs = [d.site for d in plan if d.kind == "input"]
    for site in inputs:
        first = first.override(site, activation="uint8")
    return first


def measured(
    name: str, bits: list[str], chosen: list[str], images: int, iterations: int, tested: int
) -> dict[str, Any]:
    """Return the rows of a network."""
    model = load_pretrained() if name == "demo" else trained(name)
    data, batches = load(), calibration(images)
    test, labels = (
        list(torch.split(torch.from_numpy(data.test_images[:tested]), 500)),
        torch.from_numpy(data.test_labels[:tested]),
    )
    exact, unit = outputs(model, test), float_pass(model, batches)
    works, rows = methods(iterations), dict[str, Any]()
    for pair in bits:
        own = config(model, batches[0], *BITS[pair])
        for method in chosen or works:
            sim = qsdk.quantize(model, batches[0], own)
            qsdk.calibrate(sim, batches, method="mse", weight_method="min_max", progress=False)
            spent = seconds(partial(works[method], sim, batches))
            row = {**compared(exact, outputs(sim, test), labels), "passes": spent / unit}
            row.pop("noise")
            rows.setdefault(pair, {})[method] = {key: round(value, 2) for key, value in row.items()}
            print(name, pair, method, rows[pair][method], file=sys.stderr, flush=True)
    return rows


def main(*given: str) -> None:
    one_thread()
    options = dict(text[2:].split("=", 1) for text in given if text.startswith("--"))
    bits = options.get("bits", ",".join(BITS)).split(",")
    chosen = [name for name in options.get("methods", "").split(";") if name]
    images, iterations = int(options.get("images", 512)), int(options.get("iterations", 200))
    tested = int(options.get("test", 10_000))
    for name in [text for text in given if not text.startswith("--")] or ["demo"]:
        found = measured(name, bits, chosen, images, iterations, tested)
        print(
            json.dumps({"benchmark": "few_bits", "network": name, "images": images, "tested": tested, "bits": found}),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
