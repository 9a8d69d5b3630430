"""Marks of tests that need what only some platforms have, each with its reason."""

from __future__ import annotations

import os

import pytest

_WINDOWS = os.name != "posix"

SIGNALS = pytest.mark.skipif(_WINDOWS, reason="signals are those of POSIX: elsewhere one ends the process that gets it")
LINKS = pytest.mark.skipif(_WINDOWS, reason="symbolic links need a privilege on Windows")
SCRIPTS = pytest.mark.skipif(_WINDOWS, reason="a script is started by its first line on POSIX alone")
