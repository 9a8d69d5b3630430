"""Where a newer PyTorch than the recorded one is known to do otherwise: its tests compare with the nearest recordings
(:mod:`tests.places`), and what it does on purpose is listed here until it is recorded itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests import places

#: By version: kind -> case -> what changed, with the pull request. A case that does not differ fails its test.
EXPECTED: dict[places.Version, dict[str, dict[str, str]]] = {}


def expected(kind: str, installed: places.Version | None = None) -> dict[str, str]:
    """Cases of a kind (``functions``, ``loops``, ``steps``) in which the ``installed`` PyTorch, by default the one that
    is, differs from the recordings that it is compared with -> why."""
    running = installed or places.installed_torch()
    if running is None:
        return {}
    recorded = places.nearest(running, places.WHOLE)
    found: dict[str, str] = {}
    for version in sorted(EXPECTED):
        if recorded < version <= running:
            found |= EXPECTED[version].get(kind, {})
    return found


def marks(kind: str, case: str, quick: bool) -> list[Any]:
    """The marks of a test of this case: slow unless it is quick, and failing where a difference is expected."""
    why = expected(kind).get(case)
    return [*([] if quick else [pytest.mark.slow]), *([pytest.mark.xfail(reason=why, strict=True)] if why else [])]
