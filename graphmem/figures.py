"""Figures that are not known exactly, and what they depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes that are not known exactly, with the least and the most that their source allows."""

    name: str
    bytes: int
    least_bytes: int
    most_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Loads:
    """What a run makes a process load. ``communicators``: the ranks of each NCCL communicator; ``cuda``: the version of
    CUDA, None for one of today."""

    cudnn: bool = False
    communicators: tuple[int, ...] = ()
    eager: bool = False
    cuda: tuple[int, int] | None = None
