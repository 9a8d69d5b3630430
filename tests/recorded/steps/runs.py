"""A recorded run, the same run captured on fake tensors, and the two compared.

The recordings were made with CUDA builds of PyTorch (2.13.0 unless they say otherwise) on a stub of the CUDA driver
(real operators and allocator, no GPU), with the loop that :func:`step_of` repeats: build on the host, move, then
iterations of forward, loss, backward, clipping, optimizer. A recording keeps the peaks, how many allocations every part
of every iteration made, and the allocator's events.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphmem.accuracy.align import Match, align
from graphmem.accuracy.divergence import changes_of
from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.base.versions import version_named
from graphmem.cudnn.library import Cudnn
from graphmem.devices import Device, described_device, device_named
from graphmem.replay import Replay, replay
from graphmem.trace import Trace
from graphmem.units import GIB
from models_zoo import libraries, reference
from models_zoo.recipe import Recipe
from tests import places

FOLDER = places.PYTORCH / "steps"
SUFFIX = ".json.gz"

#: Options of a run that this module understands; a recording with another one is refused rather than half followed.
OPTIONS = {
    "accum", "benchmark", "channels_last", "ckpt", "clip", "compile", "cudnn", "foreach", "fused", "keepgrad", "sdp",
    "tf32",
}  # fmt: skip

#: The last part that :func:`step_of` tells of: model and optimizer are still there.
DONE = "done"

#: Threads of a multiprocessor by compute capability, 2048 elsewhere (CUDA C++ Programming Guide, technical
#: specifications per compute capability), and multiprocessors of the pretended card.
_THREADS = {75: 1024, 86: 1536, 89: 1536}
_MULTIPROCESSORS = 132

_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
    "cudnn": "CUDNN_ATTENTION",
}


@dataclass(frozen=True)
class RecordedRun:
    """One recording. ``changes`` are its allocations (positive requested bytes) and frees (negative), in order."""

    name: str
    model: str
    batch: int
    optimizer: str
    dtype: str
    iterations: int
    options: dict[str, str]
    alloc_conf: str
    capability: int
    torch_version: tuple[int, int]  # (major, minor) that recorded, and that is predicted
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    marks: tuple[tuple[str, int], ...]  # (part that ends, allocations so far)
    changes: tuple[int, ...]

    @property
    def library(self) -> str:
        """``hf``, ``tv``, ``timm``, or "" for a model of our own."""
        return self.model.partition(":")[0] if ":" in self.model else ""


@dataclass(frozen=True)
class PredictedRun:
    """The prediction. ``changes`` as in the recording, with the event of the trace behind each; seconds to make it."""

    trace: Trace
    replay: Replay
    changes: tuple[int, ...]
    events: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """Distance of a prediction from its recording: errors in bytes (positive: too much), allocations matched."""

    recorded: RecordedRun
    predicted: PredictedRun
    match: Match

    @property
    def allocated_error_bytes(self) -> int:
        return self.predicted.replay.peak_allocated_bytes - self.recorded.peak_allocated_bytes

    @property
    def reserved_error_bytes(self) -> int:
        return self.predicted.replay.peak_reserved_bytes - self.recorded.peak_reserved_bytes

    @property
    def allocated_error(self) -> float:
        return self.allocated_error_bytes / self.recorded.peak_allocated_bytes

    @property
    def reserved_error(self) -> float:
        return self.reserved_error_bytes / self.recorded.peak_reserved_bytes


def names(part: str = "", folder: Path = FOLDER) -> list[str]:
    """Names of the recordings that contain ``part``."""
    found = sorted(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
    return [name for name in found if part in name]


def load(name: str, folder: Path = FOLDER) -> RecordedRun:
    """Read a recording. Raises ``ValueError`` if it was made with an option that is not understood here."""
    document = json.loads(gzip.decompress((folder / f"{name}{SUFFIX}").read_bytes()))
    options = dict(document["opts"])
    if unknown := set(options) - OPTIONS:
        raise ValueError(f"{name}: options {sorted(unknown)} are not understood")
    signs = {"alloc": 1, "free_requested": -1}
    return RecordedRun(
        name=name,
        model=document["model"],
        batch=document["batch"],
        optimizer=document["optimizer"],
        dtype=document["dtype"],
        iterations=document["steps"],
        options=options,
        alloc_conf=document["alloc_conf"],
        capability=document["cc"],
        torch_version=version_named(document["torch"]),
        peak_allocated_bytes=document["allocated_peak"],
        peak_reserved_bytes=document["reserved_peak"],
        marks=tuple((row[0], row[6]) for row in document["marks"]),
        changes=tuple(signs[action] * size for action, _, size, _ in document["trace"] if action in signs),
    )


def predict(run: RecordedRun, cudnn_workspaces: bool = False, library: str | None = None) -> PredictedRun:
    """Capture the recorded run's step and replay it under the recorded allocator configuration.

    The stub behind the recordings of :data:`FOLDER` answers that cuDNN's plans need no workspace, and so does the
    capture unless ``cudnn_workspaces`` is true. ``library`` is a cuDNN to ask for them, as ``--cudnn`` names one.
    """
    from graphmem.capture.session.session import capture  # recording, in an older PyTorch too, needs none

    start = time.perf_counter()
    major, minor = divmod(run.capability, 10)
    device = described_device(
        "recorded", (major, minor), 80 * GIB, _MULTIPROCESSORS, _THREADS.get(run.capability, 2048)
    )
    step = step_of(run)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_flags(run.options))
        captured = capture(
            lambda _: step(),
            source=run.name,
            device=device,
            torch_version=run.torch_version,
            cudnn_workspaces=cudnn_workspaces,
            cudnn=stack.enter_context(Cudnn(library, _card(device))) if library else None,
        )
    conf = parse_alloc_conf(run.alloc_conf, run.torch_version)
    replayed = replay(captured.trace, PyTorchCachingAllocator(conf=conf, torch_version=run.torch_version))
    seconds = time.perf_counter() - start
    changes = changes_of(captured.trace)
    return PredictedRun(captured.trace, replayed, changes.sizes, changes.events, seconds)


def _card(device: Device) -> Device:
    """The H200 that the recordings with cuDNN's workspaces describe to it, with the pretended kernels' limits."""
    known = device_named("H200-141GB")
    return replace(
        known,
        compute_capability=device.capability,
        sm_count=device.sm_count,
        max_threads_per_sm=device.max_threads_per_sm,
    )


def compare(name: str, folder: Path = FOLDER, cudnn_workspaces: bool = False, library: str | None = None) -> Comparison:
    """Predict a recorded run and line its allocations up with the recording's; arguments as :func:`predict`."""
    gc.collect()  # the previous capture goes before the next one starts
    recorded = load(name, folder)
    predicted = predict(recorded, cudnn_workspaces, library)
    ours, theirs = ([size for size in run.changes if size > 0] for run in (predicted, recorded))
    return Comparison(recorded, predicted, align(ours, theirs))


# --- the step ---------------------------------------------------------------------------------------------------------


def recipe_of(run: RecordedRun) -> Recipe:
    """The model of a run. Raises ``ImportError`` when its library is not installed."""
    return libraries.recipe(run.model) if run.library else reference.MODELS[run.model]


def step_of(run: RecordedRun, mark: Callable[[str], None] = lambda part: None) -> Callable[[], None]:
    """A function that builds the model and runs every iteration; ``mark`` is told what has just ended."""
    recipe = recipe_of(run)

    def step() -> None:
        model = _on_device(recipe.build(), run)
        inputs, targets = recipe.make_batch(run.batch, "cuda")
        if run.dtype == "bf16" and inputs.is_floating_point():
            inputs = inputs.to(torch.bfloat16)
        if _flag(run, "channels_last") and inputs.dim() == 4:
            inputs = inputs.to(memory_format=torch.channels_last)
        if run.options.get("compile") == "model":
            model = torch.compile(model)
        if run.optimizer == "none":
            _infer(run, model, inputs, mark)
        else:
            _train(run, recipe, model, inputs, targets, mark)

    return step


def _on_device(model: nn.Module, run: RecordedRun) -> nn.Module:
    if run.dtype == "bf16":
        model = model.to(torch.bfloat16)
    model = model.to("cuda")
    if _flag(run, "channels_last"):
        model = model.to(memory_format=torch.channels_last)
    model.train()
    if _flag(run, "ckpt"):
        model.checkpoint_blocks = True
    return model


def _infer(run: RecordedRun, model: nn.Module, inputs: torch.Tensor, mark: Callable[[str], None]) -> None:
    mark("setup")
    for iteration in range(run.iterations):
        with _autocast(run), torch.no_grad():
            output = model(inputs)
        mark(f"fwd{iteration}")
        del output
        mark(f"end{iteration}")
    mark(DONE)


def _train(
    run: RecordedRun,
    recipe: Recipe,
    model: nn.Module,
    inputs: torch.Tensor,
    targets: Any,
    mark: Callable[[str], None],
) -> None:
    optimizer = _optimizer(run, model)
    scaler = torch.amp.GradScaler("cuda") if run.dtype == "ampfp16" else None
    micro_batches = int(run.options.get("accum", 1))

    def losses(inputs: torch.Tensor, targets: Any) -> torch.Tensor:
        return recipe.loss(model(inputs), targets)

    if run.options.get("compile") == "loss":
        losses = torch.compile(losses)
    mark("setup")
    for iteration in range(run.iterations):
        with _autocast(run):
            loss = losses(inputs, targets)
        mark(f"fwd{iteration}")
        (scaler.scale(loss) if scaler else loss).backward()
        mark(f"bwd{iteration}")
        if "clip" in run.options:  # also between micro-batches
            nn.utils.clip_grad_norm_(model.parameters(), float(run.options["clip"]))
        if (iteration + 1) % micro_batches:
            del loss
            continue
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        mark(f"opt{iteration}")
        if not _flag(run, "keepgrad"):
            optimizer.zero_grad(set_to_none=True)
        del loss
        mark(f"end{iteration}")
    mark(DONE)


def _optimizer(run: RecordedRun, model: nn.Module) -> torch.optim.Optimizer:
    options = {key: run.options[key] == "1" for key in ("foreach", "fused") if key in run.options}
    kind, extra = {
        "sgd": (torch.optim.SGD, {"lr": 0.1}),
        "sgdm": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "rmsprop": (torch.optim.RMSprop, {}),
        "adafactor": (getattr(torch.optim, "Adafactor", None), {}),  # since 2.5
    }[run.optimizer]
    return kind(model.parameters(), **extra, **options)


def _autocast(run: RecordedRun) -> torch.autocast:
    dtype = torch.float16 if run.dtype == "ampfp16" else torch.bfloat16
    return torch.autocast("cuda", dtype, enabled=run.dtype.startswith("amp"))


def _flag(run: RecordedRun, name: str) -> bool:
    return run.options.get(name) == "1"


def _attention_by(name: str) -> contextlib.AbstractContextManager[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel  # since 2.3

    chosen: contextlib.AbstractContextManager[None] = sdpa_kernel(getattr(SDPBackend, name))
    return chosen


@contextlib.contextmanager
def torch_flags(options: dict[str, str]) -> Iterator[None]:
    """The global switches of a run, set for its duration."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.enabled, cudnn.benchmark, matmul.allow_tf32
    cudnn.enabled = options.get("cudnn") != "0"
    cudnn.benchmark = options.get("benchmark") == "1"
    matmul.allow_tf32 = options.get("tf32") == "1"
    attention = _attention_by(_BACKENDS[options["sdp"]]) if "sdp" in options else contextlib.nullcontext()
    try:
        with attention:
            yield
    finally:
        cudnn.enabled, cudnn.benchmark, matmul.allow_tf32 = before
