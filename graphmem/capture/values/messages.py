"""Messages between the processes of one job in small whole numbers: sizes, flags, pickled objects.

One process is analysed, and what another one sends decides at times what it does: the shapes of a pipeline's
activations, the name of a run that the first process broadcasts. Such a process is run too, as far as the message, and
what it says is kept here for the others (:mod:`graphmem.answering.other_ranks`). Floats are seldom asked for, and
are large.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Message(NamedTuple):
    """The ``number``-th one from ``source`` to ``target`` (-1: to all) in a group; ranks are those of the job."""

    source: int
    target: int
    group: tuple[int, ...]
    number: int


class Unheard(BaseException):  # no program handles it
    """A process needs a message that nobody has sent yet."""

    def __init__(self, message: Message) -> None:
        super().__init__(f"a message of rank {message.source}")
        self.message = message


class Said(BaseException):
    """The message that a process was run for is sent."""


@dataclass
class Messages:
    """Those of a job: what was said, and what will never be."""

    said: dict[Message, torch.Tensor] = field(default_factory=dict)
    lost: set[Message] = field(default_factory=set)


class Post:
    """How one process, of rank ``rank``, takes part: until it has said ``wanted``, if that is given."""

    def __init__(self, rank: int, messages: Messages, wanted: Message | None = None) -> None:
        self.rank, self._messages, self._wanted = rank, messages, wanted
        self._counts: Counter[tuple[Any, ...]] = Counter()

    def next(self, source: int, target: int, group: tuple[int, ...]) -> Message:
        """The next message of its kind."""
        self._counts[source, target, group] += 1
        return Message(source, target, group, self._counts[source, target, group])

    def say(self, message: Message, value: torch.Tensor) -> None:
        """``value`` is a host tensor of the sender's. Raises :class:`Said` where that is enough."""
        self._messages.said[message] = value
        if message == self._wanted:
            raise Said

    def hear(self, message: Message, target: Any) -> torch.Tensor | None:
        """The tensor of the message; None where nobody will know it. Raises :class:`Unheard` where its sender has not
        run yet."""
        if target.is_floating_point() or target.is_complex():
            return None
        if message not in self._messages.said and message not in self._messages.lost:
            raise Unheard(message)
        return self._messages.said.get(message)
