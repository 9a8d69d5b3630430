"""The question of one analysis: its options, checked and read, and the part of it that a trace depends on."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from functools import cached_property
from os.path import splitext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphmem.base.documents import LARGEST_NUMBER, shown
from graphmem.base.figures import parse_margin
from graphmem.base.records import dataclass
from graphmem.base.versions import NEWEST, version_named, workspace_variables
from graphmem.cudnn.library import AUTO, find_library
from graphmem.devices import DEFAULT_DEVICE, Device, as_cuda, device_named
from graphmem.errors import UsageError
from graphmem.graph.asked import Asked, Range
from graphmem.runtimes import runtime_named
from graphmem.runtimes.base import Graphs, Runtime, Setting
from graphmem.sources import compiles_for_card
from graphmem.sources.base import OnnxModel, Sizes
from graphmem.sources.manifests import is_manifest, read_manifest
from graphmem.sources.zoo import ZOO, usual_step
from graphmem.training import Inference, Training

if TYPE_CHECKING:
    from graphmem.estimate import Estimate
    from graphmem.run import Run

#: Models whose step their own runtime may tell, and another one captures.
_OF_THEIR_RUNTIME = "keras:"
#: More iterations than any run needs to settle; the events of every one of them are held.
MOST_ITERATIONS = 1000


@dataclass(frozen=True, eq=False)
class Question:
    """The arguments of :func:`graphmem.analyze` under their own names. Raises :class:`UsageError` for one that no
    analysis takes."""

    model: Any
    example_inputs: Any = None
    batch: int | None = None
    seq_len: int | None = None
    training: Training | Inference | bool | None = None
    runtime: str | None = None
    device: str | Device | None = None
    alloc_conf: str | None = None
    dims: Mapping[str, int | Range] | None = None
    input_shapes: Mapping[str, Sequence[int]] | None = None
    input_values: Mapping[str, Sequence[float]] | None = None
    trip_count: int | None = None
    shapes: str | None = None
    iterations: int | None = None
    top: int = 10
    torch_version: str | None = None
    build_on: str = "host"
    cudnn: str | Path = AUTO
    trust: bool = False
    margin: str | None = None
    bounds: bool = False
    layers: int | None = None  # build the model with so many; of a TorchModel that has ``layers`` to choose

    def __post_init__(self) -> None:
        check_counts(1, batch=self.batch, seq_len=self.seq_len, iterations=self.iterations, trip_count=self.trip_count)
        check_counts(0, top=self.top)
        if self.iterations is not None and self.iterations > MOST_ITERATIONS:
            raise UsageError(f"iterations is {self.iterations}; accepted: 1 to {MOST_ITERATIONS}, as a few settle it")
        # Before a model is loaded in vain:
        _ = self.margin_share, self.step, self.setting, self.asked_runtime, self.cudnn_library
        self._check_batches()
        if self.is_onnx and isinstance(self.step, Inference) and self.step.generate is not None:
            raise UsageError("generate is a method of transformers' models (hf:...); an ONNX file has none")

    def with_alloc_conf(self, text: str | None) -> Question:
        """The same with other options of the runtime's allocator; all else is as it was read here."""
        made = copy(self)
        object.__setattr__(made, "alloc_conf", text)
        vars(made).pop("optimization", None)
        return made

    @cached_property
    def kept(self) -> dict[Hashable, Answered]:
        """What was answered to it, by all that the allocator's options decide; shared by those of other options."""
        return {}

    @property
    def loading(self) -> tuple[Any, ...]:
        """What the file or the factory is loaded with: sizes, dimensions, shapes of runs, optimization."""
        return self.asked, self.shapes, self.optimization, self.trust, self.layers

    @cached_property
    def captured(self) -> CaptureKey:
        """The key of a step that is captured, or compiled, whatever the allocator's options."""
        setting, runtime = self.setting, self.asked_runtime.name if self.asked_runtime is not None else None
        cudnn = None if self.cudnn_library is None else (self.cudnn_library, setting.device)
        variables = workspace_variables(os.environ)
        of_runtime = runtime if str(self.model).startswith(_OF_THEIR_RUNTIME) else None
        card = setting.device if self.is_compiled else card_facts(setting.device)
        capture = (self.build_on, setting.torch_version, card, cudnn, variables, of_runtime)
        return CaptureKey(self.loading, self.step, self.iterations, None, capture)

    @cached_property
    def margin_share(self) -> float | None:
        """The share of runs that must fit; None for everything that is known to be possible."""
        return None if self.margin is None else parse_margin(self.margin)

    @cached_property
    def cudnn_library(self) -> str | None:
        """The cuDNN that is asked; None for none."""
        return find_library(self.cudnn)

    def _check_batches(self) -> None:
        """Raises :class:`UsageError` for sizes of batches that contradict each other."""
        step = self.step
        if isinstance(step, Training) and step.prefetch and self.build_on == "device":
            raise UsageError("batches that are moved ahead come from the host; leave out build_on device")
        if not isinstance(step, Training) or not step.epoch.varies:
            return
        if step.seq_lens and self.seq_len is not None:
            raise UsageError("seq_len is one length for all batches and seq_lens one for each; give one of them")
        if step.last_batch is not None and self.batch is None:
            raise UsageError("last_batch is the size of a smaller batch than the others: give batch too")
        if self.build_on == "device":
            raise UsageError("batches of several sizes come from the host; leave out build_on device")
        step.epoch.iterations(self.batch, self.seq_len, self.iterations)

    @property
    def usual_step(self) -> Training | Inference | None:
        """The step that a model of the zoo usually makes, with types and an optimizer of its own; None of others."""
        if not isinstance(self.model, str) or not self.model.startswith(ZOO):
            return None
        return usual_step(self.model.removeprefix(ZOO), training=isinstance(self.step, Training))

    @cached_property
    def step(self) -> Training | Inference:
        """The step asked for; by default inference for ONNX files, a model of the zoo's usual step, and training for
        everything else."""
        if isinstance(self.model, str) and self.model.startswith(ZOO) and self.training in (None, True, False):
            return usual_step(self.model.removeprefix(ZOO), training=self.training is not False)
        if is_manifest(self.model) and self.training in (None, True):
            return read_manifest(str(self.model)).step()
        if isinstance(self.training, bool):
            return Training() if self.training else Inference()
        if self.training is None:
            return Inference() if self.is_onnx else Training()
        if not isinstance(self.training, (Training, Inference)):
            raise UsageError(f"training is a graphmem.Training, a graphmem.Inference or a bool, not {self.training!r}")
        return self.training

    @cached_property
    def is_onnx(self) -> bool:
        """True if the model is an ONNX file, or a list of them."""
        names = self.model if isinstance(self.model, (list, tuple)) else [self.model]
        return all(isinstance(name, (str, Path)) and splitext(name)[1].lower() == ".onnx" for name in names)

    @cached_property
    def is_compiled(self) -> bool:
        """True if a compiler of the model's own framework makes its step, for which it looks at all facts of the card:
        JAX's. Nothing is captured then."""
        return compiles_for_card(self.model)

    @cached_property
    def setting(self) -> Setting:
        """The card and the version of PyTorch, the newest known where none is needed."""
        card = self.device if isinstance(self.device, Device) else device_named(self.device or DEFAULT_DEVICE)
        needs_pytorch = self.planner is None or self.torch_version is not None
        return Setting(card, version_named(self.torch_version) if needs_pytorch else NEWEST, self.cudnn_library)

    @property
    def sizes(self) -> Sizes:
        """The sizes that a model is built for."""
        step = self.step
        weights = None if isinstance(step, Training) else step.weights
        lengths = step.seq_lens if isinstance(step, Training) else ()
        seq_len = max(lengths) if lengths else self.seq_len
        training = isinstance(step, Training)
        generate = None if isinstance(step, Training) else step.generate
        mask = step.attention_mask
        cards = step.processes.world_size if isinstance(step, Training) and step.processes is not None else 1
        return Sizes(
            self.batch, seq_len, training, self.iterations, weights, step.dtype, mask, generate, self.layers, cards
        )

    @cached_property
    def asked(self) -> Asked:
        """The values that bind the inputs of ONNX files."""
        return Asked(
            self.batch,
            self.seq_len,
            dict(self.dims or {}),
            {name: tuple(shape) for name, shape in (self.input_shapes or {}).items()},
            {name: tuple(values) for name, values in (self.input_values or {}).items()},
            self.trip_count,
            self.step.data_dependent,
        )

    @cached_property
    def asked_runtime(self) -> Runtime[object] | None:
        """The runtime the user named; None: the one natural to the model."""
        return None if self.runtime is None else runtime_named(self.runtime)

    def runtime_by_default(self, natural: str) -> Runtime[object]:
        """The runtime the user named, else ``natural``."""
        return self.asked_runtime or runtime_named(natural)

    @cached_property
    def planner(self) -> Runtime[object] | None:
        """The runtime that plans the graphs of an ONNX file; None where a step is captured, or nothing can be done."""
        if not self.is_onnx or isinstance(self.step, Training):
            return None
        runtime = self.runtime_by_default(OnnxModel.runtime)
        return runtime if runtime.graphs is Graphs.PLANNED else None

    @cached_property
    def optimization(self) -> tuple[str | None, str]:
        """The (level, provider) to optimize an ONNX file for while it is loaded; no level: as it is. Raises
        :class:`UsageError` for options that the runtime refuses."""
        if self.planner is None:
            return None, "cpu"
        return self.planner.optimization(self.planner.parse(self.alloc_conf, self.setting))


class Answered(NamedTuple):
    """The answer that a run gave."""

    run: Run
    estimate: Estimate


@dataclass(frozen=True)
class CaptureKey:
    """The part of a question about one model that its trace depends on: equal keys give equal traces.

    Not in it: the allocator's options, the card's capacity and context, the runtime a captured trace is replayed by. A
    step's own code may ask the card for its name and its memory; :class:`graphmem.answering.runs.RunCache` notices it.
    Compared, not hashed: options of optimizers may be lists.
    """

    #: See :attr:`Question.loading`.
    loading: tuple[Any, ...]
    step: Training | Inference
    iterations: int | None
    #: The runtime that planned the trace and what it looked at, or None for a captured step.
    plan: tuple[str, Hashable] | None
    #: Of a captured step: where the model is built, the version of PyTorch, the card as kernels see it, the cuDNN, the
    #: variables about workspaces.
    capture: tuple[Any, ...] | None


def capture_key(question: Question) -> CaptureKey:
    """The key of a question. Raises :class:`UsageError` for options that the runtime refuses."""
    planner = question.planner
    if planner is None:
        return question.captured
    plan = planner.name, planner.plan_options(planner.parse(question.alloc_conf, question.setting))
    return CaptureKey(question.loading, question.step, question.iterations, plan, None)


def card_facts(card: Device) -> tuple[object, ...]:
    """The facts of a card that kernels, and PyTorch where it chooses them, look at: equal facts give equal kernels."""
    like = as_cuda(card)
    cores = like.compute_capability, like.sm_count, like.max_threads_per_sm
    return (*cores, like.cublas_workspace_bytes, like.vendor)


def check_counts(least: int, **counts: int | None) -> None:
    """Raises :class:`UsageError` for one that is given and no whole number of at least ``least``."""
    for name, count in counts.items():
        if count is not None and (type(count) is not int or not least <= count <= LARGEST_NUMBER):
            raise UsageError(f"{name} is a whole number of at least {least} and of 63 bits, not {shown(count)}")
