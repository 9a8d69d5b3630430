"""Expert parallelism of transformers: how many tokens go to which process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from graphmem.capture.patches import Patches
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.torch_internals import unset_fake_temporarily

_EVENLY = "tokens were taken to be routed evenly over the experts, those of the other processes too"
_Function = Callable[..., object]


def patch_experts(patches: Patches, book: Recorder) -> None:
    """Where the choice of a router is unknown, its choice is even: every expert gets as many tokens, and the first ones
    the remainder (torchtitan's ``debug_force_load_balance`` makes it so).

    ``AllToAllEP`` (transformers/distributed/expert_parallel.py of 5.23) counts them, exchanges the counts, and reads
    both, as sizes of its messages.
    """
    try:
        module = importlib.import_module("transformers.distributed.expert_parallel")
    except ImportError:
        return
    if not hasattr(module, "AllToAllEP") or not hasattr(module, "all_to_all_single"):
        return
    rows: list[int] = []  # pairs of a token and an expert, of the layer that runs

    def dispatch(
        original: _Function, self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, weights: torch.Tensor
    ) -> object:
        shared = -(-top_k_index.shape[0] // self.tp_mesh.size())  # what chunks of a batch hold that is shared
        first = min(shared * self.tp_mesh.get_local_rank(), top_k_index.shape[0])
        rows.append(min(shared, top_k_index.shape[0] - first) * top_k_index.shape[-1])
        try:
            return original(self, hidden_states, top_k_index, weights)
        finally:
            rows.pop()

    def counted(
        original: _Function, received: torch.Tensor, sent: torch.Tensor, group: Any = None, **others: object
    ) -> object:
        is_known = not rows or book.values.of(sent) is not None
        result = original(received, sent, group=group, **others)
        if not is_known:
            book.note_once(_EVENLY)
            counts = _evenly(rows[-1], tuple(sent.shape))
            book.values.overwrite(sent, counts)
            book.values.overwrite(received, _of_others(counts, group.rank()))
        return result

    patches.around(module.AllToAllEP, {"_dispatch_tokens": dispatch})
    patches.around(module, {"all_to_all_single": counted})


def _evenly(rows: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The number of ``rows`` that each expert gets, by process and expert there."""
    with unset_fake_temporarily():
        number = shape[0] * shape[1]
        each, more = divmod(rows, number)
        return torch.full((number,), each).add_(torch.arange(number) < more).reshape(shape)


def _of_others(counts: torch.Tensor, rank: int) -> torch.Tensor:
    """The counts from each of the others, who route as many tokens in the same way."""
    with unset_fake_temporarily():
        return counts[rank].expand_as(counts).contiguous()
