"""Single functions and modules whose allocations were recorded on the CUDA build, one by one.

A case is a function of tensors (and perhaps of a module). It runs forward, then backward from gradients made by
``empty_like``. Sizes are chosen so that a buffer that is forgotten shows. Nothing here knows who records: the same code
runs on the CUDA build and in a capture (:mod:`tests.functions.runner`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

FP16, BF16, FP64, I64, I32, U8, BOOL = (
    torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
C64 = torch.complex64


@dataclass(frozen=True)
class T:
    """A tensor on the device: a leaf that requires a gradient if its dtype can have one and ``grad`` says so.

    ``layout``: ``contiguous``, ``channels_last``, ``transposed`` (last two dimensions swapped in memory), ``sliced``
    (every second element of a wider last dimension) or ``expanded`` (the first dimension has stride 0).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    grad: bool = True
    layout: str = "contiguous"

    def make(self) -> torch.Tensor:
        tensor = self._made()
        floating = tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad_() if floating and self.grad else tensor

    def _made(self) -> torch.Tensor:
        shape, options = self.shape, {"dtype": self.dtype, "device": "cuda"}
        if self.layout == "channels_last":
            format_ = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
            return torch.zeros(shape, **options).to(memory_format=format_)
        if self.layout == "transposed":
            return torch.zeros((*shape[:-2], shape[-1], shape[-2]), **options).transpose(-1, -2)
        if self.layout == "sliced":
            return torch.zeros((*shape[:-1], 2 * shape[-1]), **options)[..., ::2]
        if self.layout == "expanded":
            return torch.zeros((1, *shape[1:]), **options).expand(shape)
        return torch.zeros(shape, **options)


def t(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, layout: str = "contiguous") -> T:
    return T(shape, dtype, grad, layout)


def index(*shape: int, dtype: torch.dtype = I64) -> T:
    return T(shape, dtype)


@dataclass(frozen=True)
class Case:
    """``run(module, *tensors)`` or, without ``module``, ``run(*tensors)``. ``grad`` off: under ``no_grad``."""

    name: str
    group: str
    run: Callable[..., Any]
    tensors: tuple[T, ...]
    module: Callable[[], nn.Module] | None = None
    grad: bool = True
    refused: str = ""


CASES: dict[str, Case] = {}
_group = ""


def group(name: str) -> None:
    global _group
    _group = name


def add(name: str, run: Callable[..., Any], *tensors: T, **options: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, _group, run, tensors, **options)


def call(module: nn.Module, *tensors: torch.Tensor) -> Any:
    return module(*tensors)


def module(
    name: str, make: Callable[[], nn.Module], *tensors: T, run: Callable[..., Any] = call, **options: Any
) -> None:
    add(name, run, *tensors, module=make, **options)


# --- pooling ----------------------------------------------------------------------------------------------------------

group("pooling")
IMAGE = t(8, 64, 56, 56)
IMAGE_HALF = t(8, 64, 56, 56, dtype=BF16)
IMAGE_LAST = t(8, 64, 56, 56, layout="channels_last")
IMAGE_HALF_LAST = t(8, 64, 56, 56, dtype=BF16, layout="channels_last")
SERIES = t(8, 64, 1000)
VOLUME = t(2, 16, 20, 28, 28)
VOLUME_LAST = t(2, 16, 20, 28, 28, layout="channels_last")

add("max_pool1d", lambda x: F.max_pool1d(x, 3, 2), SERIES)
add("max_pool1d_no_grad", lambda x: F.max_pool1d(x, 3, 2), SERIES, grad=False)
add("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE)
add("max_pool2d_bf16", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE_HALF)
add("max_pool2d_channels_last", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE_LAST)
add("max_pool2d_ceil", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), IMAGE)
add("max_pool2d_indices", lambda x: F.max_pool2d(x, 2, return_indices=True)[0], IMAGE)
add("max_pool2d_no_grad", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE, grad=False)
add("max_pool2d_sliced", lambda x: F.max_pool2d(x, 3, 2, 1), t(8, 64, 56, 56, layout="sliced"))
add("max_pool3d", lambda x: F.max_pool3d(x, 3, 2, 1), VOLUME)
add("max_pool3d_channels_last", lambda x: F.max_pool3d(x, 3, 2, 1), VOLUME_LAST)
add("max_unpool2d", lambda x, i: F.max_unpool2d(x, i, 2), t(8, 64, 28, 28), index(8, 64, 28, 28))
add("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2), SERIES)
add("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE)
add("avg_pool2d_channels_last", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE_HALF_LAST)
add("avg_pool3d", lambda x: F.avg_pool3d(x, 3, 2, 1), VOLUME)
add("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 7), SERIES)
add("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 7), IMAGE)
add("adaptive_avg_pool2d_one", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE)
add("adaptive_avg_pool2d_one_channels_last", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE_HALF_LAST)
add("adaptive_avg_pool2d_channels_last", lambda x: F.adaptive_avg_pool2d(x, 7), IMAGE_LAST)
add("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 4), VOLUME)
add("adaptive_avg_pool3d_one", lambda x: F.adaptive_avg_pool3d(x, 1), VOLUME)
add("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 7), SERIES)
add("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 7), IMAGE)
add("adaptive_max_pool2d_channels_last", lambda x: F.adaptive_max_pool2d(x, 7), IMAGE_LAST)
add("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 4), VOLUME)
add("lp_pool1d", lambda x: F.lp_pool1d(x, 2.0, 3), SERIES)
add("lp_pool2d", lambda x: F.lp_pool2d(x, 2.0, 3), IMAGE)
add("fractional_max_pool2d", lambda x: F.fractional_max_pool2d(x, 3, output_size=(20, 20)), IMAGE)
add("fractional_max_pool3d", lambda x: F.fractional_max_pool3d(x, 3, output_size=(8, 8, 8)), VOLUME)

# --- interpolation, padding, rearranging images -----------------------------------------------------------------------

group("images")
SMALL = t(4, 32, 28, 28)
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

# --- activations ------------------------------------------------------------------------------------------------------

group("activations")
X, XH = t(64, 4096), t(64, 4096, dtype=BF16)
for name, function in {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "glu": F.glu,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "mish": F.mish,
    "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_eval": lambda x: F.rrelu(x, training=False),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu_inplace": lambda x: F.leaky_relu(x * 2, inplace=True),
    "relu_inplace": lambda x: F.relu(x * 2, inplace=True),
    "elu_inplace": lambda x: F.elu(x * 2, inplace=True),
    "swiglu": lambda x: F.silu(x[:, :2048]) * x[:, 2048:],
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
}.items():
    add(name, function, X)
add("gelu_bf16", F.gelu, XH)
add("silu_bf16", F.silu, XH)
add("mish_bf16", F.mish, XH)
add("glu_bf16", F.glu, XH)
module("prelu", lambda: nn.PReLU(), SMALL)
module("prelu_channels", lambda: nn.PReLU(32), SMALL)

# --- softmax ----------------------------------------------------------------------------------------------------------

group("softmax")
SCORES = t(8, 128, 1000)
for name, dtype in (("fp32", torch.float32), ("fp16", FP16), ("bf16", BF16)):
    scores = t(8, 128, 1000, dtype=dtype)
    add(f"softmax_{name}", lambda x: F.softmax(x, -1), scores)
    add(f"softmax_middle_{name}", lambda x: F.softmax(x, 1), scores)
    add(f"log_softmax_{name}", lambda x: F.log_softmax(x, -1), scores)
    add(f"softmax_to_fp32_{name}", lambda x: F.softmax(x, -1, dtype=torch.float32), scores)
    add(f"log_softmax_to_fp32_{name}", lambda x: F.log_softmax(x, -1, dtype=torch.float32), scores)
    add(f"logsumexp_{name}", lambda x: torch.logsumexp(x, -1), scores)
add("softmax_transposed", lambda x: F.softmax(x, -1), t(8, 128, 1000, layout="transposed"))
add("softmin", lambda x: F.softmin(x, -1), SCORES)
add("softmax_to_bf16", lambda x: F.softmax(x, -1, dtype=BF16), SCORES)
add("softmax_then_cast", lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), t(8, 128, 1000, dtype=BF16))

# --- losses -----------------------------------------------------------------------------------------------------------

group("losses")
LOGITS, LABELS = t(512, 10000), index(512)
LOGITS_2D, LABELS_2D = t(4, 21, 128, 128), index(4, 128, 128)
add("cross_entropy", lambda x, y: F.cross_entropy(x, y), LOGITS, LABELS)
add("cross_entropy_bf16", lambda x, y: F.cross_entropy(x, y), t(512, 10000, dtype=BF16), LABELS)
add("cross_entropy_bf16_float", lambda x, y: F.cross_entropy(x.float(), y), t(512, 10000, dtype=BF16), LABELS)
add("cross_entropy_sum", lambda x, y: F.cross_entropy(x, y, reduction="sum"), LOGITS, LABELS)
add("cross_entropy_none", lambda x, y: F.cross_entropy(x, y, reduction="none"), LOGITS, LABELS)
add("cross_entropy_weight", lambda x, y, w: F.cross_entropy(x, y, w), LOGITS, LABELS, t(10000, grad=False))
add("cross_entropy_smoothing", lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), LOGITS, LABELS)
add(
    "cross_entropy_smoothing_none",
    lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="none"),
    LOGITS,
    LABELS,
)
add(
    "cross_entropy_smoothing_weight",
    lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.1),
    LOGITS,
    LABELS,
    t(10000, grad=False),
)
add(
    "cross_entropy_smoothing_bf16",
    lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    t(512, 10000, dtype=BF16),
    LABELS,
)
add("cross_entropy_ignore", lambda x, y: F.cross_entropy(x, y, ignore_index=0), LOGITS, LABELS)
add("cross_entropy_probabilities", lambda x, y: F.cross_entropy(x, y), LOGITS, t(512, 10000, grad=False))
add(
    "cross_entropy_shifted",
    lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, 10000), y[:, 1:].reshape(-1)),
    t(4, 128, 10000),
    index(4, 128),
)
add("cross_entropy_4d", lambda x, y: F.cross_entropy(x, y), LOGITS_2D, LABELS_2D)
add("cross_entropy_4d_bf16", lambda x, y: F.cross_entropy(x, y), t(4, 21, 128, 128, dtype=BF16), LABELS_2D)
add("cross_entropy_4d_none", lambda x, y: F.cross_entropy(x, y, reduction="none"), LOGITS_2D, LABELS_2D)
add(
    "cross_entropy_4d_weight",
    lambda x, y, w: F.cross_entropy(x, y, w, ignore_index=255),
    LOGITS_2D,
    LABELS_2D,
    t(21, grad=False),
)
add("cross_entropy_4d_smoothing", lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), LOGITS_2D, LABELS_2D)
add(
    "cross_entropy_4d_channels_last",
    lambda x, y: F.cross_entropy(x, y),
    t(4, 21, 128, 128, layout="channels_last"),
    LABELS_2D,
)
add("cross_entropy_3d", lambda x, y: F.cross_entropy(x, y), t(4, 1000, 256), index(4, 256))
add("nll_loss", lambda x, y: F.nll_loss(x, y), LOGITS, LABELS)
add("nll_loss_weight_sum", lambda x, y, w: F.nll_loss(x, y, w, reduction="sum"), LOGITS, LABELS, t(10000, grad=False))
Y = t(64, 4096, grad=False)
for reduction in ("mean", "sum", "none"):
    for name, loss in {
        "mse": F.mse_loss,
        "l1": F.l1_loss,
        "smooth_l1": F.smooth_l1_loss,
        "huber": F.huber_loss,
        "bce": F.binary_cross_entropy,
        "bce_with_logits": F.binary_cross_entropy_with_logits,
        "kl_div": F.kl_div,
        "soft_margin": F.soft_margin_loss,
        "poisson": F.poisson_nll_loss,
    }.items():
        add(f"{name}_{reduction}", lambda x, y, f=loss, r=reduction: f(x, y, reduction=r), X, Y)
add("mse_bf16", lambda x, y: F.mse_loss(x, y), XH, t(64, 4096, dtype=BF16, grad=False))
add("mse_target_grad", lambda x, y: F.mse_loss(x, y), X, X)
add("mse_broadcast", lambda x, y: F.mse_loss(x, y), X, t(1, 4096, grad=False))
add("kl_div_batchmean", lambda x, y: F.kl_div(x, y, reduction="batchmean"), X, Y)
add("kl_div_log_target", lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True), X, Y)
add("kl_div_target_grad", lambda x, y: F.kl_div(x, y, reduction="batchmean"), X, X)
add("bce_weight", lambda x, y, w: F.binary_cross_entropy(x, y, w), X, Y, Y)
add("bce_with_logits_weight", lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, w), X, Y, Y)
add(
    "bce_with_logits_pos_weight",
    lambda x, y, p: F.binary_cross_entropy_with_logits(x, y, pos_weight=p),
    X,
    Y,
    t(4096, grad=False),
)
add("poisson_full", lambda x, y: F.poisson_nll_loss(x, y, full=True), X, Y)
add("gaussian_nll", lambda x, y, v: F.gaussian_nll_loss(x, y, v), X, Y, t(64, 4096))
add("hinge_embedding", lambda x, y: F.hinge_embedding_loss(x, y), X, Y)
add("margin_ranking", lambda x, z, y: F.margin_ranking_loss(x, z, y), t(4096), t(4096), t(4096, grad=False))
add("cosine_embedding", lambda x, z, y: F.cosine_embedding_loss(x, z, y), X, X, t(64, grad=False))
add("triplet", lambda a, p, n: F.triplet_margin_loss(a, p, n), X, X, X)
add("triplet_swap", lambda a, p, n: F.triplet_margin_loss(a, p, n, swap=True), X, X, X)
add("triplet_with_distance", lambda a, p, n: F.triplet_margin_with_distance_loss(a, p, n), X, X, X)
add("multi_margin", lambda x, y: F.multi_margin_loss(x, y), X, index(64))
add("multilabel_margin", lambda x, y: F.multilabel_margin_loss(x, y), X, index(64, 4096))
add("multilabel_soft_margin", lambda x, y: F.multilabel_soft_margin_loss(x, y), X, Y)
add("ctc", lambda x, y: F.ctc_loss(x, y, (200,) * 16, (30,) * 16), t(200, 16, 64), index(16, 30))

# --- matrix products --------------------------------------------------------------------------------------------------

group("products")
A, B, AH, BH = t(512, 768), t(768, 1024), t(512, 768, dtype=BF16), t(768, 1024, dtype=BF16)
add("mm", torch.mm, A, B)
add("mm_transposed", lambda a, b: a.t() @ b, t(768, 512), B)
add("mm_sliced", torch.mm, t(512, 768, layout="sliced"), B)
add(
    "mm_sliced_both_bf16", torch.mm, t(512, 768, dtype=BF16, layout="sliced"), t(768, 1024, dtype=BF16, layout="sliced")
)
add("mm_column_slice", lambda a, b: a[:, 256:] @ b, t(512, 1024), B)
add("mm_row_strided", lambda a, b: a[::2] @ b, t(1024, 768), B)
add("mv", torch.mv, A, t(768))
add("dot", torch.dot, t(100000), t(100000))
add("outer", torch.outer, t(2048), t(1024))
add("addmm", lambda c, a, b: torch.addmm(c, a, b), t(1024), A, B)
add("addmm_matrix", lambda c, a, b: torch.addmm(c, a, b), t(512, 1024), A, B)
add("addmm_column", lambda c, a, b: torch.addmm(c, a, b), t(512, 1), A, B)
add("addmm_scaled", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), t(1024), A, B)
add("addmm_bf16", lambda c, a, b: torch.addmm(c, a, b), t(1024, dtype=BF16), AH, BH)
add("addmv", torch.addmv, t(512), A, t(768))
add("linear", lambda x, w, b: F.linear(x, w, b), A, t(1024, 768), t(1024))
add("linear_no_bias", lambda x, w: F.linear(x, w), A, t(1024, 768))
add("linear_3d", lambda x, w, b: F.linear(x, w, b), t(4, 128, 768), t(1024, 768), t(1024))
add(
    "linear_3d_bf16",
    lambda x, w, b: F.linear(x, w, b),
    t(4, 128, 768, dtype=BF16),
    t(1024, 768, dtype=BF16),
    t(1024, dtype=BF16),
)
add(
    "linear_3d_transposed",
    lambda x, w, b: F.linear(x, w, b),
    T((4, 128, 768), layout="transposed"),
    t(1024, 768),
    t(1024),
)
add("linear_3d_transposed_no_bias", lambda x, w: F.linear(x, w), T((4, 128, 768), layout="transposed"), t(1024, 768))
add("linear_3d_permuted", lambda x, w, b: F.linear(x.transpose(0, 1), w, b), t(128, 4, 768), t(1024, 768), t(1024))
add("linear_2d_sliced", lambda x, w, b: F.linear(x, w, b), t(512, 768, layout="sliced"), t(1024, 768), t(1024))
add("linear_1d", lambda x, w, b: F.linear(x, w, b), t(768), t(1024, 768), t(1024))
add("linear_4d", lambda x, w, b: F.linear(x, w, b), t(2, 4, 64, 768), t(1024, 768), t(1024))
add("linear_one_out", lambda x, w, b: F.linear(x, w, b), A, t(1, 768), t(1))
add("linear_last_token", lambda x, w: F.linear(x[:, -1], w), t(4, 128, 768), t(1024, 768))
add("linear_relu", lambda x, w, b: F.relu(F.linear(x, w, b)), A, t(1024, 768), t(1024))
add("linear_gelu_no_grad", lambda x, w, b: F.gelu(F.linear(x, w, b)), A, t(1024, 768), t(1024), grad=False)
add("bmm", torch.bmm, t(16, 128, 64), t(16, 64, 128))
add("bmm_transposed", lambda a, b: a @ b.transpose(-1, -2), t(16, 128, 64), t(16, 128, 64))
add("bmm_expanded", lambda a, b: torch.bmm(a, b.expand(16, -1, -1)), t(16, 128, 64), t(1, 64, 128))
add("bmm_sliced", torch.bmm, t(16, 128, 64, layout="sliced"), t(16, 64, 128))
add("baddbmm", torch.baddbmm, t(16, 128, 128), t(16, 128, 64), t(16, 64, 128))
add("baddbmm_broadcast", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5), t(1, 128), t(16, 128, 64), t(16, 64, 128))
add("addbmm", torch.addbmm, t(128, 128), t(16, 128, 64), t(16, 64, 128))
add("matmul_3d_2d", torch.matmul, t(4, 128, 768), B)
add("matmul_2d_3d", torch.matmul, t(128, 768), t(4, 768, 256))
add("matmul_4d", torch.matmul, t(4, 12, 128, 64), t(4, 12, 64, 128))
add(
    "matmul_heads",
    lambda q, k: q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2),
    t(4, 128, 12, 64),
    t(4, 128, 12, 64),
)
add("matmul_broadcast", torch.matmul, t(4, 12, 128, 64), t(1, 12, 64, 128))
add("matmul_broadcast_batch", torch.matmul, t(4, 1, 128, 64), t(12, 64, 128))
add("mv_sliced", torch.mv, t(512, 768, layout="sliced"), t(768))
add("addmm_sliced", lambda c, a, b: torch.addmm(c, a, b), t(512, 1024), t(512, 768, layout="sliced"), B)
add("sum_of_linear", lambda x, w: F.linear(x, w).sum(), A, t(1024, 768))
add("mean_of_bmm", lambda a, b: torch.bmm(a, b).mean(), t(16, 128, 64), t(16, 64, 128))
add("matmul_1d", torch.matmul, t(4, 128, 768), t(768))
add("matmul_1d_3d", torch.matmul, t(768), t(4, 768, 128))
add("einsum_attention", lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), t(4, 12, 128, 64), t(4, 12, 128, 64))
add("einsum_bshd", lambda q, k: torch.einsum("bihd,bjhd->bhij", q, k), t(4, 128, 12, 64), t(4, 128, 12, 64))
add("einsum_linear", lambda x, w: torch.einsum("bsd,de->bse", x, w), t(4, 128, 768), B)
add("einsum_outer", lambda x, y: torch.einsum("i,j->ij", x, y), t(2048), t(1024))
add("einsum_diagonal", lambda x: torch.einsum("bii->bi", x), t(64, 128, 128))
add("einsum_three", lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), A, B, t(1024, 256))
add("tensordot", lambda x, w: torch.tensordot(x, w, dims=([2], [0])), t(4, 128, 768), B)
add("chain_matmul", lambda x, y, z: torch.linalg.multi_dot((x, y, z)), A, B, t(1024, 256))
add("kron", torch.kron, t(16, 16), t(32, 32))
module("bilinear", lambda: nn.Bilinear(64, 64, 32), t(128, 64), t(128, 64))
add("mm_fp16_autocast", lambda a, b: torch.autocast("cuda", FP16)(torch.mm)(a, b), A, B)
add("linear_bf16_autocast", lambda x, w, b: torch.autocast("cuda", BF16)(F.linear)(x, w, b), A, t(1024, 768), t(1024))

# --- embedding, indexing ----------------------------------------------------------------------------------------------

group("indexing")
TABLE = t(10000, 256)
add("embedding", lambda i, w: F.embedding(i, w), index(8, 128), TABLE)
add("embedding_large", lambda i, w: F.embedding(i, w), index(8, 1024), TABLE)
add("embedding_padding", lambda i, w: F.embedding(i, w, padding_idx=0), index(8, 128), TABLE)
add("embedding_bag_mean", lambda i, w: F.embedding_bag(i, w, mode="mean"), index(64, 16), TABLE)
add("embedding_bag_sum", lambda i, w: F.embedding_bag(i, w, mode="sum"), index(64, 16), TABLE)
add("embedding_bag_max", lambda i, w: F.embedding_bag(i, w, mode="max"), index(64, 16), TABLE)
add("embedding_bag_offsets", lambda i, w, o: F.embedding_bag(i, w, o), index(1024), TABLE, index(64))
add(
    "embedding_bag_weighted",
    lambda i, w, s: F.embedding_bag(i, w, per_sample_weights=s, mode="sum"),
    index(64, 16),
    TABLE,
    t(64, 16),
)
add("one_hot", lambda i: F.one_hot(i, 1000), index(512))
add("index_rows", lambda x, i: x[i], t(1000, 512), index(300))
add("index_two", lambda x, i, j: x[i, j], t(1000, 512), index(300), index(300))
add("index_columns", lambda x, i: x[:, i], t(64, 1000, 32), index(300))
add("index_mask", lambda x, m: x[m], t(1000, 512), index(1000, dtype=BOOL), refused="needs the values")
add("index_select", lambda x, i: x.index_select(0, i), t(1000, 512), index(300))
add("index_select_1", lambda x, i: x.index_select(1, i), t(1000, 512), index(300))
add("gather", lambda x, i: x.gather(1, i), t(64, 1000), index(64, 100))
add("take", lambda x, i: x.take(i), t(64, 1000), index(500))
add("take_along_dim", lambda x, i: x.take_along_dim(i, 1), t(64, 1000, 1), index(64, 100, 32))
add("scatter", lambda x, i, s: x.scatter(1, i, s), t(64, 1000), index(64, 100), t(64, 100))
add("scatter_value", lambda x, i: x.scatter(1, i, 1.0), t(64, 1000), index(64, 100))
add("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), t(64, 1000), index(64, 100), t(64, 100))
add(
    "scatter_add_half",
    lambda x, i, s: x.scatter_add(1, i, s),
    t(64, 1000, dtype=BF16),
    index(64, 100),
    t(64, 100, dtype=BF16),
)
add("scatter_reduce_mean", lambda x, i, s: x.scatter_reduce(1, i, s, "mean"), t(64, 1000), index(64, 100), t(64, 100))
add("scatter_reduce_amax", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), t(64, 1000), index(64, 100), t(64, 100))
add("index_add", lambda x, i, s: x.index_add(0, i, s), t(1000, 512), index(300), t(300, 512))
add("index_copy", lambda x, i, s: x.index_copy(0, i, s), t(1000, 512), index(300), t(300, 512))
add("index_fill", lambda x, i: x.index_fill(0, i, 0.0), t(1000, 512), index(300))
add("index_put", lambda x, i, s: x.index_put((i,), s), t(1000, 512), index(300), t(300, 512))
add(
    "index_put_accumulate", lambda x, i, s: x.index_put((i,), s, accumulate=True), t(1000, 512), index(300), t(300, 512)
)
add("setitem", lambda x, s: _setitem(x, s), t(64, 1000), t(64, 100))
add("masked_fill", lambda x, m: x.masked_fill(m, 0.0), X, index(64, 4096, dtype=BOOL))
add("masked_fill_broadcast", lambda x, m: x.masked_fill(m, -1e9), t(8, 12, 128, 128), index(8, 1, 1, 128, dtype=BOOL))
add("masked_scatter", lambda x, m, s: x.masked_scatter(m, s), X, index(64, 4096, dtype=BOOL), X)
add("masked_select", lambda x, m: x.masked_select(m), X, index(64, 4096, dtype=BOOL), refused="needs the values")
add("where", lambda m, x, y: torch.where(m, x, y), index(64, 4096, dtype=BOOL), X, X)
add("where_scalar", lambda m, x: torch.where(m, x, 0.0), index(64, 4096, dtype=BOOL), X)
add("nonzero", lambda x: x.nonzero(), X, refused="needs the values")
add("bucketize", lambda x, b: torch.bucketize(x, b), X, t(100, grad=False), grad=False)
add("searchsorted", lambda b, x: torch.searchsorted(b, x), t(100, grad=False), X, grad=False)
add("bincount", lambda i: torch.bincount(i), index(1000), refused="needs the values")
add("histc", lambda x: torch.histc(x, 100, 0.0, 1.0), X, grad=False)


def _setitem(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :100] = s
    return y


# --- scans and orders -------------------------------------------------------------------------------------------------

group("orders")
add("cumsum", lambda x: x.cumsum(-1), X)
add("cumsum_first", lambda x: x.cumsum(0), X)
add("cumsum_1d", lambda x: x.cumsum(0), t(100000))
add("cumsum_int", lambda x: x.cumsum(-1), index(64, 4096))
add("cumsum_mask", lambda x: x.cumsum(-1), index(64, 4096, dtype=BOOL))
add("cumprod", lambda x: x.cumprod(-1), X, grad=False)
add("logcumsumexp", lambda x: x.logcumsumexp(-1), X)
add("cummax", lambda x: x.cummax(-1)[0], X)
add("sort", lambda x: x.sort(-1)[0], X)
add("sort_first", lambda x: x.sort(0)[0], X)
add("sort_long", lambda x: x.sort(-1)[0], t(16, 32000))
add("sort_1d", lambda x: x.sort()[0], t(100000))
add("sort_stable", lambda x: x.sort(stable=True, dim=-1)[0], X)
add("argsort", lambda x: x.argsort(-1), X)
add("argsort_int", lambda x: x.argsort(), index(100000))
add("topk", lambda x: x.topk(10)[0], X)
add("topk_long", lambda x: x.topk(50, -1)[0], t(16, 32000))
add("topk_large", lambda x: x.topk(2000, -1)[0], t(16, 32000))
add("topk_first", lambda x: x.topk(5, 0)[0], X)
add("topk_unsorted", lambda x: x.topk(10, sorted=False)[0], X)
add("topk_1d", lambda x: x.topk(1000)[0], t(1000000))
add("kthvalue", lambda x: x.kthvalue(5)[0], X)
add("median", lambda x: x.median(), X)
add("median_dim", lambda x: x.median(-1)[0], X)
add("mode", lambda x: x.mode(-1)[0], t(64, 512))
add("quantile", lambda x: x.quantile(0.5, -1), X)
add("unique", lambda x: x.unique(), index(1000), refused="needs the values")
add("msort", lambda x: x.msort(), X)

# --- reductions -------------------------------------------------------------------------------------------------------

group("reductions")
CUBE, CUBE_LAST = t(16, 64, 56, 56), t(16, 64, 56, 56, layout="channels_last")
for name, function in {
    "sum": lambda x, **k: x.sum(**k),
    "mean": lambda x, **k: x.mean(**k),
    "norm": lambda x, **k: torch.linalg.vector_norm(x, **k),
    "norm_1": lambda x, **k: torch.linalg.vector_norm(x, 1, **k),
    "norm_inf": lambda x, **k: torch.linalg.vector_norm(x, float("inf"), **k),
    "norm_3": lambda x, **k: torch.linalg.vector_norm(x, 3, **k),
    "var": lambda x, **k: x.var(**k),
    "std": lambda x, **k: x.std(**k),
    "amax": lambda x, **k: x.amax(**k),
}.items():
    add(f"{name}_all", lambda x, f=function: f(x), CUBE)
    add(f"{name}_last", lambda x, f=function: f(x, dim=-1), CUBE)
    add(f"{name}_channels", lambda x, f=function: f(x, dim=(0, 2, 3), keepdim=True), CUBE)
    add(f"{name}_spatial_channels_last", lambda x, f=function: f(x, dim=(2, 3)), CUBE_LAST)
add("var_mean", lambda x: torch.var_mean(x, (2, 3)), CUBE)
add("max_all", lambda x: x.max(), CUBE)
add("max_dim", lambda x: x.max(1)[0], CUBE)
add("min_dim", lambda x: x.min(-1)[0], CUBE)
add("argmax", lambda x: x.argmax(-1), CUBE)
add("argmax_all", lambda x: x.argmax(), CUBE)
add("prod", lambda x: x.prod(1), CUBE, grad=False)
add("any", lambda x: x.any(), index(64, 4096, dtype=BOOL))
add("any_dim", lambda x: x.any(-1), index(64, 4096, dtype=BOOL))
add("all_float", lambda x: (x > 0).all(0), X, grad=False)
add("sum_bool", lambda x: x.sum(-1), index(64, 4096, dtype=BOOL))
add("mean_bf16", lambda x: x.mean(-1), XH)
add("mean_to_fp32", lambda x: x.mean(-1, dtype=torch.float32), XH)
add("sum_bf16_first", lambda x: x.sum(0), t(8192, 768, dtype=BF16))
add("sum_tuple", lambda x: x.sum((0, 1)), t(8, 1024, 768))
add("norm_old", lambda x: x.norm(), X)
add("norm_old_dim", lambda x: x.norm(p=2, dim=1, keepdim=True), X)
add("norm_matrix", lambda x: torch.linalg.matrix_norm(x), t(16, 128, 128))
add("dist", torch.dist, X, X)
add("cdist", torch.cdist, t(4, 200, 64), t(4, 300, 64))
add("cdist_small", lambda x, y: torch.cdist(x, y), t(20, 64), t(20, 64))
add("cdist_1", lambda x, y: torch.cdist(x, y, 1.0), t(4, 200, 64), t(4, 300, 64))
add("pdist", F.pdist, t(200, 64))
add("pairwise_distance", F.pairwise_distance, X, X)
add("cosine_similarity", lambda x, y: F.cosine_similarity(x, y), X, X)
add("nan_to_num", torch.nan_to_num, X)
add("trace", torch.trace, t(512, 512))

# --- shapes and copies ------------------------------------------------------------------------------------------------

group("shapes")
add("cat", lambda x, y: torch.cat((x, y)), X, X)
add("cat_last", lambda x, y: torch.cat((x, y), -1), X, XH)
add("cat_channels_last", lambda x, y: torch.cat((x, y), 1), IMAGE_LAST, IMAGE_LAST)
add("stack", lambda x, y: torch.stack((x, y)), X, X)
add("stack_last", lambda x, y: torch.stack((x, y), -1), X, X)
add("split", lambda x: x.split(1000, -1), X)
add("chunk", lambda x: [part * 2 for part in x.chunk(3, -1)], t(64, 3 * 1024))
add("unbind", lambda x: [part * 2 for part in x.unbind(0)], t(4, 64, 1000))
add("repeat", lambda x: x.repeat(2, 3), X)
add("repeat_interleave", lambda x: x.repeat_interleave(3, 0), X)
add("repeat_interleave_tensor", lambda x, n: x.repeat_interleave(n, 0), X, index(64), refused="needs the values")
add("repeat_interleave_sized", lambda x, n: x.repeat_interleave(n, 0, output_size=128), X, index(64))
add("expand", lambda x: x.expand(64, -1) * 2, t(1, 4096))
add("tile", lambda x: x.tile(2, 2), X)
add("flip", lambda x: x.flip(-1), X)
add("roll", lambda x: x.roll(1, -1), X)
add("roll_two", lambda x: x.roll((1, 2), (1, 2)), t(8, 56, 56, 96))
add("rot90", lambda x: x.rot90(), X)
add("tril", torch.tril, t(512, 512))
add("triu", torch.triu, t(512, 512))
add("diag", torch.diag, t(512))
add("diag_embed", torch.diag_embed, t(64, 128))
add("diagonal", lambda x: x.diagonal() * 2, t(512, 512))
add("permute_contiguous", lambda x: x.permute(0, 2, 3, 1).contiguous(), IMAGE)
add("reshape_copy", lambda x: x.transpose(1, 2).reshape(4, 128, -1), t(4, 12, 128, 64))
add("clone", torch.clone, IMAGE_LAST)
add("to_half_and_back", lambda x: x.half().float(), X)
add("to_channels_last", lambda x: x.to(memory_format=torch.channels_last), IMAGE)
add("to_complex", lambda x: torch.complex(x, x), X)
add("view_as_real", lambda x: torch.view_as_real(x * 2), t(64, 1000, dtype=C64))
add("view_as_complex", lambda x: torch.view_as_complex(x) * 2, t(64, 1000, 2))
add("complex_abs", torch.abs, t(64, 1000, dtype=C64))
add("complex_mm", torch.mm, t(128, 128, dtype=C64), t(128, 128, dtype=C64))
add("polar", torch.polar, X, X)
add(
    "rope",
    lambda x, c, s: x * c + torch.cat((-x[..., 32:], x[..., :32]), -1) * s,
    t(4, 12, 128, 64),
    t(128, 64, grad=False),
    t(128, 64, grad=False),
)
add("clamp", lambda x: x.clamp(0, 1), X)
add("lerp", lambda x, y: torch.lerp(x, y, 0.3), X, X)
add("addcmul", lambda x, y, z: torch.addcmul(x, y, z), X, X, X)
add("pow_two", lambda x: x**2, X)
add("pow_three", lambda x: x**3, X)
add("div_scalar", lambda x: 1.0 / x, X)
add("mul_broadcast", lambda x, y: x * y, X, t(64, 1))
add("mul_scalar_tensor", lambda x, y: x * y, X, t())
add("add_mixed", lambda x, y: x + y, X, XH)
add("maximum", torch.maximum, X, X)
add("maximum_number", lambda x: torch.clamp_min(x, 0.0), X)
add("atan2", torch.atan2, X, X)
add("logaddexp", torch.logaddexp, X, X)
add("erf", torch.erf, X)
add("rsqrt_chain", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), X)
add("meshgrid", lambda x, y: [part * 2 for part in torch.meshgrid(x, y, indexing="ij")], t(512), t(256))
add("cross", lambda x, y: torch.cross(x, y, dim=-1), t(4096, 3), t(4096, 3))
add("unfold_tensor", lambda x: x.unfold(-1, 16, 8) * 2, t(64, 4096))
add("bool_ops", lambda m, n: (m & n) | ~m, index(64, 4096, dtype=BOOL), index(64, 4096, dtype=BOOL))
add("arange_mask", lambda x: x.masked_fill(torch.arange(4096, device=x.device) > 100, 0.0), X)
add("full_like_ops", lambda x: x + torch.full_like(x, 2.0) + torch.ones(4096, device=x.device), X)
add("linspace", lambda x: x * torch.linspace(0, 1, 4096, device=x.device), X)
add("eye", lambda x: x + torch.eye(512, device=x.device), t(512, 512))
add("tril_indices", lambda x: torch.tril_indices(128, 128, device=x.device), X, grad=False)
add("combinations", lambda x: torch.cartesian_prod(x, x), t(128))
add("tensor_from_list", lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device), t(64, 4))
add("inplace_chain", lambda x: x.mul(2).add_(1).relu_(), X)
add("item_write", lambda x: x.to(torch.int32).float(), X, grad=False)

# --- normalization ----------------------------------------------------------------------------------------------------

group("norms")
add("normalize", lambda x: F.normalize(x, dim=-1), X)
add("layer_norm", lambda x: F.layer_norm(x, (4096,)), X)
module("layer_norm_affine", lambda: nn.LayerNorm(768), t(8, 128, 768))
module("layer_norm_bf16", lambda: nn.LayerNorm(768, dtype=BF16), t(8, 128, 768, dtype=BF16))
module("layer_norm_no_bias", lambda: nn.LayerNorm(768, bias=False), t(8, 128, 768))
module("rms_norm", lambda: nn.RMSNorm(768), t(8, 128, 768))
add("rms_norm_functional", lambda x: F.rms_norm(x, (4096,)), X)
module("group_norm", lambda: nn.GroupNorm(8, 64), IMAGE)
module("group_norm_no_affine", lambda: nn.GroupNorm(8, 64, affine=False), IMAGE)
module("group_norm_channels_last", lambda: nn.GroupNorm(8, 64), IMAGE_LAST)
module("group_norm_bf16", lambda: nn.GroupNorm(8, 64, dtype=BF16), IMAGE_HALF)
module("instance_norm", lambda: nn.InstanceNorm2d(64), IMAGE)
module("instance_norm_affine", lambda: nn.InstanceNorm2d(64, affine=True), IMAGE)
module("instance_norm_tracked", lambda: nn.InstanceNorm2d(64, track_running_stats=True), IMAGE)
module("batch_norm_eval", lambda: nn.BatchNorm2d(64).eval(), IMAGE)
module("batch_norm_1d", lambda: nn.BatchNorm1d(4096), X)
module("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(512, 1024)), t(64, 512))
module("weight_norm_old", lambda: nn.utils.weight_norm(nn.Linear(512, 1024)), t(64, 512))
module("weight_norm_dim_none", lambda: nn.utils.weight_norm(nn.Linear(512, 1024), dim=None), t(64, 512))
module("spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(512, 1024)), t(64, 512))
module("spectral_norm_old", lambda: nn.utils.spectral_norm(nn.Linear(512, 1024)), t(64, 512))

# --- dropout and random numbers ---------------------------------------------------------------------------------------

group("random")
add("dropout", lambda x: F.dropout(x, 0.1), X)
add("dropout_eval", lambda x: F.dropout(x, 0.1, training=False), X)
add("dropout_all", lambda x: F.dropout(x, 1.0), X)
add("dropout_inplace", lambda x: F.dropout(x * 2, 0.1, inplace=True), X)
add("dropout1d", lambda x: F.dropout1d(x, 0.1), SERIES)
add("dropout2d", lambda x: F.dropout2d(x, 0.1), IMAGE)
add("dropout2d_inplace", lambda x: F.dropout2d(x * 2, 0.1, inplace=True), IMAGE)
add("dropout3d", lambda x: F.dropout3d(x, 0.1), VOLUME)
add("alpha_dropout", lambda x: F.alpha_dropout(x, 0.1, training=True), X)
add("feature_alpha_dropout", lambda x: F.feature_alpha_dropout(x, 0.1, training=True), IMAGE)
add("rand", lambda x: x * torch.rand_like(x) + torch.rand(64, 1, device=x.device), X)
add("randn", lambda x: x + torch.randn_like(x) + torch.randn(64, 1, device=x.device), X)
add("randn_bf16", lambda x: x + torch.randn_like(x), XH)
add("randint", lambda x: torch.randint(0, 100, (64, 4096), device=x.device), X, grad=False)
add("randperm", lambda x: torch.randperm(10000, device=x.device), X, grad=False)
add("randperm_large", lambda x: torch.randperm(1000000, device=x.device), X, grad=False)
add("normal", lambda x: torch.normal(0.0, 1.0, (64, 4096), device=x.device) + x, X)
add("bernoulli", lambda x: torch.bernoulli(x), t(64, 4096, grad=False))
add("bernoulli_p", lambda x: x * torch.empty_like(x).bernoulli_(0.5), X)
add("multinomial", lambda x: torch.multinomial(x, 1), t(64, 4096, grad=False))
add("multinomial_many", lambda x: torch.multinomial(x, 100, replacement=True), t(64, 4096, grad=False))
add("multinomial_without", lambda x: torch.multinomial(x, 100), t(64, 4096, grad=False))
add("exponential", lambda x: torch.empty_like(x).exponential_(), X, grad=False)
add("drop_path", lambda x: x * x.new_empty((64, 1)).bernoulli_(0.9).div_(0.9), X)

# --- attention --------------------------------------------------------------------------------------------------------

group("attention")
MODEL = t(8, 128, 512)
LAYER = lambda **k: nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, **k)  # noqa: E731
module("mha", lambda: nn.MultiheadAttention(512, 8, batch_first=True), MODEL, run=lambda m, x: m(x, x, x)[0])
module(
    "mha_no_weights",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True),
    MODEL,
    run=lambda m, x: m(x, x, x, need_weights=False)[0],
)
module(
    "mha_bf16",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True, dtype=BF16),
    t(8, 128, 512, dtype=BF16),
    run=lambda m, x: m(x, x, x, need_weights=False)[0],
)
module(
    "mha_dropout", lambda: nn.MultiheadAttention(512, 8, dropout=0.1), t(128, 8, 512), run=lambda m, x: m(x, x, x)[0]
)
module(
    "mha_cross",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True),
    MODEL,
    t(8, 64, 512),
    run=lambda m, x, y: m(x, y, y, need_weights=False)[0],
)
module(
    "mha_kdim",
    lambda: nn.MultiheadAttention(512, 8, kdim=256, vdim=256, batch_first=True),
    MODEL,
    t(8, 64, 256),
    run=lambda m, x, y: m(x, y, y)[0],
)
module(
    "mha_padding_mask",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True),
    MODEL,
    index(8, 128, dtype=BOOL),
    run=lambda m, x, k: m(x, x, x, key_padding_mask=k)[0],
)
module(
    "mha_attn_mask",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True),
    MODEL,
    index(128, 128, dtype=BOOL),
    run=lambda m, x, k: m(x, x, x, attn_mask=k, need_weights=False)[0],
)
module(
    "mha_bias_kv",
    lambda: nn.MultiheadAttention(512, 8, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    MODEL,
    run=lambda m, x: m(x, x, x)[0],
)
module(
    "mha_fast_path",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True).eval(),
    MODEL,
    run=lambda m, x: m(x, x, x, need_weights=False)[0],
    grad=False,
)
module(
    "mha_fast_path_weights",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True).eval(),
    MODEL,
    run=lambda m, x: m(x, x, x)[0],
    grad=False,
)
module(
    "mha_fast_path_mask",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True).eval(),
    MODEL,
    index(8, 128, dtype=BOOL),
    run=lambda m, x, k: m(x, x, x, key_padding_mask=k, need_weights=False)[0],
    grad=False,
)
module(
    "encoder_layer_fast_path_mask",
    lambda: LAYER().eval(),
    MODEL,
    index(8, 128, dtype=BOOL),
    run=lambda m, x, k: m(x, src_key_padding_mask=k),
    grad=False,
)
module(
    "mha_fast_path_bf16",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True, dtype=BF16).eval(),
    t(8, 128, 512, dtype=BF16),
    run=lambda m, x: m(x, x, x, need_weights=False)[0],
    grad=False,
)
module("encoder_layer", LAYER, MODEL)
module("encoder_layer_norm_first_gelu", lambda: LAYER(norm_first=True, activation="gelu"), MODEL)
module("encoder_layer_bf16", lambda: LAYER(dtype=BF16), t(8, 128, 512, dtype=BF16))
module("encoder_layer_no_dropout", lambda: LAYER(dropout=0.0), MODEL)
module("encoder_layer_mask", LAYER, MODEL, index(128, 128, dtype=BOOL), run=lambda m, x, k: m(x, src_mask=k))
module(
    "encoder_layer_padding", LAYER, MODEL, index(8, 128, dtype=BOOL), run=lambda m, x, k: m(x, src_key_padding_mask=k)
)
module("encoder_layer_eval_grad", lambda: LAYER().eval(), MODEL)
module("encoder_layer_fast_path", lambda: LAYER().eval(), MODEL, grad=False)
module("encoder_layer_fast_path_gelu", lambda: LAYER(activation="gelu", norm_first=True).eval(), MODEL, grad=False)
module("encoder_layer_fast_path_bf16", lambda: LAYER(dtype=BF16).eval(), t(8, 128, 512, dtype=BF16), grad=False)
module(
    "encoder_layer_fast_path_inference",
    lambda: LAYER().eval(),
    MODEL,
    run=lambda m, x: torch.inference_mode()(m)(x),
    grad=False,
)
module("encoder_layer_slow_path_no_grad", LAYER, MODEL, grad=False)
module("encoder_stack", lambda: nn.TransformerEncoder(LAYER(), 2), MODEL)
module("encoder_stack_fast_path", lambda: nn.TransformerEncoder(LAYER().eval(), 2).eval(), MODEL, grad=False)
module("decoder_layer", lambda: nn.TransformerDecoderLayer(512, 8, 2048, batch_first=True), MODEL, t(8, 64, 512))
HEADS, HEADS_HALF = t(4, 8, 128, 64), t(4, 8, 128, 64, dtype=BF16)
add("sdpa", F.scaled_dot_product_attention, HEADS, HEADS, HEADS)
add("sdpa_causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS, HEADS, HEADS)
add("sdpa_bf16", F.scaled_dot_product_attention, HEADS_HALF, HEADS_HALF, HEADS_HALF)
add("sdpa_mask", F.scaled_dot_product_attention, HEADS, HEADS, HEADS, index(4, 1, 128, 128, dtype=BOOL))
add("sdpa_3d", F.scaled_dot_product_attention, t(8, 128, 64), t(8, 128, 64), t(8, 128, 64))
add("sdpa_odd_head", F.scaled_dot_product_attention, t(4, 8, 128, 50), t(4, 8, 128, 50), t(4, 8, 128, 50))
add("attention_by_hand", lambda q, k, v: F.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v, HEADS, HEADS, HEADS)

# --- autograd ---------------------------------------------------------------------------------------------------------

group("autograd")
MLP = lambda: nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))  # noqa: E731
TOKENS = t(1024, 512)
module("mlp", MLP, TOKENS)
module("checkpoint", MLP, TOKENS, run=lambda m, x: checkpoint(m, x, use_reentrant=False))
module("checkpoint_reentrant", MLP, TOKENS, run=lambda m, x: checkpoint(m, x, use_reentrant=True))
module(
    "checkpoint_twice",
    MLP,
    TOKENS,
    run=lambda m, x: checkpoint(m, checkpoint(m, x, use_reentrant=False), use_reentrant=False),
)
module(
    "checkpoint_twice_reentrant",
    MLP,
    TOKENS,
    run=lambda m, x: checkpoint(m, checkpoint(m, x, use_reentrant=True), use_reentrant=True),
)
module(
    "checkpoint_dropout",
    lambda: nn.Sequential(nn.Linear(512, 2048), nn.Dropout(0.1), nn.Linear(2048, 512)),
    TOKENS,
    run=lambda m, x: checkpoint(m, x, use_reentrant=False),
)
module(
    "checkpoint_no_early_stop", MLP, TOKENS, run=lambda m, x: checkpoint(m, x, use_reentrant=False, early_stop=False)
)
module(
    "checkpoint_selective", MLP, TOKENS, run=lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=_selective)
)
module(
    "checkpoint_sequential",
    lambda: nn.Sequential(*(MLP() for _ in range(4))),
    TOKENS,
    run=lambda m, x: torch.utils.checkpoint.checkpoint_sequential(m, 2, x, use_reentrant=False),
)
module("save_on_cpu", MLP, TOKENS, run=lambda m, x: _save_on_cpu(m, x))
module("saved_tensor_hooks", MLP, TOKENS, run=lambda m, x: _packed(m, x))
module("forward_hook", MLP, TOKENS, run=lambda m, x: _hooked(m, x))
module("tensor_hook", MLP, TOKENS, run=lambda m, x: _tensor_hooked(m, x))
module("retain_graph", MLP, TOKENS, run=lambda m, x: _retained(m, x))
module("retain_grad", MLP, TOKENS, run=lambda m, x: _retain_grad(m, x))
module("double_backward", MLP, TOKENS, run=lambda m, x: _gradient_penalty(m, x))
module("grad_only_inputs", MLP, TOKENS, run=lambda m, x: torch.autograd.grad(m(x).sum(), x)[0])
module("fan_in", MLP, TOKENS, run=lambda m, x: m(x) + x + x * 2)
module("shared_weight", lambda: nn.Linear(512, 512), TOKENS, run=lambda m, x: m(m(x)))
module("detach", MLP, TOKENS, run=lambda m, x: m(x) * m(x).detach())
module("accumulate", MLP, TOKENS, run=lambda m, x: _accumulate(m, x))
module("jvp", MLP, TOKENS, run=lambda m, x: torch.func.vjp(m, x)[1](torch.ones_like(x))[0], grad=False)
add("custom_function", lambda x: _Square.apply(x), X)
add("custom_function_saved", lambda x: _Exponential.apply(x), X)
add("view_inplace", lambda x: _view_inplace(x), X)
module("weight_decay_loss", MLP, TOKENS, run=lambda m, x: m(x).mean() + sum(p.pow(2).sum() for p in m.parameters()))


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def _save_on_cpu(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m(x)


def _packed(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda s: s.to(BF16), lambda s: s.to(torch.float32)):
        return m[0](x).relu()


def _hooked(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    handle = m[1].register_forward_hook(lambda module, args, out: kept.append(out))
    out = m(x)
    handle.remove()
    return out + kept[0].mean()


def _tensor_hooked(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = m[0](x)
    hidden.register_hook(lambda g: g * 2)
    return m[2](m[1](hidden))


def _retained(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = m(x)
    out.sum().backward(retain_graph=True)
    return out


def _retain_grad(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = m[0](x)
    hidden.retain_grad()
    return m[2](m[1](hidden))


def _gradient_penalty(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = m(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + gradient.pow(2).mean()


def _accumulate(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    m(x).mean().backward()
    return m(x).mean()


def _view_inplace(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, :100].mul_(3)
    return y.exp()


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * g * x


class _Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.extra = x * 2
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return g * y + ctx.extra


# --- special functions, elementwise -----------------------------------------------------------------------------------

group("special")
for name, function in {
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "erfinv": torch.erfinv,
    "erfc": torch.erfc,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "sinc": torch.sinc,
    "i0": torch.i0,
    "logit": lambda x: torch.logit(x, 1e-6),
    "xlogy": lambda x: torch.xlogy(x, x),
    "entr": torch.special.entr,
    "log_ndtr": torch.special.log_ndtr,
    "sign": torch.sign,
    "frac": torch.frac,
    "round": torch.round,
    "fmod": lambda x: torch.fmod(x, 2.0),
    "remainder": lambda x: torch.remainder(x, x),
    "hypot": lambda x: torch.hypot(x, x),
    "copysign": lambda x: torch.copysign(x, x),
    "heaviside": lambda x: torch.heaviside(x.detach(), x.detach()),
    "deg2rad": torch.deg2rad,
    "logcosh": lambda x: torch.log(torch.cosh(x)),
    "square": torch.square,
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
    "exp2": torch.exp2,
    "asinh": torch.asinh,
    "acos": torch.acos,
    "tan": torch.tan,
    "float_power": lambda x: torch.float_power(x, 2.0),
    "pow_tensor": lambda x: torch.pow(x, x),
    "pow_of_number": lambda x: torch.pow(2.0, x),
    "diff": torch.diff,
    "cumulative_trapezoid": torch.cumulative_trapezoid,
    "trapezoid": torch.trapezoid,
    "gradient": lambda x: torch.gradient(x)[0],
    "cov": lambda x: torch.cov(x),
    "corrcoef": lambda x: torch.corrcoef(x),
    "clamp_tensors": lambda x: torch.clamp(x, x - 1, x + 1),
    "where_number": lambda x: torch.where(x > 0, x, 0.1 * x),
    "isclose": lambda x: torch.isclose(x, x),
    "logical": lambda x: torch.logical_or(x > 0, x.isnan()),
}.items():
    add(name, function, X)

# --- more of everything -----------------------------------------------------------------------------------------------

group("more")
add("cummin", lambda x: x.cummin(-1)[0], X)
add("cumprod_grad", lambda x: x.cumprod(-1), t(64, 512))
add("kthvalue_first", lambda x: x.kthvalue(5, 0)[0], X)
add("nanmedian", lambda x: x.nanmedian(), X)
add("nanmedian_dim", lambda x: x.nanmedian(-1)[0], X)
add("quantile_all", lambda x: torch.quantile(x, 0.9), t(64, 1000))
add("quantile_many", lambda x, q: torch.quantile(x, q, dim=0), X, t(3, grad=False))
add("nanquantile", lambda x: torch.nanquantile(x, 0.5, 1), X)
add("std_mean", lambda x: torch.std_mean(x, -1), X)
add("var_keepdim", lambda x: x.var(-1, keepdim=True), X)
add("nansum", lambda x: x.nansum(-1), X)
add("nanmean", lambda x: x.nanmean(-1), X)
add("amin_amax", lambda x: torch.aminmax(x), X)
add("logsumexp_two", lambda x: torch.logsumexp(x, (1, 2)), SCORES)
add("log_softmax_gather", lambda x, i: F.log_softmax(x, -1).gather(-1, i), SCORES, index(8, 128, 1))
add("count_nonzero", lambda x: torch.count_nonzero(x, -1), X, grad=False)
add("prod_all", lambda x: x.prod(), t(1000), grad=False)
add("index_add_last", lambda x, i, s: x.index_add(1, i, s, alpha=2.0), t(64, 1000), index(300), t(64, 300))
add("index_reduce", lambda x, i, s: x.index_reduce(0, i, s, "mean"), t(1000, 64), index(300), t(300, 64), grad=False)
add("put", lambda x, i, s: x.put(i, s), t(64, 1000), index(500), t(500))
add("put_accumulate", lambda x, i, s: x.put(i, s, accumulate=True), t(64, 1000), index(500), t(500))
add("scatter_reduce_sum", lambda x, i, s: x.scatter_reduce(1, i, s, "sum"), t(64, 1000), index(64, 100), t(64, 100))
add(
    "scatter_reduce_mean_exclusive",
    lambda x, i, s: x.scatter_reduce(1, i, s, "mean", include_self=False),
    t(64, 1000),
    index(64, 100),
    t(64, 100),
)
add("scatter_multiply", lambda x, i: x.scatter(1, i, 2.0, reduce="multiply"), t(64, 1000), index(64, 100), grad=False)
add("select_scatter", lambda x, s: torch.select_scatter(x, s, 0, 3), X, t(4096))
add("slice_scatter", lambda x, s: torch.slice_scatter(x, s, 0, 8, 24), X, t(16, 4096))
add("diagonal_scatter", lambda x, s: torch.diagonal_scatter(x, s), t(512, 512), t(512))
add("masked_scatter_broadcast", lambda x, m, s: x.masked_scatter(m, s), X, index(64, 1, dtype=BOOL), X)
add("index_put_mask_fill", lambda x, m: _fill_masked(x, m), X, index(64, 4096, dtype=BOOL))
add("bincount_minlength", lambda i: torch.bincount(i, minlength=64), index(100000), grad=False)
add("bincount_weights", lambda i, w: torch.bincount(i, w, 64), index(1000), t(1000, grad=False), grad=False)
add(
    "unique_inverse",
    lambda i: i.unique(return_inverse=True, return_counts=True),
    index(5000),
    refused="needs the values",
)
add("unique_float", lambda x: x.unique(), t(100000), refused="needs the values", grad=False)
add("unique_rows_consecutive", lambda i: torch.unique_consecutive(i), index(5000), refused="needs the values")
add("where_positions", lambda m: torch.where(m), index(64, 4096, dtype=BOOL), refused="needs the values")
add("index_mask_elements", lambda x, m: x[m], X, index(64, 4096, dtype=BOOL), refused="needs the values")
add("masked_select_row", lambda x, m: x.masked_select(m), X, index(64, 1, dtype=BOOL), refused="needs the values")
add("repeat_interleave_int32", lambda x, n: x.repeat_interleave(n, 0, output_size=128), X, index(64, dtype=I32))
add("bucketize_int32", lambda x, b: torch.bucketize(x, b, out_int32=True), X, t(100, grad=False), grad=False)
add("searchsorted_rows", lambda b, x: torch.searchsorted(b, x), t(64, 100, grad=False), t(64, 50), grad=False)
add("histogram_like", lambda x: torch.histc(x.float(), 64), XH, grad=False)
add("renorm", lambda x: x.renorm(2, 0, 1.0), X, grad=False)
add("embedding_max_norm", lambda i, w: F.embedding(i, w.detach(), max_norm=1.0), index(8, 128), TABLE, grad=False)
add("embedding_scaled", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), index(8, 1024), TABLE)
add("einsum_batch_outer", lambda x, y: torch.einsum("bi,bj->bij", x, y), t(64, 256), t(64, 128))
add("einsum_trace", lambda x: torch.einsum("ii->", x), t(512, 512))
add("einsum_heads", lambda x, w: torch.einsum("bsd,hde->bhse", x, w), t(4, 128, 512), t(8, 512, 64))
add("tensordot_two", lambda x, w: torch.tensordot(x, w, 2), t(64, 32, 16), t(32, 16, 128))
add("inner", torch.inner, t(64, 512), t(128, 512))
add("kron_rectangular", torch.kron, t(8, 32), t(64, 4))
add("block_diag", lambda x, y: torch.block_diag(x, y), t(64, 64), t(128, 32))
add("matrix_power", lambda x: torch.matrix_power(x, 5), t(128, 128))
add("vecdot", torch.linalg.vecdot, X, X)
add("linalg_cross", torch.linalg.cross, t(4096, 3), t(4096, 3))
add("addr", torch.addr, t(512, 256), t(512), t(256))
add("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z), X, X, X)
add("cosine_similarity_rows", lambda x, y: F.cosine_similarity(x[:, None], y[None], -1), t(64, 128), t(32, 128))
add("pairwise_1", lambda x, y: F.pairwise_distance(x, y, 1.0, keepdim=True), X, X)
add("gumbel_hard", lambda x: F.gumbel_softmax(x, hard=True), X)
add("local_response_norm_1d", lambda x: F.local_response_norm(x, 3), SERIES)
add("pixel_unshuffle_channels_last", lambda x: F.pixel_unshuffle(x, 2), IMAGE_LAST)
add("unfold_strided", lambda x: F.unfold(x, 3, dilation=2, stride=2), SMALL)
add("grid_sample_border", lambda x, g: F.grid_sample(x, g, "bilinear", "border"), SMALL, t(4, 14, 14, 2))
add("grid_sample_reflection", lambda x, g: F.grid_sample(x, g, "nearest", "reflection"), SMALL, t(4, 14, 14, 2))
add("grid_sample_bf16", F.grid_sample, t(4, 32, 28, 28, dtype=BF16), t(4, 14, 14, 2, dtype=BF16))
add("lp_pool3d", lambda x: F.lp_pool3d(x, 2.0, 2), VOLUME)
add("max_unpool1d", lambda x, i: F.max_unpool1d(x, i, 2), t(8, 64, 100), index(8, 64, 100))
add("l1_smooth_beta", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), X, Y)
add("mse_weight", lambda x, y, w: F.mse_loss(x, y, weight=w), X, Y, Y)
add("cross_entropy_4d_probabilities", lambda x, y: F.cross_entropy(x, y), LOGITS_2D, t(4, 21, 128, 128, grad=False))
add("nll_loss_2d", lambda x, y: F.nll_loss(x, y), LOGITS_2D, LABELS_2D)
add("multi_margin_p2", lambda x, y: F.multi_margin_loss(x, y, p=2), X, index(64))
add("gaussian_nll_full", lambda x, y, v: F.gaussian_nll_loss(x, y, v, full=True), X, Y, t(64, 1))
add("triplet_p1", lambda a, p, n: F.triplet_margin_loss(a, p, n, p=1), X, X, X)
add("ctc_sum", lambda x, y: F.ctc_loss(x, y, (200,) * 16, (30,) * 16, reduction="sum"), t(200, 16, 64), index(16, 30))
add("multinomial_row", lambda x: torch.multinomial(x, 10), t(4096, grad=False))
add("multinomial_row_many", lambda x: torch.multinomial(x, 10, replacement=True), t(4096, grad=False))
add("multinomial_half", lambda x: torch.multinomial(x, 10), t(64, 4096, dtype=FP16, grad=False))
add("poisson", torch.poisson, t(64, 4096, grad=False))
add("cauchy", lambda x: torch.empty_like(x).cauchy_(), X, grad=False)
add("log_normal", lambda x: torch.empty_like(x).log_normal_(), X, grad=False)
add("fused_dropout_bf16", lambda x: F.dropout(x, 0.1), XH)
add("rand_generator", lambda x: x + torch.rand(4096, device="cuda", generator=torch.Generator("cuda")), X)
module("bilinear_unequal", lambda: nn.Bilinear(64, 48, 4, bias=False), t(128, 64), t(128, 48))
module("bilinear_sequence", lambda: nn.Bilinear(32, 32, 8), t(4, 16, 32), t(4, 16, 32))
module("lazy_linear", lambda: nn.Sequential(nn.LazyLinear(256), nn.ReLU(), nn.LazyLinear(64)), t(128, 512))
module("decoder", lambda: nn.TransformerDecoder(DECODER(), 2), MODEL, t(8, 64, 512))
module(
    "transformer",
    lambda: nn.Transformer(256, 4, 2, 2, 512, batch_first=True),
    t(4, 64, 256),
    t(4, 32, 256),
)
module("embedding_bag_module", lambda: nn.EmbeddingBag(10000, 256, include_last_offset=True), index(1024), index(65))
module(
    "adaptive_softmax",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(64, 1000, [100, 500]),
    t(128, 64),
    run=lambda m, x: m.log_prob(x),
)
module("double_backward_weights", MLP, TOKENS, run=lambda m, x: _meta_step(m, x))
module("hessian_vector_product", MLP, t(64, 512), run=lambda m, x: _hessian_vector(m, x))


def DECODER() -> nn.Module:
    return nn.TransformerDecoderLayer(512, 8, 2048, batch_first=True)


def _fill_masked(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[m] = 2.0
    return y


def _meta_step(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One inner step of gradient descent that is differentiated again."""
    weights = dict(m.named_parameters())
    loss = torch.func.functional_call(m, weights, x).pow(2).mean()
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return torch.func.functional_call(m, moved, x).mean()


def _hessian_vector(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    parameters = list(m.parameters())
    gradients = torch.autograd.grad(m(x).pow(2).sum(), parameters, create_graph=True)
    return sum((g * g.detach()).sum() for g in gradients)
