"""MXNet on one GPU: its pooled storage, by the environment variables that shape it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace

from graphmem.allocators.mxnet_pooled import MXNetPooledStorage, PoolConfig
from graphmem.errors import UsageError
from graphmem.runtimes.base import Runs, Runtime, Setting, Taken, within_card
from graphmem.trace import Trace

#: Environment variable (``env_var_name`` in src/storage/storage.cc) -> field of :class:`PoolConfig`.
VARIABLES = {f"MXNET_GPU_{field.name.upper()}": field.name for field in fields(PoolConfig)}

CAPTURED_ASSUMED = (
    "operators, their order, temporaries and library workspaces are PyTorch's, replayed in MXNet's pooled storage; "
    "MXNet's own memory planning of graphs is not modelled"
)


def read_options(text: str, environment: Mapping[str, str]) -> PoolConfig:
    """The pool of ``text``, such as ``MXNET_GPU_MEM_POOL_TYPE=Round``, and of the environment, where ``text`` wins.

    Raises :class:`~graphmem.errors.UsageError` listing what is accepted.
    """
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*[:=]\s*(.+)", entry)
        if match is None or match.group(1) not in VARIABLES:
            raise UsageError(f"cannot read {entry!r} as NAME=VALUE of MXNet; accepted: {', '.join(VARIABLES)}")
        given[match.group(1)] = match.group(2)
    config: dict[str, str | int] = {}
    for name, value in given.items():
        field = VARIABLES[name]
        if field != "mem_pool_type" and not re.fullmatch(r"[0-9]{1,15}", value):
            raise UsageError(f"{name} is {value!r}; accepted: a whole number")
        config[field] = value if field == "mem_pool_type" else int(value)
    return replace(PoolConfig(), **config)  # type: ignore[arg-type]


def describe(config: PoolConfig) -> str:
    """The pool in words."""
    changed = [
        f"{name}={getattr(config, field)}"
        for name, field in VARIABLES.items()
        if getattr(config, field) != getattr(PoolConfig(), field)
    ]
    return f"MXNet pooled storage ({', '.join(changed) or 'default options'})"


class MXNet(Runtime[PoolConfig]):
    """The pool under a captured step; MXNet's own planning of graphs is not modelled."""

    name = "mxnet"
    title = "MXNet"

    def parse(self, text: str | None, setting: Setting) -> PoolConfig:
        """The pool on this machine: ``text`` and the environment. Raises :class:`~graphmem.errors.UsageError`."""
        return read_options(text or "", os.environ)

    def describe(self, options: PoolConfig, setting: Setting) -> str:
        """The pool in words."""
        return describe(options)

    def take(self, trace: Trace) -> Taken:
        """The trace as it is: MXNet is taken to run PyTorch's operators."""
        return Taken(
            trace,
            (CAPTURED_ASSUMED,),
        )

    def run(self, trace: Trace, options: PoolConfig, setting: Setting) -> Runs:
        """Replayed in a pool without end and, where that exceeds the card, in one that nobody else uses the card of."""
        card = setting.device

        def make(capacity: int | None) -> MXNetPooledStorage:
            if capacity is None:
                return MXNetPooledStorage(options)
            return MXNetPooledStorage(options, capacity_bytes=card.capacity_bytes, other_bytes=card.taken_bytes)

        return within_card(trace, make, card)


RUNTIME = MXNet()
