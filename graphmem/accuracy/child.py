"""The measuring process: one case on the card, from a fresh start. The only place in graphmem that runs a model.

``python -m graphmem.accuracy.child`` reads a case as JSON from stdin and prints one line of JSON. The loop is the one
that predictions are made of (``graphmem.capture.loop.step``), so the two differ in nothing but the device.
"""

from __future__ import annotations

import ctypes
import gzip
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from graphmem.accuracy.calibration_step import run_calibration
from graphmem.accuracy.case import Case
from graphmem.accuracy.device_meter import DeviceMeter
from graphmem.accuracy.record import GPU, STUB_DRIVER
from graphmem.torch_names import private

_LOST = "allocations cannot be recorded"

#: Events kept by PyTorch while a trace is recorded.
MAX_EVENTS = 2_000_000
_PACKAGES = ("torch", "transformers", "timm", "torchvision", "graphmem")


class Watch:
    """A capture's recorder and session for the default loop on a real device: it counts iterations and reads meters."""

    def __init__(self, meter: DeviceMeter) -> None:
        self.recorder = self
        self.operator_count = 0
        self.iteration = 0
        self._meter = meter
        self.device_bytes: list[int] = []
        self.iterations: list[dict[str, int]] = []

    def begin_iteration(self) -> None:
        """Called before every iteration; looks at the end of the one before."""
        if self.iteration:
            self.look()
        self.iteration += 1

    def look(self) -> None:
        """Note the card's memory in use now and the peaks of PyTorch's allocator, as the entry of an iteration."""
        import torch

        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        self.device_bytes.append(self._meter.used_bytes())
        self.iterations.append(
            {
                "allocated_peak_bytes": stats["allocated_bytes.all.peak"],
                "reserved_peak_bytes": stats["reserved_bytes.all.peak"],
                "device_bytes": self.device_bytes[-1],
            }
        )

    def label_model(self, _: object) -> None:
        """Names are for predictions."""

    def label_inputs(self, _: object, __: str = "") -> None:
        """Names are for predictions."""


def run_case(case: Case, cap_bytes: int | None, trace: Path | None) -> dict[str, object]:
    """Measure one case. Running out of memory is an answer; any other error comes through."""
    meter = DeviceMeter()
    baseline = meter.used_bytes() if meter.sees_baseline else 0
    import torch

    torch.cuda.init()
    torch.cuda.synchronize()
    context = meter.used_bytes()
    if cap_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total))
    if trace is not None:
        private("torch.cuda.memory._record_memory_history", _LOST)(enabled="all", context=None, max_entries=MAX_EVENTS)
    watch = Watch(meter)
    status = "ok"
    try:
        _run_step(case, watch)
        watch.look()
    except torch.OutOfMemoryError:
        status = "out of memory"
    if trace is not None:
        _write_trace(trace, case)
    return {
        "status": status,
        "machine": machine(meter),
        "measured": _measured(watch, meter.name, baseline or context, context),
    }


def _run_step(case: Case, watch: Watch) -> None:
    from graphmem import sources
    from graphmem.capture.loop.loading import loader_for
    from graphmem.capture.loop.step import run_inference, run_training
    from graphmem.errors import SourceError
    from graphmem.training import Training

    loaded = sources.load(case.model)
    training = isinstance(case.step, Training)
    if not isinstance(loaded, sources.TorchModel):
        raise SourceError(f"{case.model}: only PyTorch models are measured")
    lengths = case.step.seq_lens if isinstance(case.step, Training) else ()
    length = max(lengths) if lengths else case.seq_len
    sizes = sources.Sizes(case.batch, length, training=training, attention_mask=case.step.attention_mask)
    built = loaded.build(sizes)
    session: Any = watch
    if built is None:
        return  # a step function that ran all its iterations
    if isinstance(case.step, Training):
        has_loader = case.step.has_loader
        loader = loader_for(loaded.build, built, sizes, case.step, case.iterations) if has_loader else None
        run_training(session, built.model, built.inputs, built.loss, case.step, case.iterations, None, loader)
    else:
        run_inference(session, built.model, built.inputs, case.step, case.iterations)


def _measured(watch: Watch, meter: str, baseline: int, context: int) -> dict[str, Any]:
    import torch

    stats = torch.cuda.memory_stats()
    seen = watch.device_bytes or [context]
    return {
        "requested_bytes": stats["requested_bytes.all.peak"],
        "allocated_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "device": {
            "meter": meter,
            "baseline_bytes": baseline,
            "context_bytes": context,
            "first_iteration_bytes": seen[0],
            "peak_bytes": max(seen),
        },
        "iterations": watch.iterations,
    }


def machine(meter: DeviceMeter) -> dict[str, Any]:
    """The card and the versions, as :class:`graphmem.accuracy.record.Machine` has them."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    versions = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version()), "driver": meter.driver}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "source": STUB_DRIVER if _is_stub_driver() else GPU,
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "sm_count": properties.multi_processor_count,
        "threads_per_sm": properties.max_threads_per_multi_processor,
        "total_bytes": properties.total_memory,
        "versions": versions,
    }


def _is_stub_driver() -> bool:
    """Whether the driver is the stub that tests preload: it exports its counters."""
    return hasattr(ctypes.CDLL(None), "fake_cuda_peak")


def _write_trace(path: Path, case: Case) -> None:
    """Every allocation event, addresses relative to the lowest: ``[action, address, bytes, stream number]``."""

    streams: dict[int, int] = {}
    events = [
        [event["action"], event.get("addr", -1), event["size"], streams.setdefault(event["stream"], len(streams))]
        for event in private("torch.cuda.memory._snapshot", _LOST)()["device_traces"][0]
    ]
    base = min((event[1] for event in events if event[1] >= 0), default=0)
    rows = [[action, address - base if address >= 0 else -1, size, stream] for action, address, size, stream in events]
    columns = ["action", "address", "bytes", "stream"]
    document = {"schema": 1, "case": case.to_json(), "columns": columns, "events": rows}
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(document, separators=(",", ":")).encode())


def main() -> None:
    """Read ``{"case", "cap_bytes", "trace"}`` from stdin and print the answer as the last line.

    Without a case the answer is the machine, and its constants if the request has ``calibrate``. Exits with one line
    where there is no CUDA card.
    """
    import torch

    request = json.load(sys.stdin)
    if not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} finds no CUDA device")
    if request["case"] is None:
        meter = DeviceMeter()
        answer: dict[str, Any] = {"status": "ok"}
        if request.get("calibrate"):
            answer["calibration"] = run_calibration(meter)
        answer["machine"] = machine(meter)
    else:
        trace = Path(request["trace"]) if request.get("trace") else None
        answer = run_case(Case.from_json(request["case"]), request.get("cap_bytes"), trace)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
