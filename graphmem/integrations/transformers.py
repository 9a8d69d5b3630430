"""Hugging Face's Trainer: ``Trainer(..., callbacks=[MemoryCallback(gpu="L4")])`` predicts the memory at the first
batch, and compares it with what the first steps take.

A process that trains alone is followed; of DeepSpeed, FSDP and several processes ``graphmem run`` knows more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from graphmem.integrations.watching import Watch, Watched, watch
from graphmem.training import Training


class MemoryCallback(TrainerCallback):  # type: ignore[misc]
    """Predicts and compares. ``answer`` is the :class:`Watched` once there is one."""

    def __init__(self, gpu: str | None = None, say: Callable[[str], None] = print) -> None:
        self._gpu, self._say = gpu, say
        self._watch: Watch | None = None

    @property
    def answer(self) -> Watched | None:
        """What was predicted, and from the third step on what was measured."""
        return None if self._watch is None else self._watch.answer

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Called by the Trainer."""
        if args.world_size > 1:
            self._say("graphmem: several processes are not predicted here; graphmem run is for the whole program")
            return
        own = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self._watch = watch(model, own, training=training_of(args), device=self._gpu, say=self._say)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the Trainer."""
        if self._watch is not None:
            self._watch.stop()


def training_of(args: Any) -> Training:
    """The step that ``TrainingArguments`` ask for, but for the optimizer."""
    return Training(
        amp="bf16" if args.bf16 else "fp16" if args.fp16 else None,
        grad_accum=args.gradient_accumulation_steps,
        clip_grad_norm=args.max_grad_norm or None,
        loop="drop",  # compute_loss gives the loss alone back
    )
