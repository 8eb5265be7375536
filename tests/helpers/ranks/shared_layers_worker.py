"""One of several processes that improve sims together: `python shared_layers_worker.py rank world_size store out`."""

import copy
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from rank_group import in_process_group
from torch import Tensor, nn
from torch_models import seeded

import qsdk

VERBS = {"seq_mse": qsdk.seq_mse, "gptq": qsdk.gptq, "adaround": qsdk.adaround}
BATCHES = 8


class Mixed(nn.Module):
    """Convolutions, one with groups, two layers that read one input, and one that is called twice: [N, 3, 12, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.q, self.k, self.twice = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 300)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.deep(torch.relu(self.stem(x)))).flatten(2)
        x = self.q(x) * torch.sigmoid(self.k(x))
        found: Tensor = self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))
        return found


def sims() -> dict[str, Any]:
    """A calibrated sim of either side, the same in every process."""
    torch.manual_seed(0)
    model, x = Mixed().eval(), seeded(4, 3, 12, 12)
    stream = io.BytesIO()
    plain = nn.Sequential(model.stem, nn.ReLU(), nn.Flatten(), nn.Linear(800, 20), nn.ReLU(), nn.Linear(20, 9)).eval()
    torch.onnx.export(plain, (x,), stream, dynamo=True, dynamic_shapes=({0: torch.export.Dim("n")},), verbose=False)
    proto = onnx.load_from_string(stream.getvalue())
    return {"torch": qsdk.quantize(model, x, "w4a8"), "onnx": qsdk.quantize(proto, None, "w4a8")}


def digest(sim: Any) -> str:
    """Of all that is stored: the values that were given, and the encodings."""
    stored = sim.stored_floats([site for site, made in sim.plan.decisions.items() if made.kind in ("weight", "bias")])
    result = hashlib.sha256()
    for site, values in sorted(stored.items()):
        result.update(site.encode() + np.ascontiguousarray(values).tobytes())
    for site, encoding in sorted(sim.encodings.items()):
        result.update(site.encode() + encoding.scale.tobytes() + encoding.zero_point.tobytes())
    return result.hexdigest()


def improved(rank: int, size: int) -> dict[str, Any]:
    """Calibrate and improve on this rank's share of the batches."""
    batches = [seeded(4, 3, 12, 12, seed=seed) for seed in range(BATCHES)][rank::size]
    result = {}
    for door, sim in sims().items():
        data = batches if door == "torch" else [x.numpy() for x in batches]
        qsdk.calibrate(sim, data, progress=False)
        for name, verb in VERBS.items():
            own = copy.deepcopy(sim)
            report = verb(own, data, progress=False)
            errors = [row["error_after"] for row in report.rows]
            result[f"{door} {name}"] = {"digest": digest(own), "errors": errors, "before": digest(sim)}
    return result


def main() -> None:
    """Write down what was found."""
    rank, size, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    found = in_process_group(lambda: improved(rank, size), rank=rank, size=size, store=store)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
