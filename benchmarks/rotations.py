"""What `rotate` is worth: perplexity of stories15M at W4A8, cosine of MiniLM at W8A8, before and after it.

One JSON line. `stories15m`: perplexity on 8 stories of 128 tokens that the float model told, calibrated on 8 others by
min-max; `weights` quantizes weights alone to 4 bits, `activations` activations alone to 8, `w4a8` both, each `plain`,
and after `rotate` by each method; `float_off` is the largest change of float logits by it, relative. MiniLM is a
post-norm model, of which `rotate` turns the attention heads alone: `cosine` to the float model's outputs.
`python benchmarks/rotations.py --gptq` adds W4A8 with gptq after either.
"""

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

import qsdk

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text

METHODS = ("hadamard", "random", "learned")
CONFIGS = {
    "weights": qsdk.w4a8().override("*", activation="float32"),
    "activations": qsdk.w8a8().override("*", weight="float32"),
    "w4a8": qsdk.w4a8(),
}


def logits(model: Any, batches: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in batches])


def stories(*, gptq: bool) -> dict[str, Any]:
    model = zoo_text.NextToken(zoo_text.stories()).eval()
    tokens = zoo_text.told(model, 16, 128)
    heard, told = tokens[8:, :-1].split(4), tokens[:8]
    asked = list(told[:, :-1].split(4))
    exact = logits(model, asked)
    result: dict[str, Any] = {"float": round(zoo_text.perplexity(exact, told), 3)}
    for name, config in CONFIGS.items():
        sim = qsdk.quantize(model, (heard[0],), config)
        qsdk.calibrate(sim, heard, progress=False)
        found = {"plain": sim}
        for method in METHODS:
            found[method] = copy.deepcopy(sim)
            qsdk.rotate(found[method], heard, method=method, progress=False)
        rotated = found["hadamard"].unwrap()
        result["float_off"] = float((logits(rotated, asked) - exact).abs().max() / exact.abs().max())
        if gptq and name == "w4a8":
            for method in ("plain", "hadamard"):
                found[f"{method} gptq"] = copy.deepcopy(found[method])
                qsdk.gptq(found[f"{method} gptq"], heard, progress=False)
        result[name] = {key: round(zoo_text.perplexity(logits(one, asked), told), 3) for key, one in found.items()}
    return result


def mini_lm() -> dict[str, Any]:
    model = zoo_text.mini_lm()
    batches = zoo_text.sentences(zoo_text.reviews(64)[0], length=64, size=16)
    sim = qsdk.quantize(model, batches[0], qsdk.w8a8())
    qsdk.calibrate(sim, batches[2:], progress=False)
    with torch.no_grad():
        exact = torch.cat([model(**batch) for batch in batches[:2]])
    plain = torch.cat([sim(**batch) for batch in batches[:2]])
    report = qsdk.rotate(sim, batches[2:], progress=False)
    after = torch.cat([sim(**batch) for batch in batches[:2]])
    cosines = {key: round(zoo_text.cosine(exact, one), 4) for key, one in (("plain", plain), ("hadamard", after))}
    return {**cosines, "rotated": report.summary["rotated"], "left": report.rows[0]["reason"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gptq", action="store_true")
    given = parser.parse_args()
    print(json.dumps({"stories15m": stories(gptq=given.gptq), "mini_lm": mini_lm()}))


if __name__ == "__main__":
    main()
