"""Whole programs as one of several processes runs them, started as ``torchrun`` starts it.

A program is a function that takes nothing: the same code runs on the CUDA build and in a capture. On the CUDA build the
others are not there either: process groups are PyTorch's ``fake`` ones, or, where the reducer of
DistributedDataParallel asks for results, those of :mod:`tests.recorded.cases.parallel.group` (``alone``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Case:
    """One program as rank ``rank`` of ``world_size``. ``needs``: the packages that it imports beside torch;
    ``compiles``: it calls ``torch.compile``."""

    name: str
    group: str
    program: Callable[[], Any]
    needs: tuple[str, ...] = ("transformers",)
    world_size: int = 8
    rank: int = 0
    backend: str = "fake"
    compiles: bool = False


CASES: dict[str, Case] = {}


def add(name: str, function: Callable[..., Any], *needs: str, world: int = 8, rank: int = 0, backend: str = "fake",
        **options: Any) -> None:  # fmt: skip
    """Register ``function(**options)`` under a name, in the group of the function's file."""
    assert name not in CASES, name
    group = function.__module__.rpartition(".")[2]
    compiles = bool(options.get("compiles"))
    CASES[name] = Case(name, group, partial(function, **options), needs, world, rank, backend, compiles)
