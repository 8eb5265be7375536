"""Accuracy of every form of the demo network on its 10,000 test images, in points of float.

One JSON line; targets: W8A8 within 0.3 points of float, integer-only within 0.1 of the simulation.
"""

import contextlib
import io
import json
import tempfile
from pathlib import Path

from qsdk.demo.run import run_demo


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        run_demo(folder)
        results = json.loads((Path(folder) / "results.json").read_text())
    points = {name: 100 * facts["accuracy"] for name, facts in results.items() if "accuracy" in facts}
    print(
        json.dumps(
            {
                "benchmark": "demo accuracy, points",
                "float": round(points["float"], 2),
                "w8a8_below_float": round(points["float"] - points["sim_w8a8"], 2),
                "w4a8_below_float": round(points["float"] - points["sim_w4a8"], 2),
                "onnx_below_sim": round(points["sim_w8a8"] - points["onnx_w8a8"], 2),
                "integer_below_sim": round(points["sim_w8a8"] - points["integer_w8a8"], 2),
                "integer_bytes_over_float": round(results["integer_w8a8"]["bytes"] / results["float"]["bytes"], 3),
                "targets": {"w8a8_below_float": 0.3, "integer_below_sim": 0.1},
                "parity": results["parity"],
            }
        )
    )


if __name__ == "__main__":
    main()
