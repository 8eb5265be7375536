"""Image models of other libraries: classifiers, detectors, segmentation, dense prediction."""

from foreign_makers import SMALL, Foreign, anchored, configured, diffusing, image, made, normal, positional

TIMM = """resnet10t skresnet18 regnetz_005 mobilenetv4_conv_small_035 mobileone_s0 repghostnet_050 efficientvit_b0
edgenext_xx_small convnextv2_atto dla34 rexnet_100 nf_regnet_b0 starnet_s1 shvit_s1 swiftformer_xs poolformer_s12
caformer_s18 mambaout_femto repvit_m0_9"""
TIMM_SIZED = (
    "vit_tiny_patch16_224 cait_xxs24_224 pit_ti_224 xcit_nano_12_p16_224 gmlp_ti16_224 coat_lite_tiny pvt_v2_b0"
)
PYTORCHCV = "squeezenet_v1_1 menet108_8x1_g3 bam_resnet18 diaresnet10 peleenet xdensenet40_2_k24_bc_cifar10"
EXTRA = "pytorchcv.model_provider:get_model"


def image_models() -> list[Foreign]:
    """Classifiers of timm, torchvision, pytorchcv and vit-pytorch."""
    found = [Foreign(f"timm/{n}", made("timm:create_model", n, num_classes=10), image(64)) for n in TIMM.split()]
    for name in TIMM_SIZED.split():
        found.append(Foreign(f"timm/{name}", made("timm:create_model", name, num_classes=10), normal((1, 3, 224, 224))))
    for name in PYTORCHCV.split():
        size = 32 if name.endswith("cifar10") else 224
        found.append(Foreign(f"pytorchcv/{name}", made(EXTRA, name), normal((1, 3, size, size))))
    for name, options in (("googlenet", {"init_weights": True}), ("shufflenet_v2_x0_5", {}), ("swin_v2_t", {})):
        found.append(Foreign(f"torchvision/{name}", made(f"torchvision.models:{name}", **options), image(64)))
    facts = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}
    for path in (
        "vit:ViT",
        "simple_vit:SimpleViT",
        "deepvit:DeepViT",
        "parallel_vit:ViT",
        "vit_for_small_dataset:ViT",
        "learnable_memory_vit:ViT",
        "simple_vit_with_qk_norm:SimpleViT",
        "simple_vit_with_register_tokens:SimpleViT",
        "simple_vit_with_value_residual:SimpleViT",
        "normalized_vit:nViT",
        "simple_vit_with_fft:SimpleViT",
        "vit_with_patch_merger:ViT",
        "jumbo_vit:JumboViT",
        "simple_vit_with_hyper_connections:SimpleViT",
    ):
        extra = {"vit_with_patch_merger": {"patch_merge_layer": 1}, "simple_vit_with_fft": {"freq_patch_size": 8}}
        extra |= {"jumbo_vit": {"num_jumbo_cls": 1, "jumbo_cls_k": 2, "jumbo_ff_mult": 2}, "normalized_vit": {}}
        extra |= {"simple_vit_with_hyper_connections": {"num_residual_streams": 2}}
        options = facts | extra.get(path.split(":")[0], {})
        found.append(Foreign(f"vit_pytorch/{path.split(':')[0]}", made(f"vit_pytorch.{path}", **options), image(64)))
    return found


def detection() -> list[Foreign]:
    """Detectors, segmentation, dense prediction: ultralytics, transformers, torchvision, MONAI, kornia and more."""
    found = [
        Foreign(
            f"ultralytics/{name}",
            made("ultralytics.nn.tasks:" + cls, f"{name}.yaml", verbose=False),
            normal((1, 3, 64, 64)),
        )
        for name, cls in (
            ("yolov5n", "DetectionModel"),
            ("yolov8n", "DetectionModel"),
            ("yolo11n", "DetectionModel"),
            ("yolov10n", "DetectionModel"),
            ("yolo11n-seg", "SegmentationModel"),
            ("yolov8n-pose", "PoseModel"),
        )
    ]
    for name in ("retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large"):
        found.append(Foreign(f"torchvision/{name}", anchored(name, num_classes=3), normal((1, 3, 64, 64))))
    yolos = SMALL | {"image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 6}
    seg = {
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_encoder_blocks": 2,
        "decoder_hidden_size": 16,
    }
    found += [
        positional(
            "transformers/yolos", configured("YolosConfig", "YolosForObjectDetection", **yolos), normal((1, 3, 64, 64))
        ),
        positional(
            "transformers/segformer", configured("SegformerConfig", "SegformerForSemanticSegmentation", **seg), image()
        ),
        positional("transformers/dinov2", configured("Dinov2Config", "Dinov2Model", **SMALL, image_size=56), image(56)),
        positional("transformers/vit_msn", configured("ViTMSNConfig", "ViTMSNModel", **SMALL, image_size=64), image()),
        positional(
            "transformers/bit",
            configured(
                "BitConfig",
                "BitModel",
                embedding_size=16,
                hidden_sizes=[32, 48],
                depths=[1, 1],
                layer_type="bottleneck",
                num_groups=8,
            ),
            image(),
        ),
        positional(
            "transformers/focalnet",
            configured(
                "FocalNetConfig",
                "FocalNetModel",
                image_size=32,
                embed_dim=16,
                depths=[1, 1],
                focal_levels=[2, 2],
                focal_windows=[3, 3],
                hidden_sizes=[16, 32],
            ),
            image(32),
        ),
        positional(
            "transformers/pvt_v2",
            configured(
                "PvtV2Config",
                "PvtV2Model",
                image_size=64,
                depths=[1, 1, 1, 1],
                hidden_sizes=[16, 32, 32, 32],
                num_attention_heads=[1, 2, 2, 2],
            ),
            image(),
        ),
        positional(
            "transformers/glpn",
            configured(
                "GLPNConfig",
                "GLPNForDepthEstimation",
                depths=[1] * 4,
                hidden_sizes=[8, 16, 16, 16],
                num_attention_heads=[1, 2, 2, 2],
                decoder_hidden_size=8,
            ),
            image(),
        ),
        positional(
            "transformers/levit",
            configured(
                "LevitConfig",
                "LevitModel",
                image_size=64,
                hidden_sizes=[32, 48, 64],
                num_attention_heads=[2, 2, 2],
                depths=[1, 1, 1],
                key_dim=[8] * 3,
            ),
            image(),
        ),
        positional(
            "transformers/swin2sr",
            configured(
                "Swin2SRConfig",
                "Swin2SRForImageSuperResolution",
                image_size=32,
                patch_size=1,
                embed_dim=16,
                depths=[1, 1],
                num_heads=[2, 2],
                window_size=4,
                upscale=2,
            ),
            normal((1, 3, 16, 16)),
        ),
        positional(
            "transformers/mobilevit_segmentation",
            configured(
                "MobileViTConfig",
                "MobileViTForSemanticSegmentation",
                image_size=64,
                hidden_sizes=[32, 40, 48],
                neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 160],
            ),
            image(),
        ),
    ]
    for name in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        maker = made(f"torchvision.models.segmentation:{name}", weights=None, weights_backbone=None, num_classes=5)
        found.append(Foreign(f"torchvision/{name}", maker, image(64)))
    for name in ("Unet", "UnetPlusPlus", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3Plus", "MAnet"):
        maker = made(f"segmentation_models_pytorch:{name}", "resnet18", encoder_weights=None, classes=2)
        found.append(Foreign(f"segmentation_models_pytorch/{name}", maker, image(128 if name == "PAN" else 64)))
    flat = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    steps = {"channels": (8, 16, 32), "strides": (2, 2)}
    nets = "monai.networks.nets"
    found += [
        Foreign("monai/unet", made(f"{nets}:UNet", **flat, **steps, num_res_units=1), image(32, 1)),
        Foreign(
            "monai/unet_3d", made(f"{nets}:UNet", **(flat | {"spatial_dims": 3}), **steps), normal((1, 1, 16, 16, 16))
        ),
        Foreign("monai/attention_unet", made(f"{nets}:AttentionUnet", **flat, **steps), image(32, 1)),
        Foreign("monai/basic_unet", made(f"{nets}:BasicUNet", **flat, features=(8, 8, 16, 16, 16, 8)), image(32, 1)),
        Foreign("monai/segresnet", made(f"{nets}:SegResNet", **flat, init_filters=8), image(32, 1)),
        Foreign(
            "monai/dynunet",
            made(
                f"{nets}:DynUNet",
                **flat,
                kernel_size=[3, 3, 3],
                strides=[1, 2, 2],
                upsample_kernel_size=[2, 2],
                filters=[8, 16, 32],
            ),
            image(32, 1),
        ),
        Foreign("monai/vnet", made(f"{nets}:VNet", **flat), image(32, 1)),
        Foreign(
            "monai/unetr",
            made(f"{nets}:UNETR", **flat, img_size=32, feature_size=8, hidden_size=48, mlp_dim=64, num_heads=4),
            image(32, 1),
        ),
        Foreign("monai/swin_unetr", made(f"{nets}:SwinUNETR", **flat, feature_size=12), image(64, 1)),
        Foreign("monai/highresnet", made(f"{nets}:HighResNet", **flat), image(32, 1)),
        Foreign(
            "monai/diffusion_unet",
            made(
                f"{nets}:DiffusionModelUNet",
                **flat,
                channels=(16, 16),
                num_res_blocks=1,
                attention_levels=(False, True),
                norm_num_groups=8,
                num_head_channels=8,
            ),
            diffusing((1, 1, 16, 16)),
        ),
        Foreign(
            "monai/autoencoder_kl",
            made(
                f"{nets}:AutoencoderKL",
                **flat,
                channels=(16, 16),
                num_res_blocks=1,
                latent_channels=3,
                attention_levels=(False, False),
                norm_num_groups=8,
            ),
            image(32, 1),
        ),
        Foreign("kornia/hardnet", made("kornia.feature:HardNet", pretrained=False), normal((4, 1, 32, 32))),
        Foreign("kornia/sosnet", made("kornia.feature:SOSNet", pretrained=False), normal((4, 1, 32, 32))),
        Foreign("kornia/tfeat", made("kornia.feature:TFeat", pretrained=False), normal((4, 1, 32, 32))),
        Foreign("kornia/hynet", made("kornia.feature:HyNet", pretrained=False), normal((4, 1, 32, 32))),
    ]
    return found
