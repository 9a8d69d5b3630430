"""Activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.common import SMALL, XH, X
from tests.recorded.cases.functions.registry import add, group, module

group("activations")
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
add("gumbel_hard", lambda x: F.gumbel_softmax(x, hard=True), X)
