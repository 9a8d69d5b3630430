"""The run of one process of a job with the messages that other processes of it send
(:mod:`graphmem.capture.values.messages`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from graphmem.errors import GraphmemError
from graphmem.run import Run
from graphmem.sources import TorchModel
from graphmem.training import Inference, Training

if TYPE_CHECKING:
    from graphmem.capture.values.messages import Message, Messages, Post

_Attempt: TypeAlias = "Callable[[TorchModel, Training | Inference, Post | None], Run]"


def run_with_messages(run: _Attempt, step: Training | Inference, load: Callable[[], TorchModel]) -> Run:
    """The run of ``step``. The processes whose messages decide its course are run until they send them; where they wait
    for each other, or fail, the messages are unknown. ``load`` gives the model for every run."""
    from graphmem.capture.values.messages import Messages, Post, Unheard

    processes = step.processes if isinstance(step, Training) else None
    is_agreed = isinstance(step, Training) and step.pp is not None  # what stages made here say is known
    if processes is None or processes.world_size == 1 or is_agreed:
        return run(load(), step, None)
    assert isinstance(step, Training)
    messages = Messages()
    while True:
        try:
            return run(load(), step, Post(processes.rank, messages))
        except Unheard as missing:
            _ask(missing.message, run, step, load, messages)


def _ask(
    message: Message, run: _Attempt, step: Training, load: Callable[[], TorchModel], messages: Messages,
    asking: tuple[Message, ...] = (),
) -> None:  # fmt: skip
    """Get the message by a run of its sender, or record it as lost."""
    from graphmem.capture.values.messages import Post, Said, Unheard

    while message not in messages.said and message not in messages.lost:
        try:
            run(load(), replace(step, rank=message.source), Post(message.source, messages, message))
            messages.lost.add(message)  # it ended without
        except Said:
            return
        except Unheard as missing:
            if missing.message in (message, *asking):
                messages.lost.add(missing.message)
            else:
                _ask(missing.message, run, step, load, messages, (*asking, message))
        except GraphmemError:
            messages.lost.add(message)
