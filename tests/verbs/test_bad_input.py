"""Bad input at the PyTorch door: a clear error with place and remedy, nothing half-written, the sim unchanged."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_models import (
    BatchNormNet,
    ConvNet,
    Keywords,
    TiedLanguageModel,
    calibrated,
    seeded,
    sim_of,
)

import qsdk
from qsdk import (
    CalibrationError,
    ConfigError,
    DataError,
    ExportError,
    FileFormatError,
    ModelError,
    QsdkError,
    QuantConfig,
    QuantSim,
    calibrate,
    check_parity,
    export,
    quantize,
    to_integer,
    validate,
    w8a8,
)
from qsdk.verbs.qdq_files import inspect

X = seeded(2, 3, 6, 6)


@pytest.fixture(scope="module")
def shared() -> QuantSim:
    return calibrated(ConvNet(), X)


@pytest.fixture
def sim(shared: QuantSim) -> Iterator[QuantSim]:
    """A sim that a failing call must leave as it was."""
    before, output = shared.encodings, shared(X)
    kept = {name: tensor.clone() for name, tensor in shared.model.state_dict().items()}
    yield shared
    assert shared.encodings == before
    assert list(shared.model.state_dict()) == list(kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in shared.model.state_dict().items())
    assert torch.equal(shared(X), output)
    assert not shared.model.training


def refused(model: Any, example: Any, match: str, error: type[Exception] = ModelError, **options: Any) -> None:
    """Quantizing fails with a message, and leaves the model as it was."""
    known = isinstance(model, nn.Module)
    before = {n: t.clone() for n, t in model.state_dict().items()} if known else {}
    classes = [type(m) for m in model.modules()] if known else []
    with pytest.raises(error, match=match):
        quantize(model, example, options.pop("config", w8a8()), **options)
    if known:
        assert [type(m) for m in model.modules()] == classes
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


# the example


@pytest.mark.parametrize(
    ("example", "match", "error"),
    [
        (
            seeded(2, 5, 6, 6),
            r"does not run on the example \(tensors of shape \[\(2, 5, 6, 6\)\]\).*give an example",
            ModelError,
        ),
        (seeded(2, 3, 9, 9), r"does not run on the example.*the float\s+model accepts", ModelError),
        ((X, X), r"takes 2 positional arguments but 3 were given; give an example", ModelError),
        ((), r"missing 1 required positional argument: 'x'; give an example", ModelError),
        ({"y": X}, r"unexpected keyword argument 'y'.*give an example", ModelError),
        (X.numpy(), r"a mapping, got ndarray; convert it to tensors first, by torch\.from_numpy", DataError),
        (None, r"a mapping, got NoneType; give what the module is called with, such as one batch", DataError),
        ("model.onnx", r"expected a tensor, a tuple or a mapping, got str", DataError),
        ((X.numpy(),), r"(?s)does not run on the example.*ndarray.*give an example", ModelError),
        (X.long(), r"does not run on the example", ModelError),
    ],
    ids=["channels", "size", "too many", "too few", "keyword", "array", "none", "text", "array inside", "integers"],
)
def test_a_wrong_example(example: Any, match: str, error: type[Exception]):
    refused(ConvNet(), example, match, error)


def test_a_token_out_of_range_in_the_example():
    refused(TiedLanguageModel(), torch.tensor([[1, 99]]), r"does not run on the example.*index out of range")


class Branches(nn.Module):
    """A branch that the values of the input choose."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.fc(x).relu(), self.fc, (x,))


def test_a_part_that_torch_compiles_as_it_runs_is_named():
    named = r"torch\.cond compiles a part of the model as it runs at .*test_bad_input\.py:\d+ \(return torch\.cond.*"
    refused(Branches(), seeded(2, 4), named + r"quantize the file that torch\.onnx\.export makes")


def test_an_error_of_the_model_keeps_its_own_class_if_it_is_not_about_the_arguments():
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise FileNotFoundError("vocabulary")

    with pytest.raises(FileNotFoundError, match="vocabulary"):
        quantize(Broken(), X, w8a8())


# the model


def test_a_script_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        scripted = torch.jit.script(nn.Linear(4, 2))
        traced = torch.jit.trace(nn.Linear(4, 2), torch.randn(2, 4))
    for module in (scripted, traced, nn.Sequential(scripted)):
        with pytest.raises(
            ModelError, match=r"is a ScriptModule, whose code is fixed; quantize the nn\.Module it came"
        ):
            quantize(module, seeded(2, 4), w8a8())


def test_a_module_that_is_already_wrapped(sim: QuantSim):
    match = r"is already wrapped by a sim; quantize the float model, or take sim\.unwrap\(\)"
    for module in (sim.model, sim.model.conv1, nn.Sequential(sim.model)):
        with pytest.raises(ModelError, match=match):
            quantize(module, X, w8a8())
    assert isinstance(quantize(sim.unwrap(), X, w8a8()), QuantSim)


def test_a_sim_is_no_model(sim: QuantSim):
    for config in (w8a8(), None):
        with pytest.raises(ModelError, match=r"model, got QuantSim; quantize the float model, or take sim\.unwrap\(\)"):
            quantize(sim, X, config)


def test_a_data_parallel_module():
    model = nn.DataParallel(nn.Linear(4, 4))
    refused(model, seeded(2, 4), r"the model \(DataParallel\) is a DataParallel; quantize model\.module")
    assert isinstance(quantize(model.module, seeded(2, 4), w8a8()), QuantSim)


def test_something_that_is_no_module():
    refused(torch.relu, seeded(2, 4), r"expected an nn\.Module, an ONNX path or an ONNX model, got builtin")
    refused(None, seeded(2, 4), r"expected an nn\.Module.*got NoneType")
    refused(X, ConvNet(), r"expected an nn\.Module.*got Tensor; the model comes first, then the example")
    with pytest.raises(ModelError, match=r"got OrderedDict; weights without their network: load them into the module"):
        quantize(ConvNet().state_dict(), X)


def test_a_checkpoint_of_torch_is_no_model(tmp_path: Path):
    path = tmp_path / "weights.pt"
    torch.save(ConvNet().state_dict(), path)
    with pytest.raises(FileFormatError, match=r"\.pt cannot be read as ONNX: it is a zip archive, as torch\.save"):
        quantize(path)
    with pytest.raises(FileFormatError, match=r"has no manifest.*state_dict: sim\.model\.load_state_dict"):
        qsdk.load(path, ConvNet())


def test_a_model_that_cannot_be_copied():
    model = nn.Linear(4, 2)
    model.helper = Lock()
    refused(model, seeded(2, 4), r"cannot be copied.*pass in_place=True to quantize it itself")
    assert quantize(model, seeded(2, 4), w8a8(), in_place=True).model is model


def test_a_model_that_cannot_be_traced():
    class DataDependent(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if float(x.sum()) > 0 else x

    refused(DataDependent(), seeded(2, 4).abs(), r"depends on the values of a tensor at .*torch\.where", ExportError)


# the config


@pytest.mark.parametrize("config", [{"weight": "int8"}, w8a8, 8])
def test_a_config_of_the_wrong_type(config: Any):
    refused(ConvNet(), X, r"expected a QuantConfig such as qsdk\.w8a8\(\), got ", ConfigError, config=config)


def test_a_config_by_name():
    assert quantize(ConvNet(), X, "w4a8").config == qsdk.w4a8()
    match = r"config='htp_v81' is none of the presets w8a8, .* give config=qsdk\.load_config\('htp_v81'\) for"
    refused(ConvNet(), X, match, ConfigError, config="htp_v81")
    match = r'config=\'w4a4\' is none of .*; write it as .*\.override\(.*weight="int4", activation="uint4"\)'
    refused(ConvNet(), X, match, ConfigError, config="w4a4")
    match = r'config=\'int8\' is none of .*; "w8a8" quantizes all, qsdk\.weight_only\("int8"\) weights alone'
    refused(ConvNet(), X, match, ConfigError, config="int8")
    with pytest.raises(ConfigError, match=r"there is no preset w2a8; .* --override '\*' weight=\.\.\."):
        qsdk.load_config("w2a8")


def test_a_preset_with_a_cache_is_a_word():
    assert qsdk.load_config("w8a8kv8") == w8a8(kv_cache="int8")
    assert qsdk.load_config("w4a16kv4") == qsdk.w4a16(kv_cache="int4")
    refused(nn.Linear(6, 4), X, "kv_cache is chosen, and the example has no cache", ConfigError, config="w4a8kv4")
    with pytest.raises(ConfigError, match=r"config='w8a8kv5' is none of the presets"):
        quantize(nn.Linear(4, 4), X, "w8a8kv5")


@pytest.mark.parametrize("name", ["w4a4", "W4A8", "w4a4kv4", "fp8", "float8e4m3", "float8e5m2"])
def test_the_config_that_stands_for_a_name_is_one(name: str):
    with pytest.raises(ConfigError, match=r"write it as qsdk\.") as raised:
        quantize(nn.Linear(4, 4), X, name)
    written = str(raised.value).partition("write it as qsdk.")[2]
    assert isinstance(eval(written, {name: getattr(qsdk, name) for name in ("w8a8", "w4a8")}), QuantConfig)


def test_an_example_with_labels_or_a_whole_loader():
    refused(ConvNet(), (X, torch.zeros(len(X))), r"\(the inputs alone, without labels: batch\[0\]\)", ModelError)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X))
    refused(ConvNet(), loader, r"a mapping, got DataLoader; give one of its batches", DataError)


@pytest.mark.slow
def test_a_pattern_that_matches_nothing_names_the_nearest_owners():
    match = r"the rule 'convv1' -> weight=int4 matches no owner in the model; the nearest are: conv1"
    refused(ConvNet(), X, match, ConfigError, config=w8a8().override("convv1", weight="int4"))
    refused(ConvNet(), X, match, ConfigError, config=w8a8().override("convv1", weight="int4"), in_place=True)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: w8a8().override("fc", weight="int9000"), r"unknown dtype 'int9000'; choose one of int2"),
        (lambda: w8a8().skip("fc", dtype="int8"), r"skip\('fc'\) keeps owners float; int8 is not a float dtype"),
        (lambda: w8a8().override("fc", weight=torch.int8), r"unknown dtype torch\.int8; write 'int8'; all: int2"),
        (lambda: w8a8().override("fc", weight=4), r"unknown dtype 4; write 'int4'; all: int2"),
        (lambda: w8a8().skip(nn.Linear(2, 2)), r"by a text such as 'layer1\.\*', got a Linear; write the name that"),
        (lambda: w8a8().override("fc"), r"the rule for 'fc' overrides nothing; give weight="),
        (lambda: w8a8().override("fc", bias="int8"), r"a bias is int32 or float, not int8 \(rule 'fc'\)"),
    ],
    ids=["dtype", "skip", "dtype of torch", "number of bits", "module", "nothing", "bias"],
)
def test_a_rule_that_cannot_be_meant(call: Callable[[], Any], match: str):
    with pytest.raises(ConfigError, match=match):
        call()


# the data


@pytest.mark.slow
def test_labels_in_the_data_show_the_forward_that_takes_them_off(sim: QuantSim):
    loader = DataLoader(TensorDataset(seeded(6, 3, 6, 6), torch.arange(6)), batch_size=3)
    with pytest.raises(DataError) as caught:
        calibrate(sim, loader, progress=False)
    message = str(caught.value)
    assert "batch 0 has 2 elements, the model was quantized with 1" in message
    shown = message.partition("pass ")[2]
    assert shown == "forward=lambda m, b: m(b[0])"
    fresh = sim_of(ConvNet(), X)
    forward = eval(shown.partition("=")[2])
    report = calibrate(fresh, loader, forward=forward, progress=False)
    assert report.summary["sites"] == sum(q.owns_encoding for q in fresh.quantizers.values())
    plain = sim_of(fresh.unwrap(), X)
    calibrate(plain, [batch for batch, _ in loader], progress=False)
    assert plain.encodings == fresh.encodings


def test_labels_in_the_data_of_other_verbs(sim: QuantSim, tmp_path: Path):
    loader = DataLoader(TensorDataset(seeded(6, 3, 6, 6), torch.arange(6)), batch_size=3)
    export(sim, tmp_path / "model.onnx")
    for verb in (qsdk.seq_mse, qsdk.adaround, lambda s, d, **o: check_parity(s, tmp_path / "model.onnx", d, **o)):
        with pytest.raises(DataError, match=r"batch 0 has 2 elements.*forward=lambda m, b: m\(b\[0\]\)"):
            verb(sim, loader, progress=False)


@pytest.mark.spread(12)
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (list, r"the data holds no batch; a generator that was used before is empty, give a list or DataLoader"),
        (lambda: iter(()), r"the data holds no batch"),
        (lambda: X, r"data must be an iterable of batches, got one batch; wrap it in a list: \[batch\]"),
        (lambda: {"x": X}, r"data must be an iterable of batches, got one batch"),
        (lambda: None, r"data must be an iterable of batches, got NoneType"),
        (lambda: 3, r"data must be an iterable of batches, got int"),
        (lambda: [None], r"expected a tensor, a tuple or a mapping, got NoneType"),
        (lambda: [X.numpy()], r"expected a tensor, a tuple or a mapping, got ndarray; convert it to tensors first"),
        (lambda: [X, seeded(2, 4, 6, 6)], r"does not run on batch 1 \(tensors of shape \[\(2, 4, 6, 6\)\]\)"),
        (lambda: [X, X.long()], r"does not run on batch 1"),
        (lambda: [{"y": X}], r"does not run on batch 0.*unexpected keyword argument 'y'.*give batches shaped like"),
        (
            lambda: [X, torch.full((1, 3, 6, 6), torch.nan)],
            r"NaN or inf at the site x:input in batch 1; clean the data",
        ),
        (lambda: [X * torch.inf], r"NaN or inf at the site x:input in batch 0"),
        (lambda: [torch.zeros(0, 3, 6, 6)], r"no batch reached x:input.*; calibrate with data"),
    ],
    ids=[
        *("empty", "empty iterator", "one tensor", "one mapping", "none", "number", "none inside", "array", "shape"),
        *("dtype", "keyword", "nan", "inf", "no rows"),
    ],
)
def test_data_that_cannot_be_used(make: Callable[[], Any], match: str):
    sim = sim_of(ConvNet(), X)
    with pytest.raises((DataError, CalibrationError), match=match):
        calibrate(sim, make(), progress=False)
    assert not sim.encodings_where_ready()
    calibrate(sim, [X], progress=False)


def test_data_that_cannot_be_used_leaves_a_calibrated_sim(sim: QuantSim):
    for data in ([], X, [X * 9, seeded(2, 4, 6, 6)], [X * 9, X * torch.nan], None):
        with pytest.raises(DataError):
            calibrate(sim, data, progress=False)


def test_an_exhausted_generator(sim: QuantSim):
    batches = (batch for batch in [X])
    assert len(list(batches)) == 1
    with pytest.raises(DataError, match=r"the data holds no batch; a generator that was used before is empty"):
        calibrate(sim, batches, progress=False)


@pytest.mark.slow
def test_a_generator_is_enough_where_data_is_read_once():
    sim, found = calibrated(ConvNet(), X), []
    start = sim.snapshot(weights=True)
    for data in ((batch for batch in [X]), [X]):
        sim.restore(start)
        qsdk.adaround(sim, data, progress=False)
        found.append(sim(X))
    assert torch.equal(*found)


@pytest.mark.slow
def test_a_token_out_of_range_names_the_batch():
    tokens = torch.tensor([[1, 2]])
    sim = sim_of(TiedLanguageModel(), tokens)
    with pytest.raises(DataError, match=r"does not run on batch 1.*index out of range"):
        calibrate(sim, [tokens, tokens + 90], progress=False)
    assert not sim.encodings_where_ready()


def test_a_missing_keyword_names_the_batch():
    example = {"x": seeded(3, 4), "bias": seeded(3, 4), "tokens": torch.tensor([0, 3, 6])}
    sim = sim_of(Keywords(), example)
    with pytest.raises(DataError, match=r"batch 0.*missing 1 required keyword-only argument: 'tokens'"):
        calibrate(sim, [{k: v for k, v in example.items() if k != "tokens"}], progress=False)


@pytest.mark.parametrize("option", ["method", "weight_method"])
def test_an_unknown_method(sim: QuantSim, option: str):
    with pytest.raises(ConfigError, match=r"unknown calibration method 'magic'; choose one of min_max"):
        calibrate(sim, [X], progress=False, **{option: "magic"})


def test_an_error_of_a_users_forward_stays_itself(sim: QuantSim):
    with pytest.raises(ZeroDivisionError):
        calibrate(sim, [X], forward=lambda m, b: 1 / 0, progress=False)


def test_an_uncalibrated_sim_is_named_by_every_verb(tmp_path: Path):
    sim = sim_of(ConvNet(), X)
    with pytest.raises(CalibrationError, match=r"these sites have no encoding: conv1:weight.*qsdk\.calibrate.*float"):
        export(sim, tmp_path / "model.onnx")
    with pytest.raises(CalibrationError, match=r"these sites have no encoding: conv1:weight"):
        qsdk.seq_mse(sim, [X], progress=False)
    with pytest.raises(CalibrationError, match=r"x:input has no encoding yet"):
        sim.run(X)
    assert list(tmp_path.iterdir()) == []


# files


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def exported(shared: QuantSim, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    export(shared, path)
    return path


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    for source in (exported, exported.with_suffix(".encodings.json")):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    return tmp_path / exported.name


def test_export_into_a_missing_folder_writes_nothing(sim: QuantSim, tmp_path: Path):
    target = tmp_path / "missing" / "model.onnx"
    with pytest.raises(ExportError, match=r"cannot write .*missing/model.*; create the folder .*missing or choose"):
        export(sim, target)
    assert list(tmp_path.iterdir()) == []


def test_export_into_a_file_as_folder_writes_nothing(sim: QuantSim, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match=r"cannot write .*file/model"):
        export(sim, tmp_path / "file" / "model.onnx")
    assert listing(tmp_path) == {"file": b"mine"}


def test_export_onto_a_folder_writes_nothing(sim: QuantSim, tmp_path: Path):
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(ExportError, match=r"model\.onnx is a directory; give the name of a file"):
        export(sim, tmp_path / "model.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.slow
def test_a_failing_export_leaves_the_old_files_intact(sim: QuantSim, copied: Path):
    before = listing(copied.parent)
    with pytest.raises(ConfigError, match=r"opset 26 cannot be written; choose one of 13 to 25"):
        export(sim, copied, opset=26)
    with pytest.raises(ConfigError, match=r"unknown dialect 'tflite'; choose one of .*onnxruntime, openvino, qnn"):
        export(sim, copied, dialect="tflite")
    uncalibrated = sim_of(ConvNet(), X)
    with pytest.raises(CalibrationError):
        export(uncalibrated, copied)
    assert listing(copied.parent) == before
    assert check_parity(sim, copied, [X], progress=False).summary["passed"]


def test_an_export_of_a_model_whose_code_changed_is_refused(tmp_path: Path):
    sim = calibrated(ConvNet(), X)
    sim.model.flatten = nn.Sequential(sim.model.flatten, nn.ReLU())
    with pytest.raises(QsdkError, match=r"changed since it was quantized|was not reached|came into the model after"):
        export(sim, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


READERS: dict[str, Callable[[QuantSim, Path, Path], Any]] = {
    "check_parity": lambda sim, path, out: check_parity(sim, path, [X], progress=False),
    "to_integer": lambda sim, path, out: to_integer(path, out / "int.onnx"),
    "inspect": lambda sim, path, out: inspect(path),
    "validate": lambda sim, path, out: validate(path),
    "quantize": lambda sim, path, out: quantize(path, None, w8a8()),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", ["half", "nothing left", "text", "missing", "folder"])
def test_a_damaged_onnx_file(sim: QuantSim, copied: Path, reader: str, damage: str):
    data = copied.read_bytes()
    if damage in ("missing", "folder"):
        copied.unlink()
        if damage == "folder":
            copied.mkdir()
    else:
        copied.write_bytes({"half": data[: len(data) // 2], "nothing left": b"", "text": b"hello there"}[damage])
    before = listing(copied.parent)
    remedy = "truncated or no ONNX model; export" if damage in ("half", "nothing left", "text") else "check the path"
    with pytest.raises(FileFormatError, match=rf"model\.onnx.*{remedy}"):
        READERS[reader](sim, copied, copied.parent)
    assert listing(copied.parent) == before


@pytest.mark.parametrize("reader", ["check_parity", "to_integer", "inspect"])
@pytest.mark.parametrize("damage", ["truncated", "another's", "empty"])
def test_a_damaged_encodings_file(sim: QuantSim, copied: Path, reader: str, damage: str):
    companion = copied.with_suffix(".encodings.json")
    text = companion.read_text()
    replaced = {"truncated": text[: len(text) // 2], "another's": text.replace("fc:", "gc:"), "empty": ""}[damage]
    companion.write_text(replaced)
    before = listing(copied.parent)
    match = r"model\.encodings\.json does not belong to .*model\.onnx.*export again, or delete the encodings file"
    with pytest.raises(FileFormatError, match=match):
        READERS[reader](sim, copied, copied.parent)
    assert listing(copied.parent) == before
    companion.unlink()
    READERS[reader](sim, copied, copied.parent)


def test_an_integer_model_into_a_missing_folder_writes_nothing(copied: Path):
    before = listing(copied.parent)
    with pytest.raises(ExportError, match=r"cannot write .*; create the folder"):
        to_integer(copied, copied.parent / "missing" / "int.onnx")
    assert listing(copied.parent) == before


@pytest.mark.slow
def test_a_failing_in_place_quantize_can_be_repaired_and_repeated():
    model = BatchNormNet().eval()
    expected = model(seeded(2, 2, 6, 6))
    refused(model, seeded(2, 2, 6, 6), "matches no owner", ConfigError, config=w8a8().skip("bnn"), in_place=True)
    assert torch.equal(model(seeded(2, 2, 6, 6)), expected)
    sim = quantize(model, seeded(2, 2, 6, 6), w8a8().skip("bn1"), in_place=True)
    assert isinstance(sim, QuantSim)
    assert np.isfinite(expected.detach().numpy()).all()
