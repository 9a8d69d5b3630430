"""Context parallelism: a sequence shared among processes, as Accelerate and ``Trainer`` run PyTorch's own.

``torch.distributed.tensor.experimental.context_parallel`` cuts the tensors of a batch, and has attention fetch the keys
and values of the others; Accelerate's hooks take masks away from attention (``_attach_context_parallel_hooks``,
accelerate/big_modeling.py of 1.15). The tensors of the batch are put back after each backward pass, as they are by
default in PyTorch: the loop has one batch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from graphmem.capture.distributed.strategy import Strategy
from graphmem.errors import CaptureError, first_line
from graphmem.torch_names import private

_LOST = "sharded models and process groups cannot be followed"

#: Tensors of a batch that have a sequence, in their second dimension (``Trainer._prepare_context_parallel_inputs``).
_CUT = ("input_ids", "labels", "shift_labels", "position_ids")


class ContextParallel(Strategy):
    """``--cp``: every process that FSDP2 shards parameters over has a part of each sequence."""

    def inputs(self, inputs: object) -> dict[str, Any]:
        """The batch with positions and shifted labels. Raises :class:`CaptureError` for one that cannot be cut."""
        assert self.step.cp is not None
        processes, parts = self.step.cp, self.step.tp or 1 if self.step.sp else 1  # parts: between layers
        if not isinstance(inputs, dict) or not {"input_ids", "labels"} <= set(inputs) or "attention_mask" in inputs:
            raise CaptureError(
                "--cp is of models of transformers that make their loss of input_ids and labels, with no "
                "attention_mask; write a program for others (graphmem run)"
            )
        rows, length = inputs["input_ids"].shape
        if length % (2 * processes):
            raise CaptureError(
                f"the sequence of {length} cannot be cut into 2 parts for each of {processes} processes, as context "
                "parallelism cuts it for causal attention; give another --seq-len"
            )
        if length // processes % parts:
            raise CaptureError(
                f"the sequence of {length} cannot be cut into {processes} x {parts} equal parts; give another --seq-len"
            )
        labels = nn.functional.pad(inputs["labels"], (0, 1), value=-100)
        positions = torch.arange(length).repeat(rows, 1)
        return {**inputs, "shift_labels": labels[:, 1:].contiguous(), "position_ids": positions}

    def prepare(self, model: nn.Module) -> None:
        """Have the model's attention be causal without a mask. Raises :class:`CaptureError` for one that cannot be."""
        try:
            from accelerate.big_modeling import _attach_context_parallel_hooks

            set_rotate_method = private("torch.distributed.tensor.experimental._attention.set_rotate_method", _LOST)
        except ImportError as error:
            raise CaptureError(
                "--cp runs Accelerate's context parallelism, with PyTorch 2.7 or newer: pip install accelerate "
                f"({error})"
            ) from None
        chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if chosen != "sdpa":
            raise CaptureError(f"context parallelism is of attention by sdpa, and {type(model).__name__} uses {chosen}")
        set_rotate_method("allgather")  # Accelerate's default
        try:
            _attach_context_parallel_hooks(model)
        except ValueError as error:
            raise CaptureError(f"--cp: {first_line(error)}") from None

    def micro_batch(self, model: nn.Module, inputs: Any, is_last: bool) -> contextlib.AbstractContextManager[object]:
        from torch.distributed.tensor.experimental import context_parallel

        buffers = [inputs[name] for name in _CUT]
        made: contextlib.AbstractContextManager[object] = context_parallel(
            self.mesh["cp"], buffers=buffers, buffer_seq_dims=[1] * len(buffers)
        )
        return made
