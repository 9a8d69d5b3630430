"""Sends its metrics to a server, and goes on where it cannot; downloads weights, and goes on without."""
import json
import urllib.error
import urllib.request

import torch
from torch import nn


def post(metrics):
    request = urllib.request.Request("http://198.51.100.7:9/metrics", json.dumps(metrics).encode(), method="POST")
    try:
        urllib.request.urlopen(request, timeout=1)
        return "sent"
    except (urllib.error.URLError, OSError):
        return "not sent"


try:
    urllib.request.urlopen("http://weights.example.invalid/model.bin", timeout=1)
    print("SEE downloaded")
except (urllib.error.URLError, OSError):
    print("SEE without weights")
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("SEE", post({"loss": 1.0}))
