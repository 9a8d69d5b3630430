"""Nearest neighbours of many vectors, in chunks whose size is chosen from the memory that the card has free."""

from __future__ import annotations

from collections.abc import Mapping

import torch

ROWS, WIDTH, NEIGHBOURS = 60_000, 256, 16


def chunk_rows(columns: int) -> int:
    """How many rows of distances fit into 40 % of the free memory; the sort of ``topk`` takes as much again."""
    free, _ = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return max(1, int(0.4 * (free + cached)) // (columns * 4))


@torch.no_grad()
def main() -> Mapping[str, int]:
    """The indices of the nearest, chunk by chunk."""
    base = torch.randn(ROWS, WIDTH).to("cuda")
    norms = base.square().sum(1)
    found: dict[str, int] = {"free at first": torch.cuda.mem_get_info()[0], "total": torch.cuda.mem_get_info()[1]}
    nearest, start, sizes = [], 0, []
    while start < ROWS:
        rows = min(chunk_rows(ROWS), ROWS - start)
        query = base[start : start + rows]
        distances = torch.addmm(norms, query, base.T, alpha=-2)
        nearest.append(distances.topk(NEIGHBOURS, largest=False).indices.cpu())
        sizes.append(rows)
        start += rows
        del distances, query
    found |= {f"rows of chunk {number}": rows for number, rows in enumerate(sizes)}
    found["free in the end"] = torch.cuda.mem_get_info()[0]
    torch.cuda.empty_cache()
    found["free of the emptied card"] = torch.cuda.mem_get_info()[0]
    return found | {"rows": len(torch.cat(nearest)), "most reserved": torch.cuda.max_memory_reserved()}
