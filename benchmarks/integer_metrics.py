"""What integer-only networks are worth at their tasks, beside their Q/DQ models at W8A8 and float.

One JSON line per network; names on the command line choose among them. `metric` says what is counted, `decisions` of
how many; `float`, `qdq` (as written: `qsdk` simulates it so), `standard` and `onnxruntime` are points of 100; `a - qdq`
is what the integers gain, `a differs` the percentage of decisions that are others than the Q/DQ model's, `a operations
off` the share of elements in which an operation differs from the Q/DQ model's on the same inputs. Decisions
that differ are as likely to become right as wrong: where a share p of n decisions differs, `a - qdq` has a standard
error of about 100 * sqrt(p / n) points. `qdq again` is the Q/DQ model as written by other float kernels: what differs
there is the noise of float32, which a whole network compounds. Target: within 0.2 points of the Q/DQ model.

Labels are true ones but for `yolov8n` (no labelled images for it: agreement with float) and `stories15m` (the next
words of stories that the float model told). Images of ImageNet are 50 crops each of 20 photographs.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from PIL import Image
from torch import Tensor, nn

import qsdk
from onnx_backend.runtime.session import simulation_session
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

sys.path.insert(0, str(Path(__file__).parent))
import synthetic
from detectors import images

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo
import zoo_text
from fetch import FOOLBOX, NUDENET, RAPID_OCR, SILERO_VAD, fetch
from pretrained_road import travelled

Array = np.ndarray
Feed = dict[str, Array]
Run = Callable[[Feed], Array]
#: quantizes a module or a file, calibrated on batches -> the path of its Q/DQ model
Quantize = Callable[[nn.Module | Path, Sequence[Tensor | dict[str, Tensor] | Feed]], Path]
FORMS = ("standard", "onnxruntime")
TARGET = 0.2


@dataclass(frozen=True)
class Case:
    """A network and what it is worth; its points are those of the first batches too.

    Attributes:
        metric: what the points are.
        path: of the Q/DQ model.
        feeds: batches of one size.
        original: gives the float model's first output for a batch.
        decide: gives the decisions in a batch's first output.
        points: of all decisions, 0 to 100.
        counted: where a decision counts; everywhere if None.
    """

    metric: str
    path: Path
    feeds: Sequence[Feed]
    original: Run
    decide: Callable[[Array], Array]
    points: Callable[[Array], float]
    counted: Array | None = None


def measured(case: Case, folder: Path) -> dict[str, object]:
    """The points of all forms and what the integers change."""
    runs = {"float": case.original, "qdq": _runner(simulation_session(onnx.load(case.path)))}
    runs["qdq again"] = _runner(_session(case.path, exact=True))
    sizes = {name: value.shape for name, value in case.feeds[0].items()}
    off: dict[str, object] = {}
    for form in FORMS:
        out = folder / f"{form}.onnx"
        report = qsdk.to_integer(case.path, out, target=form, data=case.feeds[:1], shapes=sizes)
        assert report.summary["float_tensors"] == 0
        off[f"{form} operations off"] = report.summary["operations_differing"]
        runs[form] = _runner(_session(out))
    decided = {name: np.concatenate([case.decide(run(feed)) for feed in case.feeds]) for name, run in runs.items()}
    points = {name: case.points(found) for name, found in decided.items()}
    counted = np.ones(decided["qdq"].shape, bool) if case.counted is None else case.counted
    row: dict[str, object] = {"metric": case.metric, "decisions": int(counted.sum())}
    row |= {name: round(value, 2) for name, value in points.items()} | off
    for form in ("qdq again", *FORMS):
        row[f"{form} - qdq"] = round(points[form] - points["qdq"], 2)
        row[f"{form} differs"] = round(100 * float((decided[form] != decided["qdq"])[counted].mean()), 3)
    return row


def _session(path: Path, *, exact: bool = False) -> ort.InferenceSession:
    """Open a session; an exact one runs Q/DQ as written, at the basic level."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if exact:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.disable_double_qdq_remover", "1")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _runner(session: ort.InferenceSession) -> Run:
    first = session.get_outputs()[0].name

    def run(feed: Feed) -> Array:
        return session.run([first], feed)[0]

    return run


def _right(labels: Array) -> Callable[[Array], float]:
    return lambda decided: 100 * float((decided == labels[: len(decided)]).mean())


def _top(output: Array) -> Array:
    return output.argmax(-1)


def _of_module(
    metric: str,
    model: nn.Module,
    calibration: Sequence[Tensor | dict[str, Tensor]],
    test: Sequence[dict[str, Tensor]],
    decide: Callable[[Array], Array],
    points: Callable[[Array], float],
    quantize: Quantize,
) -> Case:
    """A case of a torch module that takes the tensors of a batch by position, named as its file names them."""
    path = quantize(model, calibration)
    names = [value.name for value in onnx.load(path).graph.input]
    feeds = [{name: t.numpy() for name, t in zip(names, batch.values(), strict=True)} for batch in test]

    def original(feed: Feed) -> Array:
        with torch.no_grad():
            return model(*(torch.from_numpy(feed[name]) for name in names)).numpy()

    return Case(metric, path, feeds, original, decide, points)


def w8a8_in(folder: Path) -> Quantize:
    """How the cases are quantized: to 8 bits, each into one file of the folder."""

    def quantize(model: nn.Module | Path, calibration: Sequence[Tensor | dict[str, Tensor] | Feed]) -> Path:
        return travelled(model, calibration, qsdk.w8a8(), folder).path

    return quantize


def _of_file(source: Path, feeds: Sequence[Feed], calibration: int, quantize: Quantize) -> tuple[Path, Run]:
    """The Q/DQ model of a float file, calibrated on the first batches, and how to run the file."""
    return quantize(source, feeds[:calibration]), _runner(_session(source))


def demo(quantize: Quantize) -> Case:
    data = load()
    test = [{"x": x} for x in torch.from_numpy(data.test_images).split(500)]
    calibration = torch.from_numpy(data.calibration_images[:256]).split(64)
    points = _right(data.test_labels)
    return _of_module("top-1 accuracy", load_pretrained(), calibration, test, _top, points, quantize)


def crops_of_photographs(count: int, *, lite: bool) -> tuple[Tensor, Array]:
    """Crops of half the area and more of each photograph, flipped by chance, float32 [20 * count, 3, 224, 224]."""
    rng, found, labels = np.random.default_rng(0), [], []
    mean, std = (zoo.LITE_MEAN, zoo.LITE_STD) if lite else (zoo.IMAGENET_MEAN, zoo.IMAGENET_STD)
    for path in sorted((fetch(FOOLBOX) / "foolbox" / "data").glob("imagenet_*")):
        with Image.open(path) as file:
            photograph = file.convert("RGB")
        for _ in range(count):
            share = np.sqrt(rng.uniform(0.5, 1.0, 2))
            width, height = (round(side * s) for side, s in zip(photograph.size, share, strict=True))
            left, top = rng.integers(photograph.width - width + 1), rng.integers(photograph.height - height + 1)
            box = (int(left), int(top), int(left) + width, int(top) + height)
            pixels = np.asarray(photograph.resize((224, 224), Image.Resampling.BILINEAR, box), np.float32) / 255
            pixels = pixels[:, :: rng.choice([-1, 1])]
            found.append(((pixels - np.float32(mean)) / np.float32(std)).transpose(2, 0, 1))
            labels.append(int(path.stem.rpartition("_")[2]))
    return torch.from_numpy(np.ascontiguousarray(np.stack(found))), np.asarray(labels)


def _imagenet(model: nn.Module, quantize: Quantize, *, lite: bool) -> Case:
    crops, labels = crops_of_photographs(50, lite=lite)
    calibration = zoo.imagenet_images(lite=lite)[0].split(5)
    test = [{"x": x} for x in crops.split(2)]
    return _of_module("top-1 accuracy", model, calibration, test, _top, _right(labels), quantize)


def mobilenet_v2(quantize: Quantize) -> Case:
    return _imagenet(zoo.mobilenet_v2(), quantize, lite=False)


def efficientnet_lite0(quantize: Quantize) -> Case:
    return _imagenet(zoo.efficientnet_lite0(), quantize, lite=True)


def _texts(count: int, most: int) -> list[str]:
    """Pieces of film reviews of a few words, at most `most` characters that PP-OCR knows."""
    words = [word for word in " ".join(zoo_text.reviews(400)[0]).split() if word.isascii()]
    found = [" ".join(words[i : i + 3]) for i in range(0, 6 * count, 3)]
    return [text for text in found if len(text) <= most][:count]


def _ocr(name: str) -> Path:
    return fetch(RAPID_OCR) / "rapidocr_onnxruntime" / "models" / f"ch_{name}_infer.onnx"


def ocr_direction(quantize: Quantize) -> Case:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 1600)
    drawn = [synthetic.line(text, rng).rotate(180 * int(up)) for text, up in zip(_texts(1600, 24), labels, strict=True)]
    pixels = np.stack([synthetic.strip(image, 192) for image in drawn])
    feeds = [{"x": pixels[i : i + 8]} for i in range(0, len(pixels), 8)]
    path, run = _of_file(_ocr("ppocr_mobile_v2.0_cls"), feeds, 16, quantize)
    return Case("top-1 accuracy (upright or not)", path, feeds, run, _top, _right(labels))


def ocr_detection(quantize: Quantize) -> Case:
    rng = np.random.default_rng(0)
    texts = _texts(480, 24)
    pages = [synthetic.page(texts[i : i + 12], rng, 320, 480) for i in range(0, 480, 12)]
    labels = np.stack([cores for _, cores in pages])
    feeds = [{"x": pixels[None]} for pixels, _ in pages]
    path, run = _of_file(_ocr("PP-OCRv4_det"), feeds, 8, quantize)

    def points(found: Array) -> float:
        return 200 * float((found & labels[: len(found)]).sum() / (found.sum() + labels[: len(found)].sum()))

    return Case("F1 of the pixels of text", path, feeds, run, lambda output: output[:, 0] > 0.3, points)


def ocr_recognition(quantize: Quantize) -> Case:
    rng = np.random.default_rng(0)
    texts = _texts(1280, 20)
    pixels = np.stack([synthetic.strip(synthetic.line(text, rng), 320) for text in texts])
    feeds = [{"x": pixels[i : i + 4]} for i in range(0, len(pixels), 4)]
    path, run = _of_file(_ocr("PP-OCRv4_rec"), feeds, 16, quantize)
    facts = {entry.key: entry.value for entry in onnx.load(_ocr("PP-OCRv4_rec")).metadata_props}
    letters = ["", *facts["character"].splitlines(), " "]

    def points(found: Array) -> float:
        read = texts[: len(found)]
        wrong = sum(_edits(_read(row, letters), text) for row, text in zip(found, read, strict=True))
        return 100 * (1 - wrong / sum(map(len, read)))

    return Case("100 - character error rate (decisions: time steps)", path, feeds, run, _top, points)


def _read(steps: Array, letters: list[str]) -> str:
    """What connectionist temporal classification reads: repetitions are one letter, 0 is none."""
    kept = steps[(steps != np.concatenate([[0], steps[:-1]])) & (steps != 0)]
    return "".join(letters[step] for step in kept).strip()


def _edits(one: str, other: str) -> int:
    """The least number of letters to insert, remove or replace."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def yolov8n(quantize: Quantize) -> Case:
    found = [image[..., ::flip] for image in images(320) for flip in (1, -1)]
    found += [np.roll(image, shift, (2, 3)) for image in found for shift in (40, 80, 120)]
    feeds = [{"images": np.ascontiguousarray(image)} for image in found]
    path, run = _of_file(fetch(NUDENET) / "nudenet" / "320n.onnx", feeds, 8, quantize)
    scores = np.concatenate([run(feed)[:, 4:] for feed in feeds])
    exact, counted = scores.argmax(1), scores.max(1) >= 0.01

    def points(decided: Array) -> float:
        return 100 * float((decided == exact[: len(decided)])[counted[: len(decided)]].mean())

    metric = "agreement with float: class of the anchors that float scores 0.01 or more"
    return Case(metric, path, feeds, run, lambda output: output[:, 4:].argmax(1), points, counted)


def mini_lm(quantize: Quantize) -> Case:
    model, trained, count = zoo_text.mini_lm(), 1000, 1000
    texts, labels = zoo_text.reviews(trained + count)
    batches = zoo_text.sentences(texts, length=64, size=8)
    cut = trained // 8
    with torch.no_grad():
        known = torch.cat([model(**batch) for batch in batches[:cut]])
    head = _logistic(known, labels[:trained])

    def positive(output: Array) -> Array:
        with torch.no_grad():
            return (head(torch.from_numpy(output))[:, 0] > 0).long().numpy()

    points = _right(labels[trained:].numpy())
    metric = "accuracy of sentiment, by logistic regression on float embeddings"
    return _of_module(metric, model, batches[:8], batches[cut:], positive, points, quantize)


def _logistic(features: Tensor, labels: Tensor) -> nn.Linear:
    """Logistic regression with a little weight decay, to its optimum."""
    torch.manual_seed(0)
    head = nn.Linear(features.shape[1], 1)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = nn.functional.binary_cross_entropy_with_logits(head(features)[:, 0], labels.float())
        found = found + 1e-3 * head.weight.square().sum()
        found.backward()
        return found

    optimizer.step(loss)  # type: ignore[arg-type]
    return head


def stories15m(quantize: Quantize) -> Case:
    model = zoo_text.NextToken(zoo_text.stories()).eval()
    tokens = zoo_text.told(model, 40, 129)
    given = [{"input_ids": part[:, :-1]} for part in tokens.split(4)]
    points = _right(tokens[:, 1:].numpy())
    return _of_module("top-1 of the next word", model, [given[0]["input_ids"]], given, _top, points, quantize)


def silero_vad(quantize: Quantize) -> Case:
    rng, states = np.random.default_rng(0), {name: np.zeros((1, 1, 128), np.float32) for name in "hc"}
    made = [synthetic.voice(rng, 32) for _ in range(60)]
    feeds = [{"input": frames, **states} for frames, _ in made]
    source = fetch(SILERO_VAD) / "silero_vad" / "data" / "silero_vad_16k_sequence.onnx"
    path, run = _of_file(source, feeds, 8, quantize)
    labels = np.concatenate([spoken for _, spoken in made])
    return Case("accuracy of frames", path, feeds, run, lambda output: output.reshape(-1) > 0.5, _right(labels))


NETWORKS = {
    make.__name__: make
    for make in (
        demo,
        mobilenet_v2,
        efficientnet_lite0,
        ocr_detection,
        ocr_direction,
        ocr_recognition,
        yolov8n,
        mini_lm,
        stories15m,
        silero_vad,
    )
}


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names or NETWORKS:
        with tempfile.TemporaryDirectory() as place:
            row = measured(NETWORKS[name](w8a8_in(Path(place))), Path(place))
        print(json.dumps({"benchmark": "integer_metrics", "network": name, **row, "target": TARGET}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
