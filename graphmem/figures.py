"""Figures that are not known exactly."""

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
