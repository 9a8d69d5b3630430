"""timm's ``train.py`` as GPUMemNet ran it: SGD with Nesterov's momentum, smoothed labels, fp32, cuDNN benchmarks its
plans, and the next batch is brought to the card by a stream of its own as bytes and made numbers there.

Arguments: the model, the batch.
"""

import sys

import timm
import torch
from torch.nn import functional


def batches(batch, size):
    """The prefetching loader: what it yields next is made while this one is used."""
    stream = torch.cuda.Stream()
    mean = torch.zeros(1, 3, 1, 1, device="cuda")
    deviation = torch.ones(1, 3, 1, 1, device="cuda")
    images = None
    for _ in range(5):
        with torch.cuda.stream(stream):
            following = torch.zeros(batch, *size, dtype=torch.uint8).to("cuda", non_blocking=True)
            targets = torch.zeros(batch, dtype=torch.long).to("cuda", non_blocking=True)
            following = following.to(torch.float32).sub_(mean).div_(deviation)
        if images is not None:
            yield images, labels  # noqa: F821
        torch.cuda.current_stream().wait_stream(stream)
        images, labels = following, targets
    yield images, labels


def smoothed(logits, target):
    logarithm = functional.log_softmax(logits, dim=-1)
    likelihood = -logarithm.gather(dim=-1, index=target.unsqueeze(1))
    likelihood = likelihood.squeeze(1)
    smooth = -logarithm.mean(dim=-1)
    loss = 0.9 * likelihood + 0.1 * smooth
    return loss.mean()


def main():
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        train()


def train():
    model = timm.create_model(sys.argv[1], pretrained=False)
    model.to("cuda")
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 2e-5}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    model.train()
    optimizer.zero_grad()

    def loss_of(images, target):
        output = model(images)
        return smoothed(output, target)

    for images, target in batches(int(sys.argv[2]), model.default_cfg["input_size"]):
        loss = loss_of(images, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
