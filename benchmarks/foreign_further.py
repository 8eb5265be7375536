"""Modules of small libraries of research: attention, tables, graphs, audio, pictures, operators."""

from collections.abc import Callable
from typing import Any

import torch
from foreign_makers import Batch, Foreign, image, made, normal, tokens

Row = tuple[str, Callable[..., Any], Callable[[int], Batch]]

WORDS = tokens((1, 16), 50)
ROWS = normal((4, 20, 32))


def attention() -> list[Foreign]:
    """Kinds of attention, and what stands in its place."""
    table: list[Row] = [
        (
            "reformer_pytorch/lm",
            made(
                "reformer_pytorch:ReformerLM",
                num_tokens=50,
                dim=32,
                depth=1,
                max_seq_len=16,
                heads=2,
                bucket_size=4,
                n_hashes=2,
                causal=True,
            ),
            WORDS,
        ),
        (
            "performer_pytorch/lm",
            made("performer_pytorch:PerformerLM", num_tokens=50, max_seq_len=16, dim=32, depth=2, heads=2, dim_head=16),
            WORDS,
        ),
        (
            "linformer/lm",
            made("linformer:LinformerLM", num_tokens=50, dim=32, seq_len=16, depth=2, heads=2, k=8),
            WORDS,
        ),
        (
            "perceiver_pytorch/perceiver",
            made(
                "perceiver_pytorch:Perceiver",
                num_freq_bands=4,
                depth=1,
                max_freq=10.0,
                input_channels=3,
                input_axis=2,
                num_latents=8,
                latent_dim=32,
                cross_heads=1,
                latent_heads=2,
                cross_dim_head=16,
                latent_dim_head=16,
                num_classes=5,
            ),
            normal((1, 16, 16, 3)),
        ),
        (
            "perceiver_pytorch/io",
            made(
                "perceiver_pytorch:PerceiverIO",
                dim=32,
                queries_dim=32,
                depth=1,
                num_latents=8,
                latent_dim=32,
                cross_heads=1,
                latent_heads=2,
                cross_dim_head=16,
                latent_dim_head=16,
            ),
            normal((1, 20, 32)),
        ),
        (
            "mlp_mixer_pytorch/mixer",
            made("mlp_mixer_pytorch:MLPMixer", image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=5),
            image(32),
        ),
        (
            "res_mlp_pytorch/resmlp",
            made("res_mlp_pytorch:ResMLP", image_size=32, patch_size=8, dim=32, depth=2, num_classes=5),
            image(32),
        ),
        (
            "g_mlp_pytorch/lm",
            made("g_mlp_pytorch:gMLP", num_tokens=50, dim=32, depth=2, seq_len=16, causal=True),
            WORDS,
        ),
        (
            "g_mlp_pytorch/vision",
            made("g_mlp_pytorch:gMLPVision", image_size=32, patch_size=8, num_classes=5, dim=32, depth=2),
            image(32),
        ),
        (
            "lambda_networks/layer",
            made("lambda_networks:LambdaLayer", dim=16, dim_out=16, r=5, dim_k=8, heads=2, dim_u=1),
            normal((1, 16, 12, 12)),
        ),
        (
            "bottleneck_transformer_pytorch/stack",
            made(
                "bottleneck_transformer_pytorch:BottleStack",
                dim=16,
                fmap_size=8,
                dim_out=32,
                proj_factor=4,
                heads=2,
                dim_head=8,
                downsample=True,
                num_layers=2,
            ),
            normal((1, 16, 8, 8)),
        ),
        (
            "nystrom_attention/transformer",
            made(
                "nystrom_attention:Nystromformer",
                dim=32,
                dim_head=16,
                heads=2,
                depth=1,
                num_landmarks=4,
                pinv_iterations=3,
            ),
            ROWS,
        ),
        (
            "axial_attention/attention",
            made("axial_attention:AxialAttention", dim=16, dim_index=1, dim_heads=8, heads=2, num_dimensions=2),
            normal((1, 16, 8, 8)),
        ),
        (
            "linear_attention_transformer/lm",
            made(
                "linear_attention_transformer:LinearAttentionTransformerLM",
                num_tokens=50,
                dim=32,
                heads=2,
                depth=2,
                max_seq_len=16,
                causal=False,
            ),
            WORDS,
        ),
        ("soft_moe_pytorch/soft", made("soft_moe_pytorch:SoftMoE", dim=32, seq_len=20, num_experts=4), ROWS),
        ("soft_moe_pytorch/dynamic", made("soft_moe_pytorch:DynamicSlotsSoftMoE", dim=32, num_experts=4), ROWS),
        (
            "timesformer_pytorch/video",
            made(
                "timesformer_pytorch:TimeSformer",
                dim=32,
                image_size=16,
                patch_size=8,
                num_frames=4,
                num_classes=5,
                depth=1,
                heads=2,
                dim_head=16,
            ),
            normal((1, 4, 3, 16, 16)),
        ),
        (
            "uformer_pytorch/uformer",
            made(
                "uformer_pytorch:Uformer", dim=16, stages=2, num_blocks=1, window_size=4, dim_head=8, heads=2, ff_mult=2
            ),
            normal((1, 3, 32, 32)),
        ),
        ("vector_quantize_pytorch/fsq", made("vector_quantize_pytorch:FSQ", levels=[8, 5, 5, 5], dim=32), ROWS),
        ("vector_quantize_pytorch/vq", made("vector_quantize_pytorch:VectorQuantize", dim=32, codebook_size=16), ROWS),
        ("vector_quantize_pytorch/lfq", made("vector_quantize_pytorch:LFQ", codebook_size=64, dim=32), ROWS),
        (
            "colt5_attention/transformer",
            made(
                "colt5_attention:ConditionalRoutedTransformerBlock",
                dim=32,
                num_heavy_ff_tokens=4,
                num_heavy_attn_tokens_q=4,
                num_heavy_attn_tokens_kv=4,
            ),
            normal((1, 16, 32)),
        ),
        (
            "halonet_pytorch/attention",
            made("halonet_pytorch:HaloAttention", dim=16, block_size=4, halo_size=2, dim_head=8, heads=2),
            normal((1, 16, 8, 8)),
        ),
        (
            "glom_pytorch/glom",
            made("glom_pytorch:Glom", dim=16, levels=3, image_size=16, patch_size=8),
            normal((1, 3, 16, 16)),
        ),
        (
            "x_clip/text",
            made("x_clip.x_clip:TextTransformer", dim=32, num_tokens=50, max_seq_len=16, depth=1, heads=2, dim_head=16),
            WORDS,
        ),
        (
            "product_key_memory/pkm",
            made("product_key_memory:PKM", dim=32, heads=2, num_keys=8, topk=4, dim_head=16),
            ROWS,
        ),
        (
            "bs_roformer/roformer",
            made(
                "bs_roformer:BSRoformer",
                dim=16,
                depth=1,
                time_transformer_depth=1,
                freq_transformer_depth=1,
                heads=2,
                dim_head=8,
                flash_attn=False,
                stft_n_fft=64,
                stft_hop_length=16,
                stft_win_length=64,
                freqs_per_bands=(8, 8, 17),
                stereo=False,
            ),
            normal((1, 512)),
        ),
    ]
    return listed(table)


def tables() -> list[Foreign]:
    """Tables, series, clicks and differential equations."""
    mixed = lambda s: (tokens((4, 3), 5)(s)[0], normal((4, 6))(s)[0])  # type: ignore[index] # noqa: E731
    numbers = normal((4, 6))
    table: list[Row] = [
        (
            "tab_transformer_pytorch/ft",
            made(
                "tab_transformer_pytorch:FTTransformer",
                categories=(5, 5, 5),
                num_continuous=6,
                dim=16,
                dim_out=1,
                depth=2,
                heads=2,
            ),
            mixed,
        ),
        (
            "itransformer/itransformer",
            made(
                "iTransformer:iTransformer",
                num_variates=5,
                lookback_len=24,
                dim=32,
                depth=2,
                heads=2,
                dim_head=16,
                pred_length=6,
            ),
            normal((2, 24, 5)),
        ),
        (
            "itransformer/2d",
            made(
                "iTransformer:iTransformer2D",
                num_variates=5,
                num_time_tokens=4,
                lookback_len=24,
                dim=32,
                depth=1,
                heads=2,
                dim_head=16,
                pred_length=6,
            ),
            normal((1, 24, 5)),
        ),
        (
            "pytorch_tcn/tcn",
            made("pytorch_tcn:TCN", num_inputs=6, num_channels=[16, 16], kernel_size=3),
            normal((2, 6, 30)),
        ),
        (
            "pytorch_tcn/conditioned",
            made(
                "pytorch_tcn:TCN",
                num_inputs=6,
                num_channels=[16, 16],
                kernel_size=3,
                use_skip_connections=True,
                use_norm="layer_norm",
                activation="gelu",
                causal=False,
            ),
            normal((2, 6, 30)),
        ),
        (
            "pytorch_tabnet/tabnet",
            made(
                "pytorch_tabnet.tab_network:TabNet", 6, 2, n_d=8, n_a=8, n_steps=2, group_attention_matrix=torch.eye(6)
            ),
            normal((8, 6)),
        ),
        (
            "pytorch_tabnet/entmax",
            made(
                "pytorch_tabnet.tab_network:TabNet",
                6,
                2,
                n_d=8,
                n_a=8,
                n_steps=2,
                mask_type="entmax",
                group_attention_matrix=torch.eye(6),
            ),
            normal((8, 6)),
        ),
        (
            "rtdl_revisiting_models/mlp",
            made("rtdl_revisiting_models:MLP", d_in=6, d_out=1, n_blocks=2, d_block=32, dropout=0.1),
            numbers,
        ),
        (
            "rtdl_revisiting_models/resnet",
            made(
                "rtdl_revisiting_models:ResNet",
                d_in=6,
                d_out=1,
                n_blocks=2,
                d_block=32,
                d_hidden=None,
                d_hidden_multiplier=2.0,
                dropout1=0.1,
                dropout2=0.0,
            ),
            numbers,
        ),
        (
            "rtdl_revisiting_models/ft",
            made(
                "rtdl_revisiting_models:FTTransformer",
                n_cont_features=6,
                cat_cardinalities=[5, 5, 5],
                d_out=1,
                n_blocks=2,
                d_block=16,
                attention_n_heads=2,
                attention_dropout=0.1,
                ffn_d_hidden=None,
                ffn_d_hidden_multiplier=2.0,
                ffn_dropout=0.1,
                residual_dropout=0.0,
            ),
            lambda s: (*numbers(s), mixed(s)[0]),
        ),
        ("rtdl_num_embeddings/periodic", made("rtdl_num_embeddings:PeriodicEmbeddings", 6, lite=False), numbers),
        ("ncps/cfc", made("ncps.torch:CfC", 6, 16), normal((2, 8, 6))),
        ("ncps/ltc", made("ncps.torch:LTC", 6, 8), normal((2, 4, 6))),
        ("egnn_pytorch/egnn", made("egnn_pytorch:EGNN", dim=16), normal((1, 6, 16), (1, 6, 3))),
        (
            "siren_pytorch/siren",
            made("siren_pytorch:SirenNet", dim_in=2, dim_hidden=32, dim_out=3, num_layers=3),
            normal((16, 2)),
        ),
        (
            "neuralop/fno",
            made("neuralop.models:FNO", n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=1),
            normal((1, 1, 16, 16)),
        ),
        ("kan/efficient", made("kan.MultKAN:KAN", width=[4, 3, 1], grid=3, k=3, auto_save=False), normal((5, 4))),
    ]
    return listed(table)


def sounds() -> list[Foreign]:
    """Sounds and pictures."""
    wave = normal((1, 1, 1024))
    table: list[Row] = [
        (
            "asteroid/conv_tasnet",
            made(
                "asteroid.models:ConvTasNet",
                n_src=2,
                n_filters=16,
                kernel_size=16,
                stride=8,
                n_blocks=2,
                n_repeats=1,
                bn_chan=16,
                hid_chan=16,
                skip_chan=16,
            ),
            normal((1, 800)),
        ),
        (
            "asteroid/dprnn",
            made(
                "asteroid.models:DPRNNTasNet",
                n_src=2,
                n_filters=16,
                bn_chan=16,
                hid_size=16,
                chunk_size=10,
                n_repeats=1,
                kernel_size=16,
                stride=8,
            ),
            normal((1, 400)),
        ),
        (
            "encodec/encoder",
            made("encodec.modules:SEANetEncoder", n_filters=4, dimension=16, ratios=[4, 2], lstm=1),
            wave,
        ),
        (
            "encodec/decoder",
            made("encodec.modules:SEANetDecoder", n_filters=4, dimension=16, ratios=[4, 2], lstm=1),
            normal((1, 16, 20)),
        ),
        (
            "demucs/demucs",
            made("demucs.demucs:Demucs", ["a", "b"], channels=8, depth=2, lstm_layers=1, resample=False),
            normal((1, 2, 1024)),
        ),
        (
            "vocos/backbone",
            made("vocos.models:VocosBackbone", input_channels=16, dim=32, intermediate_dim=64, num_layers=2),
            normal((1, 16, 20)),
        ),
        (
            "openunmix/unmix",
            made("openunmix.model:OpenUnmix", nb_bins=33, nb_channels=1, hidden_size=16, nb_layers=1),
            normal((1, 1, 33, 12)),
        ),
        (
            "snac/snac",
            made(
                "snac:SNAC",
                encoder_dim=8,
                encoder_rates=[2, 2],
                decoder_dim=32,
                decoder_rates=[2, 2],
                attn_window_size=None,
                codebook_size=16,
                codebook_dim=4,
                vq_strides=[2, 1],
                noise=False,
            ),
            normal((1, 1, 128)),
        ),
        ("torchcrepe/crepe", made("torchcrepe:Crepe", "tiny"), normal((1, 1024))),
        (
            "efficientnet_pytorch/b0",
            made("efficientnet_pytorch:EfficientNet.from_name", "efficientnet-b0", num_classes=10),
            image(64),
        ),
        ("geffnet/mobilenetv3", made("geffnet:mobilenetv3_rw", pretrained=False, num_classes=10), image(64)),
        ("resnest/resnest14", made("resnest.torch:resnest50_fast_1s1x64d", pretrained=False), image(64)),
        (
            "facenet_pytorch/inception",
            made("facenet_pytorch:InceptionResnetV1", classify=False),
            normal((1, 3, 96, 96)),
        ),
        ("facenet_pytorch/pnet", made("facenet_pytorch.models.mtcnn:PNet", pretrained=False), image(32)),
        (
            "lpips/alex",
            made("lpips:LPIPS", net="squeeze", pretrained=False, pnet_rand=True, verbose=False),
            normal((1, 3, 64, 64), (1, 3, 64, 64)),
        ),
        (
            "pretrainedmodels/bninception",
            made("pretrainedmodels:bninception", pretrained=None),
            normal((1, 3, 224, 224)),
        ),
        (
            "pytorchvideo/x3d",
            made("pytorchvideo.models.x3d:create_x3d", input_clip_length=4, input_crop_size=64, model_num_class=5),
            normal((1, 3, 4, 64, 64)),
        ),
        (
            "denoising_diffusion_pytorch/unet",
            made("denoising_diffusion_pytorch:Unet", dim=16, dim_mults=(1, 2), flash_attn=False),
            lambda s: (*normal((1, 3, 16, 16))(s), torch.tensor([7 + s])),
        ),
        (
            "denoising_diffusion_pytorch/unet_1d",
            made("denoising_diffusion_pytorch:Unet1D", dim=16, dim_mults=(1, 2), channels=3),
            lambda s: (*normal((1, 3, 32))(s), torch.tensor([7 + s])),
        ),
        (
            "pytorch_msssim/ssim",
            made("pytorch_msssim:SSIM", data_range=1.0, channel=3),
            normal((1, 3, 32, 32), (1, 3, 32, 32)),
        ),
    ]
    return listed(table)


def listed(table: list[Row]) -> list[Foreign]:
    """Return the modules of the rows."""
    return [Foreign(*row) for row in table]
