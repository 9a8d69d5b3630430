"""Hides PyTorch's private names one at a time, and asks plain questions: what becomes of the answers.

    python -m tests.support.hidden_names [PART OF A NAME ...]

Each name is hidden in a process of its own, before captures are imported. Where a step of PyTorch alone, on fake
tensors, goes on without it, it is deleted from PyTorch, as a new version deletes it. Where PyTorch itself needs it, a
new version has something else in its place, and graphmem alone must not find it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.convert_frame
from torch import nn

from graphmem.analyze import analyze
from graphmem.errors import GraphmemError

MANIFEST = Path(__file__).parents[2] / "graphmem" / "torch_names.json"

#: How answers end. The first four are as they should be, the last one is a traceback or another error.
UNTOUCHED = "the same figures"
TOLD = "the same figures, and what is lost"
LESS = "other figures, and what is lost"
REFUSED = "an error that names the version"
BROKEN = "something else"
ANSWERED = (UNTOUCHED, TOLD, LESS)


# --- plain questions --------------------------------------------------------------------------------------------------


def perceptron() -> Any:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.randn(32, 64), torch.randint(0, 10, (32,)), nn.functional.cross_entropy


def convolutions() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)), nn.functional.cross_entropy


def transformer() -> Any:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32 * 16, 50))
    return model, torch.randint(0, 50, (4, 16)), torch.randint(0, 50, (4,)), nn.functional.cross_entropy


QUESTIONS: tuple[Callable[[], Any], ...] = (perceptron, convolutions, transformer)


@dataclass
class Answer:
    """Of one question: peaks by level, what was told, and the error in its place."""

    figures: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    error: str = ""


def ask() -> dict[str, Answer]:
    """The answers of the graphmem that is imported now."""
    return {question.__name__: _answer(question) for question in QUESTIONS}


def _answer(question: Callable[[], Any]) -> Answer:
    try:
        estimate = analyze(question, device="A100-40GB", cudnn="never")
    except GraphmemError as error:
        return Answer(error=str(error))
    except Exception:
        return Answer(error=traceback.format_exc())
    levels = [estimate.requested, estimate.allocated, estimate.reserved, estimate.device]
    return Answer(levels, [item.message for item in estimate.diagnostics])


# --- hiding -----------------------------------------------------------------------------------------------------------


def outcomes(path: str, known: dict[str, Answer]) -> dict[str, str]:
    """By question, how the answer ends without the name, and ``known`` answers with it."""
    found = _elsewhere(lambda: _without(path))
    if found is None:
        return dict.fromkeys(known, BROKEN)
    return {name: _outcome(path, Answer(**found[name]), known[name]) for name in known}


def _outcome(path: str, answer: Answer, known: Answer) -> str:
    if answer.error:
        is_told = "PyTorch" in answer.error and (
            "is newer than" in answer.error or "as it was released" in answer.error
        )
        return REFUSED if is_told and "Traceback" not in answer.error else f"{BROKEN}: {answer.error.strip()[-200:]}"
    is_told = any(path.rpartition(".")[2] in message for message in answer.told if message not in known.told)
    if answer.figures == known.figures:
        return TOLD if is_told else UNTOUCHED
    return LESS if is_told else f"{BROKEN}: {answer.figures} in place of {known.figures}"


def known_answers() -> dict[str, Answer]:
    """The answers with every name there."""
    found = _elsewhere(ask)
    assert found is not None
    return {name: Answer(**answer) for name, answer in found.items()}


def _without(path: str) -> dict[str, Answer]:
    """Ask with the name hidden; only in a process that ends after it."""
    if _elsewhere(lambda: _pytorch_alone(path)) is not None:
        delete(path)
    else:
        refuse(path)
    return ask()


def _pytorch_alone(path: str) -> dict[str, Answer]:
    """A training step of PyTorch itself on fake tensors, without the name. Raises what that raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    delete(path)
    for question in QUESTIONS:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, inputs, targets, loss = question()
            optimizer = torch.optim.AdamW(model.parameters())
            loss(model(inputs), targets).backward()
            optimizer.step()
    return {}


def delete(path: str) -> None:
    """Take the name away from PyTorch. Raises :class:`AttributeError` and :class:`TypeError` where that cannot be."""
    parts = path.split(".")
    holder: Any = torch
    for end, part in enumerate(parts[1:-1], start=2):
        holder = getattr(holder, part) if hasattr(holder, part) else importlib.import_module(".".join(parts[:end]))
    name = parts[-1]
    if path in sys.modules or _is_module(path):
        sys.modules[path] = None  # type: ignore[assignment]
    owners = [kind for kind in holder.__mro__ if name in vars(kind)] if isinstance(holder, type) else [holder]
    if path not in sys.modules or name in vars(holder):
        delattr(owners[0], name)


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def refuse(path: str) -> None:
    """Let graphmem alone not find the name, nor what is below it."""
    from graphmem import torch_names

    find = torch_names.find
    hidden = path

    def refusing(path: str) -> Any:
        return torch_names.GONE if f"{path}.".startswith(f"{hidden}.") else find(path)

    torch_names.find = refusing


def _elsewhere(work: Callable[[], dict[str, Answer]]) -> dict[str, Any] | None:
    """What ``work`` gives in a process of its own, as JSON has it; None where it raises, or ends otherwise."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            found = {name: vars(answer) for name, answer in work().items()}
            with os.fdopen(writing, "w") as stream:
                json.dump(found, stream)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 and text else None


# --- all of them ------------------------------------------------------------------------------------------------------


def declared() -> list[str]:
    """The names of the manifest that this PyTorch has."""
    from graphmem.torch_names import GONE, find

    paths = sorted({entry["path"] for entry in json.loads(MANIFEST.read_text(encoding="utf-8"))})
    return [path for path in paths if find(path) is not GONE]


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    found = _elsewhere(lambda: dict.fromkeys(declared(), Answer()))  # it imports what names are in
    assert found is not None
    known, counted = known_answers(), Counter[str]()
    names = [path for path in found if not words or any(word in path for word in words)]
    for path in names:
        ends = outcomes(path, known)
        worst = max(ends.values(), key=lambda end: (*ANSWERED, REFUSED, BROKEN).index(end.partition(":")[0]))
        counted[worst.partition(":")[0]] += 1
        print(f"{path}: {worst if len(set(ends.values())) == 1 else ends}", flush=True)
    answered = sum(counted[end] for end in ANSWERED)
    print(f"{answered} of {len(names)} answered ({answered / max(len(names), 1):.1%}): {dict(counted)}")


if __name__ == "__main__":
    main(sys.argv[1:])
