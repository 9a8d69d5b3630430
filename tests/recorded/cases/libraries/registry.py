"""Whole programs in the style of a library's own tutorial, recorded from their first line to their last.

A program is a function: it makes its data, its model and its trainer, trains, evaluates, and returns what a script
would still hold at its end. The same code runs on the CUDA build and in a capture, and nothing in it knows which.
There is no hub: models come from configurations, tokenizers from a vocabulary in memory, data from lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One program; ``needs``: the packages that it imports beside torch. ``refused``: what the message says where a
    capture cannot follow it. ``compiles``: it uses ``torch.compile``, which cannot be recorded with values followed."""

    name: str
    group: str
    program: Callable[[], Any]
    needs: tuple[str, ...]
    refused: str = ""
    compiles: bool = False


CASES: dict[str, Case] = {}


def program(*needs: str, refused: str = "", compiles: bool = False) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a program under its name, in the group of its file."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        name, group = function.__name__, function.__module__.rpartition(".")[2]
        assert name not in CASES, name
        CASES[name] = Case(name, group, function, needs, refused, compiles)
        return function

    return register
