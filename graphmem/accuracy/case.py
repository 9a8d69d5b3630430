"""A case: one step of one model that can be predicted and measured alike. Plain values, kept in every record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from graphmem.base.documents import check_fields
from graphmem.base.options import of_json
from graphmem.errors import UsageError
from graphmem.training import Inference, Training

#: Iterations of a measured run: the first, the first with the optimizer's state, and a settled one.
ITERATIONS = 3


@dataclass(frozen=True)
class Case:
    """``model`` is what ``graphmem analyze`` takes; ``batch`` and ``seq_len`` None stand for the model's own.

    ``runtime`` is one of :data:`graphmem.runtimes.RUNTIMES`, and ``alloc_conf`` holds its options; ``shapes`` lists the
    runs of an ONNX session, as ``batch=1;batch=16``.
    """

    name: str
    model: str
    step: Training | Inference
    batch: int | None = None
    seq_len: int | None = None
    iterations: int = ITERATIONS
    alloc_conf: str = ""
    runtime: str = "pytorch"
    shapes: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain values; the step says whether it trains."""
        document = {key: value for key, value in vars(self).items() if key != "step"}
        document["step"] = {"training": isinstance(self.step, Training), **asdict(self.step)}
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Case:
        """The case of :meth:`to_json`. Raises :class:`UsageError` for a document that is none."""
        try:
            values = dict(document)
            step = dict(values.pop("step"))
            kind = Training if step.pop("training") else Inference
            step = of_json(kind, step)
            if kind is Training:
                step.setdefault("loop", "drop")  # what ran before there was a choice
            check_fields(kind, step)
            values["step"] = kind(**step)
            check_fields(cls, values)
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not a case of graphmem: {error}") from None


def case_of(
    model: str,
    step: Training | Inference,
    batch: int | None = None,
    seq_len: int | None = None,
    iterations: int = ITERATIONS,
    alloc_conf: str = "",
    runtime: str = "pytorch",
    shapes: str = "",
) -> Case:
    """A case named after what makes it: ``zoo:gpt2`` in its usual training becomes ``gpt2-training``."""
    short = Path(model).stem if model.endswith(".onnx") else model.removeprefix("zoo:")
    parts = [short, "training" if isinstance(step, Training) else "inference"]
    parts += _unusual(model, step)
    parts += [f"b{batch}"] if batch else []
    parts += [f"s{seq_len}"] if seq_len else []
    parts += [shapes] if shapes else []
    shown = alloc_conf.removeprefix("provider:cpu").lstrip(",")
    parts += [shown] if shown else []
    name = re.sub(r"[^A-Za-z0-9_.=,-]+", "-", "-".join(parts)).strip("-")
    return Case(name, model, step, batch, seq_len, iterations, alloc_conf, runtime, shapes)


def _unusual(model: str, step: Training | Inference) -> list[str]:
    """Words for the fields of the step that are neither those of the zoo's entry nor the defaults."""
    usual = _usual_step(model, step)
    changed = {field.name: getattr(step, field.name) for field in fields(step)}
    changed = {name: value for name, value in changed.items() if value != getattr(usual, name)}
    return [word for name, value in changed.items() if (word := _word(name, value))]


def _usual_step(model: str, step: Training | Inference) -> Training | Inference:
    from graphmem.sources.zoo import usual_step

    if model.startswith("zoo:"):
        return usual_step(model.removeprefix("zoo:"), training=isinstance(step, Training))
    return type(step)()


def _word(name: str, value: object) -> str:
    if value is None or value is False:
        return f"no-{name}"
    if value is True:
        return name
    return f"{name}-{value}" if isinstance(value, (str, int, float)) else ""  # options of options are too long


def zoo_cases(names: tuple[str, ...] = (), steps: tuple[str, ...] = ("training", "inference")) -> list[Case]:
    """The cases of the zoo's entries, or of those named. Raises :class:`graphmem.errors.SourceError`."""
    from graphmem.sources.zoo import usual_step, zoo_entries, zoo_entry

    wanted = [zoo_entry(name) for name in names] if names else zoo_entries()
    return [
        case_of(f"zoo:{entry.name}", usual_step(entry.name, training=kind == "training"))
        for entry in wanted
        for kind in steps
    ]
