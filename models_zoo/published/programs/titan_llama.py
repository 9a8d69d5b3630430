"""torchtitan's Llama 3 on one mesh of FSDP2, in the order of its ``train.py`` and ``parallelize_llama.py`` (commit
9dec370 of December 2024 and its neighbours): made on ``meta``, each block checkpointed, then compiled, then
sharded, the last one kept after its forward pass; bfloat16 with gradients reduced in 32 bits; AdamW; logits dropped
before backward.

Arguments: batch, length, checkpointing (``op``: every second product of a block and the attention's output are kept;
``full``), then what else holds of ``compile``, ``fused`` (AdamW) and ``wide`` (the model makes its logits 32 bits, as
until October 2024).
"""

import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

BATCH, LENGTH, KEPT, MORE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], set(sys.argv[4:])
WIDTH, LAYERS, HEADS, GROUPS, HIDDEN, VOCABULARY, THETA = 4096, 32, 32, 8, 14336, 128256, 500000.0
HEAD = WIDTH // HEADS
aten = torch.ops.aten


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def angles():
    rates = 1.0 / (THETA ** (torch.arange(0, HEAD, 2)[: HEAD // 2].float() / HEAD))
    turns = torch.outer(torch.arange(LENGTH, device=rates.device), rates).float()
    return torch.polar(torch.ones_like(turns), turns)


def turned(x, phases):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * phases.view(1, LENGTH, 1, -1)).flatten(3)


def repeated(x):
    batch, length, groups, head = x.shape
    count = HEADS // GROUPS
    return x.unsqueeze(3).expand(batch, length, groups, count, head).reshape(batch, length, groups * count, head)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.wv = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x, phases):
        batch, length, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = q.view(batch, length, -1, HEAD)
        k = k.view(batch, length, -1, HEAD)
        v = v.view(batch, length, -1, HEAD)
        wide_q, wide_k = turned(q, phases), turned(k, phases)
        q, k = wide_q.type_as(q), wide_k.type_as(k)
        del wide_q, wide_k
        keys, values = repeated(k), repeated(v)
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(found.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = Norm(), Norm()

    def forward(self, x, phases):
        h = x + self.attention(self.attention_norm(x), phases)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("phases", angles(), persistent=True)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm = Norm()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.phases)
        h = self.output(self.norm(h))
        return h.float() if "wide" in MORE else h


SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    aten.abs.default,
    aten.max.default,
}


def chosen():
    products = Counter()

    def policy(context, function, *args, **kwargs):
        when = "again" if context.is_recompute else "forward"
        products[when] += function == aten.mm.default
        keeps = function in SAVED and not (function == aten.mm.default and products[when] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def parallelized(model, mesh):
    options = {"context_fn": chosen} if KEPT == "op" else {}
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False, **options))
    if "compile" in MORE:
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, block in enumerate(model.layers.values()):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=number < LAYERS - 1)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def clipped(parameters):
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, 2.0, False, True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, True)


def main():
    os.environ["TORCH_NCCL_AVOID_RECORD_STREAMS"] = "1"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    with torch.device("meta"):
        model = Llama()
    parallelized(model, mesh)
    model.to_empty(device="cuda")
    with torch.no_grad(), torch.device("cuda"):
        model.phases = angles()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    model.train()
    fused = "fused" in MORE
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused, foreach=not fused
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 201)
    losses = []
    for _ in range(10):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to("cuda")
        labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to("cuda")
        optimizer.zero_grad()
        predicted = model(tokens)
        loss = functional.cross_entropy(predicted.flatten(0, 1).float(), labels.flatten(0, 1))
        del predicted
        loss.backward()
        clipped(list(model.parameters()))
        optimizer.step()
        scheduler.step()
        losses.append(loss)


main()
