"""A program that leaves half of the card to others, grows its batch until that half is full, and keeps a log of what
the allocator says on the way."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch

from tests.recorded.cases.answering.network import Gpt, batch_of


def main() -> Mapping[str, int]:
    """The largest batch, by fours."""
    torch.cuda.set_per_process_memory_fraction(0.5)
    model = Gpt().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, int] = {}
    batch_size = best = 4
    while True:
        torch.cuda.reset_peak_memory_stats()
        failed = False
        try:
            for _ in range(2):
                optimizer.zero_grad()
                model(*batch_of(batch_size)).backward()
                optimizer.step()
        except torch.OutOfMemoryError as error:
            failed = True
            found["words"] = len(str(error).split("GPU 0 has")[0].split())
        stats = torch.cuda.memory_stats()
        found |= {
            f"most allocated by {batch_size}": torch.cuda.max_memory_allocated(),
            f"most reserved by {batch_size}": torch.cuda.max_memory_reserved(),
            f"allocations before {batch_size} ends": stats["allocation.all.allocated"],
            f"inactive after {batch_size}": stats["inactive_split_bytes.all.current"],
            f"retries after {batch_size}": stats["num_alloc_retries"],
        }
        if failed:
            break
        best, batch_size = batch_size, batch_size + 4
    optimizer.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return found | {
        "batch size": best,
        "errors": torch.cuda.memory_stats()["num_ooms"],
        "segments": len(segments),
        "blocks": sum(len(segment["blocks"]) for segment in segments),
        "bytes of segments": sum(segment["total_size"] for segment in segments),
        "lines of the summary": len(torch.cuda.memory_summary().splitlines()),
    }
