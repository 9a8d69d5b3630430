"""One rank of several (:mod:`tests.recorded.cases.sharded`), run as :mod:`tests.recorded.whole` says.

On the CUDA build the environment is ``torchrun``'s, the process groups are without others, and events are ready at
once: what is recorded is what PyTorch and the framework take from the allocator, without what NCCL takes beside it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests import places
from tests.recorded.cases.sharded import CASES, Case
from tests.recorded.whole import CaseProgram, WholePrograms, captured

if TYPE_CHECKING:
    from graphmem.run import Run


class ShardedProgram(CaseProgram):
    """A case, as one rank of several."""

    def run(self) -> Any:
        from tests.recorded.scripts import without_others

        os.environ.update(_launched(self.case))
        without_others(self.case.backend)
        _route_evenly()
        _hold_rows_everywhere()
        if "deepspeed" in self.needs:
            _find_kernels()
            _agree_on_batches()
        with _agreeing_on_shapes():
            return self.case.program()

    def captured(self, torch_version: tuple[int, int], library: str | None) -> Run:
        with _environment(_launched(self.case)), _agreeing_on_shapes():
            return captured(self.case.program, self.name, torch_version, library)


def _launched(case: Case) -> dict[str, str]:
    """What ``torchrun`` says, every process on a node of its own card's number 0."""
    size = str(case.world_size)
    return {
        "RANK": str(case.rank), "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        # DeepSpeed: its own kernels are compiled for those that ask for them, where a CUDA toolkit is named.
        "DS_BUILD_OPS": "0", "CUDA_HOME": os.environ.get("CUDA_HOME", "/nonexistent"),
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


@contextlib.contextmanager
def _agreeing_on_shapes() -> Iterator[None]:
    """The stages of a pipeline vote whether all of them know their shapes, and receive the outcome; a group without
    others sends none. It is 1 where all know them (``PipelineStage._warmup_backward_result``), as in these cases."""
    from torch.distributed.pipelining import PipelineStage

    result = getattr(PipelineStage, "_warmup_backward_result", None)

    def passed(self: Any, received_result: Any = None) -> _Passed:
        received = received_result.tensor if isinstance(received_result, _Passed) else received_result
        return _Passed(result(self, received))  # type: ignore[misc]

    if result is None:
        yield
        return
    PipelineStage._warmup_backward_result = passed
    try:
        yield
    finally:
        PipelineStage._warmup_backward_result = result


def _route_evenly() -> None:
    """A group without others tells no process how many tokens it gets, and kernels that compute nothing route none:
    routers are made to choose evenly, as torchtitan's ``debug_force_load_balance`` makes them, everywhere."""
    try:
        from transformers.distributed import expert_parallel as module
    except ImportError:
        return
    exchange, dispatch, rows = module.all_to_all_single, module.AllToAllEP._dispatch_tokens, []

    def dispatched(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        rows.append(top_k_index.numel() // self.tp_mesh.size())
        return dispatch(self, hidden_states, top_k_index, top_k_weights)

    def exchanged(received: Any, sent: Any, group: Any) -> Any:
        import torch

        work = exchange(received, sent, group=group)
        each, more = divmod(rows.pop(), sent.numel())
        assert not more
        for counts in (sent, received):
            counts.copy_(torch.full(tuple(sent.shape), each))
        return work

    module.AllToAllEP._dispatch_tokens, module.all_to_all_single = dispatched, exchanged


def _hold_rows_everywhere() -> None:
    """``SyncBatchNorm`` leaves out processes that had no rows, by counts that a group without others does not send."""
    import torch
    from torch.nn.modules import _functions

    name = "all_gather_single" if hasattr(_functions.dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(_functions.dist, name)

    def gathered(output: Any, given: Any, *args: Any, **options: Any) -> Any:
        work = gather(output, given, *args, **options)
        output.copy_(torch.ones(output.shape, dtype=output.dtype))
        return work

    _functions.dist = SimpleNamespace(**{**vars(_functions.dist), name: gathered})


def _find_kernels() -> None:
    """DeepSpeed's Adam of the host need not be compiled: it updates in place, and nothing of it is on the card. The one
    of the card is DeepSpeed's own, built before (its ``FusedAdamBuilder().load()``) where ``TORCH_EXTENSIONS_DIR``
    says."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
    from torch.utils.cpp_extension import _import_module_from_library

    def done(*_: Any) -> None:
        pass

    on_host = SimpleNamespace(**dict.fromkeys(("create_adam", "destroy_adam", "adam_update"), done))
    CPUAdamBuilder.load = lambda self, verbose=False: on_host
    folder = os.path.join(os.environ.get("TORCH_EXTENSIONS_DIR", ""), "fused_adam")
    if os.path.exists(os.path.join(folder, "fused_adam.so")):
        built = _import_module_from_library("fused_adam", folder, True)
        FusedAdamBuilder.load = lambda self, verbose=False: built


def _agree_on_batches() -> None:
    """The processes that share layers count how many of them have the same batch (``DeepSpeedEngine``,
    ``check_dataloader_inputs_same_across_ranks``), and a group without others counts one."""
    from deepspeed.runtime import engine

    reduce = engine.dist.all_reduce

    def counted(tensor: Any, *args: Any, group: Any = None, **options: Any) -> Any:
        work = reduce(tensor, *args, group=group, **options)
        return tensor.mul_(group.size()) if tensor.dim() == 0 and group is not None else work

    engine.dist.all_reduce = counted


@dataclass(frozen=True)
class _Passed:
    """The outcome of a vote that passed."""

    tensor: Any

    def item(self) -> int:
        return 1


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


PROGRAMS = {name: ShardedProgram(case) for name, case in CASES.items()}
KIND = WholePrograms("sharded", places.PYTORCH / "sharded", lambda: PROGRAMS)
