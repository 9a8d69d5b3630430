"""Layers of states in a model of transformers', each of which is one layer of vLLM's own: Mamba 2's mixers
(``MambaMixer2``, layers/mamba/mamba_mixer2.py), short convolutions (``ShortConv``, layers/mamba/short_conv.py) and
gated delta nets whose projections are one but for their rates (``OlmoHybridGatedDeltaNetAttention``,
layers/mamba/gdn/olmo_gdn_linear_attn.py)."""

from __future__ import annotations

from torch import nn

from graphmem.sources.vllm_layers import StateSizes


def states(model: nn.Module) -> dict[str, StateSizes]:
    """The layers of states by name, with their sizes."""
    found = {f"model.{name}": _sizes(module) for name, module in model.named_modules()}
    return {name: sizes for name, sizes in found.items() if sizes is not None}


def _sizes(module: nn.Module) -> StateSizes | None:
    convolution = next((one for one in module.children() if isinstance(one, nn.Conv1d)), None)
    if convolution is not None and all(hasattr(module, name) for name in ("a_proj", "b_proj", "g_proj", "A_log")):
        return StateSizes(
            convolution.kernel_size[0], conv_bias=False, bias=False, heads=module.num_v_heads,
            head_dim=module.head_v_dim, groups=module.num_k_heads, size=module.head_k_dim, delta=True,
        )  # fmt: skip
    if convolution is None or not hasattr(module, "in_proj") or not hasattr(module, "out_proj"):
        return None
    kernel, bias = convolution.kernel_size[0], module.in_proj.bias is not None
    if hasattr(module, "ssm_state_size") and hasattr(module, "n_groups"):
        return StateSizes(
            kernel, convolution.bias is not None, bias, module.num_heads, module.head_dim, module.n_groups,
            module.ssm_state_size, module.chunk_size, normed=hasattr(getattr(module, "norm", None), "weight"),
            scaled=hasattr(module, "mup_vector"),
        )  # fmt: skip
    if module.in_proj.out_features == 3 * module.in_proj.in_features == 3 * convolution.in_channels:
        return StateSizes(kernel, convolution.bias is not None, bias, head_dim=convolution.in_channels)
    return None
