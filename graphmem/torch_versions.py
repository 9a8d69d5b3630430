"""Versions of PyTorch: which is installed, which is predicted, and what that assumes."""

from __future__ import annotations

import importlib.metadata
import re

from graphmem.errors import UsageError

#: The newest version whose rules were checked against recordings, taken when no torch is installed.
NEWEST = (2, 13)
OLDEST = (2, 4)

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*(?:(?:a|b|rc|\.dev|\.post)\d*)?(?:\+[\w.]+)?")


def version_named(text: str | None) -> tuple[int, int]:
    """(major, minor) of ``2.6``, ``2.6.0`` or ``2.6.0+cu124``; None means the installed version, or the newest known.

    Versions after the newest known are taken, and :func:`version_notes` says so. Raises :class:`UsageError` for text
    that is no version, for versions before 2.4 and from 3.0 on.
    """
    if text is None:
        return installed_version() or NEWEST
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"torch version {text!r} is not a version; write it like 2.6 or 2.6.0")
    version = int(match[1]), int(match[2])
    if not OLDEST <= version < (3, 0):
        raise UsageError(f"unknown torch version {text!r}; accepted: {_words(OLDEST)} to {_words(NEWEST)}")
    return version


def installed_version() -> tuple[int, int] | None:
    """(major, minor) of the installed torch, None where there is none.

    Raises :class:`UsageError` if it is too old to run a step on fake tensors as graphmem does.
    """
    try:
        text = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    match = re.match(r"(\d+)\.(\d+)", text)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < OLDEST:
        raise UsageError(f"torch {text} is installed, and graphmem needs {_words(OLDEST)} or later; upgrade torch")
    return version


def version_notes(asked: tuple[int, int], installed: tuple[int, int]) -> list[str]:
    """What of the version asked for is followed when another one is installed, and what is known of it at all."""
    notes, newest = [], _words(NEWEST)
    if asked > NEWEST:
        notes.append(
            f"PyTorch {_words(asked)} is newer than {newest}, the newest known: the rules of {newest} are applied"
        )
    if asked != installed:
        notes.append(
            f"PyTorch {_words(asked)} is predicted with PyTorch {_words(installed)} installed: its allocator and the "
            "allocator's options, cuBLAS's workspaces, the choice of attention kernels, and the kernels and composites "
            f"known to differ; but {_words(installed)}'s Python code (optimizers, modules), gradient formulas and "
            "model library"
        )
    if asked != NEWEST:
        notes.append(
            f"cuDNN's convolution workspaces are those of PyTorch {newest}'s wheel, whatever version is predicted"
        )
    return notes


def _words(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
