"""``record_run.py CASE.json OUT.json``: start SGLang's scheduler with a case's options and dummy weights on the stub
driver, and write down what it and PyTorch's allocator say of memory.

The environment is sglang 0.5.23 with torch 2.14.1 for CUDA 13. Kernels that FlashInfer compiles need a toolkit whose
libraries link: ``LIBRARY_PATH`` names a folder with ``libcudart.so`` and ``libcuda.so``, ``CPATH`` one with headers.
What is not real: the CUDA context, memory of modules, the driver's part of CUDA graphs; of several ranks the others,
NCCL's memory, and the engine's own sums (``--disable-custom-all-reduce``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

CASE: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
if "--tp-size" in CASE["options"]:
    os.environ["RANKS"] = CASE["options"][CASE["options"].index("--tp-size") + 1]
    import one_of_ranks  # noqa: F401  before the engine

import sglang  # noqa: E402
import torch  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.model_executor.model_runner import ModelRunner  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank  # noqa: E402
from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: E402

if "RANKS" in os.environ:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import pynccl_wrapper, shm_broadcast

    class Silent(pynccl_wrapper.NCCLLibrary):
        """NCCL's calls, which move nothing and allocate nothing here."""

        def __init__(self, so_file: str | None = None) -> None:
            self._funcs = {one.name: lambda *arguments: 0 for one in self.exported_functions}

    pynccl_wrapper.NCCLLibrary = Silent
    sys.modules["sglang.srt.distributed.device_communicators.pynccl"].NCCLLibrary = Silent
    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * int(os.environ["RANKS"])
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *arguments, **options: None)

_COUNTERS = ("allocated_bytes.all.current", "reserved_bytes.all.current", "requested_bytes.all.current")
if CASE.get("version", sglang.__version__) != sglang.__version__:
    raise SystemExit(f"SGLang {CASE['version']} is asked for, and {sglang.__version__} is installed")
stages: dict[str, dict[str, int]] = {}
runners: list[Any] = []


def _marked(name: str) -> None:
    """Counters of the allocator, and what is free, before and after a method of the runner."""
    method = getattr(ModelRunner, name)

    def marking(self: Any, *arguments: Any, **options: Any) -> Any:
        runners.append(self)
        _note(f"before {name}")
        result = method(self, *arguments, **options)
        _note(f"after {name}")
        return result

    setattr(ModelRunner, name, marking)


def _note(stage: str) -> None:
    counters = torch.cuda.memory_stats()
    stages[stage] = {name.split("_")[0]: counters.get(name, 0) for name in _COUNTERS}
    stages[stage]["free"] = torch.cuda.mem_get_info()[0]


for _name in ("load_model", "alloc_memory_pool", "init_attention_backends", "init_cuda_graphs"):
    _marked(_name)
folder = Path(sys.argv[1]).with_name("model")
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text(json.dumps(CASE["model_config"]))
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
options = ["--model-path", str(folder), "--load-format", "dummy", "--skip-tokenizer-init", *CASE["options"]]
given = ServerArgs.from_cli_args(parser.parse_args(options))
given.resolve_once()
publish(
    given, role="scheduler",
    ranks=SpawnRanks(world_rank=spawn_world_rank(given, tp_rank=0, pp_rank=0), dp_rank=None, gpu_id=0),
)  # fmt: skip
Scheduler(given, PortArgs.init_new(given))
CASE |= {
    "total_memory": torch.cuda.mem_get_info()[1],
    "stages": stages,
    "tokens": runners[0].max_total_num_tokens,
    "requests": runners[0].max_running_requests,
    "mem_fraction_static": runners[0].mem_fraction_static,
}
Path(sys.argv[2]).write_text(json.dumps(CASE))
os._exit(0)
