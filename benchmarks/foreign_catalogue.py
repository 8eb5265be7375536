"""Modules of other libraries, made small or given small inputs: those of images, diffusion, audio and sequences."""

from collections.abc import Callable
from typing import Any

import torch
from foreign_further import attention, sounds, tables
from foreign_images import detection, image_models
from foreign_makers import SMALL, Batch, Foreign, configured, diffusing, image, keyed, made, normal, positional, tokens
from foreign_texts import pictures, texts
from torch import nn

UNET = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 16}
DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 16, "patch_size": 4}
BLOCKS = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "in_channels": 4,
    "out_channels": 4,
}
CODER = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}


def diffusion() -> list[Foreign]:
    """Denoisers and autoencoders of diffusers, and of MONAI."""
    picture, latent = (1, 3, 16, 16), (1, 4, 16, 16)
    coder = CODER | {"block_out_channels": (16, 32), "norm_num_groups": 8}
    table: list[tuple[str, dict[str, Any], Callable[[int], Batch]]] = [
        ("UNet2DModel", UNET | BLOCKS | {"attention_head_dim": 8}, diffusing(picture)),
        ("UNet2DConditionModel", UNET | CROSS, diffusing(latent, (1, 7, 32))),
        ("UNet2DConditionModel+linear", UNET | CROSS | {"use_linear_projection": True}, diffusing(latent, (1, 7, 32))),
        ("AutoencoderKL", coder | {"latent_channels": 4}, normal((1, 3, 32, 32))),
        (
            "AutoencoderTiny",
            {"encoder_block_out_channels": (16,) * 4, "decoder_block_out_channels": (16,) * 4},
            normal((1, 3, 64, 64)),
        ),
        ("VQModel", coder | {"latent_channels": 4, "num_vq_embeddings": 32}, normal((1, 3, 32, 32))),
        (
            "AutoencoderDC",
            {
                "encoder_block_out_channels": (16, 32),
                "decoder_block_out_channels": (16, 32),
                "encoder_layers_per_block": (1, 1),
                "decoder_layers_per_block": (1, 1),
                "encoder_block_types": "ResBlock",
                "decoder_block_types": "ResBlock",
                "encoder_qkv_multiscales": ((), ()),
                "decoder_qkv_multiscales": ((), ()),
                "latent_channels": 8,
            },
            normal((1, 3, 32, 32)),
        ),
        (
            "PixArtTransformer2DModel",
            DIT
            | {
                "cross_attention_dim": 32,
                "caption_channels": 24,
                "in_channels": 4,
                "out_channels": 8,
                "use_additional_conditions": False,
            },
            keyed(
                lambda s: (normal(latent)(s)[0], normal((1, 7, 24))(s)[0], torch.tensor([40 + s])),
                "hidden_states",
                "encoder_hidden_states",
                "timestep",
            ),
        ),
        (
            "DiTTransformer2DModel",
            DIT | {"in_channels": 4, "out_channels": 4, "norm_num_groups": 8, "num_embeds_ada_norm": 50},
            keyed(
                lambda s: (normal(latent)(s)[0], torch.tensor([40 + s]), torch.tensor([3])),
                "hidden_states",
                "timestep",
                "class_labels",
            ),
        ),
        (
            "SD3Transformer2DModel",
            {
                "sample_size": 16,
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 24,
                "caption_projection_dim": 32,
                "pooled_projection_dim": 20,
                "pos_embed_max_size": 16,
            },
            keyed(
                lambda s: (*normal(latent, (1, 7, 24), (1, 20))(s), torch.tensor([40 + s])),
                "hidden_states",
                "encoder_hidden_states",
                "pooled_projections",
                "timestep",
            ),
        ),
        (
            "PriorTransformer",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 16,
                "num_layers": 2,
                "embedding_dim": 24,
                "num_embeddings": 5,
                "additional_embeddings": 4,
            },
            keyed(
                lambda s: (normal((1, 24))(s)[0], torch.tensor([40 + s]), *normal((1, 24), (1, 5, 24))(s)),
                "hidden_states",
                "timestep",
                "proj_embedding",
                "encoder_hidden_states",
            ),
        ),
        (
            "UNet1DModel",
            {
                "block_out_channels": (16, 32, 32),
                "in_channels": 4,
                "out_channels": 4,
                "sample_size": 64,
                "extra_in_channels": 32,
            },
            diffusing((1, 4, 64)),
        ),
        (
            "UVit2DModel",
            {
                "hidden_size": 32,
                "cond_embed_dim": 16,
                "micro_cond_encode_dim": 8,
                "micro_cond_embed_dim": 40,
                "encoder_hidden_size": 24,
                "vocab_size": 40,
                "codebook_size": 32,
                "in_channels": 24,
                "block_out_channels": 24,
                "num_res_blocks": 1,
                "block_num_heads": 2,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 48,
            },
            lambda s: (*tokens((1, 8, 8), 32)(s), *normal((1, 7, 24), (1, 16), (1, 5))(s)),
        ),
    ]
    found = []
    for name, options, batch in table:
        cls = name.split("+")[0]
        found.append(positional(f"diffusers/{name}", made(f"diffusers:{cls}", **options), batch))
    return found


SPEECH = SMALL | {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}


def audio() -> list[Foreign]:
    """Speech and sound: transformers, speechbrain."""
    wave = keyed(normal((1, 1600)), "input_values")
    table: list[tuple[str, str, str, dict[str, Any], Callable[[int], Batch]]] = [
        ("wav2vec2", "Wav2Vec2Config", "Wav2Vec2ForCTC", SPEECH | {"vocab_size": 32}, wave),
        ("hubert", "HubertConfig", "HubertModel", SPEECH, wave),
        ("wavlm", "WavLMConfig", "WavLMModel", SPEECH, wave),
        ("data2vec_audio", "Data2VecAudioConfig", "Data2VecAudioModel", SPEECH | {"num_conv_pos_embeddings": 5}, wave),
        ("unispeech", "UniSpeechConfig", "UniSpeechModel", SPEECH, wave),
        ("sew", "SEWConfig", "SEWModel", SPEECH | {"squeeze_factor": 2}, wave),
        ("ast", "ASTConfig", "ASTModel", SMALL | {"max_length": 64, "num_mel_bins": 32}, normal((1, 64, 32))),
        (
            "whisper_encoder",
            "WhisperConfig",
            "WhisperForAudioClassification",
            {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "num_mel_bins": 16,
                "max_source_positions": 40,
                "vocab_size": 60,
                "pad_token_id": 1,
            },
            normal((1, 16, 80)),
        ),
        (
            "clap_audio",
            "ClapAudioConfig",
            "ClapAudioModel",
            {
                "spec_size": 64,
                "num_mel_bins": 16,
                "patch_size": 4,
                "patch_stride": (4, 4),
                "hidden_size": 32,
                "patch_embeds_hidden_size": 8,
                "depths": [1, 1],
                "num_attention_heads": [2, 2],
                "window_size": 4,
                "num_classes": 2,
            },
            keyed(lambda s: (normal((1, 1, 60, 16))(s)[0], torch.tensor([[False]])), "input_features", "is_longer"),
        ),
    ]
    found = []
    for name, config, model, options, batch in table:
        found.append(positional(f"transformers/{name}", configured(config, model, **options), batch))
    lobes = "speechbrain.lobes.models"
    found += [
        Foreign(
            "speechbrain/ecapa_tdnn",
            made(
                f"{lobes}.ECAPA_TDNN:ECAPA_TDNN",
                24,
                channels=[32] * 4 + [96],
                kernel_sizes=[5, 3, 3, 3, 1],
                dilations=[1, 2, 3, 4, 1],
                attention_channels=16,
                lin_neurons=32,
            ),
            normal((2, 40, 24)),
        ),
        Foreign(
            "speechbrain/xvector",
            made(f"{lobes}.Xvector:Xvector", in_channels=24, tdnn_channels=[32] * 4 + [48], lin_neurons=32),
            normal((2, 40, 24)),
        ),
        Foreign("speechbrain/cnn14", made(f"{lobes}.Cnn14:Cnn14", mel_bins=64, emb_dim=64), normal((2, 96, 64))),
        Foreign("speechbrain/conv_tasnet_encoder", made(f"{lobes}.conv_tasnet:Encoder", 16, 32), normal((2, 320))),
        Foreign(
            "speechbrain/conv_tasnet_masker",
            made(f"{lobes}.conv_tasnet:MaskNet", 16, 8, 16, 3, 2, 1, 2, "gLN", False, "relu"),
            normal((1, 16, 40)),
        ),
        Foreign(
            "speechbrain/resnet",
            made(
                f"{lobes}.ResNet:ResNet",
                input_size=24,
                channels=[16] * 4,
                block_sizes=[1] * 4,
                strides=[1, 2, 2, 2],
                lin_neurons=32,
            ),
            normal((2, 40, 24)),
        ),
    ]
    return found


def sequences() -> list[Foreign]:
    """Text and sequences of x-transformers, open_clip and local-attention."""
    layers = "x_transformers:Encoder"
    found = []
    for name, options in {
        "plain": {},
        "rmsnorm_swish": {"use_rmsnorm": True, "ff_swish": True, "ff_glu": True},
        "rotary": {"rotary_pos_emb": True},
        "alibi": {"alibi_pos_bias": True},
        "t5_bias": {"rel_pos_bias": True},
        "qk_norm": {"attn_qk_norm": True},
        "scalenorm": {"use_scalenorm": True},
        "sandwich": {"sandwich_norm": True},
        "gated_residual": {"gate_residual": True},
        "talking_heads": {"attn_pre_talking_heads": True},
        "memory": {"attn_num_mem_kv": 4},
        "relu_squared": {"ff_relu_squared": True},
    }.items():
        found.append(Foreign(f"x_transformers/{name}", encoder(layers, options), tokens((2, 12), 50)))
    clip = {"width": 32, "layers": 2}
    vision = made("open_clip.transformer:VisionTransformer", 32, 8, heads=2, mlp_ratio=2.0, output_dim=16, **clip)
    found.append(Foreign("open_clip/vision", vision, image(32)))
    text = made("open_clip.transformer:TextTransformer", 16, 60, heads=2, output_dim=16, **clip)
    found.append(Foreign("open_clip/text", text, tokens((2, 16), 60)))
    local = made(
        "local_attention:LocalTransformer",
        num_tokens=50,
        dim=32,
        depth=2,
        max_seq_len=32,
        local_attn_window_size=8,
        heads=2,
    )
    found.append(Foreign("local_attention/transformer", local, tokens((1, 32), 50)))
    found.append(
        Foreign("conformer/block", made("conformer:ConformerBlock", dim=32, heads=2, dim_head=16), normal((2, 20, 32)))
    )
    return found


def encoder(path: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return the maker of an encoder of tokens."""

    def make() -> nn.Module:
        layers = made(path, dim=32, depth=2, heads=2, **options)()
        return made("x_transformers:TransformerWrapper", num_tokens=50, max_seq_len=16, attn_layers=layers)()

    return make


def catalogue() -> dict[str, Foreign]:
    """Return every module by its name."""
    found = [*sequences(), *audio(), *diffusion(), *detection(), *image_models()]
    found += [*attention(), *tables(), *sounds(), *texts(), *pictures()]
    return {foreign.name: foreign for foreign in found}
