"""The shell does the whole job: pictures in, verbs, mixed precision, scores, the layers that hurt."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from qdq_models import classifier, convnet

import qsdk
from onnx_backend.proto.inputs import ModelInput
from qsdk import ConfigError, DataError, FileFormatError
from qsdk.cli import main
from qsdk.commands import files
from qsdk.commands.batches import from_files
from qsdk.commands.data import pictures
from qsdk.commands.data.pictures import preprocess_of_options

CLASSES = 5  # of `classifier`
FUNCTIONS = """
import numpy as np
import torch

def read(path):
    return np.load(path)["pixels"] / 255

def closeness(outputs, labels):
    assert labels is None
    return -float(np.abs(outputs[0]).max())

def words(outputs, labels):
    return "much"

def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5))

def make_with_example():
    return make_model(), torch.zeros(2, 3, 8, 8)

def make_nothing():
    return 3

def fail(path):
    raise RuntimeError("no such sensor")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float classifier, pictures in a folder per class, the same as arrays, and functions of a user."""
    home = tmp_path_factory.mktemp("whole_job")
    onnx.save(classifier(), home / "float.onnx")
    rng = np.random.default_rng(0)
    samples = []
    for name in "abcde":
        (home / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(home / "pictures" / name / f"{number}.png")
            samples.append(pixels)
    (home / "raw").mkdir()
    for number, pixels in enumerate(samples):
        np.savez(home / "raw" / f"{number:02}.npz", pixels=pixels.astype(np.float32).transpose(2, 0, 1))
    arrays = (np.stack(samples).astype(np.float32) / 255).transpose(0, 3, 1, 2)
    np.savez(home / "arrays.npz", x=arrays)
    np.save(home / "arrays.npy", arrays)
    session_outputs = qsdk.quantize(str(home / "float.onnx"), None, qsdk.w8a8().skip("*"))
    best = np.argmax(session_outputs.run(arrays)[0], axis=1)
    np.save(home / "right.npy", best)
    np.save(home / "wrong.npy", (best + 1) % CLASSES)
    np.save(home / "few.npy", best[:3])
    np.save(home / "one.npy", best[0])
    np.save(home / "words.npy", best.astype("U1"))
    (home / "latin.csv").write_bytes("größe,1\n".encode("latin-1"))
    (home / "quote.csv").write_text('"a,1\n')
    np.save(home / "beyond.npy", best + 100)
    np.savez(home / "held.npz", x=arrays, labels=best)
    (home / "mine.py").write_text(FUNCTIONS)
    return home


@pytest.fixture
def at(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *command: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(part) for part in command])
    found = capsys.readouterr()
    return code, found.out, found.err


def document(capsys: pytest.CaptureFixture[str], *command: str | Path) -> dict:
    code, out, err = said(capsys, *command, "--json")
    assert code == 0, err
    return json.loads(out)


# --- pictures and arrays ------------------------------------------------------------------------------------------

PLAIN = ("--image-size", "8", "--resize", "--mean", "0", "--std", "1")


@pytest.mark.parametrize(
    "data",
    [("pictures", *PLAIN), ("raw", "--preprocess", "mine.py:read"), ("arrays.npy",)],
    ids=["pictures", "function", "npy"],
)
def test_pictures_give_the_encodings_of_the_same_arrays(at: Path, capsys, data: tuple[str, ...]):
    said(capsys, "quantize", "float.onnx", at / "m.onnx", "--data", "arrays.npz")
    code, out, err = said(capsys, "quantize", "float.onnx", at / "p.onnx", "--data", *data, "--batch-size", "7")
    assert code == 0, err
    assert f"calibration: min_max on {data[0]}" in out
    wanted, found = (qsdk.quantize(str(at / name)).encodings for name in ("m.onnx", "p.onnx"))
    assert wanted.keys() == found.keys()
    for site, encoding in wanted.items():
        np.testing.assert_allclose(found[site].scale, encoding.scale, rtol=1e-5)


def reader(home: Path, **options: object) -> pictures.Preprocess:
    given = {"preprocess": None, "image_size": None, "crop": None, "resize": False, "mean": None, "std": None}
    shape = options.pop("shape", ("n", 3, "h", "w"))
    dtype = np.dtype(options.pop("dtype", np.float32))
    return preprocess_of_options(Namespace(**{**given, "layout": None, **options}), [ModelInput("x", dtype, shape)])


def test_a_picture_is_cropped_normalised_and_laid_out(tmp_path: Path):
    wide = np.zeros((40, 80, 3), np.uint8)
    wide[:, 30:50, 0] = 255  # the centre is red
    Image.fromarray(wide).save(tmp_path / "wide.png")
    cut = reader(tmp_path, image_size=(10, 10), crop=40, mean=(0.0,), std=(1.0,))(tmp_path / "wide.png")
    assert cut.shape == (3, 10, 10)
    assert (cut[0] == 1).all()
    assert (cut[1:] == 0).all()
    squeezed = reader(tmp_path, image_size=(10, 10), resize=True, mean=(0.0,), std=(1.0,))(tmp_path / "wide.png")
    assert squeezed[0, :, 0].max() == 0
    assert squeezed[0, :, 5].min() > 0.9
    usual = reader(tmp_path)(tmp_path / "wide.png")
    assert usual.shape == (3, 224, 224)
    assert usual[1].max() == pytest.approx(-0.456 / 0.224)  # ImageNet's green
    last = reader(tmp_path, shape=(1, 32, 48, 3))(tmp_path / "wide.png")
    assert last.shape == (32, 48, 3)
    asked = reader(tmp_path, layout="nhwc", image_size=(4, 6))(tmp_path / "wide.png")
    assert asked.shape == (4, 6, 3)
    pixels = reader(tmp_path, shape=(1, 32, 48, 3), dtype=np.uint8)(tmp_path / "wide.png")
    assert (pixels.dtype, pixels.max()) == (np.uint8, 255)
    grey = reader(tmp_path, shape=("n", 1, 8, 8))(tmp_path / "wide.png")
    assert grey.shape == (1, 8, 8)
    assert 0 <= grey.min() < grey.max() <= 1


def test_what_is_no_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(FileFormatError, match=r"text\.png cannot be read as a picture"):
        reader(tmp_path)(tmp_path / "text.png")
    with pytest.raises(DataError, match=r"the input 'x' is .*, no pictures; give --preprocess"):
        reader(tmp_path, shape=("n", 3))
    with pytest.raises(ConfigError, match="has 64 channels; pictures have 3 or 1"):
        reader(tmp_path, shape=("n", 64, 8, 8))
    with pytest.raises(ConfigError, match=r"--mean has 2 numbers for 3 channels; give 1 or 3"):
        reader(tmp_path, mean=(0.5, 0.5))
    with pytest.raises(ConfigError, match="--std holds 0"):
        reader(tmp_path, std=(0.0,))
    with pytest.raises(ConfigError, match="--crop 100 is less than the 224 pixels"):
        reader(tmp_path, crop=100)

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(pictures, "import_module", absent)
    with pytest.raises(ConfigError, match=r"pip install 'qsdk\[images\]'"):
        reader(tmp_path)(tmp_path / "text.png")


def test_samples_without_a_batch_axis_are_stacked(tmp_path: Path):
    for number in range(5):
        np.save(tmp_path / f"{number}.npy", np.full((3, 2), number, np.float32))
    found = list(from_files([ModelInput("x", np.dtype(np.float32), ("n", 3, 2))], [str(tmp_path)], 2))
    assert [batch["x"].shape for batch in found] == [(2, 3, 2), (2, 3, 2), (1, 3, 2)]
    assert [float(batch["x"][0, 0, 0]) for batch in found] == [0, 2, 4]
    fixed = from_files([ModelInput("x", np.dtype(np.float32), (3, 3, 2))], [str(tmp_path)], 2)
    with pytest.raises(DataError, match=r"the last 2 samples, .* do not fill a batch of 3"):
        list(fixed)
    np.save(tmp_path / "5.npy", np.zeros((4, 2), np.float32))  # of another size: a batch of its own
    open_sizes = from_files([ModelInput("x", np.dtype(np.float32), ("n", "t", 2))], [str(tmp_path)], 4)
    assert [batch["x"].shape for batch in open_sizes] == [(4, 3, 2), (1, 3, 2), (1, 4, 2)]


def test_max_samples_takes_pictures_of_every_class(at: Path, capsys):
    options = ("--labels", "folder-names", *PLAIN)
    (at / "count.py").write_text(
        "def kinds(outputs, labels):\n    assert len(outputs[0]) == len(labels) == 5\n    return len(set(labels))\n"
    )
    command = ("evaluate", "float.onnx", "--data", "pictures", *options, "--metric", f"{at / 'count.py'}:kinds")
    found = document(capsys, *command, "--max-samples", "5")
    assert found["rows"][0] == {"model": "float.onnx", "kinds": 5.0, "samples": 5}
    arrays = ("evaluate", "float.onnx", "--data", "arrays.npz", "--labels", "right.npy", "--batch-size", "3")
    assert document(capsys, *arrays, "--max-samples", "7")["rows"][0]["samples"] == 7
    code, _, err = said(capsys, *arrays, "--max-samples", "0")
    assert (code, "--max-samples 0 makes no batch" in err) == (2, True)


# --- evaluate -----------------------------------------------------------------------------------------------------


def test_evaluate_counts_right_answers(at: Path, capsys):
    def score(*options: str) -> dict:
        return document(capsys, "evaluate", "float.onnx", "--data", "arrays.npz", *options)["rows"][0]

    right = score("--labels", "right.npy")
    assert (right["top1"], right["top5"], right["samples"]) == (1.0, 1.0, 20)
    assert score("--labels", "wrong.npy")["top1"] == 0.0
    held = document(capsys, "evaluate", "float.onnx", "--data", "held.npz", "--labels", "held.npz")
    assert held["rows"][0]["top1"] == 1.0
    (at / "right.csv").write_text("label\n" + "\n".join(map(str, np.load("right.npy"))))
    assert score("--labels", str(at / "right.csv"))["top1"] == 1.0
    assert score("--metric", "mine.py:closeness")["closeness"] < 0


@pytest.mark.slow
def test_integers_are_measured_on_the_users_data(at: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    said(capsys, "quantize", "float.onnx", at / "m.onnx", "--data", "arrays.npz")
    taken = []

    def to_integer(*paths, data, **options):
        taken.extend(data or [])
        return qsdk.to_integer(*paths, data=taken or None, **options)

    monkeypatch.setattr(files, "to_integer", to_integer)
    command = ("to-integer", at / "m.onnx", at / "i.onnx")
    found = document(capsys, *command, "--data", "pictures", *PLAIN, "--max-samples", "3")
    assert found["summary"]["float_tensors"] == 0
    assert [len(batch["x"]) for batch in taken] == [3]
    taken.clear()
    document(capsys, *command)
    assert taken == []


def test_labels_by_name_of_file(at: Path, capsys):
    right = np.load("right.npy")
    lines = [
        f"{name}/{number}.png,{right[4 * place + number]}" for place, name in enumerate("abcde") for number in range(4)
    ]
    (at / "names.csv").write_text("file,label\n" + "\n".join(reversed(lines)))
    command = ("evaluate", "float.onnx", "--data", "pictures", *PLAIN, "--labels", at / "names.csv")
    assert document(capsys, *command)["rows"][0]["top1"] == 1.0
    (at / "names.csv").write_text("\n".join(lines[:-1]))
    code, _, err = said(capsys, *command)
    assert code == 1
    assert "has no label for pictures/e/3.png; add a line" in err


def test_evaluate_takes_float_quantized_and_integer_files_side_by_side(at: Path, capsys):
    said(capsys, "quantize", "float.onnx", at / "m.onnx", "--data", "arrays.npz")
    said(capsys, "to-integer", at / "m.onnx", at / "i.onnx")
    for name in ("m.onnx", "i.onnx"):
        command = ("evaluate", at / name, "--data", "arrays.npz", "--labels", "right.npy", "--against", "float.onnx")
        found = document(capsys, *command)
        assert [row["model"] for row in found["rows"]] == [str(at / name), "float.onnx"]
        assert found["summary"]["against"] == 1.0
        assert found["summary"]["drop"] == pytest.approx(1.0 - found["rows"][0]["top1"])
        assert found["rows"][0]["top1"] > 0.7


@pytest.mark.parametrize(("runtime", "package"), [("openvino", "openvino"), ("qnn", "onnxruntime_qnn")])
def test_evaluate_runs_files_in_another_runtime(at: Path, capsys, runtime: str, package: str):
    pytest.importorskip(package, reason=f"{package} has no wheel for this system")
    given = ("--data", "arrays.npz", "--labels", "right.npy")
    size = ("--shape", "x=4,3,8,8") if runtime == "qnn" else ()
    said(capsys, "quantize", "float.onnx", at / "m.onnx", "--data", "arrays.npz", "--dialect", runtime, *size)
    here = document(capsys, "evaluate", at / "m.onnx", *given, "--against", "float.onnx", "--runtime", runtime)
    assert (here["summary"]["runtime"], here["summary"]["against"]) == (runtime, 1.0)
    usual = document(capsys, "evaluate", at / "m.onnx", *given)
    assert here["rows"][0]["top1"] == pytest.approx(usual["rows"][0]["top1"], abs=0.05)
    assert "misread" not in here["rows"][0]

    said(capsys, "quantize", "float.onnx", at / "plain.onnx", "--data", "arrays.npz", "--config", "w8a8")
    said(capsys, "to-integer", at / "plain.onnx", at / "integers.onnx")
    wrong = at / ("integers.onnx" if runtime == "openvino" else "plain.onnx")
    row = document(capsys, "evaluate", wrong, *given, "--runtime", runtime)["rows"][0]
    assert f"errors of qsdk validate {wrong} --dialect {runtime}" in row["misread"]


@pytest.mark.spread(1)
@pytest.mark.parametrize("data", ["arrays.npz", "pictures"])
def test_evaluate_says_how_to_score_a_file_that_takes_codes(at: Path, capsys, data: str):
    said(capsys, "quantize", "float.onnx", at / "m.onnx", "--data", "arrays.npz")
    said(capsys, "to-integer", at / "m.onnx", at / "codes.onnx", "--edges", "integer")
    more = ("--data", data, *(PLAIN if data == "pictures" else ()), "--labels", "right.npy")
    for command in ((at / "codes.onnx", *more), (at / "m.onnx", *more, "--against", at / "codes.onnx")):
        code, out, err = said(capsys, "evaluate", *command)
        assert (code, out) == (1, "")
        assert f"{at / 'codes.onnx'} takes and gives codes (x, y), since it was written with --edges integer" in err
    # the remedy, as the message has it
    assert "qsdk to-integer QDQ.onnx scored.onnx --edges float" in err
    assert said(capsys, "to-integer", at / "m.onnx", at / "scored.onnx", "--edges", "float")[0] == 0
    assert document(capsys, "evaluate", at / "scored.onnx", *more)["summary"]["top1"] > 0.7


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "nothing to score by: give --labels FILE, or --metric FILE.py:function"),
        (("--labels", "few.npy"), 1, "few.npy holds 3 labels, the data 20 samples"),
        (("--labels", "beyond.npy"), 1, "the classes from 0 to 4"),
        (("--labels", "none.npy"), 2, "there is no file of labels none.npy"),
        (("--labels", "mine.py"), 2, "--labels mine.py is none of .npy, .npz, .csv and folder-names"),
        (("--labels", "arrays.npz"), 1, "arrays.npz has no array 'labels', but x"),
        (("--labels", "latin.csv"), 2, "latin.csv is no text; save it in UTF-8"),
        (("--labels", "quote.csv"), 2, "quote.csv cannot be read as a table"),
        (("--labels", "one.npy"), 1, "one.npy holds a single number; labels are an array"),
        (("--labels", "words.npy"), 2, "words.npy holds <U1, which are no numbers"),
        (("--labels", "folder-names"), 2, "needs one file per sample, in a folder per class"),
        (("--metric", "mine.py:words"), 2, "the metric words returns 'much', which is no number"),
        (("--metric", "mine.py:wordz"), 2, "mine.py has no function wordz; it has read, closeness"),
        (("--metric", "none.py:words"), 2, "there is no file none.py"),
        (("--metric", "words"), 2, "is not of the form FILE.py:function"),
    ],
)
def test_evaluate_refuses(at: Path, capsys, options: tuple[str, ...], code: int, message: str):
    returned, out, err = said(capsys, "evaluate", "float.onnx", "--data", "arrays.npz", *options)
    assert (returned, out) == (code, "")
    assert message in err


def test_folder_names_need_a_folder_per_class(at: Path, capsys):
    command = ("evaluate", "float.onnx", "--data", "pictures/a", *PLAIN, "--labels", "folder-names")
    returned, out, err = said(capsys, *command)
    assert (returned, out) == (2, "")
    assert "--labels folder-names needs a folder per class, and all files lie in 'a';" in err


@pytest.mark.parametrize(
    ("renamed", "code", "message"),
    [
        (dict(zip("abcde", ("1", "2", "3", "9", "10"), strict=True)), 2, "where '10' comes before '2'; write"),
        (dict(zip("abcd", "abcd", strict=True)), 1, "there are 4 folders (a, b, c, d ...) and 5 classes in the model"),
    ],
    ids=["numbers", "one_is_missing"],
)
def test_folders_that_cannot_be_told_to_be_classes_are_refused(at: Path, capsys, renamed, code: int, message: str):
    for name, new in renamed.items():
        shutil.copytree(f"pictures/{name}", at / "renamed" / new)
    command = ("evaluate", "float.onnx", "--data", at / "renamed", *PLAIN, "--labels", "folder-names")
    returned, out, err = said(capsys, *command)
    assert (returned, out) == (code, "")
    assert message in err


def test_evaluate_says_how_pictures_were_read_and_which_folder_is_which_class(at: Path, capsys):
    command = ("evaluate", "float.onnx", "--data", "pictures", *PLAIN, "--labels", "folder-names", "--max-samples", "3")
    summary = document(capsys, *command)["summary"]
    assert summary["classes"] == "0 = a, 1 = b, 2 = c, 3 = d, 4 = e"
    assert summary["data"].startswith("pictures (")


def test_a_file_for_the_htp_takes_one_sample_unless_told_otherwise(at: Path, capsys):
    command = ("quantize", "float.onnx", at / "q.onnx", "--data", "arrays.npz", "--dialect", "qnn")
    assert document(capsys, *command)["summary"]["fixed_shapes"]["x"][0] == 1
    assert document(capsys, *command, "--shape", "x=4,3,8,8")["summary"]["fixed_shapes"]["x"][0] == 4


def test_errors_of_a_users_function_name_it_and_the_file(at: Path, capsys):
    code, _, err = said(
        capsys, "quantize", "float.onnx", at / "m.onnx", "--data", "raw", "--preprocess", "mine.py:fail"
    )
    assert code == 1
    assert "--preprocess mine.py:fail raises RuntimeError on raw/00.npz: no such sensor" in err


# --- quantize and sensitivity -------------------------------------------------------------------------------------


def test_verbs_run_in_the_order_given(at: Path, capsys):
    command = ("quantize", "float.onnx", at / "m.onnx", "--data", "arrays.npz", "--config", "w4a8")
    found = document(capsys, *command, "--verbs", "seq_mse,correct-bias")
    assert found["summary"]["verbs"] == "seq_mse, correct_bias"
    sim = qsdk.quantize("float.onnx", None, qsdk.w4a8())
    batches = [np.load("arrays.npy")]
    qsdk.calibrate(sim, batches, progress=False)
    before = sim.encodings
    qsdk.seq_mse(sim, batches, progress=False)
    qsdk.correct_bias(sim, batches, progress=False)
    opened = qsdk.quantize(str(at / "m.onnx"))
    assert opened.encodings == sim.encodings
    assert opened.encodings != before
    code, _, err = said(capsys, *command, "--verbs", "seq_msd")
    assert (code, "--verbs: 'seq_msd' is none of rotate" in err) == (2, True)


def test_mixed_precision_keeps_a_metric_within_its_budget(at: Path, capsys):
    command = ("quantize", "float.onnx", at / "m.onnx", "--data", "arrays.npz", "--config", "w4a8", "--mixed-precision")
    found = document(capsys, *command, "--labels", "right.npy", "--max-drop", "0")["summary"]
    assert (found["met"], found["reference"], found["drop"]) == (True, 1.0, 0.0)
    scored = document(capsys, "evaluate", at / "m.onnx", "--data", "arrays.npz", "--labels", "right.npy")
    assert scored["summary"]["top1"] == 1.0
    code, _, err = said(capsys, *command)
    assert (code, "--mixed-precision needs a metric" in err) == (2, True)


def test_mixed_precision_scores_on_data_of_its_own(at: Path, capsys):
    np.save(at / "calibration.npy", np.load("arrays.npy")[:4])
    command = ("quantize", "float.onnx", at / "m.onnx", "--data", at / "calibration.npy", "--config", "w4a8")
    mixed = (*command, "--mixed-precision", "--labels", "right.npy", "--max-drop", "0", "--max-samples", "4")
    found = document(capsys, *mixed, "--metric-data", "arrays.npz")["summary"]
    assert found["metric_data"] == "arrays.npz"
    assert found["calibration"] == f"min_max on {at / 'calibration.npy'}"
    assert (found["met"], found["drop"]) == (True, 0.0)
    scored = document(capsys, "evaluate", at / "m.onnx", "--data", "arrays.npz", "--labels", "right.npy")
    assert (scored["summary"]["top1"], scored["rows"][0]["samples"]) == (1.0, 20)  # on all 20, not on 4 of them
    # `few.npy` fits the calibration data, and not what is scored
    code, _, err = said(capsys, *mixed, "--metric-data", "arrays.npz", "--labels", "few.npy")
    assert (code, "few.npy holds 3 labels, the data 20 samples" in err) == (1, True)
    code, _, err = said(capsys, *mixed, "--metric-data", "none.npz")
    assert (code, "there is no file or folder none.npz" in err) == (2, True)
    code, _, err = said(capsys, *command, "--metric-data", "arrays.npz")
    assert (code, "--metric-data is what --mixed-precision scores on" in err) == (2, True)


def test_sensitivity_ranks_the_layers_of_a_float_model_and_of_a_quantized_file(at: Path, capsys):
    onnx.save(convnet(), at / "net.onnx")
    np.save(at / "x.npy", np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32))
    bad = ("--override", "conv", "weight=int2")
    found = document(capsys, "sensitivity", at / "net.onnx", "--data", at / "x.npy", *bad, "--exact")
    assert (found["rows"][0]["layer"], found["rows"][0]["kind"]) == ("conv", "weights")
    assert found["summary"]["method"] == "measured"
    said(capsys, "quantize", at / "net.onnx", at / "m.onnx", "--data", at / "x.npy")
    metric = ("--metric", "mine.py:closeness")
    opened = document(capsys, "sensitivity", at / "m.onnx", "--data", at / "x.npy", *metric)
    assert "drop" in opened["rows"][0]
    code, _, err = said(capsys, "sensitivity", at / "m.onnx", "--data", at / "x.npy", "--config", "w8a8")
    assert (code, "is quantized already; leave out --config" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["make_model", "make_with_example"])
def test_a_module_is_made_by_a_function(at: Path, capsys, name: str):
    command = ("quantize", f"mine.py:{name}", at / "m.onnx", "--batch-size", "10", "--verbs", "seq_mse")
    found = document(capsys, *command, "--data", "arrays.npy", "--config", "w4a8")
    assert {row["dtype"] for row in found["rows"] if row["kind"] == "weight"} == {"int4"}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5))
    x = torch.from_numpy(np.load("arrays.npy"))
    sim = qsdk.quantize(model, x[:10], qsdk.w4a8())
    qsdk.calibrate(sim, [x[:10], x[10:]], progress=False)
    qsdk.seq_mse(sim, [x[:10], x[10:]], progress=False)
    assert qsdk.check_parity(sim, str(at / "m.onnx"), [x], progress=False).summary["passed"]


def test_a_module_has_its_metric_too(at: Path, capsys):
    command = ("quantize", "mine.py:make_with_example", at / "m.onnx", "--data", "pictures", *PLAIN)
    found = document(capsys, *command, "--mixed-precision", "--metric", "mine.py:closeness", "--max-drop", "10")
    assert found["summary"]["met"] is True
    apart = ("--metric", "mine.py:closeness", "--max-drop", "10", "--metric-data", "arrays.npy")
    assert document(capsys, *command, "--mixed-precision", *apart)["summary"]["metric_data"] == "arrays.npy"
    code, _, err = said(capsys, "quantize", "mine.py:make_nothing", at / "m.onnx", "--random", "1")
    assert (code, "mine.py:make_nothing returns int; return an nn.Module" in err) == (2, True)


def test_the_help_lists_the_choices(capsys):
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("tf_enhanced", "seq_mse, adaround", "nchw,nhwc", "w4a16", "FILE.py:function", "default: ImageNet's"):
        assert words in text


def test_a_folder_for_servers_of_language_models(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = f"{home / 'mine.py'}:make_with_example"
    common = ["--format", "compressed-tensors", "--config", "w8a8", "--random", "4", "--json"]
    assert main(["quantize", model, str(tmp_path / "out"), *common]) == 0
    facts = json.loads(capsys.readouterr().out)["summary"]
    assert (facts["format"], facts["layers"]) == ("int-quantized", 1)
    assert facts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["config_groups"]["group_0"]["input_activations"]["symmetric"]
    assert main(["quantize", str(home / "float.onnx"), str(tmp_path / "other"), *common]) == 2
    assert "--format compressed-tensors is for a PyTorch module" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert main(["quantize", model, str(tmp_path / "file"), *common]) == 2
    assert "is a file, and --format compressed-tensors writes a folder" in capsys.readouterr().err


def test_a_module_becomes_a_program_for_executorch(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, out = f"{home / 'mine.py'}:make_with_example", tmp_path / "model.pt2"
    common = ["--format", "pt2e", "--dialect", "xnnpack", "--random", "4", "--json"]
    assert main(["quantize", model, str(out), "--longest", "batch=64", *common]) == 0
    (bound,) = torch.export.load(out).range_constraints.values()
    assert bound.upper == 64
    facts = json.loads(capsys.readouterr().out)["summary"]
    assert (facts["weights_max_lsb"], facts["bytes"]) == (0, out.stat().st_size)
    sites = [node for node in torch.export.load(out).graph.nodes if "quantize_per_tensor" in str(node.target)]
    assert sites
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    for given in (home / "float.onnx", tmp_path / "folder"):
        assert main(["quantize", str(given), str(tmp_path / "other.pt2"), *common]) == 2
        assert "--format pt2e is for a PyTorch module" in capsys.readouterr().err


def test_lengths_of_open_axes_are_for_programs_alone(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["quantize", str(home / "float.onnx"), str(tmp_path / "out.onnx"), "--random", "1", "--longest"]
    assert main([*common, "batch=64"]) == 2
    assert "--longest is for --format pt2e; leave it out with --format onnx" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*common, "batch=many"])
    assert "'batch=many' is not of the form batch=64" in capsys.readouterr().err
