"""Every kind of recording, and which goldens it records. Nothing here needs PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.recorded import stub

if TYPE_CHECKING:
    from tests.recorded.kind import Kind


@dataclass(frozen=True)
class Listed:
    """One kind. ``where``: ``module:object``. ``goldens``: patterns of its files below ``tests/golden``.

    ``environment``: what the stub is told. ``on_stub``: the whole kind is recorded in one process on the stub; the
    others start their own processes, or need no CUDA build.
    """

    about: str
    where: str
    goldens: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    on_stub: bool = True


_LARGE = stub.REAL_CUDNN | {"FAKE_CUDA_TOTAL_MIB": "1000000"}
KINDS = {
    "functions": Listed(
        "single functions and modules, forward and backward",
        "tests.recorded.functions:KIND",
        ("pytorch/functions/*.jsonl.gz",),
        _LARGE,
    ),
    "loops": Listed("training loops", "tests.recorded.loops:KIND", ("pytorch/loops/*.jsonl.gz",)),
    "parallel": Listed(
        "streams, data parallel, sharded, CUDA graphs",
        "tests.recorded.parallel:KIND",
        ("pytorch/parallel/*.jsonl.gz",),
    ),
    "steps": Listed(
        "whole runs: models, optimizers, allocator options, compute capabilities",
        "tests.recorded.steps.kind:STEPS",
        ("pytorch/steps/*.json.gz",),
        on_stub=False,
    ),
    "compiled": Listed(
        "whole runs under torch.compile",
        "tests.recorded.steps.kind:COMPILED",
        ("pytorch/compiled/*.json.gz",),
        on_stub=False,
    ),
}


def load(name: str) -> Kind:
    """The kind of that name."""
    module, _, attribute = KINDS[name].where.partition(":")
    kind: Kind = getattr(importlib.import_module(module), attribute)
    return kind


def has_card() -> bool:
    """Whether this process has a CUDA build of PyTorch and a card, real or pretended."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()
