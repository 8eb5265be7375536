"""Recipes for language models: the perplexity of stories15M after each, on 8 stories of 128 tokens, over that in float.

A table in Markdown. Calibrated by min-max on 8 other stories that the float model told. `all` quantizes every tensor,
as a chip of integers needs it; `linear` quantizes what linear layers read, and the cache's keys and values, as servers
of language models do (`only_linear=True`). `python benchmarks/recipes.py W4A8KV8` runs the recipes of one name. Target:
W4A8KV8 within 3 % of float.
"""

import argparse
import gc
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import qsdk

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text


@dataclass(frozen=True)
class Recipe:
    """A config, and the verbs that follow `quantize` and `calibrate`."""

    name: str
    config: qsdk.QuantConfig
    verbs: tuple[str, ...] = ()

    @property
    def quantized(self) -> str:
        """Return which tensors the config quantizes."""
        if self.config.activation == qsdk.float32:
            return "weights"
        return "linear" if self.config.only_linear else "all"


W4A8, W4A8KV8 = qsdk.w4a8(block_size=32), qsdk.w4a8(block_size=32, kv_cache="int8")
RECIPES = [
    Recipe("W8A8", qsdk.w8a8()),
    Recipe("W8A8", qsdk.w8a8(), ("rotate", "smooth_quant")),
    Recipe("W8A8", replace(qsdk.w8a8(), only_linear=True)),
    Recipe("W8A8", replace(qsdk.w8a8(), only_linear=True), ("rotate", "smooth_quant")),
    Recipe("W4A16", qsdk.weight_only("int4", block_size=32)),
    Recipe("W4A16", qsdk.weight_only("int4", block_size=32), ("gptq",)),
    Recipe("W4A16", qsdk.weight_only("int4", block_size=32), ("awq", "gptq")),
    Recipe("W4A8", W4A8, ("rotate", "gptq")),
    Recipe("W4A8", replace(W4A8, only_linear=True), ("rotate", "gptq")),
    Recipe("W4A8KV8", replace(W4A8KV8, only_linear=True)),
    Recipe("W4A8KV8", replace(W4A8KV8, only_linear=True), ("gptq",)),
    Recipe("W4A8KV8", replace(W4A8KV8, only_linear=True), ("smooth_quant", "gptq")),
    Recipe("W4A8KV8", replace(W4A8KV8, only_linear=True), ("rotate", "gptq")),
    Recipe("W4A8KV8", W4A8KV8, ("rotate", "gptq")),
]


def applied(recipe: Recipe, model: torch.nn.Module, heard: list[dict[str, torch.Tensor]]) -> qsdk.QuantSim:
    sim = qsdk.quantize(model, heard[0], recipe.config)
    qsdk.calibrate(sim, heard, progress=False)
    for verb in recipe.verbs:
        options = {"method": "learned"} if verb == "rotate" else {}
        getattr(qsdk, verb)(sim, heard, progress=False, **options)
    return sim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    model = zoo_text.stories()
    tokens = zoo_text.told(zoo_text.NextToken(model).eval(), 16, 128)
    heard = [{"input_ids": part} for part in tokens[8:].split(4)]
    told = tokens[:8]
    exact = qsdk.perplexity(model, told, batch_size=8)
    print("| recipe | quantized | verbs | perplexity | over float |\n|---|---|---|---|---|")
    print(f"| float | | | {exact:.3f} | |", flush=True)
    for recipe in RECIPES:
        if names and recipe.name not in names:
            continue
        started = time.perf_counter()
        value = qsdk.perplexity(applied(recipe, model, heard), told, batch_size=8)
        verbs = ", ".join(recipe.verbs).replace("rotate", "rotate learned")
        row = f"| {recipe.name} | {recipe.quantized} | {verbs} | {value:.3f} | {100 * (value / exact - 1):+.1f} % |"
        print(row, flush=True)
        print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
