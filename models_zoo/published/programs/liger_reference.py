"""linkedin/Liger-Kernel, ``benchmark/scripts``: what PyTorch and transformers need for an operator that Liger fuses.

Each runs ten times forward and backward; the published figure is the median peak, so that gradients of an earlier
round are there. Three rounds tell the same. Arguments: the operator, its varying size, ``forward`` or ``full``.
"""

import sys

import torch
from torch import nn
from torch.nn import functional


def cross_entropy(vocabulary):
    logits = torch.randn(8 * 2048, vocabulary, requires_grad=True, device="cuda")
    target = torch.randint(vocabulary, (8 * 2048, 1), device="cuda").squeeze(1)
    return lambda: nn.CrossEntropyLoss()(logits, target), lambda y: y.backward()


def _gated(batch, length, width, inner, activation):
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(hidden_size=width, intermediate_size=inner, hidden_act=activation)
    x = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = LlamaMLP(config=config).to("cuda").to(torch.bfloat16)
    return lambda: layer(x), lambda y: y.backward(torch.randn_like(y), retain_graph=True)


def geglu(length):
    return _gated(8, length, 4096, 11008, "gelu_pytorch_tanh")


def swiglu(length):
    return _gated(4, length, 4096, 11008, "silu")


def tiled_swiglu(length):
    return _gated(2, length, 2048, 4096, "silu")


def rms_norm(width):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    layer = LlamaRMSNorm(hidden_size=width, eps=1e-6).to("cuda")
    other = nn.Parameter(torch.ones(width)).to("cuda")  # Liger's own layer is there too
    x = torch.randn(2048, width, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return lambda: (layer(x), other)[0], lambda y: y.backward(dy, retain_graph=True)


def layer_norm(width):
    other = nn.LayerNorm(width).to("cuda")  # Liger's own layer is there too
    layer = nn.LayerNorm(width, eps=1e-6).to("cuda")
    x = torch.randn(4096, width, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return lambda: (layer(x), other)[0], lambda y: y.backward(dy, retain_graph=True)


def group_norm(channels):
    other = nn.GroupNorm(num_groups=channels // 4, num_channels=channels, eps=1e-6).to("cuda")
    layer = nn.GroupNorm(num_groups=channels // 4, num_channels=channels, eps=1e-6).to("cuda")
    x = torch.randn(128, channels, 512, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return lambda: (layer(x), other)[0], lambda y: y.backward(dy, retain_graph=True)


def _turned(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rope(length):
    q = torch.randn((1, length, 32, 256), device="cuda", requires_grad=True, dtype=torch.bfloat16).transpose(1, 2)
    k = torch.randn((1, length, 8, 256), device="cuda", requires_grad=True, dtype=torch.bfloat16).transpose(1, 2)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length, device="cuda", dtype=torch.long).unsqueeze(0)
    frequencies = 1.0 / (10000 ** (torch.arange(0, 256, 2, device="cuda").float() / 256))
    angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)  # a matrix product, as there
    angles = torch.cat((angles, angles), dim=-1)
    cosine, sine = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    del angles

    def forward():
        _ = positions  # the caller of the source holds them
        c, s = cosine.unsqueeze(1), sine.unsqueeze(1)
        return (q * c) + (_turned(q) * s), (k * c) + (_turned(k) * s)

    return forward, lambda y: torch.autograd.grad(y, (q, k), (dq, dk), allow_unused=True, retain_graph=True)


def embedding(vocabulary):
    layer = nn.Embedding(vocabulary, 4096).to("cuda")
    other = nn.Embedding(vocabulary, 4096).to("cuda")  # Liger's own layer is there too
    ids = torch.randint(0, vocabulary, (8, 2048), device="cuda")
    return lambda: (layer(ids), other)[0], lambda y: y.backward(torch.randn_like(y))


def linear_cross_entropy(tokens):
    layers = [nn.Linear(4096, 128256, bias=False, dtype=torch.bfloat16).to("cuda") for _ in range(2)]  # and Liger's own
    x = torch.randn(tokens, 4096, requires_grad=True, dtype=torch.bfloat16, device="cuda")
    target = torch.randint(128256, (tokens, 1), dtype=torch.long, device="cuda").squeeze(1)
    return lambda: functional.cross_entropy(layers[0](x), target), lambda y: y.backward()


def jsd(vocabulary):
    divergence = nn.KLDivLoss(reduction="batchmean", log_target=True)
    given = torch.randn(4 * 2048, vocabulary, requires_grad=True, device="cuda").log_softmax(dim=-1)
    target = torch.randn(4 * 2048, vocabulary, device="cuda").log_softmax(dim=-1)

    def loss(log_p, log_q):
        log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
        middle = 0.5 * (torch.exp(log_p) + torch.exp(log_q))
        log_m = torch.log(middle)
        return 0.5 * (divergence(log_m, log_p) + divergence(log_m, log_q))

    return lambda: loss(given, target), lambda y: y.backward(retain_graph=True)


def tvd(vocabulary):
    given = torch.randn(8 * 2048, vocabulary, requires_grad=True, device="cuda").softmax(dim=-1)
    target = torch.randn(8 * 2048, vocabulary, device="cuda").softmax(dim=-1)

    def loss(p, q):
        halves = torch.abs(p - q) / 2.0
        return torch.sum(halves) / p.size(0)

    return lambda: loss(given, target), lambda y: y.backward(retain_graph=True)


def main():
    forward, backward = globals()[sys.argv[1]](int(sys.argv[2]))

    def full():
        y = forward()
        backward(y)

    if sys.argv[3] == "forward":  # the benchmarks of backward came first: their workspaces are there
        small = torch.zeros(8, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        (small @ small).sum().backward()
        del small
    for _ in range(3):
        forward() if sys.argv[3] == "forward" else full()


main()
