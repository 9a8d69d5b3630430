"""Spiking networks (snntorch): leaky neurons, a convolution before them, rates of spikes as a loss, 25 steps in time."""

import snntorch as snn
import torch
from snntorch import functional as spiking
from snntorch import spikegen, surrogate, utils
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.rand(512, 1, 28, 28), torch.randint(0, 10, (512,)))
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
grad = surrogate.fast_sigmoid(slope=25)
net = nn.Sequential(
    nn.Conv2d(1, 12, 5),
    nn.MaxPool2d(2),
    snn.Leaky(beta=0.9, spike_grad=grad, init_hidden=True),
    nn.Conv2d(12, 32, 5),
    nn.MaxPool2d(2),
    snn.Leaky(beta=0.9, spike_grad=grad, init_hidden=True),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
    snn.Leaky(beta=0.9, spike_grad=grad, init_hidden=True, output=True),
).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.9, 0.999))
loss_fn = spiking.ce_rate_loss()


def forward(images, steps=25):
    utils.reset(net)
    spikes = spikegen.rate(images, num_steps=steps)
    record, potentials = [], []
    for step in range(steps):
        out, potential = net(spikes[step])
        record.append(out)
        potentials.append(potential)
    return torch.stack(record), torch.stack(potentials)


for epoch in range(3):
    net.train()
    for images, labels in loader:
        images, labels = images.cuda(), labels.cuda()
        out, _ = forward(images)
        loss = loss_fn(out, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = spiking.accuracy_rate(out, labels)
    print(f"epoch {epoch} loss {loss.item():.3f} accuracy {accuracy:.3f}")
