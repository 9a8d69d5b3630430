"""The part of a calibration that runs on the card: a little of every library, then what the card holds beside it."""

from __future__ import annotations

from graphmem.accuracy.device_meter import DeviceMeter


def run_calibration(meter: DeviceMeter) -> dict[str, object]:
    """Bytes outside PyTorch's allocator once the usual libraries are loaded, and of one cuBLAS workspace.

    Without NVML the card cannot be read before this process is on it; then what other processes hold counts too.
    """
    baseline = meter.used_bytes() if meter.sees_baseline else 0
    import torch

    torch.cuda.init()
    workspace = _first_product_keeps()
    _use_every_library()
    torch.cuda.synchronize()
    outside = meter.used_bytes() - baseline - torch.cuda.memory_reserved()
    return {"context_bytes": max(0, outside), "cublas_workspace_bytes": workspace, "meter": meter.name}


def _first_product_keeps() -> int:
    """Bytes that stay allocated after the first matrix product and its operands are gone."""
    import torch

    before = torch.cuda.memory_allocated()
    matrix = torch.zeros(64, 64, device="cuda")
    product = matrix @ matrix
    del matrix, product
    return int(torch.cuda.memory_allocated() - before)


def _use_every_library() -> None:
    """A training step of a convolution, a norm, an attention and a product, in two precisions."""
    import torch
    from torch import nn
    from torch.nn import functional

    network = nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(2), nn.Linear(196, 64))
    network = network.cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            x = network(torch.zeros(4, 8, 16, 16, device="cuda")).unflatten(1, (4, 16))
            loss = functional.scaled_dot_product_attention(x, x, x).float().softmax(-1).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
