"""Interpolation, padding, rearranging images."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from tests.recorded.cases.functions.common import IMAGE, IMAGE_LAST, SERIES, SMALL, VOLUME, VOLUME_LAST
from tests.recorded.cases.functions.registry import BF16, add, group, t

group("images")
for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
    for suffix, tensor in (
        ("", SMALL),
        ("_bf16", t(4, 32, 28, 28, dtype=BF16)),
        ("_channels_last", t(4, 32, 28, 28, layout="channels_last")),
    ):
        add(f"interpolate_{mode}{suffix}", lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode), tensor)
add("interpolate_bilinear_aligned", lambda x: F.interpolate(x, (41, 41), mode="bilinear", align_corners=True), SMALL)
add("interpolate_bilinear_antialias", lambda x: F.interpolate(x, (14, 14), mode="bilinear", antialias=True), SMALL)
add("interpolate_bicubic_antialias", lambda x: F.interpolate(x, (14, 14), mode="bicubic", antialias=True), SMALL)
add("interpolate_linear1d", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), SERIES)
add("interpolate_nearest1d", lambda x: F.interpolate(x, scale_factor=2), SERIES)
add("interpolate_trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), VOLUME)
add("interpolate_trilinear_channels_last", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), VOLUME_LAST)
add("interpolate_nearest3d", lambda x: F.interpolate(x, scale_factor=2), VOLUME)
for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
    add(
        f"interpolate_{mode}_inference",
        lambda x, mode=mode: torch.inference_mode()(F.interpolate)(x, scale_factor=2, mode=mode),
        SMALL,
        grad=False,
    )
for mode in ("constant", "reflect", "replicate", "circular"):
    add(f"pad_{mode}", lambda x, mode=mode: F.pad(x, (1, 2, 3, 1), mode), SMALL)
    add(f"pad_{mode}_1d", lambda x, mode=mode: F.pad(x, (1, 2), mode), SERIES)
    add(f"pad_{mode}_3d", lambda x, mode=mode: F.pad(x, (1, 2, 1, 1, 2, 2), mode), VOLUME)
add("pad_replicate_channels_last", lambda x: F.pad(x, (1, 2, 3, 1), "replicate"), IMAGE_LAST)
add("interpolate_nearest3d_channels_last", lambda x: F.interpolate(x, scale_factor=2), VOLUME_LAST)
add("roll_permuted", lambda x: x.permute(0, 2, 3, 1).roll((1, 2), (1, 2)), IMAGE)
add("affine_grid_aligned", lambda a: F.affine_grid(a, [4, 3, 28, 28], align_corners=True), t(4, 2, 3))
add("affine_grid_3d", lambda a: F.affine_grid(a, [4, 3, 8, 28, 28], align_corners=False), t(4, 3, 4))
add("avg_pool2d_sliced", lambda x: F.avg_pool2d(x, 3, 2, 1), t(8, 64, 56, 56, layout="sliced"))
add(
    "interpolate_bilinear_sliced",
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    t(4, 32, 28, 28, layout="sliced"),
)
add("unfold_sliced", lambda x: F.unfold(x, 3, padding=1), t(4, 32, 28, 28, layout="sliced"))
add("pad_reflect_channels_last", lambda x: F.pad(x, (1, 2, 3, 1), "reflect"), IMAGE_LAST)
for mode in ("bilinear", "bicubic", "nearest", "nearest-exact"):
    add(
        f"interpolate_{mode}_of_the_same_size",
        lambda x, mode=mode: F.interpolate(x.mT, (28, 28), mode=mode).mT.contiguous(),
        SMALL,
    )
add(
    "interpolate_linear_of_the_same_size",
    lambda x: F.interpolate(x.mT, x.shape[1], mode="linear").mT.contiguous(),
    SERIES,
)
add(
    "interpolate_trilinear_of_the_same_size",
    lambda x: F.interpolate(x.mT, x.mT.shape[2:], mode="trilinear").mT.contiguous(),
    VOLUME,
)
add("pad_reflect_1d_permuted", lambda x: F.pad(x, (1, 2), "reflect").mT.contiguous(), SERIES)
add("pad_reflect_permuted", lambda x: F.pad(x, (1, 2, 3, 1), "reflect").mT.contiguous(), SMALL)
add("new_zeros_of_permuted", lambda x: x.mT.new_zeros(x.mT.shape) + 1, SMALL)
add("pad_constant_channels_last", lambda x: F.pad(x, (1, 2, 3, 1)), IMAGE_LAST)
add("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), SMALL)
add("pixel_shuffle_channels_last", lambda x: F.pixel_shuffle(x, 2), IMAGE_LAST)
add("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), SMALL)
add("channel_shuffle", lambda x: F.channel_shuffle(x, 4), SMALL)
add("unfold", lambda x: F.unfold(x, 3, padding=1), SMALL)
add("fold", lambda x: F.fold(x, (28, 28), 3, padding=1), t(4, 32 * 9, 784))
add("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), SMALL, t(4, 14, 14, 2))
add("grid_sample_aligned", lambda x, g: F.grid_sample(x, g, align_corners=True), SMALL, t(4, 14, 14, 2))
add(
    "grid_sample_nearest", lambda x, g: F.grid_sample(x, g, mode="nearest", align_corners=False), SMALL, t(4, 14, 14, 2)
)
add(
    "grid_sample_bicubic", lambda x, g: F.grid_sample(x, g, mode="bicubic", align_corners=False), SMALL, t(4, 14, 14, 2)
)
add("grid_sample_3d", lambda x, g: F.grid_sample(x, g, align_corners=False), VOLUME, t(2, 8, 8, 8, 3))
add("affine_grid", lambda a: F.affine_grid(a, [4, 3, 28, 28], align_corners=False), t(4, 2, 3))
add("local_response_norm", lambda x: F.local_response_norm(x, 5), SMALL)


# --- inputs and gradients of other layouts ----------------------------------------------------------------------------

PERMUTED = t(50, 8, 2)


def _resized(mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Interpolates a view with the dimensions reversed, and reverses back: input and gradient are not contiguous."""
    return lambda x: F.interpolate(x.permute(2, 1, 0), scale_factor=2, mode=mode).permute(2, 1, 0).contiguous()


def _position_table(table: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Of a batch of one, whose stride decides whether a kernel sees channels_last."""
    square = table.reshape(1, 64, 64, -1).permute(0, 3, 1, 2)
    square = F.interpolate(square, size=(14, 14), mode="bilinear", align_corners=False)
    return patches + square.flatten(2).permute(0, 2, 1)


for mode in ("linear", "nearest"):
    add(f"interpolate_{mode}1d_permuted", _resized(mode), PERMUTED)
add(
    "interpolate_nearest_permuted",
    lambda x: F.interpolate(x.permute(3, 2, 1, 0), scale_factor=2).permute(3, 2, 1, 0).contiguous(),
    t(20, 20, 8, 2),
)
add("interpolate_position_table", _position_table, t(1, 4096, 64), t(4, 196, 64))


def _of_tokens(x: torch.Tensor) -> torch.Tensor:
    """An image from tokens behind a class token: channels last, with a gap before every image."""
    image = x[:, 1:].transpose(1, 2).unflatten(2, (8, 12))
    return F.interpolate(image, size=(16, 24), mode="bilinear")


add("interpolate_tokens", _of_tokens, t(4, 97, 64))
add(
    "interpolate_antialias_sliced",
    lambda x: F.interpolate(x, size=(8, 12), mode="bilinear", antialias=True),
    t(4, 8, 16, 24, layout="sliced"),
    grad=False,
)
add("local_response_norm_1d", lambda x: F.local_response_norm(x, 3), SERIES)
add("pixel_unshuffle_channels_last", lambda x: F.pixel_unshuffle(x, 2), IMAGE_LAST)
add("unfold_strided", lambda x: F.unfold(x, 3, dilation=2, stride=2), SMALL)
add("grid_sample_border", lambda x, g: F.grid_sample(x, g, "bilinear", "border"), SMALL, t(4, 14, 14, 2))
add("grid_sample_reflection", lambda x, g: F.grid_sample(x, g, "nearest", "reflection"), SMALL, t(4, 14, 14, 2))
add("grid_sample_bf16", F.grid_sample, t(4, 32, 28, 28, dtype=BF16), t(4, 14, 14, 2, dtype=BF16))
