"""Hydra's multirun: a program that runs itself once for each of many settings. One of them is analysed at a time.

The launcher that ``Plugins.instantiate_launcher`` gives (hydra/core/plugins.py, 1.3) would run the jobs one after the
other, or send them elsewhere; each is a run of its own here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches

_MODULE = "hydra.core.plugins"


@contextlib.contextmanager
def one_job(number: int) -> Iterator[list[str]]:
    """Until the end a multirun runs its job ``number`` alone. The yielded list is filled with the settings of all."""
    jobs: list[str] = []

    def follow(patches: Patches, module: ModuleType) -> None:
        make = module.Plugins.instantiate_launcher

        def launcher(*args: object, **kwargs: object) -> Any:
            made = make(*args, **kwargs)
            launch = made.launch

            def launch_one(job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
                jobs.extend(" ".join(map(str, one)) for one in job_overrides)
                chosen = min(number, len(job_overrides) - 1)
                return list(launch([job_overrides[chosen]], initial_job_idx + chosen)) * len(job_overrides)

            made.launch = launch_one
            return made

        patches.set(module.Plugins, "instantiate_launcher", launcher)

    with patched_imports({_MODULE: follow}):
        yield jobs
