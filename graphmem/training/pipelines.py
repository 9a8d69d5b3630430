"""Pipeline parallelism: layers in stages, and the schedules of ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Mapping

from graphmem.base.options import REQUIRED, Whole, check_values, documented, option
from graphmem.base.records import public_value
from graphmem.errors import UsageError
from graphmem.training.processes import at_least_two

#: PyTorch's names of its schedules (``get_schedule_class``, torch/distributed/pipelining/schedules.py of 2.13), by the
#: names that are accepted, and whether a process has several stages in them.
SCHEDULES: Mapping[str, tuple[str, bool]] = {
    "gpipe": ("GPipe", False),
    "1f1b": ("1F1B", False),
    "loopedbfs": ("LoopedBFS", True),
    "interleaved1f1b": ("Interleaved1F1B", True),
    "interleavedzerobubble": ("InterleavedZeroBubble", True),
    "zbvzerobubble": ("ZBVZeroBubble", True),
    "dualpipev": ("DualPipeV", True),
}
#: Those in which a process has exactly two stages, the first and the last of what is left: their order is a V.
_V_SHAPED = ("zbvzerobubble", "dualpipev")
_SPELLED = {"zbv": "zbvzerobubble", "interleaved": "interleaved1f1b"}
#: Stages of a process that has several, where no number is given: those that torchtitan takes (``pipeline_llm``).
_STAGES_OF_A_PROCESS = 2


def _schedule_named(_: str, given: object) -> str:
    schedule = str(given).strip().lower()
    schedule = _SPELLED.get(schedule, schedule)
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {given!r}; accepted: {', '.join(SCHEDULES)}")
    return schedule


def _layers_in(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(count) for count in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"--pp-layers is the layers of each stage, as 8,8,8,8, not {text!r}") from None


@documented
@public_value(frozen=True, slots=True)
class PipelineParallel:
    """``torch.distributed.pipelining`` around a transformers model: its layers in stages, the embedding with the first
    one, norm, head and loss with the last, and PyTorch's schedule of the stages of one process. Without ``layers``
    they are divided as torchtitan does (``generate_llm_fqn_per_model_part``). Raises :class:`UsageError` for a field
    that is not accepted."""

    ranks: int = option(
        REQUIRED,
        "Processes of a pipeline of the model's layers (transformers).",
        lambda _, value: at_least_two("pp", value),
        flags="--pp",
        opens=True,
    )
    schedule: str = option(
        "1f1b", f"PyTorch's schedule of the pipeline: {', '.join(SCHEDULES)}.", _schedule_named, metavar="NAME"
    )
    micro_batches: int | None = option(
        None, "Into how many the pipeline cuts the batch (-b). Default: one a row.", Whole(), metavar="M"
    )
    layers: tuple[int, ...] = option(
        (),
        "Layers of each stage. Default: as even as embedding and head allow.",
        flags="--pp-layers",
        metavar="N,N,...",
        read=_layers_in,
    )

    def __post_init__(self) -> None:
        check_values(self)
        object.__setattr__(self, "layers", tuple(self.layers))
        self._check_layers()

    def _check_layers(self) -> None:
        if not self.layers:
            return
        if any(type(count) is not int or count < 0 for count in self.layers):
            raise UsageError(f"layers of stages are whole numbers, as (8, 8, 8, 8), not {self.layers!r}")
        if len(self.layers) % self.ranks or (not SCHEDULES[self.schedule][1] and len(self.layers) != self.ranks):
            raise UsageError(
                f"layers are given for {len(self.layers)} stages, and schedule {self.schedule} of {self.ranks} "
                f"processes has {self.ranks if not SCHEDULES[self.schedule][1] else f'a multiple of {self.ranks}'}"
            )
        if self.is_v_shaped and len(self.layers) != 2 * self.ranks:
            raise UsageError(f"schedule {self.schedule} has 2 stages a process: give layers for {2 * self.ranks}")

    @property
    def is_v_shaped(self) -> bool:
        """True if a process has a stage and its mirror image: the first process has the first and the last one."""
        return self.schedule in _V_SHAPED

    @property
    def stages(self) -> int:
        """The number of stages."""
        each = _STAGES_OF_A_PROCESS if SCHEDULES[self.schedule][1] else 1
        return len(self.layers) or each * self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a process, by its place in the pipeline."""
        if self.is_v_shaped:
            return rank, self.stages - 1 - rank
        return tuple(range(rank, self.stages, self.ranks))

    def divided(self, layers: int) -> list[range]:
        """The layers of each stage, of a model that has so many. Raises :class:`UsageError` where they do not fit."""
        counts = self.layers or _evenly(layers, self.stages)
        if sum(counts) != layers:
            raise UsageError(f"the stages have {sum(counts)} layers together, and the model has {layers}")
        ends = [sum(counts[: stage + 1]) for stage in range(self.stages)]
        return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def describe(self) -> str:
        """The pipeline in words: ``pipeline over 4 (1f1b, 8 micro-batches)``."""
        words = [self.schedule]
        if self.stages > self.ranks:
            words.append(f"{self.stages} stages")
        if self.micro_batches is not None:
            words.append(f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}")
        if self.layers:
            words.append(f"layers {','.join(map(str, self.layers))}")
        return f"pipeline over {self.ranks} ({', '.join(words)})"


def _evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Layers by stage, embedding and head counted as a layer each; the first stages have one more where it does not
    come out even (``generate_llm_fqn_per_model_part`` of torchtitan, with its weights of 1)."""
    each, more = divmod(layers + 2, stages)
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    if min(counts) < 0 or each < 1:
        raise UsageError(f"{stages} stages need {stages - 2} layers or more, and the model has {layers}")
    return tuple(counts)
