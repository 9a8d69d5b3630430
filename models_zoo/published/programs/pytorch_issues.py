"""Scripts of a few lines from issues of pytorch/pytorch, by number: ``104604``, ``72450``."""

import sys

import torch
from torch.nn import functional


def main():
    if sys.argv[1] == "104604":
        model = torch.nn.Linear(1024, 1024, bias=False).cuda()
        inputs = torch.rand(1, 512, 1024).cuda()
        model(inputs)
        return
    x = torch.rand([5120, 2, 384, 384], dtype=torch.bfloat16, device="cuda", requires_grad=True)
    x = functional.softmax(x, dim=-1)
    loss = torch.mean(x)
    loss.backward()


main()
