"""The strategies that share a step out among processes, composed in one order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from graphmem.capture.device.pretend_device import cards
from graphmem.capture.values.tensors import DTYPES
from graphmem.errors import CaptureError
from graphmem.training import Inference, Training

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from graphmem.capture.distributed.strategy import Strategy
    from graphmem.capture.session.session import Session


def _in_order(step: Training | Inference, mesh: DeviceMesh | None) -> Iterator[Strategy]:
    """Those that the options of ``step`` name, in torchtitan's order (``parallelize_llama``): layers are shared out,
    then sequences, then parameters are sharded, then replicated. A strategy that is not named is not imported."""
    in_mesh = isinstance(step, Training) and step.tp_in_mesh
    if (step.tp or step.ep) and not in_mesh:
        from graphmem.capture.distributed.tensor_parallel import TensorParallel

        yield TensorParallel(step, mesh)
    if isinstance(step, Inference):
        return
    if in_mesh:
        from graphmem.capture.distributed.shared_layers import SharedLayers

        yield SharedLayers(step, mesh)
    if step.cp is not None:
        from graphmem.capture.distributed.context_parallel import ContextParallel

        yield ContextParallel(step, mesh)
    if step.fsdp is not None:
        from graphmem.capture.distributed.fully_sharded import FullySharded

        yield FullySharded(step, mesh)
    if step.ddp is not None:
        from graphmem.capture.distributed.data_parallel import Replicated

        yield Replicated(step, mesh)


class Strategies(list["Strategy"]):
    """The strategies of ``step`` in their order, and the ``mesh`` of its processes, None where it has none.

    A pipeline has them applied to each of its stages (:mod:`.pipeline`); DeepSpeed does all of it itself
    (:mod:`.engine`).
    """

    def __init__(self, step: Training | Inference) -> None:
        self.step = step
        self.mesh: Any = None
        if isinstance(step, Training) and step.mesh:
            from graphmem.capture.distributed.strategy import process_mesh

            self.mesh = process_mesh(step)
        has_engine = isinstance(step, Training) and step.zero is not None
        super().__init__(() if has_engine else _in_order(step, self.mesh))

    @property
    def training(self) -> Training:
        """The options of a training step."""
        assert isinstance(self.step, Training)
        return self.step

    @property
    def wait_for_batch(self) -> bool:
        """True if the model gets to the card after the batch."""
        by_loop = isinstance(self.step, Training) and (self.step.pp is not None or self.step.zero is not None)
        return by_loop or any(one.moves_late for one in self)

    def placed(self, part: nn.Module) -> nn.Module:
        """The model, or a stage of it, in its precision, shared out and on the card."""
        if self.step.dtype != "fp32":
            part = part.to(DTYPES[self.step.dtype])
        for one in self:
            part = one.share(part)
        if not any(one.moves for one in self):
            part = part.to(cards().own)
        for one in self:
            one.materialize(part)
        return part

    def place(self, session: Session, model: nn.Module) -> nn.Module:
        """The whole model, shared out and on the card, and known by name; a quantised one is there already."""
        if not is_quantized(model):
            for one in self:
                one.prepare(model)
            model = self.placed(model)
        session.label_model(model)
        return model


def is_quantized(model: nn.Module) -> bool:
    """True if transformers has quantised the model while it loaded, onto the card and in its types."""
    return bool(getattr(model, "is_quantized", False))


def check_precision(model: nn.Module, training: Training) -> None:
    """Raises :class:`CaptureError` for quantised weights that are to be shared out."""
    for option, done in (("pp", "split"), ("fsdp", "sharded"), ("zero", "trained")):
        if getattr(training, option) is not None and is_quantized(model):
            raise CaptureError(f"quantised weights are not {done} by --{option}; leave it out, or write the program")
