"""Models of transformers by their configurations: texts, series, pictures, videos and speech, of tiny sizes."""

from collections.abc import Callable
from typing import Any

from foreign_makers import SMALL, Batch, Foreign, configured, keyed, normal, positional, tokens

Row = tuple[str, str, str, dict[str, Any]]

TEXT = SMALL | {"vocab_size": 60, "max_position_embeddings": 32}
KEYS = TEXT | {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
TWO_SIDED = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PICTURE = SMALL | {"image_size": 32, "patch_size": 8}

READERS: list[Row] = [
    ("albert", "AlbertConfig", "AlbertModel", TEXT | {"embedding_size": 16}),
    ("electra", "ElectraConfig", "ElectraForTokenClassification", TEXT | {"embedding_size": 16}),
    ("deberta", "DebertaConfig", "DebertaModel", TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("deberta_v2", "DebertaV2Config", "DebertaV2Model", TEXT | {"relative_attention": True}),
    ("mpnet", "MPNetConfig", "MPNetModel", TEXT),
    ("mobilebert", "MobileBertConfig", "MobileBertModel", TEXT | {"embedding_size": 16, "intra_bottleneck_size": 16}),
    (
        "funnel",
        "FunnelConfig",
        "FunnelBaseModel",
        {"vocab_size": 60, "block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64},
    ),
    ("squeezebert", "SqueezeBertConfig", "SqueezeBertModel", TEXT | {"embedding_size": 32}),
    ("xlnet", "XLNetConfig", "XLNetModel", {"vocab_size": 60, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}),
    ("roformer", "RoFormerConfig", "RoFormerModel", TEXT | {"embedding_size": 16}),
    ("fnet", "FNetConfig", "FNetModel", TEXT),
    (
        "nystromformer",
        "NystromformerConfig",
        "NystromformerModel",
        TEXT | {"num_landmarks": 4, "segment_means_seq_len": 12},
    ),
    ("canine", "CanineConfig", "CanineModel", TEXT | {"downsampling_rate": 4, "local_transformer_stride": 8}),
    (
        "convbert",
        "ConvBertConfig",
        "ConvBertModel",
        TEXT | {"embedding_size": 32, "head_ratio": 2, "conv_kernel_size": 3},
    ),
    ("ibert", "IBertConfig", "IBertModel", TEXT),
    (
        "flaubert",
        "FlaubertConfig",
        "FlaubertModel",
        {"vocab_size": 60, "emb_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32},
    ),
    ("longformer", "LongformerConfig", "LongformerModel", TEXT | {"attention_window": 4}),
    ("big_bird", "BigBirdConfig", "BigBirdModel", TEXT | {"attention_type": "original_full"}),
    ("modernbert", "ModernBertConfig", "ModernBertModel", TEXT | {"pad_token_id": 0, "local_attention": 4}),
    (
        "esm",
        "EsmConfig",
        "EsmModel",
        TEXT | {"pad_token_id": 1, "mask_token_id": 5, "position_embedding_type": "rotary"},
    ),
    ("rembert", "RemBertConfig", "RemBertModel", TEXT | {"input_embedding_size": 16, "output_embedding_size": 16}),
]
WRITERS: list[Row] = [
    ("bloom", "BloomConfig", "BloomForCausalLM", {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    ("opt", "OPTConfig", "OPTForCausalLM", TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    (
        "gpt_neo",
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": 60,
            "hidden_size": 32,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 2,
            "max_position_embeddings": 32,
            "window_size": 4,
        },
    ),
    ("gptj", "GPTJConfig", "GPTJForCausalLM", GPT | {"rotary_dim": 8}),
    ("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT),
    (
        "falcon",
        "FalconConfig",
        "FalconForCausalLM",
        {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
    ("phi", "PhiConfig", "PhiForCausalLM", KEYS),
    ("phi3", "Phi3Config", "Phi3ForCausalLM", KEYS),
    ("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", KEYS | EXPERTS | {"shared_expert_intermediate_size": 32}),
    ("mixtral", "MixtralConfig", "MixtralForCausalLM", KEYS | {"num_local_experts": 4}),
    ("olmo2", "Olmo2Config", "Olmo2ForCausalLM", KEYS),
    ("stablelm", "StableLmConfig", "StableLmForCausalLM", KEYS),
    ("cohere", "CohereConfig", "CohereForCausalLM", KEYS),
    ("granite", "GraniteConfig", "GraniteForCausalLM", KEYS),
    ("nemotron", "NemotronConfig", "NemotronForCausalLM", KEYS | {"head_dim": 16}),
    (
        "mpt",
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": 60, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 32},
    ),
    ("codegen", "CodeGenConfig", "CodeGenForCausalLM", GPT | {"n_head": 4, "rotary_dim": 4}),
    (
        "mamba",
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "use_cache": False},
    ),
    (
        "rwkv",
        "RwkvConfig",
        "RwkvModel",
        {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "use_cache": False},
    ),
    (
        "xglm",
        "XGLMConfig",
        "XGLMForCausalLM",
        {
            "vocab_size": 60,
            "d_model": 32,
            "ffn_dim": 64,
            "num_layers": 2,
            "attention_heads": 2,
            "max_position_embeddings": 32,
        },
    ),
    ("glm", "GlmConfig", "GlmForCausalLM", KEYS | {"head_dim": 16}),
    ("openai_gpt", "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", GPT),
]
PAIRS: list[Row] = [
    ("bart", "BartConfig", "BartModel", TWO_SIDED),
    ("marian", "MarianConfig", "MarianModel", TWO_SIDED),
    ("pegasus", "PegasusConfig", "PegasusModel", TWO_SIDED),
    ("blenderbot", "BlenderbotConfig", "BlenderbotModel", TWO_SIDED),
]
PICTURES: list[Row] = [
    ("beit", "BeitConfig", "BeitForImageClassification", PICTURE | {"use_relative_position_bias": True}),
    (
        "dpt",
        "DPTConfig",
        "DPTForDepthEstimation",
        SMALL
        | {
            "image_size": 32,
            "patch_size": 8,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 16,
            "is_hybrid": False,
        },
    ),
    ("mobilenet_v1", "MobileNetV1Config", "MobileNetV1ForImageClassification", {"depth_multiplier": 0.25}),
    ("mobilevitv2", "MobileViTV2Config", "MobileViTV2Model", {"width_multiplier": 0.25, "image_size": 64}),
    ("poolformer", "PoolFormerConfig", "PoolFormerModel", {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}),
    (
        "hiera",
        "HieraConfig",
        "HieraModel",
        {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
    ),
    ("siglip_vision", "SiglipVisionConfig", "SiglipVisionModel", PICTURE),
    ("vit_mae", "ViTMAEConfig", "ViTMAEModel", PICTURE | {"mask_ratio": 0.0}),
    ("dinov3", "DINOv3ViTConfig", "DINOv3ViTModel", PICTURE),
    (
        "vitdet",
        "VitDetConfig",
        "VitDetModel",
        PICTURE | {"window_size": 2, "window_block_indices": [0], "use_relative_position_embeddings": True},
    ),
    ("superpoint", "SuperPointConfig", "SuperPointForKeypointDetection", {}),
    ("upernet", "UperNetConfig", "UperNetForSemanticSegmentation", {}),
]
VIDEO = PICTURE | {"num_frames": 4}


def texts() -> list[Foreign]:
    """Readers, writers and translators of texts, and models of series."""
    ids = tokens((2, 12), 60)
    found = [one(row, tokens((1, 32), 60) if row[0] == "canine" else ids) for row in [*READERS, *WRITERS]]
    both = keyed(lambda s: (ids(s)[0], ids(s + 9)[0]), "input_ids", "decoder_input_ids")  # type: ignore[index]
    found += [one(row, both) for row in PAIRS]
    series: list[Row] = [
        (
            "patchtst",
            "PatchTSTConfig",
            "PatchTSTForPrediction",
            {
                "num_input_channels": 3,
                "context_length": 32,
                "patch_length": 8,
                "patch_stride": 8,
                "d_model": 32,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "ffn_dim": 64,
                "prediction_length": 8,
                "loss": "mse",
            },
        ),
        (
            "patchtsmixer",
            "PatchTSMixerConfig",
            "PatchTSMixerForPrediction",
            {
                "num_input_channels": 3,
                "context_length": 32,
                "patch_length": 8,
                "patch_stride": 8,
                "d_model": 16,
                "num_layers": 2,
                "prediction_length": 8,
                "loss": "mse",
            },
        ),
    ]
    return found + [one(row, normal((2, 32, 3))) for row in series]


def pictures() -> list[Foreign]:
    """Models of pictures, of videos and of speech."""
    found = [
        one(row, normal((1, 3, 64 if row[0] in LARGER else 32, 64 if row[0] in LARGER else 32))) for row in PICTURES
    ]
    videos: list[Row] = [
        ("videomae", "VideoMAEConfig", "VideoMAEForVideoClassification", VIDEO | {"tubelet_size": 2}),
        ("timesformer", "TimesformerConfig", "TimesformerModel", VIDEO),
        ("vivit", "VivitConfig", "VivitModel", VIDEO | {"tubelet_size": [2, 8, 8]}),
    ]
    found += [one(row, normal((1, 4, 3, 32, 32))) for row in videos]
    found.append(
        one(
            (
                "encodec",
                "EncodecConfig",
                "EncodecModel",
                {
                    "num_filters": 4,
                    "hidden_size": 16,
                    "codebook_size": 16,
                    "codebook_dim": 16,
                    "upsampling_ratios": [4, 2],
                    "num_lstm_layers": 1,
                },
            ),
            normal((1, 1, 320)),
        )
    )
    found.append(
        one(
            (
                "speecht5_hifigan",
                "SpeechT5HifiGanConfig",
                "SpeechT5HifiGan",
                {
                    "model_in_dim": 16,
                    "upsample_initial_channel": 32,
                    "upsample_rates": [4, 4],
                    "upsample_kernel_sizes": [8, 8],
                },
            ),
            normal((20, 16)),
        )
    )
    found.append(
        one(
            (
                "univnet",
                "UnivNetConfig",
                "UnivNetModel",
                {
                    "model_in_channels": 16,
                    "model_hidden_channels": 16,
                    "num_mel_bins": 16,
                    "kernel_predictor_hidden_channels": 16,
                    "resblock_stride_sizes": [4, 4, 2],
                },
            ),
            keyed(normal((1, 10, 16), (1, 10, 16)), "input_features", "noise_sequence"),
        )
    )
    return found


LARGER = ("mobilevitv2", "hiera", "superpoint", "upernet", "pvt", "poolformer")


def one(row: Row, batch: Callable[[int], Batch]) -> Foreign:
    """Return the model of a row."""
    name, config, model, options = row
    return positional(f"transformers/{name}", configured(config, model, **options), batch)
