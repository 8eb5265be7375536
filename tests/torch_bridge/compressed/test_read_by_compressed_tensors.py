"""Folders that `qsdk.export(format="compressed-tensors")` writes, read back by that package and by transformers."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match
from safetensors.torch import load_file
from tiny_decoders import VOCABULARY, decoder
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import qsdk
from qsdk import QuantConfig

CONFIGS = {
    "int4 in groups of 32": (qsdk.weight_only("int4", block_size=32), "pack-quantized"),
    "int4 in groups of 128": (qsdk.weight_only("int4", block_size=128), "pack-quantized"),
    "int4 with zero points": (
        qsdk.weight_only("int4", block_size=32).override("*", symmetric_weights=False),
        "pack-quantized",
    ),
    "int4 per channel with zero points": (
        qsdk.weight_only("int4").override("*", symmetric_weights=False),
        "pack-quantized",
    ),
    "int4 of a narrower grid": (qsdk.weight_only("int4_strict", block_size=32), "pack-quantized"),
    "int4 in blocks of two levels": (
        qsdk.weight_only("int4", block_size=32).override("*", two_level_scales=True),
        "pack-quantized",
    ),
    "int8 per channel": (qsdk.weight_only("int8"), "pack-quantized"),
    "int8 per tensor with zero points": (
        qsdk.weight_only("int8").override("*", per_channel=False, symmetric_weights=False),
        "pack-quantized",
    ),
    "w8a8": (qsdk.w8a8(), "int-quantized"),
    "w8a8 with zero points": (qsdk.w8a8().override("*", symmetric_weights=False), "int-quantized"),
    "w4a8": (qsdk.w4a8(block_size=32), "int-quantized"),
    "w8a8 per token": (qsdk.w8a8().override("*", dynamic_activations="token"), "int-quantized"),
    "w4a8 per token": (qsdk.w4a8(block_size=32).override("*", dynamic_activations="token"), "int-quantized"),
    "w4a16": (qsdk.w4a16(block_size=32), "pack-quantized"),
    "float8": (QuantConfig(weight="float8e4m3fn", activation="float8e4m3fn"), "float-quantized"),
    "float8 per tensor": (
        QuantConfig(weight="float8e4m3fn", activation="float8e4m3fn", per_channel=False),
        "float-quantized",
    ),
    "float8 weights": (qsdk.weight_only("float8e4m3fn"), "float-quantized"),
    "nvfp4": (qsdk.block_scaled("nvfp4"), "nvfp4-pack-quantized"),
    "mxfp4": (qsdk.block_scaled("mxfp4"), "mxfp4-pack-quantized"),
    "mxfp8": (qsdk.block_scaled("mxfp8"), "mxfp8-quantized"),
    "nvfp4 weights": (qsdk.weight_only("nvfp4"), "nvfp4-pack-quantized"),
}
IN_BLOCKS = ("nvfp4", "mxfp4", "mxfp8", "nvfp4 weights")  # whose decompressor gives bfloat16, whatever the model has


_OTHERS = ("w4a8", "float8", "w8a8 per token", "w4a8 per token")


def ids(*, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))


def llama(**changes) -> nn.Module:
    return decoder("Llama", **{"hidden_size": 64, "num_hidden_layers": 1, "head_dim": 16, **changes})


def linear_layers() -> nn.Module:
    """Layers whose output channels fill whole words of int32, and others that do not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 36), nn.ReLU(), nn.Linear(36, 128)).eval()


def sim_of(model: nn.Module, config: QuantConfig):
    sim = qsdk.quantize(model, {"input_ids": ids()}, config.for_dialect("compressed-tensors"))
    qsdk.calibrate(sim, [{"input_ids": ids(seed=seed)} for seed in (1, 2)], progress=False)
    return sim


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def decompressed(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that the package's own compressors make of a folder, by the paths of their modules."""
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    config, tensors, result = QuantizationConfig.model_validate(stored), tensors_in(folder), {}
    for path, module in model.named_modules():
        for group in config.config_groups.values():
            if is_match(path, module, group.targets, config.ignore):
                own = {n.removeprefix(f"{path}."): x for n, x in tensors.items() if n.startswith(f"{path}.")}
                compressor = BaseCompressor.get_value_from_registry(group.format or config.format)
                names = compressor.compression_param_names(group)
                assert set(names) <= own.keys(), (path, names)
                result[path] = compressor.decompress({n: own[n] for n in names}, group)["weight"]
    return result


def weights_of(sim) -> dict[str, torch.Tensor]:
    """Return the weights that the sim computes with, by the paths of its linear layers."""
    found = {}
    with torch.no_grad():
        for path, module in sim.model.named_modules():
            if isinstance(module, nn.Linear):
                quantizer = sim.quantizers.get(f"{path}:weight")
                found[path] = module.weight if quantizer is None else quantizer(module.weight)
    return found


@pytest.mark.spread(10)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_package_decompresses_the_weights_of_the_sim(name: str, dtype: torch.dtype, tmp_path: Path):
    (config, layout), model = CONFIGS[name], linear_layers().to(dtype)
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = config.override("4", weight="int8", block_size=36)  # the last layer has 36 input channels
    sim = qsdk.quantize(model, x, config.for_dialect("compressed-tensors"))
    qsdk.calibrate(sim, [x], progress=False)
    if "two levels" in name and dtype != torch.float32:
        with pytest.raises(qsdk.ExportError, match="it multiplies in"):  # no narrow float holds products of two levels
            qsdk.export(sim, tmp_path / "out", format="compressed-tensors")
        return
    report = qsdk.export(sim, tmp_path / "out", format="compressed-tensors")
    assert layout in report.summary["format"].split(", ")
    read, expected = decompressed(tmp_path / "out", model), weights_of(sim)
    assert read.keys() == expected.keys() == {"0", "2", "4"}
    assert report.summary["layers"] == 3
    for path, weight in expected.items():
        assert read[path].dtype == (torch.bfloat16 if name in IN_BLOCKS and path != "4" else weight.dtype)
        assert torch.equal(read[path], weight.to(read[path].dtype)), path
        assert not torch.equal(weight, model.get_submodule(path).weight)


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    "name", ["int4 in groups of 32", "int4 with zero points", "int8 per channel", "w8a8", "float8", *IN_BLOCKS]
)
def test_the_layout_is_the_package_s_own(name: str, tmp_path: Path):
    """What its compressors make of the float weight and these scales is what the file holds, tensor by tensor."""
    model, x = nn.Sequential(nn.Linear(128, 36)), torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    sim = qsdk.quantize(model, x, CONFIGS[name][0].for_dialect("compressed-tensors"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path, format="compressed-tensors")
    tensors = tensors_in(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    group = QuantizationConfig.model_validate(stored).config_groups["group_0"]
    scale = tensors["0.weight_scale"]
    zero = torch.from_numpy(sim.encodings["0:weight"].zero_point).to(torch.int8).reshape(scale.shape)
    divisor = tensors.get("0.weight_global_scale")
    given = {"weight": model[0].weight.detach(), "weight_scale": scale, "weight_zero_point": zero}
    if divisor is not None:
        given["weight_scale"], given["weight_global_scale"] = scale.float(), divisor
    elif name in IN_BLOCKS:
        given["weight_scale"] = torch.from_numpy(sim.encodings["0:weight"].scale)
    made = BaseCompressor.get_value_from_registry(stored["format"]).compress(given, group)
    assert {f"0.{name}" for name in made} == tensors.keys() - {"0.bias", "0.input_scale", "0.input_global_scale"}
    for tensor, value in made.items():
        written = tensors[f"0.{tensor}"]
        assert written.dtype == value.dtype, tensor
        assert written.shape == value.shape
        assert torch.equal(written.view(torch.uint8), value.contiguous().view(torch.uint8)), tensor


# what is passed to dequantize is not in the folder, and transformers says so
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed .quantization_config. or equivalent")
@pytest.mark.parametrize(
    "name",
    [
        "int4 in groups of 32",
        pytest.param("int4 with zero points", marks=pytest.mark.slow),
        pytest.param("int8 per channel", marks=pytest.mark.slow),
        pytest.param("float8 weights", marks=pytest.mark.slow),
    ],
)
def test_transformers_computes_with_the_weights_of_the_sim(name: str, tmp_path: Path):
    model = llama()
    sim = sim_of(model, CONFIGS[name][0])
    qsdk.export(sim, tmp_path, format="compressed-tensors")
    # as it is, transformers 5.23 expects zero points that are not packed, which compressed-tensors itself does not read
    plain = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if "zero points" in name else {}
    with torch.no_grad():
        read = AutoModelForCausalLM.from_pretrained(tmp_path, **plain)(ids(seed=7)).logits
        for path, weight in weights_of(sim).items():
            model.get_submodule(path).weight.copy_(weight)
        assert torch.equal(read, model(ids(seed=7)).logits)
        torch.testing.assert_close(read, sim(input_ids=ids(seed=7)).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["w8a8", *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS)])
def test_transformers_quantizes_activations_as_the_sim_does(name: str, tmp_path: Path):
    sim = sim_of(llama(), CONFIGS[name][0])
    qsdk.export(sim, tmp_path, format="compressed-tensors")
    with torch.no_grad():
        read = AutoModelForCausalLM.from_pretrained(tmp_path)(ids(seed=7)).logits
    expected = sim(input_ids=ids(seed=7)).logits
    float_logits = sim.unwrap()(ids(seed=7)).logits
    torch.testing.assert_close(read, expected, rtol=0, atol=1e-5)
    assert (read - float_logits).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_transformers_quantizes_blocks_of_activations_as_the_sim_does(name: str, tmp_path: Path):
    """In float32, with the sim's own weights: the decompressor rounds those of NVFP4 to bfloat16."""
    sim = sim_of(llama().to(torch.bfloat16).float(), CONFIGS[name][0])
    qsdk.export(sim, tmp_path, format="compressed-tensors")
    read, weights = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), weights_of(sim)
    with torch.no_grad():
        read(ids(seed=7))  # which decompresses
        nn.Module.float(read)
        for path, weight in weights.items():
            assert torch.equal(read.get_submodule(path).weight, weight.to(torch.bfloat16).float())
            read.get_submodule(path).weight.data = weight
        logits = read(ids(seed=7)).logits
    expected = sim(input_ids=ids(seed=7)).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert (logits - sim.unwrap()(ids(seed=7)).logits).abs().max() > 1e-3


@pytest.mark.slow
def test_asymmetric_activations_keep_their_zero_points(tmp_path: Path):
    config = (
        qsdk.w8a8().for_dialect("compressed-tensors").override("*", activation="uint8", symmetric_activations=False)
    )
    sim = qsdk.quantize(llama(), {"input_ids": ids()}, config)
    qsdk.calibrate(sim, [{"input_ids": ids()}], progress=False)
    report = qsdk.export(sim, tmp_path, format="compressed-tensors")
    assert "ties may fall one step off" in report.summary["zero_points_of_inputs"]
    encoding = sim.encodings["model.layers.0.input_layernorm/mul.1:output"]
    tensors = tensors_in(tmp_path)
    stored = tensors["model.layers.0.self_attn.q_proj.input_zero_point"]
    assert stored.dtype == torch.int8
    assert stored.item() == encoding.zero_point.item() - 128 != 0
    assert float(tensors["model.layers.0.self_attn.q_proj.input_scale"]) == encoding.scale.item()
    with torch.no_grad():
        read = AutoModelForCausalLM.from_pretrained(tmp_path)(ids()).logits
    torch.testing.assert_close(read, sim(input_ids=ids()).logits, rtol=0, atol=2e-2)


@pytest.mark.slow
def test_groups_and_formats_side_by_side(tmp_path: Path):
    config = qsdk.weight_only("int4").override("*o_proj", weight="int8").override("*down_proj", weight="float8e4m3fn")
    model = llama()
    sim = sim_of(model, config.skip("lm_head"))
    report = qsdk.export(sim, tmp_path, format="compressed-tensors")
    assert report.summary["ignored"] == ["lm_head"]
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["format"] == "mixed-precision"
    assert sorted(group["format"] for group in stored["config_groups"].values()) == [
        "float-quantized",
        "pack-quantized",
        "pack-quantized",
    ]
    read = decompressed(tmp_path, model)
    assert "lm_head" not in read
    for path, weight in read.items():
        assert torch.equal(weight, weights_of(sim)[path]), path
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)(ids()).logits
    torch.testing.assert_close(loaded, sim(input_ids=ids()).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_tied_head_stays_float_and_tied(tmp_path: Path):
    model = llama(tie_word_embeddings=True)
    sim = sim_of(model, qsdk.weight_only("int4", block_size=32))
    report = qsdk.export(sim, tmp_path, format="compressed-tensors")
    assert report.summary["ignored"] == ["lm_head"]
    assert "lm_head.weight" not in tensors_in(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids()).logits, sim(input_ids=ids()).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_solved_weights_and_biases(tmp_path: Path):
    """What gptq chose is in the file; an int32 bias is written as the float that the sim adds."""
    model = decoder("Qwen2", num_hidden_layers=1)
    data = [{"input_ids": ids(seed=seed)} for seed in (1, 2)]
    config = qsdk.w8a8().for_dialect("compressed-tensors").override("*", bias="int32")
    sim = qsdk.quantize(model, data[0], config)
    qsdk.calibrate(sim, data, progress=False)
    qsdk.gptq(sim, data, progress=False)
    qsdk.export(sim, tmp_path, format="compressed-tensors")
    read = decompressed(tmp_path, model)
    for path, weight in weights_of(sim).items():
        assert torch.equal(read[path], weight), path
    bias = sim.model.get_submodule("model.layers.0.self_attn.q_proj").bias
    on_grid = sim.quantizers["model.layers.0.self_attn.q_proj:bias"](bias)
    written = tensors_in(tmp_path)["model.layers.0.self_attn.q_proj.bias"]
    assert torch.equal(written, on_grid)
    assert sim.plan.decisions["model.layers.0.self_attn.q_proj:bias"].quantized


@pytest.mark.slow
def test_any_module_with_linear_layers(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = torch.randn(16, 64)
    sim = qsdk.quantize(model, x, qsdk.w8a8().for_dialect("compressed-tensors"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path, format="compressed-tensors")
    read = decompressed(tmp_path, model)
    assert {path: torch.equal(read[path], weight) for path, weight in weights_of(sim).items()} == {"0": True, "2": True}
    assert torch.equal(tensors_in(tmp_path)["0.bias"], model[0].bias)


def test_scales_that_the_dtype_does_not_hold(tmp_path: Path):
    """A reader multiplies in the model's own dtype: a sim that was quantized in another one would differ in silence."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    sim = qsdk.quantize(nn.Sequential(nn.Linear(64, 32)), x, qsdk.weight_only("int4").for_dialect("compressed-tensors"))
    qsdk.calibrate(sim, [x], progress=False)
    sim.model.bfloat16()
    with pytest.raises(
        qsdk.ExportError, match="the weight that the sim has at 0:weight: it multiplies in bfloat16; quan"
    ):
        qsdk.export(sim, tmp_path / "out", format="compressed-tensors")
    assert list((tmp_path / "out").iterdir()) == []
