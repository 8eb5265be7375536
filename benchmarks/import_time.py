"""How long `import qsdk` takes, and the first use of the PyTorch door above `import torch`: whole processes, in turn.

One JSON line; targets: 0.2 s and 0.5 s. Also in units of `import numpy` and `import torch` in the same rounds.
"""

import json
import statistics
import subprocess
import sys
import time

ROUNDS = 9
COMMANDS = {
    "nothing": "pass",
    "numpy": "import numpy",
    "qsdk": "import qsdk",
    "torch": "import torch",
    "door": "import torch, qsdk; qsdk.quantize, qsdk.calibrate",
}


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    for code in COMMANDS.values():
        seconds(code)
    rounds = [{name: seconds(code) for name, code in COMMANDS.items()} for _ in range(ROUNDS)]

    def above(name: str, base: str) -> float:
        return round(statistics.median(row[name] - row[base] for row in rounds), 3)

    def ratio(name: str, unit: str) -> float:
        own = statistics.median((row[name] - row["nothing"]) / (row[unit] - row["nothing"]) for row in rounds)
        return round(own, 2)

    print(
        json.dumps(
            {
                "benchmark": "import time",
                "import_qsdk_seconds": above("qsdk", "nothing"),
                "import_qsdk_over_numpy": ratio("qsdk", "numpy"),
                "door_above_torch_seconds": above("door", "torch"),
                "door_over_torch": ratio("door", "torch"),
                "target_seconds": {"import_qsdk": 0.2, "door_above_torch": 0.5},
            }
        )
    )


if __name__ == "__main__":
    main()
