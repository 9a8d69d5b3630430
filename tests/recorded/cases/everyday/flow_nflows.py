"""Density estimation with a masked autoregressive flow of nflows; samples and their likelihood at the end."""

import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform
from nflows.transforms.base import CompositeTransform
from nflows.transforms.normalization import BatchNorm
from nflows.transforms.permutations import ReversePermutation

torch.manual_seed(4)
device = "cuda"
steps = []
for _ in range(5):
    steps.append(ReversePermutation(features=16))
    steps.append(MaskedAffineAutoregressiveTransform(features=16, hidden_features=256, num_blocks=2))
    steps.append(BatchNorm(16))
flow = Flow(CompositeTransform(steps), StandardNormal([16])).to(device)
optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
for i in range(10):
    x = torch.randn(2048, 16) * torch.linspace(0.5, 2, 16) + torch.randn(2048, 1)
    optimizer.zero_grad()
    loss = -flow.log_prob(inputs=x.to(device)).mean()
    loss.backward()
    torch.nn.utils.clip_grad_value_(flow.parameters(), 5.0)
    optimizer.step()
    if (i + 1) % 5 == 0:
        flow.eval()
        with torch.no_grad():
            print(i + 1, "held out", flow.log_prob(torch.randn(4096, 16, device=device)).mean().item())
        flow.train()
flow.eval()
with torch.no_grad():
    samples, likelihood = flow.sample_and_log_prob(512)
print(samples.std(0), likelihood.mean())
