"""Hydra's multirun: a program that runs itself once for each of many settings. One of them is analysed at a time.

``BasicLauncher.launch`` (hydra/_internal/core_plugins/basic_launcher.py, 1.3) runs the jobs one after the other in one
process; whoever asks for the next gets it in a run of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches

_MODULE = "hydra._internal.core_plugins.basic_launcher"


@contextlib.contextmanager
def one_job(number: int) -> Iterator[list[str]]:
    """Until the end a multirun runs its job ``number`` alone. The yielded list is filled with the settings of all."""
    jobs: list[str] = []

    def follow(patches: Patches, module: ModuleType) -> None:
        launch = module.BasicLauncher.launch

        def launch_one(self: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
            jobs.extend(" ".join(map(str, one)) for one in job_overrides)
            chosen = min(number, len(job_overrides) - 1)
            done = launch(self, [job_overrides[chosen]], initial_job_idx + chosen)
            return list(done) * len(job_overrides)

        patches.set(module.BasicLauncher, "launch", launch_one)

    with patched_imports({_MODULE: follow}):
        yield jobs
