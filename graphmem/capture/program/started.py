"""Processes that a program starts to train: one of them is followed, in place of them all and in this process.

``torch.multiprocessing.spawn`` and ``start_processes`` (torch/multiprocessing/spawn.py) call their function here, as
the process of this rank. A process that is forked in another way cannot be followed: where it uses the card it ends,
and the analysis with it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from weakref import WeakSet

import torch.multiprocessing

from graphmem.capture.patches import Patches
from graphmem.capture.record.storages import Storages
from graphmem.capture.threads import Threads
from graphmem.capture.torch_internals import disable_current_modes
from graphmem.errors import CaptureError
from graphmem.torch_names import private

_FORKED = (
    "a process that the program forks uses the card, and an analysis follows one process; start processes by "
    "torch.multiprocessing.spawn(function, nprocs=...), or the program by graphmem run torchrun"
)


@contextlib.contextmanager
def started_processes(storages: Storages) -> Iterator[None]:
    """Until the end, of the processes that the program starts one runs here.

    Raises :class:`CaptureError` at the end where a forked one used the card.
    """
    spawning = sys.modules["torch.multiprocessing.spawn"]
    with Patches() as patches:
        forked = _Forked(storages, patches.threads)
        for owner in (spawning, torch.multiprocessing):
            patches.set(owner, "start_processes", _call_one)
        patches.around(sys.modules["torch.multiprocessing.reductions"], {"rebuild_tensor": _rebuilt})
        yield
    if forked.used_card:
        raise CaptureError(_FORKED)


def _call_one(
    fn: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: object, **__: object
) -> _Ended | None:
    fn(min(int(os.environ.get("LOCAL_RANK") or 0), nprocs - 1), *args)
    return None if join else _Ended()


def _rebuilt(original: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    """A host tensor that another process has sent is a real one, with its values."""
    with disable_current_modes():
        return original(*args)


class _Ended:
    """The context of processes that have all ended."""

    processes: tuple[object, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True, as all have ended."""
        return True

    def pids(self) -> list[int]:
        """None is left."""
        return []


class _Forked:
    """In forked processes, the memory of a card that refuses every request; here, whether one was made."""

    def __init__(self, storages: Storages, threads: Threads) -> None:
        self._storages, self._threads, self._shared = storages, threads, mmap.mmap(-1, 1)
        _watched.add(self)

    @property
    def used_card(self) -> bool:
        """True if a forked process used the card."""
        return self._shared[0] != 0

    def begin(self) -> None:
        """This process was forked: it computes on the host as without a capture, and finds no card to use."""
        self._storages.memory = self  # type: ignore[assignment]
        Patches.undo_all(self._threads)
        self._outside = disable_current_modes()  # held, or it would end here
        self._outside.__enter__()
        if private("torch.cuda._lazy_init", "a forked process that uses the card is not noticed", None) is not None:
            vars(torch.cuda)["_lazy_init"] = self.refusal

    def refusal(self, *_: object) -> NoReturn:
        """The card is used."""
        self._shared[0] = 1
        sys.stderr.write(f"graphmem: {_FORKED}\n")
        sys.stderr.flush()
        os._exit(1)


_watched: WeakSet[_Forked] = WeakSet()


def _begin_forked() -> None:
    for one in list(_watched):
        one.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_forked)
