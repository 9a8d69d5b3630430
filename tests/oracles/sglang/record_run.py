"""``record_run.py CASE.json OUT.json``: start SGLang's scheduler with a case's options and dummy weights on the stub
driver, and write down what it and PyTorch's allocator say of memory.

The environment is sglang 0.5.23 with torch 2.14.1 for CUDA 13. Kernels that FlashInfer compiles need a toolkit whose
libraries link: ``LIBRARY_PATH`` names a folder with ``libcudart.so`` and ``libcuda.so``, ``CPATH`` one with headers.
What is not real: the CUDA context, memory of modules, the driver's part of CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
from sglang.srt.server_args import PortArgs, ServerArgs

CASE: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
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
