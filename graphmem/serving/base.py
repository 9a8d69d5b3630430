"""The protocol of a serving engine, and the values it takes and returns.

An engine takes a question, a model's configuration with the engine's own settings on a card, and returns the memory
left for the KV cache, with the reasons. It is one file or one folder of this package, or an object that an installed
package names under the entry-point group ``graphmem.serving``; nothing outside of it knows its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from graphmem.base.figures import Figure
from graphmem.base.options import option
from graphmem.devices import Device
from graphmem.sources.checkpoints import Checkpoint
from graphmem.units import parse_bytes

#: Where the engine runs: as a server, or inside a program (``LLM(...)``); defaults differ.
ENTRIES = ("server", "llm")
#: Factors of a number's last letter, as vLLM has them: ``vllm/engine/arg_utils.py``, ``human_readable_int`` (0.32).
_TIMES = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}

#: What an answer stands on: the engine was run and its figures are held by tests; figures of public logs are; its
#: code, or its models', is run on fake tensors; or it is a formula from the engine's source that nothing holds.
BASES = {
    "recordings": "starts of the engine that were recorded",
    "logs": "the engine's source, and figures of public logs",
    "engine": "its own installed code, started on the pretended card",
    "captures": "captures of the installed transformers' own code",
    "formula": "the engine's source alone: a formula that no recording holds",
}


@dataclass(frozen=True)
class ServedModel:
    """A model's configuration: its name for people, the values of its ``config.json``, and the headers of the
    checkpoint beside it, where there is one. ``path``: the file of the configuration, None for one of the table.
    ``around``: the whole model, where this is the language model within one that has encoders too."""

    name: str
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None = None
    path: Path | None = None
    around: ServedModel | None = None


def spelled(name: str) -> str:
    """An option's name on a command line."""
    return f"--{name.replace('_', '-')}"


def count_of(text: str) -> int:
    """A whole number, also as vLLM reads one: 8k is 8,000 and 8K 8,192; ``auto`` is -1, the most that fits. Raises
    ``ValueError``."""
    if text.strip() in ("auto", "-1"):
        return -1
    found = re.fullmatch(r"([0-9]{1,15})([kmKM]?)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no whole number; write for example 8192, 8k (8,000) or 8K (8,192)")
    return int(found[1]) * _TIMES.get(found[2], 1)


def _count(help: str) -> int | None:
    """A field that is a number of something, which the engine chooses where none is given."""
    return option(None, help, metavar="N", read=count_of)


@dataclass(frozen=True)
class Question:
    """The question to an engine. Fields are named as the engine's options; None stands for the engine's default.

    ``version`` is (major, minor) of the engine, ``arguments`` are further options of the engine by its own names.
    """

    model: ServedModel
    device: Device
    version: tuple[int, int] | None = None
    entry: str = option("server", "server, or llm: a program's LLM(...).", metavar="KIND")
    tensor_parallel_size: int = option(1, "Cards.", flags="--tp --tensor-parallel-size")
    max_model_len: int | None = _count("Longest request; auto: the longest that fits. Default: the model's.")
    max_num_seqs: int | None = _count("Requests of a batch. Default: by card.")
    max_num_batched_tokens: int | None = _count("Tokens of a batch. Default: by card.")
    gpu_memory_utilization: float | None = option(
        None, "Share of the card. Default 0.92 (0.9 before 0.20).", metavar="X"
    )
    kv_cache_dtype: str = option("auto", "auto, fp8, ...", metavar="TYPE")
    quantization: str | None = option(None, "awq, gptq, fp8, ... Default: the configuration's own.", metavar="NAME")
    dtype: str = option("auto", "auto, half, bfloat16, float.", metavar="TYPE")
    enforce_eager: bool = option(False, "No torch.compile and no CUDA graphs.")
    cold: bool = option(False, "The first start on a machine, which compiles. Default: a later one.")
    block_size: int | None = option(None, "Tokens of a block. Default 16.")
    alloc_conf: str = option("", "PYTORCH_CUDA_ALLOC_CONF of the engine.", metavar="CONF")
    non_torch_bytes: int = option(
        0, "What CUDA loads while it profiles. Default 0.", flags="--non-torch", metavar="SIZE", read=parse_bytes
    )
    arguments: tuple[tuple[str, str], ...] = ()

    def with_(self, **changes: Any) -> Question:
        """The same with other values."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Part:
    """One step of the waterfall from the card's memory to the KV cache: bytes, and where they come from."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class KVCache:
    """The cache as the engine cuts it; without blocks of a model that keeps nothing of what it has read, whose
    ``concurrency`` is the longest requests of one batch. ``request_blocks`` gives the blocks of a request of some
    length."""

    available_bytes: int
    block_bytes: int
    block_size: int
    blocks: int
    tokens: int
    concurrency: float
    longest: int
    groups: tuple[tuple[str, int], ...] = ()

    @property
    def keeps_nothing(self) -> bool:
        """Whether the model has no cache."""
        return not self.block_bytes


@dataclass(frozen=True)
class Served:
    """The engine's answer. Sizes are bytes of one card; every card of a tensor-parallel group has the same.

    ``settings`` are all options as the engine resolves them. ``parts`` lead from ``total_bytes`` to
    ``kv_cache.available_bytes``; ``outside``: other memory in use on the card, which the engine does not charge.
    ``graphs_bytes``: the true memory of CUDA graphs, beside the engine's estimate of them among the parts.
    ``scheduler`` makes the engine's scheduler over these blocks, of an engine that does both or, by its word, only
    ``prefill`` or ``decode``; None where it is not followed. ``refusal``: the
    engine's error where it does not start, in one line; the figures then led to it. ``basis`` is one of :data:`BASES`.
    """

    engine: str
    version: str
    model: str
    gpu: str
    cards: int
    settings: Mapping[str, Any]
    total_bytes: int
    requested_bytes: int
    weights_bytes: int
    parts: tuple[Part, ...]
    kv_cache: KVCache
    graphs_bytes: int = 0
    fragmentation_bytes: int = 0
    outside: tuple[Figure, ...] = ()
    request_blocks: Any = field(repr=False, compare=False, default=None)
    scheduler: Callable[..., Scheduler] | None = field(repr=False, compare=False, default=None)
    refusal: str | None = None
    notes: tuple[str, ...] = ()
    basis: str = "formula"

    def concurrency_at(self, lengths: Sequence[int]) -> float:
        """The number of requests in the cache at once, where their lengths are drawn from these alike: the blocks over
        the mean of one request's; in a batch where there is no cache."""
        if self.kv_cache.keeps_nothing and (tokens := self.settings.get("max_num_batched_tokens")):
            return float(tokens / (sum(lengths) / len(lengths)))
        taken = sum(self.request_blocks(length) for length in lengths) / len(lengths)
        return float(self.kv_cache.blocks / taken)


@dataclass(frozen=True)
class Request:
    """One request of a load: seconds from the start at which it arrives, tokens of its prompt and of its answer.
    ``shared``: what it begins with that others may too, in order (a name, tokens of the prompt up to its end); prompts
    are alike as far as their names are, to the nearer of two ends."""

    arrival: float
    prompt: int
    output: int
    shared: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class Batch:
    """One step of an engine. ``total``: tokens that it computes; ``admitted``: requests that waited until now;
    ``preempted``: those that lost their place; ``entries`` are the scheduler's own: (request, tokens, whether a new
    token comes of it); ``context``: tokens whose keys and values are read, ``pairs`` of one with one it attends to;
    ``begun``: requests that got their first token, once it has come back."""

    total: int
    admitted: list[int]
    preempted: list[int]
    entries: list[tuple[Any, int, bool]]
    context: int = 0
    pairs: int = 0
    begun: list[int] = field(default_factory=list)


class Scheduler(Protocol):
    """An engine's scheduler. Time is not its matter: a batch is asked for, and comes back."""

    #: Blocks that requests can hold.
    blocks: int
    #: Batches that are asked for before the first comes back.
    batches_in_flight: int

    #: Whose rules these are and what they leave out, for people.
    rules: str
    #: Tokens that were, or will be, computed once more because of preemption.
    lost_tokens: int
    #: Tokens of the requests that began, and those of them that were found in the cache.
    asked_tokens: int
    found_tokens: int
    #: Those that a connector brought.
    loaded_tokens: int

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""

    @property
    def running(self) -> int:
        """Requests in the batch."""

    @property
    def waiting(self) -> int:
        """Requests that are not, preempted ones among them."""

    def fits(self, request: Request) -> bool:
        """True if the request could run if it were alone."""

    def add(self, number: int, request: Request) -> None:
        """A request arrives, named by its number."""

    def schedule(self) -> Batch:
        """The next step; an empty one where nobody can compute."""

    def update(self, batch: Batch) -> list[int]:
        """A step comes back: requests that are finished with it."""

    def alike(self, last: Batch) -> int:
        """How many steps will be like this last one, with one token more of every request; 0 where that is not so."""

    def repeat(self, steps: int) -> None:
        """So many of them, at once."""

    def transfers(self) -> list[tuple[int, int]]:
        """Keys and values that have begun to be brought or sent since this was asked last: (request, tokens)."""

    def transferred(self, number: int) -> None:
        """Those of this request have arrived."""


@runtime_checkable
class Engine(Protocol):
    """A serving engine."""

    #: As on the command line: lower case, letters and digits only.
    name: str
    #: As its makers write it.
    title: str
    #: Newest version that is followed, as text.
    newest: str

    def serve(self, question: Question) -> Served:
        """The answer. Raises :class:`graphmem.errors.GraphmemError` for a question the engine cannot answer; where it
        would refuse to start for want of memory the answer has that."""


def for_searches(engine: Engine, question: Question) -> Question:
    """The question as it is asked over and over: of an engine that has a quick and a slow answer, for the quick one."""
    quick: Callable[[Question], Question] | None = getattr(engine, "for_searches", None)
    return question if quick is None else quick(question)
