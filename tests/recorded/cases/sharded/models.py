"""What the programs share: two models of transformers, one written out, and the loop that trains them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

SEQUENCE, BATCH, ITERATIONS, VOCABULARY = 1024, 2, 3, 32000
BF16 = torch.bfloat16

LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 2048, "use_cache": False,
    "tie_word_embeddings": False,
}  # fmt: skip


def llama(dtype: Any = None, device: str = "cuda", **settings: Any) -> Any:
    """Four layers, made on ``device`` in fp32 and then turned into ``dtype``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA | settings))
    return model.to(dtype) if dtype else model


def gpt2(dtype: Any = None, device: str = "cuda") -> Any:
    """The smallest GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(device):
        model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return model.to(dtype) if dtype else model


def blocks(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def tokens(batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, sequence), device="cuda")


def start() -> None:
    """As every program under ``torchrun`` starts."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def train(
    model: Any,
    optimizer: Any,
    *,
    iterations: int = ITERATIONS,
    accumulate: int = 1,
    clip: Callable[[], Any] | None = None,
    is_last: Callable[[bool], Any] | None = None,
    batch: int = BATCH,
    sequence: int = SEQUENCE,
    vocabulary: int = VOCABULARY,
) -> None:
    """Forward, loss, backward, step. ``is_last`` is told whether a backward pass is the last before the step."""
    model.train()
    for _ in range(iterations):
        for number in range(accumulate):
            if is_last is not None:
                is_last(number == accumulate - 1)
            ids = tokens(batch, sequence, vocabulary)
            with torch.autocast("cuda", enabled=False):
                output = model(input_ids=ids, labels=ids)
            output.loss.backward()
            del output
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def clip_norm(model: Any) -> Callable[[], Any]:
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


# --- a llama written out, without rotary embedding ---


class Attention(nn.Module):
    """As many heads as the projections give: on a rank of several, a share of them."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, head: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, head), FeedForward(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A stage of a pipeline has no embedding, or no head: these are None then."""

    tok_embeddings: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: nn.Linear | None

    def __init__(self, layers: int = 4, width: int = 1024, head: int = 64, inner: int = 2816) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, head, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


def written_llama(dtype: Any = BF16, **sizes: int) -> Any:
    with torch.device("cuda"):
        model = Llama(**sizes)
    return model.to(dtype) if dtype else model


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
