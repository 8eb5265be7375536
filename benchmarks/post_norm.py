"""MiniLM at W8A8, every site 8 bits with one scale per tensor: what `rotate` is worth once norms have no gain.

A table in Markdown: the cosine to the float model's outputs on 40 sentences, and the passes (processor time in float
forward passes over the 32 sentences that it is calibrated on). MiniLM is a post-norm model: the outputs of its norms
are the residual stream, so that their gains cannot move into the layers behind, and `rotate` leaves the stream as it
is. A norm without gain, followed by a Linear that holds the gain on its diagonal, is the same function. `rotate` turns
what is before and behind that Linear, whose weight takes up both rotations. Target: 0.99 in at most 10 passes.
"""

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import qsdk

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text

METHODS = ("min_max", "mse")


def gain_apart(norm: nn.LayerNorm) -> nn.Sequential:
    """A LayerNorm whose gain is 1, and a Linear that has the gain and the shift."""
    size = len(norm.weight)
    plain, layer = nn.LayerNorm(size, norm.eps), nn.Linear(size, size)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(norm.weight))
        layer.bias.copy_(norm.bias)
    return nn.Sequential(plain, layer)


def outputs(function: Callable[..., Tensor], batches: list[dict[str, Tensor]]) -> Tensor:
    with torch.no_grad():
        return torch.cat([function(**batch) for batch in batches])


def main() -> None:
    model = zoo_text.mini_lm()
    batches = zoo_text.sentences(zoo_text.reviews(72)[0], length=64, size=8)
    given, test = batches[:4], batches[4:]
    exact = outputs(model, test)
    begun = time.process_time()
    outputs(model, given)
    one_pass = time.process_time() - begun
    apart = copy.deepcopy(model)
    for path, norm in list(apart.named_modules()):
        if isinstance(norm, nn.LayerNorm):
            apart.set_submodule(path, gain_apart(norm))
    print("| model | verbs | cosine | passes |\n|---|---|---|---|")

    def row(name: str, verbs: str, cosine: float, spent: float) -> None:
        print(f"| {name} | {verbs} | {cosine:.4f} | {spent / one_pass:.1f} |", flush=True)

    row("gains apart, float", "", zoo_text.cosine(exact, outputs(apart, test)), 0.0)
    for name, module in {"as it is": model, "gains apart": apart}.items():
        sim = qsdk.quantize(module, given[0], qsdk.w8a8())
        turned = 0.0
        if module is apart:
            begun = time.process_time()
            qsdk.rotate(sim, progress=False)
            turned = time.process_time() - begun
        for method in METHODS:
            begun = time.process_time()
            qsdk.calibrate(sim, given, method=method, progress=False)
            spent = turned + time.process_time() - begun
            verbs = f"rotate, {method}" if turned else method
            row(name, verbs, zoo_text.cosine(exact, outputs(sim, test)), spent)


if __name__ == "__main__":
    main()
