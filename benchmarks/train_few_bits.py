"""Decoders of few bits by training on text that they write themselves: perplexity of stories15M over float.

`python benchmarks/train_few_bits.py w4g32 nvfp4` prints one JSON line for each: `over_float`, the perplexity on
`--told=64` stories of 128 tokens over that of the float model, and `cpu_minutes` so far, after each step of the recipe:
`nearest` rounding; the verbs in `--verbs=gptq` (`--verbs=seq_mse,tune_blocks`: blocks with all parameters) on
`--heard=64` of the `--texts=128` texts of 256 tokens from `qsdk.train.generate_text`; and `--steps=100` of distillation
on 4 of all at a time (`--lr` of weights, `--scale-lr` of scales, 0 to leave them, cosine decay). The loss is over the
words that occur in the texts, which makes a step nearly twice as fast as one over all; the table, which is the output
layer too, is not trained.
Texts and stories are drawn with other seeds. Recipes: `w4g32`, `w4g32z` (with zero points), `w3g128`,
`w2g64` (weights alone, the table in float; in those of 4 bits it has one range of 8), `nvfp4`
(W4A4), `w4a8kv8` (a scale per channel). `--compare` prints `w8a8`: calibrated on 8 such texts, on 8 stories, and on 8
texts whose first token is any of the vocabulary, as without a `bos_token_id`.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ptq_measure import one_thread
from torch import Tensor

import qsdk

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text

LENGTH, SIZE = 256, 4


def floats(config: qsdk.QuantConfig) -> qsdk.QuantConfig:
    """Return a config with the table, which is the last layer too, in float."""
    return config.skip("*embed_tokens*").skip("*lm_head*")


RECIPES = {
    "w4g32": qsdk.weight_only("int4", block_size=32),
    "w4g32z": qsdk.weight_only("uint4", block_size=32),
    "w3g128": floats(qsdk.weight_only("uint3", block_size=128)),
    "w2g64": floats(qsdk.weight_only("uint2", block_size=64)),
    "nvfp4": replace(qsdk.block_scaled("nvfp4"), only_linear=True),
    "w4a8kv8": replace(qsdk.w4a8(kv_cache="int8"), only_linear=True),
}


def distil(sim: Any, model: Any, texts: Tensor, given: argparse.Namespace) -> None:
    """Train weights, norms and scales against the float model's logits over the words that occur."""
    head = model.lm_head.weight.detach()[torch.unique(texts)]

    def read(network: Any, batch: Any) -> Tensor:
        return network.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    sim.unfreeze()  # what `gptq` held
    with sim.training(learn_scales=given.scale_lr > 0):
        sim.model.lm_head.weight.requires_grad_(False)
        groups = sim.parameter_groups(lr=given.lr, scale_lr=given.scale_lr)
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
        for step in range(given.steps):
            rows = torch.arange(step * SIZE, (step + 1) * SIZE) % len(texts)
            batch = {"input_ids": texts[rows]}
            loss = qsdk.distill_loss(sim, model, batch, forward=read, logits=lambda hidden: hidden @ head.T).loss
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            print(f"step {step}: {float(loss.detach()):.4f}", file=sys.stderr, flush=True)


def beginnings(model: Any, told: Tensor) -> dict[str, float]:
    """Return perplexity over float at W8A8 by the texts that it was calibrated on."""
    found, exact = {}, qsdk.analysis.perplexity(model, told, batch_size=8)
    stories = [{"input_ids": part} for part in zoo_text.told(zoo_text.NextToken(model), 8, 128, seed=5).split(4)]
    own = qsdk.train.generate_text(model, 8, 128, batch_size=4, seed=6, progress=False)
    bos, model.config.bos_token_id = model.config.bos_token_id, None
    anywhere = qsdk.train.generate_text(model, 8, 128, batch_size=4, seed=6, progress=False)
    model.config.bos_token_id = bos
    for name, batches in (("stories", stories), ("own text", own), ("begun anywhere", anywhere)):
        sim = qsdk.quantize(model, batches[0], qsdk.w8a8())
        qsdk.calibrate(sim, batches, progress=False)
        found[name] = round(qsdk.analysis.perplexity(sim, told, batch_size=8) / exact, 4)
    return found


def measured(name: str, model: Any, texts: Tensor, told: Tensor, given: argparse.Namespace) -> dict[str, Any]:
    """Return what each step of a recipe gives, and the processor time until then."""
    exact, start = qsdk.analysis.perplexity(model, told, batch_size=8), time.process_time()
    batches = [{"input_ids": part} for part in texts.split(SIZE)]
    found: dict[str, Any] = {}

    def noted(step: str) -> None:
        minutes = (time.process_time() - start) / 60
        ratio = qsdk.analysis.perplexity(sim, told, batch_size=8) / exact
        found[step] = {"over_float": round(ratio, 4), "cpu_minutes": round(minutes, 1)}
        print(name, step, found[step], file=sys.stderr, flush=True)

    sim = qsdk.quantize(model, batches[0], RECIPES[name])
    qsdk.calibrate(sim, batches[:8], progress=False)
    noted("nearest")
    for verb in filter(None, given.verbs.split(",")):
        how = {"learn": "all", "iterations": given.iterations, "batch_size": 16} if verb == "tune_blocks" else {}
        getattr(qsdk, verb)(sim, batches[: given.heard // SIZE], progress=False, **how)
        noted(verb)
    if given.steps:
        distil(sim, model, texts, given)
        noted("distilled")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", help=", ".join(RECIPES))
    for name, default in (("texts", 128), ("heard", 64), ("told", 64), ("steps", 100), ("iterations", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--scale-lr", type=float, default=0.0)
    parser.add_argument("--verbs", default="gptq")
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    one_thread()
    model = zoo_text.stories()
    told = zoo_text.told(zoo_text.NextToken(model), given.told, 128, seed=2)
    if given.compare:
        print(json.dumps({"benchmark": "train_few_bits", "w8a8": beginnings(model, told)}), flush=True)
    if given.recipes:
        start = time.process_time()
        written = qsdk.train.generate_text(model, given.texts, LENGTH, batch_size=64, seed=1, progress=False)
        texts = torch.cat([batch["input_ids"] for batch in written])
        facts = {"tokens": texts.numel(), "writing, cpu_minutes": round((time.process_time() - start) / 60, 1)}
    for name in given.recipes:
        row = {"recipe": name, **facts, **measured(name, model, texts, told, given)}
        print(
            json.dumps(
                {
                    "benchmark": "train_few_bits",
                    **{key: value for key, value in vars(given).items() if key not in ("recipes", "compare")},
                    **row,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
