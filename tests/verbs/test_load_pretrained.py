"""`sim.model.save_pretrained` and `qsdk.load`, on small random models of transformers."""

import copy
import functools
import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

import qsdk
from qsdk import ConfigError, FileFormatError, ModelError

SMALL = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS: dict[str, Any] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SMALL, max_position_embeddings=16)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1, use_cache=False)),
    "tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, tie_word_embeddings=True, use_cache=False)),
}


def inputs(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(SMALL["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@functools.cache
def calibrated(name: str) -> Any:
    torch.manual_seed(0)
    sim = qsdk.quantize(MODELS[name]().eval(), inputs(0), qsdk.w4a8())
    qsdk.calibrate(sim, [inputs(1)], progress=False)
    return sim


def quantized(name: str) -> Any:
    return copy.deepcopy(calibrated(name))


def require_same(one: Any, other: Any) -> None:
    assert one.encodings == other.encodings
    for seed in (0, 5):
        assert torch.equal(one(**inputs(seed)).logits, other(**inputs(seed)).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "tied"))])
def test_a_sim_comes_back_with_the_same_outputs(name: str, tmp_path: Path):
    sim = quantized(name)
    qsdk.gptq(sim, [inputs(1)], progress=False)
    sim.model.save_pretrained(tmp_path)
    again = qsdk.load(tmp_path)
    require_same(again, sim)
    assert again.coverage().to_dict() == sim.coverage().to_dict()
    assert not again.model.training


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "tied"])
def test_the_folder_is_an_ordinary_checkpoint_of_the_float_model(name: str, tmp_path: Path):
    sim = quantized(name)
    config = copy.deepcopy(sim.model.config)
    sim.model.save_pretrained(tmp_path)
    plain, wanted = type(sim.unwrap()), sim.unwrap().state_dict()
    found, info = plain.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(found) is plain
    assert all(torch.equal(value, wanted[key]) for key, value in found.state_dict().items())
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [plain.__name__]
    assert sim.model.config.to_dict() == config.to_dict()
    assert not any("qsdk" in key for key in load_file(tmp_path / "model.safetensors"))


@pytest.mark.slow
def test_another_example_may_be_given(tmp_path: Path):
    sim = quantized("bert")
    sim.model.save_pretrained(tmp_path)
    require_same(qsdk.load(tmp_path, example=inputs(3)), sim)


@pytest.mark.slow
def test_another_dtype_is_another_model(tmp_path: Path):
    sim = quantized("bert")
    sim.model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="was saved from another model"):
        qsdk.load(tmp_path, dtype=torch.bfloat16)


@pytest.mark.slow
def test_what_the_options_of_save_pretrained_do_they_do(tmp_path: Path):
    sim = quantized("llama")
    sim.model.save_pretrained(tmp_path, True, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    require_same(qsdk.load(tmp_path), sim)
    sim.model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.slow
def test_a_state_dict_that_a_trainer_gives_is_saved_without_its_encodings(tmp_path: Path):
    sim = quantized("bert")
    sim.model.save_pretrained(tmp_path, state_dict=sim.model.state_dict())
    assert not any("qsdk" in key for key in load_file(tmp_path / "model.safetensors"))
    require_same(qsdk.load(tmp_path), sim)


@pytest.mark.slow
def test_the_attention_that_was_traced_is_the_one_that_is_read(tmp_path: Path):
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    model.set_attn_implementation("eager")
    sim = qsdk.quantize(model, inputs(0), qsdk.w4a8())
    qsdk.calibrate(sim, [inputs(1)], progress=False)
    sim.model.save_pretrained(tmp_path)
    again = qsdk.load(tmp_path)
    assert again.model.config._attn_implementation == "eager"
    require_same(again, sim)


@pytest.mark.slow
def test_a_model_of_ones_own_is_read_by_its_owner(tmp_path: Path):
    class Mine(hf.BertForSequenceClassification):
        pass

    torch.manual_seed(0)
    sim = qsdk.quantize(Mine(hf.BertConfig(**SMALL, max_position_embeddings=16)).eval(), inputs(0))
    qsdk.calibrate(sim, [inputs(1)], progress=False)
    sim.model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no class Mine of models.* MyModel\.from_pretrained"):
        qsdk.load(tmp_path)
    require_same(qsdk.load(tmp_path, model=Mine.from_pretrained(tmp_path)), sim)
    with pytest.raises(ConfigError, match=r"device_map: options are for reading the model, which is given"):
        qsdk.load(tmp_path, model=Mine.from_pretrained(tmp_path), device_map="cpu")


@pytest.mark.slow
def test_a_loaded_sim_goes_on_and_saves_itself(tmp_path: Path):
    sim = quantized("bert")
    sim.model.save_pretrained(tmp_path / "first")
    again = qsdk.load(tmp_path / "first")
    qsdk.adaround(again, [inputs(1)], progress=False)
    again.model.save_pretrained(tmp_path / "second")
    require_same(qsdk.load(tmp_path / "second"), again)
    require_same(qsdk.load(tmp_path / "first"), sim)


@pytest.mark.slow
def test_a_copied_sim_saves_itself_and_a_copied_model_no_sim(tmp_path: Path):
    sim = quantized("bert")
    copied = copy.deepcopy(sim)
    qsdk.gptq(copied, [inputs(1)], progress=False)
    copied.model.save_pretrained(tmp_path / "copied")
    require_same(qsdk.load(tmp_path / "copied"), copied)
    for alone in (copy.deepcopy(sim.model), pickle.loads(pickle.dumps(sim.model))):
        alone.save_pretrained(tmp_path / "alone")
        with pytest.raises(FileFormatError, match=r"holds no sim\.qsdk: write it with sim\.model\.save_pretrained"):
            qsdk.load(tmp_path / "alone")
    assert type(hf.BertForSequenceClassification.from_pretrained(tmp_path / "alone")) is type(sim.unwrap())


@pytest.mark.slow
def test_a_part_of_the_model_is_saved_without_encodings(tmp_path: Path):
    sim = quantized("bert")
    sim.model.bert.save_pretrained(tmp_path)
    assert not any("qsdk" in key for key in load_file(tmp_path / "model.safetensors"))
    assert not (tmp_path / "sim.qsdk").exists()
    sim.unwrap().save_pretrained(tmp_path / "float")
    assert not (tmp_path / "float" / "sim.qsdk").exists()


def test_in_training_a_checkpoint_holds_what_training_goes_on_from(tmp_path: Path):
    sim = quantized("bert")
    with sim.training(learn_scales=True) as model:
        model.save_pretrained(tmp_path)
        assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    with pytest.raises(FileFormatError, match="outside of a training block"):
        qsdk.load(tmp_path)
    sim.model.save_pretrained(tmp_path)
    require_same(qsdk.load(tmp_path), sim)


def test_other_weights_in_the_folder_are_noticed(tmp_path: Path):
    sim = quantized("bert")
    sim.model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["classifier.bias"] += 1e-6
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"sim\.qsdk belongs to other weights than those of the model"):
        qsdk.load(tmp_path)
    sim.model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="belongs to other weights"):
        qsdk.load(tmp_path / "sim.qsdk", MODELS["bert"]())


@pytest.mark.slow
def test_a_model_with_a_folded_norm_is_refused_before_anything_is_written(tmp_path: Path):
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3)
    torch.manual_seed(0)
    model, x = hf.ResNetForImageClassification(config).eval(), torch.randn(2, 3, 32, 32)
    sim = qsdk.quantize(model, x)
    qsdk.calibrate(sim, [x], progress=False)
    with pytest.raises(ModelError, match=r"normalization.* is folded into other weights.* fold_batch_norm=False"):
        sim.model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    sim = qsdk.quantize(model, x, fold_batch_norm=False)
    qsdk.calibrate(sim, [x], progress=False)
    sim.model.save_pretrained(tmp_path / "out")
    assert torch.equal(qsdk.load(tmp_path / "out")(x).logits, sim(x).logits)


def test_a_folder_without_a_config_or_a_class_is_named(tmp_path: Path):
    sim = quantized("bert")
    sim.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileFormatError, match=r"config\.json does not name the class of the model; pass the float"):
        qsdk.load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileFormatError, match="give the folder of a checkpoint"):
        qsdk.load(tmp_path)


def test_the_attention_of_a_saved_sim_is_one_of_transformers_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sim = quantized("bert")
    sim.model.save_pretrained(tmp_path)
    with zipfile.ZipFile(tmp_path / "sim.qsdk") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    known = b'"attn_implementation": "sdpa"'
    assert sum(known in part for part in parts.values()) == 1
    with zipfile.ZipFile(tmp_path / "sim.qsdk", "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part.replace(known, b'"attn_implementation": "someone/kernels"'))
    given: list[Any] = []
    monkeypatch.setattr(hf.PreTrainedModel, "from_pretrained", lambda *_, **options: given.append(options))
    with pytest.raises(
        FileFormatError, match=r"sim\.qsdk asks for the attention 'someone/kernels'.*known are eager, sdpa"
    ):
        qsdk.load(tmp_path)
    assert not given


@pytest.mark.slow
def test_a_module_without_save_pretrained_gets_none_and_transformers_stays_unread():
    assert not hasattr(qsdk.quantize(nn.Linear(4, 2), torch.randn(2, 4)).model, "save_pretrained")
    code = "import sys, qsdk; qsdk.load; qsdk.quantize; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
