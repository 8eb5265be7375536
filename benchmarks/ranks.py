"""Processor time and bytes moved of each of 1, 2 and 4 processes that solve the layers of a model together.

`python benchmarks/ranks.py [--small]` prints one JSON line. The processes are gloo ranks with one thread each, and N of
them share the batches: rank r has r, r + N, r + 2 N, ... Of each verb and model:

- `time`: processor time of the busiest rank, over that of one process with all batches;
- `seconds`: processor time of one process;
- `megabytes`: what the busiest rank hands to collectives and takes from them, by kind;
- `same_bits`: whether all encodings and stored weights are those of one process, to the last bit.

`--small` takes tiny models, to see that it runs.
"""

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import qsdk
from qsdk.demo.model import load_pretrained

WORLDS = (1, 2, 4)
VERBS: dict[str, Callable[..., Any]] = {"seq_mse": qsdk.seq_mse, "gptq": qsdk.gptq, "adaround": qsdk.adaround}
MODELS = ("transformer", "cnn")
TIMEOUT = 1800


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), max(width // 64, 1)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        y = self.norm1(x)
        q, k, v = (each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return found


def model_and_data(name: str, small: bool) -> tuple[nn.Module, list[Tensor]]:
    """Return a model with random weights and 16 batches, the same in every process."""
    torch.manual_seed(0)
    if name == "cnn":
        return load_pretrained().eval(), [torch.randn(4 if small else 32, 1, 28, 28) for _ in range(16)]
    width, layers, tokens = (32, 1, 16) if small else (256, 4, 128)
    model = nn.Sequential(*(Block(width) for _ in range(layers))).eval()
    channels = torch.exp(torch.randn(width))  # some inputs are larger than others, as in trained networks
    return model, [torch.randn(4, tokens, width) * channels for _ in range(16)]


class Counted:
    """Counts the bytes that collectives move, inside a block; a stand-in for each is put into `torch.distributed`."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self._before: dict[str, Any] = {}

    def __enter__(self) -> "Counted":
        for name in ("reduce", "all_reduce", "all_gather_object", "gather_object", "broadcast_object_list"):
            self._before[name] = getattr(dist, name)
            setattr(dist, name, getattr(self, name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def reduce(self, tensor: Tensor, dst: int) -> None:
        """In from the others, out to the owner."""
        self.bytes["reduce"] += tensor.nbytes
        self._before["reduce"](tensor, dst)

    def all_reduce(self, tensor: Tensor, *args: Any) -> None:
        """In and out."""
        self.bytes["all_reduce"] += 2 * tensor.nbytes
        self._before["all_reduce"](tensor, *args)

    def all_gather_object(self, result: list[Any], value: Any) -> None:
        """In, and out of all ranks."""
        self._before["all_gather_object"](result, value)
        self.bytes["positions"] += _size(value) + sum(map(_size, result))

    def gather_object(self, value: Any, result: list[Any] | None, dst: int) -> None:
        """In, and at the owner out of all ranks."""
        self._before["gather_object"](value, result, dst)
        self.bytes["rows"] += _size(value) + sum(map(_size, result or []))

    def broadcast_object_list(self, held: list[Any], owner: int) -> None:
        """In from the owner, out to the others."""
        self._before["broadcast_object_list"](held, owner)
        self.bytes["solutions"] += _size(held)


def _size(value: Any) -> int:
    return len(pickle.dumps(value))


def digest(sim: Any) -> str:
    """Return a digest of all encodings and stored floats."""
    result = hashlib.sha256()
    for name, values in sorted(sim.model.state_dict().items()):
        result.update(name.encode() + values.numpy().tobytes())
    for site, encoding in sorted(sim.encodings.items()):
        result.update(site.encode() + encoding.scale.tobytes() + encoding.zero_point.tobytes())
    return result.hexdigest()


def measured(name: str, small: bool, rank: int, size: int) -> dict[str, Any]:
    """Run each verb on this rank's batches."""
    model, data = model_and_data(name, small)
    mine = data[rank::size]
    calibrated = qsdk.quantize(model, data[0], "w4a8")
    qsdk.calibrate(calibrated, mine, progress=False)
    result: dict[str, Any] = {}
    for verb, call in VERBS.items():
        sim = copy.deepcopy(calibrated)
        with Counted() as counted:
            start = time.process_time()
            report = call(sim, mine, progress=False)
            seconds = time.process_time() - start
        facts = {"seconds": seconds, "bytes": dict(counted.bytes), "digest": digest(sim)}
        result[f"{verb} {name}"] = {**facts, "layers": report.summary["layers"]}
    return result


def worker(rank: int, size: int, store: str, out: str, small: bool) -> None:
    """Measure everything as one of several ranks, and write it down."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    found = {case: facts for name in MODELS for case, facts in measured(name, small, rank, size).items()}
    dist.barrier()
    dist.destroy_process_group()
    Path(out).write_text(json.dumps(found))


def ranks(size: int, small: bool, folder: Path) -> list[dict[str, Any]]:
    """Start so many processes, and return what each has measured."""
    outs = [folder / f"{size}-{rank}.json" for rank in range(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__)), *(["--small"] if small else []), "--rank"]
    workers = [
        subprocess.Popen([*command, str(rank), str(size), str(folder / f"store{size}"), str(out)], env=environment)
        for rank, out in enumerate(outs)
    ]
    if any(each.wait(timeout=TIMEOUT) for each in workers):
        raise SystemExit(f"a process of {size} failed")
    return [json.loads(out.read_text()) for out in outs]


def main() -> None:
    """Measure 1, 2 and 4 processes one after the other."""
    small = "--small" in sys.argv
    if "--rank" in sys.argv:
        rank, size, store, out = sys.argv[sys.argv.index("--rank") + 1 :]
        return worker(int(rank), int(size), store, out, small)
    with tempfile.TemporaryDirectory() as folder:
        found = {size: ranks(size, small, Path(folder)) for size in WORLDS}
    result: dict[str, Any] = {}
    for case, alone in found[1][0].items():
        result[case] = {"layers": alone["layers"], "seconds": round(alone["seconds"], 2)}
        for size in WORLDS[1:]:
            own = [each[case] for each in found[size]]
            busiest = max(own, key=lambda each: sum(each["bytes"].values()))
            result[case][str(size)] = {
                "time": round(max(each["seconds"] for each in own) / alone["seconds"], 3),
                "megabytes": {kind: round(count / 1e6, 3) for kind, count in sorted(busiest["bytes"].items())},
                "same_bits": all(each["digest"] == alone["digest"] for each in own),
            }
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
