"""The same input gives the same bytes of output: in another process, and on another build of PyTorch.

Set GRAPHMEM_CUDA_PYTHON to the interpreter of an environment with a CUDA build of the same PyTorch version (and
graphmem's own dependencies) to compare builds; whether a GPU is there must not matter either.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import places

pytest.importorskip("torch")

ROOT = places.ROOT
STEP = """
import sys
import torch
from torch import nn
import graphmem

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(256), nn.MultiheadAttention(256, 4, dropout=0.1, batch_first=True)
        self.convolution, self.drop = nn.Conv1d(256, 256, 3, padding=1), nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.drop(self.attention(y, y, y, need_weights=False)[0])
        return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)

def factory(batch=4):
    return nn.Sequential(nn.Embedding(1000, 256), Block(), Block(), nn.Linear(256, 10)), torch.zeros(
        batch, 128, dtype=torch.long
    )

for step, device in (
    (graphmem.Training(amp="bf16", clip_grad_norm=1.0), "H100"), (graphmem.Training(amp="fp16"), "RTX-4090"),
    (graphmem.Inference(), "RTX-4090"),
):
    answer = graphmem.analyze(factory, training=step, device=device, torch_version="2.13", cudnn="never")
    sys.stdout.write(answer.to_json())  # a CUDA build brings a cuDNN, which would be asked
"""


def _run(python: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-c", STEP], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_two_processes_give_the_same_bytes() -> None:
    first = _run(sys.executable)
    assert first.count('"schema"') == 3
    assert _run(sys.executable) == first


def test_a_cuda_build_gives_the_same_bytes() -> None:
    python = os.environ.get("GRAPHMEM_CUDA_PYTHON")
    if not python:
        pytest.skip("GRAPHMEM_CUDA_PYTHON names no interpreter with a CUDA build of PyTorch")
    assert _run(python) == _run(sys.executable)
