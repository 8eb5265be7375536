"""Weights of 2 and 3 bits by training: perplexity of stories15M over float, after each step of the recipe.

`python benchmarks/train_few_bits.py --bits=2 --block=64` prints one JSON line: `over_float`, the perplexity on 8
stories of 128 tokens that the float model told, over that of the float model, after nearest rounding (`nearest`),
`gptq` on 32 stories, on a copy, `seq_mse`, blocks with all parameters after that (`blocks`), and training of scales
alone, end to end, against the float model's logits (`scales`), and `passes`, the processor time of each in float passes
over the `--stories=256` that are learned from. Linear layers of the decoder are quantized; the table, which is the
output layer too, is float. `--iterations` are steps per block, `--steps` end to end; `--weights` trains weights end to
end too, which learns few stories by heart.
"""

import argparse
import copy
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ptq_measure import float_pass, one_thread, outputs, seconds

import qsdk

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text

LENGTH, SIZE = 128, 8


def trained(sim: Any, model: Any, batches: list[torch.Tensor], steps: int, *, weights: bool) -> None:
    """Train scales, and weights too, for so many steps by the divergence from the float model's logits."""
    with sim.training(learn_scales=True):
        groups = sim.parameter_groups(lr=5e-5, scale_lr=5e-4)
        names = dict(sim.model.named_parameters())
        scales = [parameter for name, parameter in names.items() if name.endswith("_log2")]
        chosen = groups if weights else [{"params": scales, "lr": 5e-4}]
        optimizer = torch.optim.AdamW(chosen, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for step in range(steps):
            loss = qsdk.distill_loss(sim, model, batches[step % len(batches)]).loss
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            print(f"step {step}: {float(loss.detach()):.4f}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("bits", 2), ("block", 64), ("stories", 256), ("iterations", 100), ("steps", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--weights", action="store_true")
    given = parser.parse_args()
    one_thread()
    model = zoo_text.NextToken(zoo_text.stories()).eval()
    heard, told = (zoo_text.told(model, count, LENGTH + 1, seed=seed) for count, seed in ((given.stories, 0), (8, 1)))
    batches, asked = (list(torch.split(tokens[:, :-1], SIZE)) for tokens in (heard, told))
    exact, unit = zoo_text.perplexity(outputs(model, asked), told), float_pass(model, batches, 1)
    config = qsdk.weight_only(f"uint{given.bits}", block_size=given.block)
    for pattern in ("*embed_tokens*", "*lm_head*"):
        config = config.skip(pattern)
    sim = qsdk.quantize(model, (batches[0],), config)
    qsdk.calibrate(sim, batches[:1], progress=False)
    found: dict[str, Any] = {}

    def noted(name: str, one: Any, spent: float) -> None:
        ratio = zoo_text.perplexity(outputs(one, asked), told) / exact
        found[name] = {"over_float": round(ratio, 3), "passes": round(spent / unit, 1)}
        print(name, found[name], file=sys.stderr, flush=True)

    noted("nearest", sim, 0.0)
    by_gptq = copy.deepcopy(sim)
    noted("gptq", by_gptq, seconds(lambda: qsdk.gptq(by_gptq, batches[:4], progress=False)))
    how: dict[str, Any] = {"learn": "all", "iterations": given.iterations, "batch_size": SIZE, "progress": False}
    noted("seq_mse", sim, seconds(lambda: qsdk.seq_mse(sim, batches, progress=False)))
    noted("blocks", sim, seconds(lambda: qsdk.tune_blocks(sim, batches, **how)))
    end_to_end = partial(trained, sim, model, batches, given.steps, weights=given.weights)
    noted("weights and scales" if given.weights else "scales", sim, seconds(end_to_end))
    print(json.dumps({"benchmark": "train_few_bits", **vars(given), "perplexity": round(exact, 3), **found}))


if __name__ == "__main__":
    main()
