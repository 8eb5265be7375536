"""How often the operations of integer-only networks differ from their Q/DQ models, each on the same inputs.

One JSON line per network at W8A8: `elements` compared, how many `differ`, and `max_lsb`. A trained YOLOv8n, MiniLM and
stories15M from the package registries; names on the command line choose among them.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

import qsdk

sys.path.insert(0, str(Path(__file__).parent))
import integer_speed
from detectors import images

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text
from pretrained_road import travelled

Made = tuple[Path, dict[str, Any]]


def yolov8n(folder: Path) -> Made:
    path = integer_speed.quantized(folder)["qsdk"]
    return path, {onnx.load(path).graph.input[0].name: images(integer_speed.SIZE)[0]}


def mini_lm(folder: Path) -> Made:
    batches = zoo_text.sentences(zoo_text.reviews(32)[0])
    road = travelled(zoo_text.mini_lm(), batches, qsdk.w8a8(), folder)
    return road.path, {name: value.numpy() for name, value in batches[0].items()}


def stories15m(folder: Path) -> Made:
    model = zoo_text.NextToken(zoo_text.stories()).eval()
    tokens = zoo_text.told(model, 4, 128)[:, :-1]
    road = travelled(model, [tokens], qsdk.w8a8(), folder)
    return road.path, {"input_ids": tokens.numpy()}


NETWORKS: dict[str, Callable[[Path], Made]] = {"yolov8n": yolov8n, "mini_lm": mini_lm, "stories15m": stories15m}


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names or NETWORKS:
        with tempfile.TemporaryDirectory() as place:
            path, batch = NETWORKS[name](Path(place))
            sizes = {key: value.shape for key, value in batch.items()}
            out = Path(place) / "integer.onnx"
            report = qsdk.to_integer(path, out, data=[batch], shapes=sizes)
            rows = json.loads(Path(f"{out}.certificate.json").read_text())["parity"]
            found = {
                "elements": sum(row["elements"] for row in rows),
                "differ": sum(row["differing"] for row in rows),
                "max_lsb": report.summary["operations_max_lsb"],
                "float_tensors": report.summary["float_tensors"],
            }
            print(json.dumps({"benchmark": "integer_parity", "network": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
