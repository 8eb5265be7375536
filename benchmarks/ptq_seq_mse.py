"""SeqMSE in float passes and dB: a stack of eight Linear(1024) at 4,096 rows, and MiniLM on 32 sentences.

One JSON line. `sqnr_db` is that of the outputs to float on rows that were not calibrated on, before and after.
Targets: 10 passes per channel and 6 with blocks of 64 on the stack, 10 on MiniLM (W4A16, 64 tokens a sentence), where
the reference system takes 66 to 75 (blocks: 140) for 10.4 dB (11.6).
`floor` of the stack is what stock matrix products alone take, in the same passes, whatever is done between them: two
forward passes (float and quantized), the lower triangle of the second moments, and W(X~ - X) with its product with X~,
on as many rows as the verb takes for these sums.
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
from qsdk.algorithms.problems.moments import BLOCKS
from qsdk.algorithms.solvers.seq_mse import ROWS as ROWS_PER_INPUT

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text

ROWS, BATCH, WIDTH, DEPTH = 4096, 256, 1024, 8
#: one row of so many judges and is in no sum
HELD_BACK = 4


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


def matrix_products(model: nn.Module, given: list[Any]) -> None:
    """The products that SeqMSE cannot do without, each layer with inputs of the right shape."""
    rows = ROWS_PER_INPUT * WIDTH * (HELD_BACK - 1) // HELD_BACK
    step = WIDTH // BLOCKS
    for layer in (part for part in model.modules() if isinstance(part, nn.Linear)):
        for x in given:
            for _ in range(2):
                layer(x)
        for x in given[: rows // BATCH]:
            for start in range(0, WIDTH, step):
                x[:, start : start + step].mT @ x[:, : start + step]
            (x @ layer.weight.mT).mT @ x


def floor(model: nn.Module, given: list[Any], clock: Clock, rounds: int = 3) -> float:
    """Passes of the matrix products, the median of some rounds."""
    with torch.no_grad():
        found = sorted(seconds(lambda: matrix_products(model, given), clock) for _ in range(rounds))
    return round(found[rounds // 2] / float_pass(model, given, clock=clock), 1)


def measured(
    model: nn.Module, given: list[Any], test: list[Any], config: qsdk.QuantConfig, clock: Clock
) -> dict[str, Any]:
    sim = calibrated(model, given, config)
    exact = outputs(model, test)
    before = decibels(exact, outputs(sim, test))
    unit = float_pass(model, given, clock=clock)
    spent = seconds(lambda: qsdk.seq_mse(sim, given, progress=False), clock)
    least = {"floor": floor(model, given, clock)} if isinstance(model, nn.Sequential) else {}
    return {"passes": round(spent / unit, 1), **least, "sqnr_db": [before, decibels(exact, outputs(sim, test))]}


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
