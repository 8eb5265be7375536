"""How many wrong files `check_parity` passes: one stored number or one op of an exported model is another one.

One JSON line: `tried` corruptions (drawn by a seed from all that there are of small exports of both doors: images
and a transformer block at W8A8, W4A8 and W8A16, with float16 and float parts, with weights alone), `missed` of
them, and `elsewhere`: found, while no row names the place; `refused` are no valid
files any more. Take the number to try and the seed as arguments.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import corrupted_models


def main(count: int = 300, seed: int = 0) -> None:
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(seed)
    names = list(corrupted_models.CONFIGS)
    counts = {"found": 0, "refused": 0, "elsewhere": 0, "missed": 0}
    for place, name in enumerate(names):
        share = count // len(names) + (place < count % len(names))
        with tempfile.TemporaryDirectory() as folder:
            case = corrupted_models.exported(name, str(Path(folder) / "model.onnx"))
        for corruption, _ in zip(corrupted_models.corruptions(case.model, rng), range(share), strict=False):
            found = corrupted_models.verdict(case, corruption)
            counts[found] += 1
            if found not in ("found", "refused"):
                print(f"{found}: {name}, {corruption.label}", file=sys.stderr)
    tried = sum(counts.values())
    print(json.dumps({"benchmark": "corruptions", "tried": tried, **counts}), flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
