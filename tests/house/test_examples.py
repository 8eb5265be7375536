"""The examples, run as they are."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from example_files import FOLDER, example
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import qsdk


@pytest.mark.parametrize("name", [pytest.param("hugging_face_trainer", marks=pytest.mark.slow), "lightning_module"])
# Lightning reads its trees through a check that torch has deprecated, and advises more workers for its DataLoaders
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_an_example_trains_a_quantized_model_and_exports_it(name: str, tmp_path: Path):
    out = tmp_path / "model.onnx"
    found = example(name).main(str(out))
    assert out.exists()
    assert found["float"] > 0.9
    assert found["trained"] > found["quantized"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.")
def test_a_run_of_the_trainer_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In bf16: three epochs in one piece, and two and then the third, end with the same accuracies."""
    module = example("hugging_face_trainer")
    whole = module.main(str(tmp_path / "whole.onnx"), str(tmp_path / "whole"), bf16=True)
    module.main(str(tmp_path / "parts.onnx"), str(tmp_path / "parts"), bf16=True, epochs=2)
    steps, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: (steps.append(1), step(self, *args))[1])
    parts = module.main(str(tmp_path / "parts.onnx"), str(tmp_path / "parts"), bf16=True, resume=True)
    assert len(steps) == 16  # the last of three epochs, and nothing of the float training
    assert parts == whole
    assert whole["trained"] > whole["quantized"]


def test_every_example_is_run():
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == [
        "generate_text",
        "hugging_face_trainer",
        "image_classifier",
        "language_model",
        "lightning_module",
        "lm_eval_harness",
        "log_to_trackers",
        "onnx_detector",
    ]


class Letters:
    """A tokenizer of one id per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(one + 32) for one in ids)


def request(*args: Any) -> SimpleNamespace:
    """What the harness hands over: an `Instance` with `args`."""
    return SimpleNamespace(args=args)


def test_the_harness_reads_a_sim(tmp_path: Path):
    """The three methods of the harness's interface, against logits read here; the harness itself is not installed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(96, 16), nn.Linear(16, 96)).eval()  # logits of the last token alone
    sim = qsdk.quantize(model, torch.arange(8)[None], qsdk.w8a8())
    qsdk.calibrate(sim, [torch.arange(96)[None]], progress=False)
    letters, start = Letters(), 3
    adapter = example("lm_eval_harness").Adapter(sim, letters.encode, letters.decode, start=start, longest=8)
    table = sim(torch.arange(96)[None])[0].log_softmax(-1)

    def by_hand(before: int, ids: list[int]) -> float:
        return float(sum(table[a, b] for a, b in zip([before, *ids[:-1]], ids, strict=True)))

    ids = letters.encode(" world")
    [(known, greedy), (empty, _), (spaced, _)] = adapter.loglikelihood(
        [request("hello", " world"), request("", "hello"), request("hello ", "world")]
    )
    assert known == spaced == pytest.approx(by_hand(letters.encode("o")[0], ids), rel=1e-5)
    assert empty == pytest.approx(by_hand(start, letters.encode("hello")), rel=1e-5)
    assert not greedy
    text = "a text that is longer than what the model reads at once"
    assert adapter.loglikelihood_rolling([request(text)]) == pytest.approx(
        [by_hand(start, letters.encode(text))], rel=1e-5
    )
    [told] = adapter.generate_until([request("hello", {"until": [], "max_gen_toks": 5})])
    steps, last = [], letters.encode("o")[0]
    for _ in range(5):
        last = int(table[last].argmax())
        steps.append(last)
    assert told == letters.decode(steps)
    [(_, chosen)] = adapter.loglikelihood([request("hello", told)]) if not told[0].isspace() else [(0.0, True)]
    assert chosen
    [cut] = adapter.generate_until([request("hello", {"until": [told[2]], "max_gen_toks": 5})])
    assert cut == told[: told.index(told[2])]


@pytest.mark.slow
def test_an_exported_decoder_generates_text_without_qsdk(tmp_path: Path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    decoder = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    prompt = torch.randint(0, 100, (1, 8))
    sim = qsdk.quantize(decoder, {"input_ids": prompt}, qsdk.w8a8(kv_cache="int8"))
    qsdk.calibrate(sim, [{"input_ids": torch.randint(0, 100, (1, 8))}], progress=False)
    wanted = sim.model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0].tolist()
    module = example("generate_text")
    for cache in ("float", "integer"):
        qsdk.export(sim, tmp_path / "decoder.onnx", cache=cache)
        assert module.generate(str(tmp_path / "decoder.onnx"), prompt[0].tolist(), 20) == wanted
    assert "qsdk" not in vars(module)


@pytest.mark.slow
def test_a_language_model_goes_from_its_folder_to_text(tmp_path: Path):
    found = example("language_model").main(None, tmp_path)
    assert abs(found["quantized"] / found["float"] - 1) < 0.1  # of random weights: as many as there are tokens
    text = example("generate_text").generate(str(tmp_path / "model.onnx"), [1, 2, 3], 5)
    assert len(text) == 8


class Writer:
    """A stand-in for `torch.utils.tensorboard.SummaryWriter`, with the signature of its `add_scalar`."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None, walltime: Any = None) -> None:
        assert global_step is not None
        self.logged.append((tag, scalar_value, global_step))


class Mlflow:
    """A stand-in for the module, with its documented call `mlflow.log_metric(key, value, step=)`."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, float, int]] = []

    def log_metric(self, key: str, value: float, step: int | None = None) -> None:
        assert isinstance(value, float)
        assert step is not None
        self.logged.append((key, value, step))


class Wandb:
    """A stand-in for a run, with its documented calls: `log({...}, step=)` drops a step below the last one."""

    def __init__(self) -> None:
        self.axes: dict[str, str] = {}
        self.rows: list[dict[str, float]] = []
        self.step = -1

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        step = self.step + 1 if step is None else step
        if step >= self.step:
            self.step = step
            self.rows.append(data)

    @property
    def logged(self) -> list[tuple[str, float, int]]:
        """What a chart of each name shows, over the axis that was defined for it."""
        return [(name, row[name], int(row[self.axes[name]])) for row in self.rows for name in row if name in self.axes]


EXPECTED = {
    "calibrate/moved_ranges": 8,
    "adaround/error_before": 2,
    "adaround/error_after": 2,
    "scale/0:weight": 9,
    "train/loss": 8,
}


def steps_of(logged: list[tuple[str, float, int]]) -> dict[str, list[int]]:
    steps: dict[str, list[int]] = {}
    for name, _, step in logged:
        steps.setdefault(name, []).append(step)
    return {name: found for name, found in steps.items() if name in EXPECTED}


@pytest.mark.parametrize(
    ("adapter", "tracker"), [("to_tensorboard", Writer()), ("to_mlflow", Mlflow()), ("to_wandb", Wandb())]
)
def test_a_tracker_gets_every_number_at_its_step(adapter: str, tracker: Any):
    module = example("log_to_trackers")
    report = module.main(getattr(module, adapter)(tracker))
    assert steps_of(tracker.logged) == {name: list(range(count)) for name, count in EXPECTED.items()}
    after = [value for name, value, _ in tracker.logged if name == "adaround/error_after"]
    assert after == [row["error_after"] for row in report.rows]


def test_the_steps_of_verbs_alone_would_get_lost_in_weights_and_biases():
    run = Wandb()
    example("log_to_trackers").main(lambda name, value, step: run.log({name: value}, step=step))
    assert not any("adaround/error_before" in row for row in run.rows)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [("log_to_trackers", []), ("lm_eval_harness", ["folder"])])
def test_an_example_without_its_tracker_or_harness_says_what_to_install(name: str, words: list[str]):
    """Run as a user does, in a process where neither is installed."""
    hide = "import sys; sys.modules.update(tensorboard=None, lm_eval=None); import runpy; "
    program = (
        f"{hide}sys.argv = {[name, *words]!r}; runpy.run_path({str(FOLDER / f'{name}.py')!r}, run_name='__main__')"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert ": pip install " in found.stderr
    assert "Traceback" not in found.stderr


def test_generating_text_needs_a_decoder(tmp_path: Path):
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [2]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    opset = [onnx.helper.make_opsetid("", 21)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "relu.onnx")
    with pytest.raises(SystemExit, match=r"this is no decoder with a cache: it takes x; see the top"):
        example("generate_text").generate(str(tmp_path / "relu.onnx"), [1], 2)


def test_tensorboard_itself_takes_the_numbers(tmp_path: Path):
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not among the tools of `make setup`: pip install tensorboard"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    module = example("log_to_trackers")
    with SummaryWriter(str(tmp_path)) as writer:
        module.main(module.to_tensorboard(writer))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(8))
