"""Settings of PyTorch's allocator that a program makes itself, in its environment.

The allocator reads ``PYTORCH_CUDA_ALLOC_CONF`` while CUDA is initialised, at the latest for the first tensor on the
card: settings made before that count, after ``import torch`` too, and later no more (seen on the stub driver,
2.13).
"""

from __future__ import annotations

import os

from graphmem.base import versions
from graphmem.capture.record.recorder import Recorder


class ProgramSettings:
    """Compares the environment of the first tensor on the card with that of the beginning.

    ``are_followed``: nobody gave the capture other settings to look at. ``differ``: the program has made its own.
    """

    def __init__(self, recorder: Recorder, torch_version: tuple[int, int], *, are_followed: bool) -> None:
        self._recorder = recorder
        self._version = torch_version
        self._are_followed = are_followed
        self._before = versions.allocator_settings(os.environ, torch_version)
        self.differ = False
        recorder.storages.on_first = self.read

    def read(self) -> None:
        """The first tensor is about to be on the card."""
        text = versions.allocator_settings(os.environ, self._version)
        if text == self._before:
            return
        self.differ = True
        if self._are_followed:
            self._recorder.builder.allocator_settings(text, self._recorder.storages.operator)
            self._recorder.note_once(f"PYTORCH_CUDA_ALLOC_CONF={text}, as the program sets it")
        else:
            self._recorder.note_once(
                f"the program's own PYTORCH_CUDA_ALLOC_CONF={text} is not followed: others are given"
            )
