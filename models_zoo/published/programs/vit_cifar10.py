"""rasbt/pytorch-memory-optim, scripts 01 to 06, and rasbt/cvpr2023, scripts 01 to 04: torchvision's vision transformers
trained on CIFAR-10 at 224 pixels.

Arguments: the batch, the precision (``32-true``, ``16-mixed``, ``bf16-mixed``, ``bf16-true``: as Lightning Fabric does
them), the number of micro-batches, ``adam|sgd``, ``base`` for ViT-B/16 instead of ViT-L/16. Without micro-batches
gradients are cleared between forward and backward; with them after the optimizer, whose first step is after the first
micro-batch. A pass over the validation set follows.
"""

import sys

import torch
from torch.nn import functional
from torchvision.models import vit_b_16, vit_l_16

FUSED = functional.scaled_dot_product_attention


def older_fused(query, key, value, *arguments, **options):
    """Flash attention before its second version (August 2023) gives out its result image by image
    (``_scaled_dot_product_flash_attention`` in ``transformers/cuda/attention.cu``), today's as the queries lie, word by
    word in ``nn.MultiheadAttention``, which copies the former once more."""
    mixed = FUSED(query, key, value, *arguments, **options)
    return mixed.transpose(1, 2).contiguous().transpose(1, 2) if mixed.dtype != torch.float32 else mixed


class Adam(torch.optim.Optimizer):
    """Adam as the nightly PyTorch of 23 June 2023 does it: its denominators are a second list of temporaries beside the
    square roots, one until pull request 104910 of July 2023 (``torch/optim/adam.py``, ``_multi_tensor_adam``)."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        parameters = [p for p in group["params"] if p.grad is not None]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["first"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                self.state[p]["second"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        gradients = [p.grad for p in parameters]
        first = [self.state[p]["first"] for p in parameters]
        second = [self.state[p]["second"] for p in parameters]
        torch._foreach_mul_(first, 0.9)
        torch._foreach_add_(first, gradients, alpha=0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [1.0] * len(roots))
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(parameters, first, denominators, [-group["lr"]] * len(roots))


def main():
    batch, precision, parts, name = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    model = vit_b_16(weights=None) if "base" in sys.argv else vit_l_16(weights=None)
    model.heads.head = torch.nn.Linear(in_features=model.heads.head.in_features, out_features=10)
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    model.to("cuda")
    optimizers = {"adam": lambda: Adam(model.parameters(), lr=5e-5), "sgd": lambda: torch.optim.SGD(model.parameters())}
    optimizer = optimizers[name]()
    scaler = torch.amp.GradScaler("cuda") if precision == "16-mixed" else None

    def forward(images):
        kind = torch.float16 if precision == "16-mixed" else torch.bfloat16
        with torch.autocast("cuda", kind, enabled=precision.endswith("-mixed")):
            return model(images.to(torch.bfloat16) if precision == "bf16-true" else images).to(torch.float32)

    def update():
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    for index in range(3 * parts):
        model.train()
        images = torch.zeros(batch, 3, 224, 224).to("cuda")
        targets = torch.zeros(batch, dtype=torch.long).to("cuda")
        logits = forward(images)
        loss = functional.cross_entropy(logits, targets)
        if parts == 1:
            optimizer.zero_grad()
        else:
            loss = loss / parts
        (loss if scaler is None else scaler.scale(loss)).backward()
        if parts == 1:
            update()
        elif index % parts == 0:
            update()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            torch.argmax(logits, 1)
    with torch.no_grad():
        for _ in range(2):
            images = torch.zeros(batch, 3, 224, 224).to("cuda")
            outputs = forward(images)
            torch.argmax(outputs, 1)


functional.scaled_dot_product_attention = older_fused
try:
    main()
finally:
    functional.scaled_dot_product_attention = FUSED
