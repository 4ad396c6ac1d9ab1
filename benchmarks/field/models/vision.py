"""Models of images: classification, detection, segmentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.field.models.libraries import library
from benchmarks.field.models.task import Batch, FieldModel, Loss, Sizes, Task, drawn, images, merged, transformer
from benchmarks.harness.workloads import TINY_VIT, vit

CLASSES = 1000


def classified(run: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the classes that the model gives images."""
    return F.cross_entropy(run(batch["images"]).float(), batch["classes"])


def pictures(batch: int, size: int, channels: int = 3) -> list[Batch]:
    classes = torch.arange(batch, device="cpu") * 7 % 10
    return [{"images": drawn(batch, channels, size, size), "classes": classes}]


def timm(
    name: str,
    model: str,
    batch: int,
    size: int = 224,
    small: Sizes | None = None,
    small_size: int = 64,
    checkpointed: bool = False,
    **row: Any,
) -> FieldModel:
    """Return a row of timm. small: what its constructor is given for a CPU, images of `small_size`.

    small_class: the class to construct then, where the constructor fixes its sizes; small_batch: how many images, more
    where batch norm is to have something to average.
    """
    small_class, small_batch = row.pop("small_class", None), row.pop("small_batch", 2)

    def make(is_small: bool, dtype: torch.dtype) -> Task:
        arguments = {"num_classes": 16, **(small or {})} if is_small else {}
        if is_small and small_class:
            made = getattr(library("timm").models, small_class)(**arguments)
        else:
            made = library("timm").create_model(model, pretrained=False, **arguments)
        if checkpointed:
            made.set_grad_checkpointing()
        return Task(
            made.to(dtype), pictures(small_batch, small_size) if is_small else pictures(batch, size), classified
        )

    return FieldModel(name, "vision", make, ("timm",), on_cpu=True, **row)


def torchvision(
    name: str,
    model: str,
    batch: int,
    small: Callable[[Any], nn.Module],
    size: int = 224,
    loss: Loss = classified,
    **row: Any,
) -> FieldModel:
    """Return a row of torchvision. small: makes the model for a CPU out of `torchvision.models`."""
    arguments = row.pop("arguments", {})

    def make(is_small: bool, dtype: torch.dtype) -> Task:
        models = library("torchvision").models
        made = small(models) if is_small else models.get_model(model, weights=None, **arguments)
        return Task(made.to(dtype), pictures(8, 64) if is_small else pictures(batch, size), loss)

    return FieldModel(name, "vision", make, ("torchvision",), on_cpu=True, **row)


def segmented(run: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the class of each pixel."""
    out = run(batch["images"])["out"]
    return F.cross_entropy(out.float(), batch["images"][:, 0].abs().long().clamp(max=9))


SMALL_VIT = {"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 4}
TIMM = (
    timm("ViT-L · FP32 under autocast", "vit_large_patch16_224", 64, small=SMALL_VIT, autocast=True, gib=30),
    timm("ViT-B · BF16", "vit_base_patch16_224", 64, small=SMALL_VIT, gib=18),
    timm("ViT-B · one image", "vit_base_patch16_224", 1, small=SMALL_VIT),
    timm("DeiT-B · distilled · dropped paths", "deit_base_distilled_patch16_224", 64,
         small={**SMALL_VIT, "drop_path_rate": 0.1}, dropout=True, gib=18),
    timm("Swin-B · FP32 under autocast", "swin_base_patch4_window7_224", 64, autocast=True,
         small={"img_size": 56, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}, small_size=56, gib=30),
    timm("ConvNeXt-B · FP32 under autocast", "convnext_base", 64, small={"depths": (1, 1, 1, 1), "dims": (16, 32, 64,
                                                                                                          128)},
         autocast=True, gib=30),
    timm("ConvNeXt-T · channels last · BF16", "convnext_tiny", 64, small={"depths": (1, 1, 1, 1), "dims": (16, 32, 64,
                                                                                                           128)},
                                                                                                           gib=18),
    timm("MLP-Mixer-B", "mixer_b16_224", 64, small_class="MlpMixer", gib=18,
         small={"img_size": 64, "embed_dim": 64, "num_blocks": 2}),
    timm("EfficientNet-B0 · FP32 under autocast", "efficientnet_b0", 64, small_batch=8, autocast=True, gib=18),
    timm("MaxViT-T", "maxvit_tiny_tf_224", 32, small={"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1)}, gib=18),
    timm("EVA-02-B", "eva02_base_patch14_224", 32, small={**SMALL_VIT, "img_size": 56}, small_size=56, gib=18),
    timm("ViT-B · checkpointed · FP32 under autocast", "vit_base_patch16_224", 64, small=SMALL_VIT, autocast=True,
         checkpointed=True, gib=18),
)  # fmt: skip
TORCHVISION = (
    torchvision("ResNet-50 · FP32 under autocast", "resnet50", 64, autocast=True, gib=18,
                small=lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=16, width_per_group=16)),
    torchvision("ResNet-50 · channels last · BF16", "resnet50", 64, gib=18,
                small=lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1],
                                         num_classes=16).to(memory_format=torch.channels_last)),
    torchvision("ViT-B of torchvision", "vit_b_16", 64, gib=18,
                small=lambda m: m.VisionTransformer(64, 16, 2, 4, 64, 128, num_classes=16)),
    torchvision("Swin-V2-T of torchvision", "swin_v2_t", 32, gib=18,
                small=lambda m: m.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=16,
                                                  block=m.swin_transformer.SwinTransformerBlockV2,
                                                  downsample_layer=m.swin_transformer.PatchMergingV2)),
    torchvision("DeepLab-V3", "deeplabv3_resnet50", 8, size=512, loss=segmented, autocast=True, gib=18,
                arguments={"weights_backbone": None, "num_classes": 10},
                small=lambda m: m.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=10)),
)  # fmt: skip


# ---- of Transformers ------------------------------------------------------------------------------------------------


def detected(run: Any, batch: Batch) -> Tensor:
    """Return a loss of boxes and classes with queries matched in order: the library's own matcher needs SciPy."""
    out = run(pixel_values=batch["pixel_values"])
    rows, queries = out.logits.shape[:2]
    classes = torch.arange(rows * queries, device=out.logits.device) % out.logits.shape[-1]
    boxes = torch.linspace(0.1, 0.9, queries * 4, device=out.logits.device).view(1, queries, 4).expand(rows, -1, -1)
    return F.cross_entropy(out.logits.flatten(0, 1).float(), classes) + F.l1_loss(out.pred_boxes.float(), boxes)


def masked(run: Any, batch: Batch) -> Tensor:
    """Return a loss of masks and classes with queries matched in order."""
    out = run(pixel_values=batch["pixel_values"])
    logits, masks = out.class_queries_logits, out.masks_queries_logits
    classes = torch.arange(logits.shape[0] * logits.shape[1], device=logits.device) % logits.shape[-1]
    wanted = (torch.arange(masks.shape[-1], device=masks.device) % 2).expand_as(masks).float()
    of_masks = F.binary_cross_entropy_with_logits(masks.float(), wanted)
    return F.cross_entropy(logits.flatten(0, 1).float(), classes) + of_masks


def backbone(config: str, is_small: bool, small: Sizes, **more: Any) -> Any:
    return getattr(library("transformers"), config)(**{**more, **(small if is_small else {})})


def with_backbone(
    name: str,
    config: str,
    head: str,
    part: tuple[str, Sizes, Sizes],
    sizes: Sizes,
    small: Sizes,
    loss: Loss,
    batch: int,
    size: int,
    **row: Any,
) -> FieldModel:
    """Return a row whose config holds that of a backbone."""

    def make(is_small: bool, dtype: torch.dtype) -> Task:
        transformers = library("transformers")
        within = backbone(part[0], is_small, part[2], **part[1])
        both = merged(sizes, small) if is_small else sizes
        made = getattr(transformers, config)(backbone_config=within, **both)
        model = getattr(transformers, f"AutoModel{head}").from_config(made, dtype=dtype)
        rows, side = (2, 64) if is_small else (batch, size)
        return Task(model, [{"pixel_values": drawn(rows, 3, side, side)}], loss)

    return FieldModel(name, "vision", make, ("transformers", *row.pop("needs", ())), **row)


def segments(batch: int, size: int) -> Any:
    def made(config: Any, is_small: bool) -> list[Batch]:
        rows, side = (2, 64) if is_small else (batch, size)
        labels = drawn(rows, side, side, below=config.num_labels)
        return [{"pixel_values": drawn(rows, 3, side, side), "labels": labels}]

    return made


SMALL_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
SMALL_SWIN = {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 4], "window_size": 4, "image_size": 64}
DETR = {"d_model": 256, "encoder_layers": 4, "decoder_layers": 4, "num_queries": 100, "num_labels": 91,
        "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}  # fmt: skip
TRANSFORMERS = (
    transformer("ViT-H wide", "vision", "ViTConfig", "ForImageClassification",
                vit(1280, 5120, 6, 16, patch_size=14, num_labels=1000), TINY_VIT, images(64), gib=18),
    transformer("DINOv2-L wide", "vision", "Dinov2Config", "ForImageClassification",
                {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "image_size": 224,
                 "num_labels": 1000},
                {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
                 "num_labels": 16},
                images(32), gib=18),
    transformer("BEiT", "vision", "BeitConfig", "ForImageClassification",
                {"hidden_size": 768, "num_hidden_layers": 6, "num_labels": 1000, "use_relative_position_bias": True},
                {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
                 "image_size": 64, "num_labels": 16}, images(32), gib=18),
    transformer("SegFormer", "vision", "SegformerConfig", "ForSemanticSegmentation",
                {"depths": [2, 2, 4, 2], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768,
                 "num_labels": 20},
                {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 64], "num_attention_heads": [1, 2, 2, 4],
                 "decoder_hidden_size": 32}, segments(8, 512), autocast=True, gib=20),
    with_backbone("DETR", "DetrConfig", "ForObjectDetection", ("ResNetConfig", {"out_features": ["stage4"]},
                                                               SMALL_RESNET), DETR,
                  {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 10, "encoder_ffn_dim": 128,
                   "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
                  detected, 8, 640, autocast=True, gib=20),
    with_backbone("Mask2Former", "Mask2FormerConfig", "ForUniversalSegmentation",
                  ("SwinConfig", {"out_features": ["stage1", "stage2", "stage3", "stage4"], "image_size": 384},
                   SMALL_SWIN),
                  {"num_queries": 100, "decoder_layers": 4, "encoder_layers": 2},
                  {"hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32, "num_queries": 8,
                   "num_attention_heads": 4,
                   "encoder_feedforward_dim": 64, "dim_feedforward": 64, "decoder_layers": 3},
                  masked, 4, 384, autocast=True, gib=20, needs=("scipy",)),
)  # fmt: skip


# ---- written plainly ------------------------------------------------------------------------------------------------


class Double(nn.Sequential):
    """Two convolutions."""

    def __init__(self, into: int, out: int):
        super().__init__(
            nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """A U-Net as tutorials have it."""

    def __init__(self, width: int, depth: int, classes: int):
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        above = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in above)
        self.up = nn.ModuleList(Double(2 * b, b) for _, b in above)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for wider, block in zip(self.wider, self.up, strict=True):
            x = block(torch.cat([kept.pop(), wider(x)], dim=1))
        return {"out": self.head(x)}


def unet(is_small: bool, dtype: torch.dtype) -> Task:
    model = UNet(8, 3, 10) if is_small else UNet(64, 5, 10)
    return Task(model.to(dtype), pictures(2, 32) if is_small else pictures(16, 256), segmented)


PLAIN = (FieldModel("U-Net", "vision", unet, autocast=True, gib=20),)
MODELS = TIMM + TORCHVISION + TRANSFORMERS + PLAIN
