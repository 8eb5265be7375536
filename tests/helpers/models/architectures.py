"""The architectures of transformers and of torch.nn at their smallest: the real classes, random weights."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from tiny_decoders import CACHE
from torch import Tensor, nn
from torch_models import seeded
from transformers.cache_utils import DynamicCache
from zoo_models import distinct, tokens

VOCABULARY, IMAGE, LAYERS, HIDDEN = 100, 32, 2, 32
Inputs = dict[str, Tensor]
SMALL = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
VISION = {**SMALL, "image_size": IMAGE, "patch_size": 8, "num_labels": 5}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
LABELS = {"num_labels": 5}


@dataclass(frozen=True)
class Architecture:
    """How to make a model and its inputs.

    Attributes:
        build: gives the model, as its class makes it.
        inputs: (seed, batch, length) -> keyword arguments.
        sequence: whether `length` is the length of a sequence, which may differ from call to call.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int, int], Inputs]
    sequence: bool = True

    def dynamic_shapes(self) -> dict[str, dict[int, str]]:
        """The axes of every input that differ from call to call, by name."""
        some, others = self.inputs(0, 2, 9), self.inputs(0, 3, 11)
        axes = {
            name: [axis for axis in range(x.ndim) if x.shape[axis] != others[name].shape[axis]]
            for name, x in some.items()
        }
        return {
            name: {axis: "batch" if axis == 0 else _named(some[name].shape[axis] - 9) for axis in found}
            for name, found in axes.items()
        }


def _named(further: int) -> str:
    return f"length_and_{further}" if further else "length"


# --- inputs --------------------------------------------------------------------------------------------------------


def padded_text(seed: int, batch: int, length: int) -> Inputs:
    """Token ids and a mask whose last row is padded at its end."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - length // 3 :] = 0
    return {"input_ids": tokens(VOCABULARY - 4, batch, length, seed=seed) + 4, "attention_mask": mask}


def text(seed: int, batch: int, length: int) -> Inputs:
    return {"input_ids": tokens(VOCABULARY, batch, length, seed=seed)}


def images(seed: int, batch: int, length: int) -> Inputs:
    return {"pixel_values": seeded(batch, 3, IMAGE, IMAGE, seed=seed)}


def two_texts(seed: int, batch: int, length: int) -> Inputs:
    decoder = {"decoder_input_ids": tokens(VOCABULARY, batch, length, seed=seed + 100)}
    return {**padded_text(seed, batch, length + 3), **decoder}


def sound(seed: int, batch: int, length: int) -> Inputs:
    return {"input_values": seeded(batch, 400, seed=seed)}


def spectrum(seed: int, batch: int, length: int) -> Inputs:
    return {"input_features": seeded(batch, 8, 40, seed=seed)}


def spectrum_and_text(seed: int, batch: int, length: int) -> Inputs:
    return {**spectrum(seed, batch, length), "decoder_input_ids": tokens(VOCABULARY, batch, length, seed=seed)}


def images_and_text(seed: int, batch: int, length: int) -> Inputs:
    return {**padded_text(seed, batch, length), **images(seed, batch, length)}


def vectors(seed: int, batch: int, length: int) -> Inputs:
    return {"x": seeded(batch, length, HIDDEN, seed=seed)}


def vectors_and_padding(seed: int, batch: int, length: int) -> Inputs:
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[-1, length - length // 3 :] = True
    return {**vectors(seed, batch, length), "padding": padding}


def two_vectors(seed: int, batch: int, length: int) -> Inputs:
    return {"source": seeded(batch, length + 2, HIDDEN, seed=seed), "target": seeded(batch, length, HIDDEN, seed=9)}


def text_and_cache(seed: int, batch: int, length: int) -> Inputs:
    """Two new tokens behind `length` old ones."""
    shape = (batch, 2, length, 8)  # key and value heads, and their width, of GROUPED
    past = {
        f"past_{kind}_{layer}": seeded(*shape, seed=seed + 10 * layer + (kind == "value"))
        for layer in range(LAYERS)
        for kind in ("key", "value")
    }
    mask = torch.ones(batch, length + 2, dtype=torch.int64)
    mask[-1, :2] = 0
    return {"input_ids": tokens(VOCABULARY, batch, 2, seed=seed), "attention_mask": mask, **past}


# --- models --------------------------------------------------------------------------------------------------------


class WithCache(nn.Module):
    """A decoder for the next tokens: keys and values of the old ones come in as tensors and all of them go out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        past_key_0: Tensor,
        past_value_0: Tensor,
        past_key_1: Tensor,
        past_value_1: Tensor,
    ) -> tuple[Tensor, ...]:
        cache = DynamicCache()
        cache.update(past_key_0, past_value_0, 0)
        cache.update(past_key_1, past_value_1, 1)
        found = self.model(input_ids, attention_mask=attention_mask, **{CACHE: cache}, use_cache=True)
        after = [tensor for layer in found[CACHE].layers for tensor in (layer.keys, layer.values)]
        return found.logits, *after


class Attention(nn.Module):
    """nn.MultiheadAttention on itself, under a padding mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True, **options)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder under a padding mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 64, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=not options.get("norm_first"))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


class TorchDecoder(nn.Module):
    """nn.TransformerDecoder under a causal mask, told so: torch looks at its values otherwise, which no trace can."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(HIDDEN, 4, 64, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, LAYERS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.decoder(target, source, tgt_mask=mask, tgt_is_causal=True)


class TorchTransformer(nn.Module):
    """nn.Transformer, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(HIDDEN, 4, 1, 1, 64, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.transformer(source, target)


class Recurrent(nn.Module):
    """A recurrent layer of torch.nn and a classifier on its last step."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(HIDDEN, HIDDEN, batch_first=True, **options)
        self.head = nn.Linear(HIDDEN * (2 if options.get("bidirectional") else 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def made(kind: Any, config: Any, *, attention: str | None = None) -> Callable[[], nn.Module]:
    """Build a class of transformers from its config, with its own choice of attention or this one."""

    def build() -> nn.Module:
        own = copy.deepcopy(config)
        if attention is not None:
            own._attn_implementation = attention
        return kind(own)

    return build


def decoders() -> Iterator[tuple[str, Any, Any]]:
    yield "llama", hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED)
    yield "mistral", hf.MistralForCausalLM, hf.MistralConfig(**GROUPED, sliding_window=4)
    yield "qwen3", hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED)
    yield "gemma", hf.GemmaForCausalLM, hf.GemmaConfig(**GROUPED)


def encoders() -> Iterator[tuple[str, Any, Any]]:
    yield "bert", hf.BertForSequenceClassification, hf.BertConfig(**TEXT)
    yield "roberta", hf.RobertaForSequenceClassification, hf.RobertaConfig(**TEXT)
    distilled = hf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=HIDDEN, n_layers=LAYERS, n_heads=4, hidden_dim=64, max_position_embeddings=64
    )
    yield "distilbert", hf.DistilBertForSequenceClassification, distilled


def vision() -> Iterator[tuple[str, Any, Any]]:
    yield "vit", hf.ViTForImageClassification, hf.ViTConfig(**VISION)
    swin = hf.SwinConfig(image_size=IMAGE, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    yield "swin", hf.SwinForImageClassification, swin
    segformer = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    )
    yield "segformer", hf.SegformerForSemanticSegmentation, segformer
    mobile = hf.MobileViTConfig(
        image_size=64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
        num_attention_heads=2,
    )
    yield "mobilevit", hf.MobileViTForImageClassification, mobile


def convolutional() -> Iterator[tuple[str, Any, Any]]:
    yield (
        "convnext",
        hf.ConvNextForImageClassification,
        hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 2], num_stages=2),
    )
    yield (
        "resnet",
        hf.ResNetForImageClassification,
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic"),
    )
    mobile = hf.MobileNetV2Config(image_size=IMAGE, depth_multiplier=0.25, min_depth=8)
    yield "mobilenet_v2", hf.MobileNetV2ForImageClassification, mobile


GPT2 = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=HIDDEN, n_layer=LAYERS, n_head=4)
T5 = hf.T5Config(
    vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=4, decoder_start_token_id=0
)
WHISPER = hf.WhisperConfig(
    vocab_size=VOCABULARY,
    num_mel_bins=8,
    encoder_layers=LAYERS,
    encoder_attention_heads=4,
    decoder_layers=LAYERS,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    d_model=HIDDEN,
    max_source_positions=20,
    max_target_positions=30,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
CLIP = hf.CLIPConfig(
    text_config={**TEXT, "projection_dim": 16, "eos_token_id": 99},
    vision_config={**SMALL, "image_size": IMAGE, "patch_size": 8, "projection_dim": 16},
    projection_dim=16,
)
WAV2VEC2 = hf.Wav2Vec2Config(
    **SMALL,
    vocab_size=VOCABULARY,
    conv_dim=(16, 16, 16),
    conv_kernel=(10, 3, 3),
    conv_stride=(5, 2, 2),
    num_feat_extract_layers=3,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
)


def architectures() -> dict[str, Architecture]:
    """Name -> architecture; `-eager` has attention written out, `-cache` takes keys and values of earlier tokens."""
    found: dict[str, Architecture] = {}
    for name, kind, config in encoders():
        found[name] = Architecture(made(kind, config), padded_text)
        found[f"{name}-eager"] = Architecture(made(kind, config, attention="eager"), padded_text)
    for name, kind, config in decoders():
        config.use_cache = False
        found[name] = Architecture(made(kind, config), padded_text)
        found[f"{name}-eager"] = Architecture(made(kind, config, attention="eager"), padded_text)
        found[f"{name}-cache"] = Architecture(cached(kind, config), text_and_cache)
    for name, kind, config in vision():
        found[name] = Architecture(made(kind, config), images, sequence=False)
        found[f"{name}-eager"] = Architecture(made(kind, config, attention="eager"), images, sequence=False)
    for name, kind, config in convolutional():
        found[name] = Architecture(made(kind, config), images, sequence=False)
    GPT2.use_cache = T5.use_cache = WHISPER.use_cache = False
    found["gpt2"] = Architecture(made(hf.GPT2LMHeadModel, GPT2), padded_text)
    found["gpt2-eager"] = Architecture(made(hf.GPT2LMHeadModel, GPT2, attention="eager"), padded_text)
    found["t5-encoder"] = Architecture(made(hf.T5EncoderModel, T5), padded_text)
    found["t5"] = Architecture(made(hf.T5ForConditionalGeneration, T5), two_texts)
    found["t5-eager"] = Architecture(made(hf.T5ForConditionalGeneration, T5, attention="eager"), two_texts)
    whisper = made(hf.WhisperForConditionalGeneration, WHISPER)
    found["whisper-encoder"] = Architecture(lambda: whisper().model.encoder, spectrum, sequence=False)
    found["whisper"] = Architecture(whisper, spectrum_and_text)
    found["clip-text"] = Architecture(made(hf.CLIPTextModelWithProjection, CLIP.text_config), padded_text)
    found["clip-vision"] = Architecture(made(hf.CLIPVisionModelWithProjection, CLIP.vision_config), images, False)
    found["clip"] = Architecture(made(hf.CLIPModel, CLIP), images_and_text)
    found["wav2vec2"] = Architecture(made(hf.Wav2Vec2ForCTC, WAV2VEC2), sound, sequence=False)
    found |= torch_architectures()
    return found


def cached(kind: Any, config: Any) -> Callable[[], nn.Module]:
    return lambda: WithCache(kind(copy.deepcopy(config)))


def torch_architectures() -> dict[str, Architecture]:
    """What torch.nn has of its own."""
    return {
        "nn.MultiheadAttention": Architecture(Attention, vectors_and_padding),
        "nn.TransformerEncoder": Architecture(TorchEncoder, vectors_and_padding),
        "nn.TransformerEncoder-norm_first": Architecture(
            lambda: TorchEncoder(norm_first=True, activation="gelu"), vectors_and_padding
        ),
        "nn.TransformerDecoder": Architecture(TorchDecoder, two_vectors),
        "nn.Transformer": Architecture(TorchTransformer, two_vectors),
        "nn.LSTM": Architecture(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), vectors),
        "nn.GRU": Architecture(lambda: Recurrent(nn.GRU, num_layers=2), vectors),
        "nn.RNN": Architecture(lambda: Recurrent(nn.RNN), vectors),
    }


ARCHITECTURES = architectures()


def model_of(name: str) -> nn.Module:
    """The model in eval mode, with weights that do something (its class starts with zeros and ones)."""
    torch.manual_seed(0)
    return distinct(ARCHITECTURES[name].build().eval())
