"""What is otherwise for a while: variables of this process's environment, and attributes of objects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def changed(values: Mapping[str, str]) -> Iterator[None]:
    """Until the end the variables have these values; afterwards those that they had, or none."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def having(owner: Any, **values: object) -> Iterator[None]:
    """Until the end these attributes of ``owner``, which it has, have these values; afterwards their own."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
