"""``step_scheduler.py LOADS.json OUT.json``: SGLang's own scheduler over loads, in its own event loop.

A model of two layers with dummy weights lies on the stub driver, as in ``record_run.py``; its forward pass is stood in
for by zeros without a token that ends a sequence, so only counts decide. Loads of a process have the same options,
and the cache is emptied between them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from array import array
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 32000,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


class _Over(Exception):
    """All requests of a load are finished."""


def _request(number: int, prompt: int, output: int, shared: Any) -> Any:
    tokens = [1 + (number * 7919 + position * 31) % 15000 for position in range(prompt)]  # its own
    start = 0
    for name, end in shared:
        tokens[start:end] = [16000 + (crc32(name.encode()) + position * 31) % 15000 for position in range(start, end)]
        start = end
    if start < prompt:
        tokens[start] = 1 + number
    sampling = SamplingParams(max_new_tokens=output, temperature=0.0)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=str(number), input_text="", input_ids=array("q", tokens), input_embeds=None, mm_inputs=None,
        token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
        token_ids_logprob=None, stream=False,
    )  # fmt: skip


class _Course:
    """One load on the scheduler. A step is: [tokens by request in their order, requests retracted, tokens held by
    requests once it was scheduled, requests finished since the step before]."""

    def __init__(self, scheduler: Any, load: dict[str, Any]) -> None:
        self.scheduler, self.requests = scheduler, load["requests"]
        self.arrivals = deque(sorted(range(len(self.requests)), key=lambda number: self.requests[number][0]))
        self.alive: set[int] = set()
        self.done: list[int] = []
        self.retracted: list[int] = []
        self.steps: list[list[Any]] = []
        self.idle = False

    def ingest(self, stop_at_pause: bool = False) -> list[Any]:
        if self.steps:
            self.steps[-1][3] += sorted(self.done)
            self.done = []
        if not self.arrivals and not self.alive and self.idle:
            raise _Over
        while self.arrivals and (self.requests[self.arrivals[0]][0] <= len(self.steps) or not self.alive):
            number = self.arrivals.popleft()
            _, prompt, output, *shared = self.requests[number]
            self.alive.add(number)
            self.scheduler.handle_generate_request(_request(number, prompt, output, shared[0] if shared else ()))
        return []

    def note(self, batch: Any) -> None:
        allocator, tree = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        self.idle = batch is None
        entries = []
        if batch is not None:
            tokens = (
                [1] * len(batch.reqs)
                if batch.extend_lens is None or batch.forward_mode.is_decode()
                else batch.extend_lens
            )
            entries = [[int(req.rid), int(count)] for req, count in zip(batch.reqs, tokens, strict=True)]
        held = allocator.size - allocator.available_size() - tree.evictable_size()
        self.steps.append([entries, self.retracted, int(held), []])
        self.retracted = []


def _stepped(scheduler: Any, load: dict[str, Any]) -> list[list[Any]]:
    course = _Course(scheduler, load)
    plan, add = scheduler.get_next_batch_to_run, scheduler._add_request_to_queue

    def planned(*arguments: Any, **options: Any) -> Any:
        found = plan(*arguments, **options)
        course.note(found.batch_to_run)
        return found

    def added(req: Any, is_retracted: bool = False) -> None:
        if is_retracted:
            course.retracted.append(int(req.rid))
        add(req, is_retracted=is_retracted)

    def streamed(streamer: Any, reqs: Any, *arguments: Any, **options: Any) -> None:
        for req in reqs:
            if req.finished() and int(req.rid) in course.alive:
                course.alive.discard(int(req.rid))
                course.done.append(int(req.rid))

    scheduler.ingest_requests, scheduler.get_next_batch_to_run = course.ingest, planned
    scheduler._add_request_to_queue, type(scheduler.output_streamer).stream_output = added, streamed
    with suppress(_Over):
        scheduler.run_event_loop()
    scheduler.get_next_batch_to_run, scheduler._add_request_to_queue = plan, add
    scheduler.last_batch = None
    scheduler.flush_cache()
    scheduler.new_token_ratio_tracker.reset()
    scheduler.policy._waiting_prefix_refresh_calls = 0
    steps = course.steps
    while steps and not steps[-1][0] and not steps[-1][3]:
        steps.pop()
    return steps


loads: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
folder = Path(sys.argv[1]).with_name("model")
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text(json.dumps(_CONFIG))
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
options = ["--model-path", str(folder), "--load-format", "dummy", "--skip-tokenizer-init", "--disable-cuda-graph"]
given = ServerArgs.from_cli_args(parser.parse_args([*options, *loads[0]["options"]]))
given.resolve_once()
publish(
    given, role="scheduler",
    ranks=SpawnRanks(world_rank=spawn_world_rank(given, tp_rank=0, pp_rank=0), dp_rank=None, gpu_id=0),
)  # fmt: skip
scheduler = Scheduler(given, PortArgs.init_new(given))
scheduler.tp_worker.model_runner.model.forward = lambda ids, positions, batch, **more: LogitsProcessorOutput(
    torch.zeros(batch.batch_size, _CONFIG["vocab_size"], device="cuda")
)
for load in loads:
    load |= {
        "steps": _stepped(scheduler, load), "tokens": scheduler.max_total_num_tokens,
        "max_running_requests": scheduler.max_running_requests, "page_size": scheduler.page_size,
        "chunked_prefill_size": scheduler.chunked_prefill_size, "max_prefill_tokens": scheduler.max_prefill_tokens,
        "context_length": scheduler.model_config.context_len, "batches_in_flight": 2 if scheduler.enable_overlap else 1,
    }  # fmt: skip
Path(sys.argv[2]).write_text(json.dumps(loads))
os._exit(0)
