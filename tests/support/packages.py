"""Packages that a recording was made with, and a test runs with."""

from __future__ import annotations

import importlib.metadata

import pytest


def need(package: str, version: str) -> None:
    """Skip where ``package`` is not there in this version, up to its last number."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {package}")
    if found.split(".")[:2] != version.split(".")[:2]:
        pytest.skip(f"recorded with {package} {version}, and {found} is installed")
