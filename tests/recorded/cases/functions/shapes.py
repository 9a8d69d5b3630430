"""Shapes and copies."""

from __future__ import annotations

import torch

from tests.recorded.cases.functions.common import IMAGE, IMAGE_LAST, XH, X
from tests.recorded.cases.functions.registry import BOOL, C64, I32, add, group, index, t

group("shapes")
add("cat", lambda x, y: torch.cat((x, y)), X, X)
add("cat_last", lambda x, y: torch.cat((x, y), -1), X, XH)
add("cat_channels_last", lambda x, y: torch.cat((x, y), 1), IMAGE_LAST, IMAGE_LAST)
add("stack", lambda x, y: torch.stack((x, y)), X, X)
add("stack_last", lambda x, y: torch.stack((x, y), -1), X, X)
for name, joined in {"cat": torch.cat, "stack": torch.stack}.items():
    for dimension in (0, -1):
        add(
            f"{name}_into_{dimension}",
            lambda x, f=joined, d=dimension: f((x, x.sin()), d, out=f((x, x), d)),
            X,
            grad=False,
        )
add("split", lambda x: x.split(1000, -1), X)
add("chunk", lambda x: [part * 2 for part in x.chunk(3, -1)], t(64, 3 * 1024))
add("unbind", lambda x: [part * 2 for part in x.unbind(0)], t(4, 64, 1000))
add("repeat", lambda x: x.repeat(2, 3), X)
add("repeat_interleave", lambda x: x.repeat_interleave(3, 0), X)
add("repeat_interleave_tensor", lambda x, n: x.repeat_interleave(n, 0), X, index(64), true_values=True)
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
add(
    "complex_mm_of_conjugates",
    lambda x, y: torch.mm(x.conj(), y.conj().T),
    t(96, 128, dtype=C64),
    t(64, 128, dtype=C64),
)
add(
    "complex_bmm_of_conjugates",
    lambda x, y: torch.bmm(x.conj()[:, :, :96], y.conj()) + torch.bmm(x.conj()[:, :, :96], y.conj().mT),
    t(4, 96, 128, dtype=C64),
    t(4, 96, 96, dtype=C64),
)  # fmt: skip
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
add("minimum_number", lambda x: torch.clamp_max(x, 0.0), X)
add("minimum_number_in_place", lambda x: (x + 1).clamp_max_(0.0), X)
for name, bound in {"minimum": torch.clamp_max, "maximum": torch.clamp_min}.items():
    add(f"{name}_number_into", lambda x, f=bound: f(x, 0.0, out=torch.empty_like(x)), X, grad=False)
    add(f"{name}_into", lambda x, f=bound: f(x, x, out=torch.empty_like(x)), X, grad=False)
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
add("triu_indices", lambda x: torch.triu_indices(128, 128, device=x.device), X, grad=False)
add("combinations", lambda x: torch.cartesian_prod(x, x), t(128))
add("tensor_from_list", lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device), t(64, 4))
add("inplace_chain", lambda x: x.mul(2).add_(1).relu_(), X)
add("item_write", lambda x: x.to(torch.int32).float(), X, grad=False)
add(
    "size_divided_by_torch",
    lambda x: x.new_zeros((4, torch.div(1536, 512, rounding_mode="trunc") - 1, 1000)) + x,
    t(4, 2, 1000),
)
add("repeat_interleave_int32", lambda x, n: x.repeat_interleave(n, 0, output_size=128), X, index(64, dtype=I32))
add("block_diag", lambda x, y: torch.block_diag(x, y), t(64, 64), t(128, 32))
add("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z), X, X, X)
for name, window in {
    "hann": torch.hann_window, "hamming": torch.hamming_window, "blackman": torch.blackman_window,
    "bartlett": torch.bartlett_window, "kaiser": torch.kaiser_window,
}.items():  # fmt: skip
    for kind, given in {"periodic": {}, "symmetric": {"periodic": False}, "half": {"dtype": torch.float16}}.items():
        if kind != "half" or name in ("hann", "bartlett"):
            add(f"window_{name}_{kind}", lambda f=window, k=given: f(4096, device="cuda", **k), grad=False)
