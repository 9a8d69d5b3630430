"""A request for an analysis, as a value of which one setting can be changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from graphmem.answering import stages
from graphmem.answering.question import Question
from graphmem.answering.runs import Progress, RunCache, silent
from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.training import Inference, Training

#: Keywords of :func:`graphmem.analyze` that can be changed; every other name is a field of the step.
SETTINGS = ("batch", "seq_len", "device", "runtime", "alloc_conf", "iterations", "torch_version", "build_on")


def option_of(setting: str) -> str:
    """The option of a setting: ``gpu`` of ``device``, ``seq-len`` of ``seq_len``; a dimension is called as it is."""
    return "gpu" if setting == "device" else setting if ":" in setting else setting.replace("_", "-")


@dataclass(frozen=True)
class Request:
    """A model and the keywords of :func:`graphmem.analyze` for it."""

    model: Any
    example_inputs: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def question(self) -> Question:
        """The same as one checked value. Raises :class:`UsageError`."""
        options = {name: value for name, value in self.options.items() if name != "progress"}
        return Question(self.model, self.example_inputs, **options)

    @property
    def step(self) -> Training | Inference:
        """The step that will be analysed. Raises :class:`UsageError`."""
        return self.question.step

    def changed(self, **changes: Any) -> Request:
        """The same with other settings: keywords of ``analyze``, fields of the step, or ``dim:NAME`` for a symbolic
        dimension. Raises :class:`UsageError` for a name that is none of them."""
        options = dict(self.options)
        if "training" in changes:  # whose fields the others change
            options["training"] = changes.pop("training")
            return Request(self.model, self.example_inputs, options).changed(**changes)
        step = self.step
        known = [one.name for one in fields(step)]
        of_step: dict[str, Any] = {}
        for given, value in changes.items():
            name = "device" if given == "gpu" else given
            if name in SETTINGS:
                options[name] = value
            elif name.startswith("dim:"):
                options["dims"] = {**(options.get("dims") or {}), name.removeprefix("dim:"): value}
            elif name in known:
                of_step[name] = value
            else:
                raise UsageError(
                    f"nothing is called {name!r}; accepted: {', '.join((*SETTINGS, 'training', *known))}, dim:NAME"
                )
        options["training"] = replace(step, **of_step) if of_step else step
        return Request(self.model, self.example_inputs, options)

    @property
    def progress(self) -> Progress:
        """The callback for the progress of an analysis."""
        return self.options.get("progress") or silent

    @property
    def quiet(self) -> Request:
        """The same without its callback, which cannot be sent to another process."""
        return replace(self, options={name: value for name, value in self.options.items() if name != "progress"})

    def run(self, captures: RunCache | None = None, say: Progress | None = None) -> Estimate:
        """Analyse it; a capture made for another request about the same model is used where it serves.

        The estimate keeps no trace: many of them are held at once. Raises :class:`GraphmemError`.
        """
        return stages.estimate_of(self.question, captures, say or self.progress).without_events()
