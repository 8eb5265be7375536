"""Accumulators of 16 bits for W8A8 CNNs on Fashion-MNIST: what gptq and training under the bound lose, and the proof.

`python benchmarks/accumulators.py [resnet14] [mobile] [demo] [--steps=N] [--bits=16] [--tile=N]`: one JSON line. The
networks are those of `ptq_networks.py` and the demo network; accuracies in percent on the 10,000 test images. `gptq`
sees 512 images; `trained` goes on from there for N steps of 64 images, on labels and on what the float network says
(0: not done). `proven` is the most bits that a layer's sums need by the certificate of the integer file, without the
bias.

`python benchmarks/accumulators.py --pairs "six Linear 512" "UNet"`: of networks of `deployed.py`, batch 8, the SQNR in
dB of `for_dialect("onnxruntime")`, whose sums of pairs are exact on every processor, and with `processor="vnni"`,
without and with `gptq`.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from deployed_networks import NETWORKS as DEPLOYED
from deployed_networks import settled
from ptq_networks import NETWORKS, accuracy, calibration, trained, training_set
from qat_accuracy import batches, train

import qsdk
from qsdk.core.layers.accumulators import bits_for
from qsdk.demo.model import load_pretrained
from torch_bridge.sim import QuantSim

RATE = 5e-4


def proven_bits(sim: QuantSim) -> int:
    """The bits of the widest sum of products in the certificate of the integer file."""
    with tempfile.TemporaryDirectory() as folder:
        path, integer = str(Path(folder, "model.onnx")), str(Path(folder, "model.int.onnx"))
        qsdk.export(sim, path, check=False)
        qsdk.to_integer(path, integer)
        rows = json.loads(Path(f"{integer}.certificate.json").read_text())["requantizations"]
    return max(bits_for(bound) for row in rows if "weight_bits" in row for bound in row["accumulator_bounds"])


def measured(name: str, steps: int, limits: dict[str, Any]) -> dict[str, float]:
    """The accuracies of one network."""
    network = load_pretrained() if name == "demo" else trained(name)
    data = calibration()
    sim = qsdk.quantize(network, data[0], qsdk.w8a8())
    qsdk.calibrate(sim, data, progress=False)
    result = {"float": accuracy(network), "w8a8": accuracy(sim)}
    before = max(row["bits"] for row in qsdk.analysis.accumulators(sim, tile=limits["accumulator_tile"]).rows)
    free = copy.deepcopy(sim)
    qsdk.gptq(free, data, progress=False)
    qsdk.gptq(sim, data, progress=False, **limits)
    result |= {"bits_before": before, "w8a8_gptq": accuracy(free), "gptq": accuracy(sim), "proven": proven_bits(sim)}
    if steps:
        train(sim, network, batches(*training_set(), steps, 0), RATE, RATE, limits)
        result |= {"trained": accuracy(sim), "proven_trained": proven_bits(sim)}
    best = max(result["gptq"], result.get("trained", 0.0))
    return {**{key: round(value, 2) for key, value in result.items()}, "lost": round(result["float"] - best, 2)}


def pairs(name: str) -> dict[str, float]:
    """The SQNR of one deployed network, for every processor and with VNNI, nearest and by gptq."""
    torch.manual_seed(0)
    batches = [DEPLOYED[name].batch(8, seed) for seed in range(8)]
    network = settled(DEPLOYED[name].make(), batches[0])
    with torch.no_grad():
        wanted = torch.cat([network(*batch) for batch in batches[6:]])
    result = {}
    for processor in ("any", "vnni"):
        config = qsdk.w8a8().for_dialect("onnxruntime", processor=processor)
        sim = qsdk.quantize(network, batches[0], config)
        qsdk.calibrate(sim, batches[:6], progress=False)
        for verb in ("nearest", "gptq"):
            if verb == "gptq":
                qsdk.gptq(sim, batches[:6], progress=False)
            noise = torch.cat([sim(*batch) for batch in batches[6:]]) - wanted
            ratio = wanted.square().sum() / noise.square().sum()
            result[f"{processor}, {verb}"] = round(float(10 * ratio.log10()), 1)
    return result


def main() -> None:
    if "--pairs" in sys.argv:
        torch.set_num_threads(1)
        names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
        print(json.dumps({"benchmark": "pairs, dB", **{name: pairs(name) for name in names}}))
        return
    options = dict(argument[2:].split("=") for argument in sys.argv[1:] if argument.startswith("--"))
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")] or ["demo", *NETWORKS]
    tile = options.get("tile")
    limits = {"accumulator_bits": int(options.get("bits", 16)), "accumulator_tile": None if tile is None else int(tile)}
    torch.set_num_threads(1)
    found = {name: measured(name, int(options.get("steps", 0)), limits) for name in names}
    print(json.dumps({"benchmark": "accumulators, percent", **limits, **found}))


if __name__ == "__main__":
    main()
