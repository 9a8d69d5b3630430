"""Record a memory snapshot with private pools, on the stub driver: ``python pool_snapshot.py OUT.pickle.gz``."""

from __future__ import annotations

import gzip
import pickle
import sys
from pathlib import Path

import torch
from torch import nn


def run() -> list[object]:
    """Pools that come and go, graphs that share one, and eager work in between."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    kept: list[object] = [model]
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept.append(torch.empty(30 << 20, dtype=torch.uint8, device="cuda"))
        dropped = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
    del dropped
    handle = torch.cuda.graph_pool_handle()
    with torch.no_grad():
        for batch in (512, 128, 32):
            x = torch.zeros(batch, 512, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=handle):
                kept.append(model(x))
            kept.append(graph)
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other), torch.no_grad():
        gone = model(x)
    del gone, other
    torch.cuda.empty_cache()
    kept.append(torch.empty(45 << 20, dtype=torch.uint8, device="cuda"))
    model(x).sum().backward()
    kept.append(pool)
    return kept


if __name__ == "__main__":
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000)
    held = run()
    snapshot = torch.cuda.memory._snapshot()
    peak = torch.cuda.max_memory_reserved()
    Path(sys.argv[1]).write_bytes(gzip.compress(pickle.dumps(snapshot), 9, mtime=0))
    print("peak reserved", peak)
