"""What recording costs: a captured and replayed training step against the same step on plain fake tensors.

    python benchmarks/capture_overhead.py [name part]

The bare step is forward, backward and optimizer under PyTorch's own ``FakeTensorMode`` on ``cpu``. Both run in this
process, by turns, so that both meet the same load; building the model and the first iteration, which fills caches and
makes the optimizer state, are not counted. The least of three turns of five iterations, in seconds of processor time.
``analysis`` is the whole run as a user has it: build, move, three iterations, replay.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent.parent))

from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.capture.session.session import capture
from graphmem.devices import described_device
from graphmem.replay import replay
from graphmem.trace import Trace
from graphmem.units import GIB
from models_zoo import libraries, reference
from models_zoo.recipe import Recipe

ROUNDS = 5
TURNS = 3
DEVICE = described_device("H100", (9, 0), 80 * GIB, 132, 2048)


@dataclass(frozen=True)
class Case:
    """A training step: model, batch size, precision of the weights, optimizer."""

    recipe: Recipe
    batch: int
    dtype: torch.dtype
    optimizer: Callable[[Any], torch.optim.Optimizer]


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


CASES: dict[str, Callable[[], Case]] = {
    "resnet50, batch 32, sgd with momentum": lambda: Case(reference.resnet50, 32, torch.float32, _sgd),
    "gpt2, batch 4 x 1024, adamw": lambda: Case(reference.gpt2, 4, torch.float32, _adamw),
    "llama 7b, bf16, batch 1 x 2048, adamw": lambda: Case(libraries.recipe("hf:llama7b"), 1, torch.bfloat16, _adamw),
}


def iterations(case: Case, device: str, count: int) -> list[float]:
    """Build the model on the host, move it, and time ``count`` training iterations after one that is not counted."""
    model = _build(case)
    if device != "cpu":  # plain fake modules cannot even be moved to where they are
        model = model.to(device)
    inputs, targets = case.recipe.make_batch(case.batch, device)
    optimizer = case.optimizer(model.parameters())
    seconds = []
    for _ in range(count + 1):
        start = time.process_time()
        case.recipe.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    return seconds[1:]


def _build(case: Case) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        return case.recipe.build()
    finally:
        torch.set_default_dtype(before)


def bare(case: Case) -> float:
    """Seconds of an iteration on plain fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return min(iterations(case, "cpu", ROUNDS))


def recorded(case: Case) -> tuple[float, float]:
    """(seconds of a captured iteration, its share of the replay's seconds)."""
    seconds: list[float] = []
    trace = _capture(lambda: seconds.extend(iterations(case, "cuda", ROUNDS)))
    return min(seconds), _replay(trace) / (ROUNDS + 1)


def analysis(case: Case) -> float:
    """Seconds of a whole analysis of three iterations."""
    start = time.process_time()
    _replay(_capture(lambda: iterations(case, "cuda", 2)))
    return time.process_time() - start


def _capture(step: Callable[[], Any]) -> Trace:
    return capture(lambda _: step(), source="benchmark", device=DEVICE, torch_version=(2, 13)).trace


def _replay(trace: Trace) -> float:
    start = time.process_time()
    replay(trace, PyTorchCachingAllocator(torch_version=(2, 13)))
    return time.process_time() - start


def _afterwards(measure: Callable[[Case], Any], case: Case) -> Any:
    """What is measured; its garbage is collected before the next."""
    found = measure(case)
    gc.collect()
    return found


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    print(f"torch {torch.__version__}")
    print(f"{'step':40s} {'bare':>7s} {'capture':>8s} {'replay':>7s} {'ratio':>6s} {'analysis':>9s}")
    for name, make in CASES.items():
        if part not in name:
            continue
        case = make()
        turns = [(_afterwards(bare, case), *_afterwards(recorded, case)) for _ in range(TURNS)]
        plain, captured, replayed = (min(column) for column in zip(*turns, strict=True))
        whole = _afterwards(analysis, case)
        ratio = (captured + replayed) / plain
        print(f"{name:40s} {plain:7.3f} {captured:8.3f} {replayed:7.3f} {ratio:6.2f} {whole:9.2f}", flush=True)


if __name__ == "__main__":
    main()
