"""Peak memory of export: one JSON line of ratios, what it needs beyond what the sim holds over the float weights.

0 would be no memory at all, 1 a second copy of the float weights. Each is measured in a process of its own, as the
growth of the largest resident size.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())

from large_models import MIB, export_peak

LAYERS = 4


def main(width: int = 5000) -> None:
    ratios = {}
    for kind in ("module", "external", "inline"):
        with tempfile.TemporaryDirectory() as folder:
            ratios[kind] = round(export_peak(kind, Path(folder), width, LAYERS), 3)
    print(json.dumps({"float_weights_mib": round(4 * width * width * LAYERS / MIB), **ratios}))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
