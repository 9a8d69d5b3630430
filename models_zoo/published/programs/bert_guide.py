"""The guide to training on one GPU in the documentation of transformers 4.20: BERT-large classifies 512 tokens.

The Trainer of the time: one process, attention in parts, clipping, an AdamW that goes parameter by parameter. And
PyTorch 1.9: ``zero_grad`` fills gradients with zeros and keeps them (until 2.0), a softmax keeps its input beside its
result for backward (``_softmax_backward_data`` in ``derivatives.yaml``, until 1.11), and autocast computes ``gelu`` in
fp32 (``ATen/autocast_mode.cpp``, until 1.9; pull request 59639). Arguments: the batch, micro-batches, ``fp32|fp16``,
``adamw|adafactor|adam8bit``, ``checkpoint``.
"""

import math
import sys

import torch
from transformers import AttentionInterface, BertConfig, BertForSequenceClassification
from transformers.optimization import Adafactor


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = torch.softmax(x, -1)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, result = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, result, -1, x.dtype)


class Gelu(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x.float() if torch.is_autocast_enabled() else x)


def attend(module, query, key, value, attention_mask, dropout=0.0, **_):
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores + torch.zeros(query.shape[0], 1, 1, key.shape[-2], device="cuda")  # the mask of no padding
    shares = Softmax.apply(scores.float())  # autocast computes it in fp32
    shares = torch.nn.functional.dropout(shares, p=dropout, training=module.training)
    mixed = torch.matmul(shares, value)
    return mixed.transpose(1, 2).contiguous(), shares


class AdamW(torch.optim.Optimizer):
    """transformers' own, ``transformers/optimization.py`` of 4.20."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
                state["first"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["second"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                denominator = state["second"].sqrt().add_(1e-8)
                p.addcdiv_(state["first"], denominator, value=-group["lr"])


class Adam8bit(torch.optim.Optimizer):
    """bitsandbytes' own: moments of a byte each with a scale for 2,048 of them; small parameters keep four bytes."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or self.state[p]:
                    continue
                small = p.numel() < 4096
                kind = torch.float32 if small else torch.uint8
                self.state[p]["moments"] = [torch.zeros_like(p, dtype=kind) for _ in range(2)]
                if not small:
                    blocks = (p.numel() + 2047) // 2048
                    self.state[p]["scales"] = [torch.zeros(blocks, device="cuda") for _ in range(2)]


OPTIMIZERS = {
    "adamw": AdamW,
    "adam8bit": Adam8bit,
    "adafactor": lambda parameters: Adafactor(parameters, lr=5e-5, scale_parameter=False, relative_step=False),
}


def main():
    batch, parts, precision, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    AttentionInterface.register("in parts, as of 2022", attend)
    config._attn_implementation = "in parts, as of 2022"
    model = BertForSequenceClassification(config).to("cuda")
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = Gelu()
    if "checkpoint" in sys.argv:
        model.gradient_checkpointing_enable()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cuda") if precision == "fp16" else None
    model.train()
    for _ in range(3):
        for _ in range(parts):
            ids = torch.zeros(batch, 512, dtype=torch.long).to("cuda")
            labels = torch.zeros(batch, dtype=torch.long).to("cuda")
            with torch.autocast("cuda", torch.float16, enabled=scaler is not None):
                loss = model(input_ids=ids, labels=labels).loss
            loss = loss / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=False)


main()
