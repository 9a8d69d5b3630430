"""Stand-ins for cards and other machines, which launchers find."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from graphmem.base.imports import watched_imports
from graphmem.following.children import told

#: The module by which ``torchrun``, ``accelerate launch`` and others start their processes.
LAUNCHING = "torch.distributed.launcher.api"


def import_launching(module: Any, run: Callable[[], None]) -> None:
    """``launch_agent`` (torch/distributed/launcher/api.py) starts the process that is analysed, with the environment
    that its agent would give it, and waits for nobody else."""
    run()
    module.launch_agent = _launch_one


def import_counting(module: Any, run: Callable[[], None]) -> None:
    """Ray (2.60) finds the cards that are told; without any it would wait for them for ever."""
    run()

    def number() -> int:
        from graphmem.training.processes import visible_cards

        return visible_cards(os.environ)

    module.NvidiaGPUAcceleratorManager.get_current_node_num_accelerators = staticmethod(number)


#: What is replaced in modules that start processes, when they are imported.
IMPORTS = {LAUNCHING: import_launching, "ray._private.accelerators.nvidia_gpu": import_counting}


@contextlib.contextmanager
def replaced_agent() -> Iterator[None]:
    """Until the end, programs of this process that start others by ``torchrun``'s agent start one."""
    with watched_imports(IMPORTS):
        yield


def _launch_one(config: Any, entrypoint: Any, arguments: Sequence[Any], **_: object) -> dict[int, Any]:
    from graphmem.training.processes import Processes

    each = config.nproc_per_node
    world = each * config.max_nodes
    rank = min(told()["rank"], world - 1)
    values = Processes(world, rank, each).environment() | {
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": str(config.run_id or "none"), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    if callable(entrypoint):
        os.environ.update(values)
        return {rank: entrypoint(*arguments)}
    code = subprocess.call([entrypoint, *map(str, arguments)], env={**os.environ, **values})
    if code:
        raise SystemExit(code)
    return {rank: None}


def show_cards(torch: Any, count: int, touched: Callable[[], Any]) -> None:
    """PyTorch that was just imported finds ``count`` cards, and calls ``touched`` where it would begin to use one."""

    def start(*_: object, **__: object) -> Any:
        return touched()

    def number(*_: object) -> int:
        return count

    def is_there(*_: object) -> bool:
        return True

    def first(*_: object) -> int:
        return 0

    def properties(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(**told()["card"])

    class Communicator:
        """NCCL's process group, which finds cards by itself."""

        Options = staticmethod(start)
        __init__ = start

    distributed = getattr(torch.distributed, "distributed_c10d", None)
    if distributed is not None:
        distributed.ProcessGroupNCCL = Communicator
    cuda: ModuleType = torch.cuda
    replaced = {
        "device_count": number, "is_available": is_there, "current_device": first, "get_device_properties": properties,
        "_lazy_init": start,
    }  # fmt: skip
    for name, value in replaced.items():
        setattr(cuda, name, value)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        accelerator.device_count, accelerator.is_available = number, is_there
        accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
