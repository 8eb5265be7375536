"""SeqMSE in float passes and dB: a stack of eight Linear(1024) at 4,096 rows, and MiniLM on 32 sentences.

One JSON line. `sqnr_db` is that of the outputs to float on rows that were not calibrated on, before and after.
Targets: 10 passes per channel and 6 with blocks of 64 on the stack, 10 on MiniLM (W4A16, 64 tokens a sentence), where
the reference system takes 66 to 75 (blocks: 140) for 10.4 dB (11.6).
`python benchmarks/ptq_seq_mse.py stack --threads=2` measures one of them, by the clock on more threads than one.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from ptq_measure import Clock, calibrated, decibels, float_pass, outputs, seconds
from torch import nn

import qsdk

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text

ROWS, BATCH, WIDTH, DEPTH = 4096, 256, 1024, 8


def stack() -> tuple[nn.Module, list[Any], list[Any]]:
    """The stack, with inputs whose channels are correlated and of unequal size, as those of real layers are."""
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).eval()
    mixing = torch.randn(WIDTH, WIDTH) * torch.logspace(0, -1, WIDTH)
    rows = torch.randn(2 * ROWS, WIDTH) @ mixing / WIDTH**0.5
    return model, list(rows[:ROWS].split(BATCH)), list(rows[ROWS:].split(BATCH))


def mini_lm() -> tuple[nn.Module, list[Any], list[Any]]:
    """MiniLM, 32 sentences to calibrate on and 96 others."""
    batches = zoo_text.sentences(zoo_text.reviews(128)[0], length=64, size=1)
    return zoo_text.mini_lm(), batches[:32], batches[32:]


def measured(
    model: nn.Module, given: list[Any], test: list[Any], config: qsdk.QuantConfig, clock: Clock
) -> dict[str, Any]:
    sim = calibrated(model, given, config)
    exact = outputs(model, test)
    before = decibels(exact, outputs(sim, test))
    unit = float_pass(model, given, clock=clock)
    spent = seconds(lambda: qsdk.seq_mse(sim, given, progress=False), clock)
    return {"passes": round(spent / unit, 1), "sqnr_db": [before, decibels(exact, outputs(sim, test))]}


def main(*given: str) -> None:
    names = [name for name in given if not name.startswith("--")]
    threads = next((int(name.partition("=")[2]) for name in given if name.startswith("--threads=")), 1)
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    found = {
        f"{make.__name__}_{name}": measured(*make(), config, clock)
        for make in (stack, mini_lm)
        if not names or make.__name__ in names
        for name, config in (("channel", qsdk.w4a16()), ("block_64", qsdk.w4a16(block_size=64)))
    }
    print(json.dumps({"benchmark": "ptq_seq_mse", "threads": threads, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
