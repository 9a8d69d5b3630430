"""Lightning: ``Trainer(callbacks=[MemoryCallback(gpu="L4")])`` predicts the memory at the first batch, and compares it
with what the first steps take.

``training_step`` is what is analysed, with the module's first optimizer. Of several devices ``graphmem
run`` knows more.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

from graphmem.devices import device_named
from graphmem.integrations.watching import Watch, Watched, card_here, meter, optimizer_of
from graphmem.training import Training

if TYPE_CHECKING or find_spec("lightning"):
    from lightning.pytorch import Callback
else:
    from pytorch_lightning import Callback

#: ``Trainer(precision=...)`` -> autocast; others change the weights themselves.
_AMP = {"16-mixed": "fp16", "bf16-mixed": "bf16"}


class MemoryCallback(Callback):  # type: ignore[misc]
    """Predicts and compares. ``answer`` is the :class:`Watched` once there is one."""

    def __init__(self, gpu: str | None = None, say: Callable[[str], None] = print) -> None:
        self._gpu, self._say = gpu, say
        self._watch: Watch | None = None
        self._handles: tuple[Any, ...] = ()

    @property
    def answer(self) -> Watched | None:
        """What was predicted, and from the third step on what was measured."""
        return None if self._watch is None else self._watch.answer

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Called by Lightning."""
        if self._watch is not None or trainer.world_size > 1 or not trainer.optimizers:
            return
        step = Training(
            **optimizer_of(trainer.optimizers[0]),
            amp=_AMP.get(trainer.precision),
            grad_accum=trainer.accumulate_grad_batches,
            clip_grad_norm=trainer.gradient_clip_val or None,
            loop="drop",
            zero_grad_at="before_backward",  # the closure of automatic optimization
        )
        card = device_named(self._gpu) if self._gpu else card_here()
        self._watch = Watch(step, card, self._say, meter)
        self._watch.begin(_Step(pl_module), (batch,))
        before, after = self._watch.steps_of(trainer.optimizers[0])
        before.remove()  # the closure of Lightning's step runs the whole iteration
        self._handles = (after,)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Called by Lightning."""
        if self._watch is not None:
            self._watch.ends("forward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning."""
        if self._watch is not None:
            self._watch.ends("backward")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning."""
        for handle in self._handles:
            handle.remove()
        if self._watch is not None:
            self._watch.stop()


class _Step(nn.Module):  # type: ignore[misc]
    """``training_step`` as a module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        made = self.module.training_step(batch, 0)
        return made["loss"] if isinstance(made, dict) else made
