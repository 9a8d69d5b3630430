"""itu-rad/GPUMemNet, ``NeuroNetGen_scripts/MLP/mlp_next.py``: perceptrons of random shapes, Adam, 4,096 random samples.

A summary by two samples comes first. Arguments: inputs, outputs, depth, the form, the batch, the activation, the share
dropped or 0, ``norm`` for batch normalization.
"""

import sys
from itertools import pairwise

import torch
from torch import nn

ACTIVATIONS = {
    "leaky_relu": nn.LeakyReLU, "prelu": nn.PReLU, "elu": nn.ELU, "selu": nn.SELU, "mish": nn.Mish, "swish": nn.SiLU,
    "relu": nn.ReLU, "identity": nn.Identity,
}  # fmt: skip


def widths(inputs, outputs, depth, form):
    found = [inputs]
    for _ in range(depth + (form == "bottleneck")):
        if form == "uniform":
            found.append(inputs)
        elif form == "gradual":
            found.append(max(found[-1] - (inputs - outputs) // depth, outputs))
        else:
            found.append(max(int(found[-1] * 0.5), outputs))
    return found


def main():
    inputs, outputs, depth, form, batch, activation, dropped = sys.argv[1:8]
    inputs, outputs, depth, batch, dropped = int(inputs), int(outputs), int(depth), int(batch), float(dropped)
    sizes = widths(inputs, outputs, depth, form)
    layers = []
    for before, after in pairwise(sizes):
        layers.append(nn.Linear(before, after))
        if "norm" in sys.argv:
            layers.append(nn.BatchNorm1d(after))
        layers.append(ACTIVATIONS[activation]())
        if dropped:
            layers.append(nn.Dropout(dropped))
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], outputs), nn.Softmax(dim=1)).to("cuda")
    model(torch.rand(2, inputs).to("cuda"))
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss()
    batches = [batch] * (4096 // batch) + [4096 % batch] * bool(4096 % batch)
    for size in 2 * batches[-2:]:  # the rest of an epoch is a smaller batch
        samples, labels = torch.zeros(size, inputs).to("cuda"), torch.zeros(size, dtype=torch.long).to("cuda")
        optimizer.zero_grad()
        predicted = model(samples)
        loss = criterion(predicted, labels)
        loss.backward()
        optimizer.step()


main()
