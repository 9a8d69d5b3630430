"""One capture: sets up the pretended device, runs the step on it, and returns the Trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from graphmem.capture.compile import follow_compiled_code
from graphmem.capture.device.backward_thread import numbered_as_on_a_card
from graphmem.capture.device.cuda_graphs import patch_cuda_graphs
from graphmem.capture.device.fake_tensors import pretend_cuda
from graphmem.capture.device.initializers import patch_initializers
from graphmem.capture.device.pretend_device import PretendDevice
from graphmem.capture.device.streams_api import patch_streams
from graphmem.capture.distributed.process_groups import one_rank
from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.loop.optimizers.bitsandbytes_module import bitsandbytes_in_captures
from graphmem.capture.loop.optimizers.lbfgs import patch_lbfgs
from graphmem.capture.operators.autocast import cuda_autocast
from graphmem.capture.operators.composites import cuda_composites
from graphmem.capture.operators.convolution_layout import patch_convolution_layout
from graphmem.capture.operators.recurrent.cudnn import patch_rnn_modules
from graphmem.capture.patches import Patches
from graphmem.capture.record import modules
from graphmem.capture.record.cublas_workspaces import Workspaces
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.session.messages import explained
from graphmem.capture.session.settings import same_settings
from graphmem.capture.values.callers import raised_at
from graphmem.capture.values.selection import Selection
from graphmem.cudnn.library import Cudnn
from graphmem.errors import CaptureError, GraphmemError
from graphmem.trace import Category, EventKind, Trace, TraceBuilder


@dataclass(frozen=True)
class Captured:
    """A finished capture: its trace, what had to be assumed (message -> count), and the operator graph if asked for."""

    trace: Trace
    assumed: dict[str, int]
    graph: Any | None = None
    notes: tuple[str, ...] = ()


class Session:
    """What a step sees while it is captured: the recorder, and how tensors get to the device."""

    def __init__(self, recorder: Recorder, watch: modules.ModuleWatch) -> None:
        self.recorder = recorder
        self.watch = watch

    @property
    def operator_count(self) -> int:
        """How many operators have been recorded."""
        return self.recorder.operator_count

    def begin_iteration(self) -> None:
        """What follows belongs to the next iteration, starting with its forward pass."""
        self.recorder.begin_iteration()

    def label_model(self, model: torch.nn.Module) -> None:
        """Parameters and buffers of ``model`` are known by name from now on."""
        self.watch.adopt(model)

    def label_inputs(self, inputs: Any, name: str = "input") -> None:
        """Tensors anywhere in ``inputs`` are the step's inputs."""
        for path, tensor in named_tensors(inputs, name):
            self.recorder.storages.label(tensor, Category.INPUT, path)


def capture(
    run: Callable[[Session], None],
    *,
    source: str,
    device: PretendDevice,
    torch_version: tuple[int, int],
    record_graph: bool = False,
    cudnn_workspaces: bool = True,
    cudnn: Cudnn | None = None,
    world_size: int | None = None,
    data_dependent: float | None = None,
) -> Captured:
    """Run ``run`` on fake tensors of the pretended ``device`` and record it.

    ``data_dependent`` is the share of candidates that ``nonzero``, boolean masks and ``unique`` select; None refuses
    them. ``cudnn_workspaces=False`` stands for a cuDNN whose plans need none, as in some recordings; ``cudnn`` is the
    one to ask for the plans of convolutions, which are predicted without one.

    Raises :class:`CaptureError` when the step needs data that fake tensors do not have; errors of the user's own code
    come through as :class:`CaptureError` too, with the line that raised.
    """
    card = Card(
        device.capability,
        device.sm_count,
        device.max_threads_per_sm,
        torch_version,
        cudnn_workspaces=cudnn_workspaces,
        cudnn=cudnn,
    )
    builder = TraceBuilder(source)
    graph = None
    if record_graph:
        from graphmem.capture.record.fx_graph import GraphRecorder

        graph = GraphRecorder()
    holder: list[Recorder] = []

    def on_event(name: str) -> None:
        kind = EventKind.EMPTY_CACHE if name == "empty_cache" else EventKind.SYNCHRONIZE
        holder[0].cache_event(kind)

    with contextlib.ExitStack() as stack:
        stack.enter_context(same_settings())
        stack.enter_context(pretend_cuda(device, on_event))
        substitutes = stack.enter_context(cuda_composites(card))
        stack.enter_context(cuda_autocast())
        stack.enter_context(numbered_as_on_a_card())
        stack.enter_context(bitsandbytes_in_captures())
        patches = Patches()
        stack.callback(patches.undo)
        patch_initializers(patches)
        patches.set(fake_tensor.log, "disabled", True)  # of shapes that do not fit; the error says it
        patch_rnn_modules(patches)
        workspaces = Workspaces(device.capability, torch_version, measured_bytes=device.cublas_workspace_bytes)
        selection = Selection(data_dependent)
        recorder = Recorder(builder, card, workspaces, substitutes, graph, selection)
        holder.append(recorder)
        patch_lbfgs(patches, recorder)
        patch_streams(patches, recorder.streams, recorder.storages.pools, recorder.storages)
        patch_cuda_graphs(patches, recorder.streams, recorder.storages.pools, recorder)
        patch_convolution_layout(patches)
        stack.enter_context(one_rank(recorder, world_size))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        recorder.calibrate()
        watch = stack.enter_context(modules.watch_modules(recorder))
        compiled = stack.enter_context(follow_compiled_code(recorder, watch, device))
        with _readable_errors(recorder):
            run(Session(recorder, watch))
        assumed = dict(recorder.assumed)
        if recorder.values_assumed:
            assumed["values read back from the device by the training loop were assumed to be 1"] = (
                recorder.values_assumed
            )
        if selection.assumed:
            share = f"nonzero, boolean masks and unique were assumed to select {data_dependent:.0%} of the candidates"
            assumed[share] = selection.assumed
        if selection.distinct:
            assumed["indices of sparse gradients were assumed to be distinct, where equal ones are added up"] = (
                selection.distinct
            )
        for message, count in sorted(recorder.unmodelled.items()):
            assumed[f"memory inside operators is not modelled: {message}"] = count
        assumed.update(compiled.assumed)
        # The references of the step die here, while the recorder no longer listens.
        recorder.stop()
    return Captured(
        builder.build(), assumed, graph.graph if graph is not None else None, (*compiled.notes(), *recorder.notes)
    )


@contextlib.contextmanager
def _readable_errors(recorder: Recorder) -> Iterator[None]:
    try:
        yield
    except GraphmemError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = recorder.current_source()
        operator = getattr(error, "func", "an operator")
        raise CaptureError(
            f"{where}: {operator} needs the values of a tensor, and an analysis has only shapes. "
            "Keep .item(), bool(tensor), nonzero() and masks that select out of the model's forward, "
            "replace them by a fixed size for the analysis, or say with --data-dependent SHARE how much nonzero, masks "
            "and unique select; numbers that are read back are then assumed to be 1"
        ) from None
    except UnsupportedOperatorException as error:
        reason = explained(error) or (
            f"operator {error.func} has no fake implementation, so its outputs' shapes are unknown; register one with "
            "torch.library.register_fake, or choose the model's PyTorch implementation of it"
        )
        raise CaptureError(f"{recorder.current_source()}: {reason}") from None
    except Exception as error:
        where = raised_at(error) or recorder.current_source()
        known = explained(error)
        if known is not None:
            raise CaptureError(f"{where}: {known}") from error
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise CaptureError(f"{where}: the step raised {type(error).__name__}: {first_line}") from error


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists and dicts, with a path for people."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(item, str(key) if name == "input" else f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{position}]")
