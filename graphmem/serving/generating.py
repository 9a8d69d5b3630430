"""transformers' ``generate`` as a serving engine: a batch of one length in one process, by captures of it.

There is no pool of blocks: a batch is padded to its longest text, and the cache grows with it. So the answer is whether
a batch of ``--max-num-seqs`` texts of ``--max-model-len`` tokens (prompt and answer) runs; where one of the two is not
given, the largest that does. Every figure is an analysis of ``--generate`` (:func:`graphmem.analyze`), none a formula:
the search goes by generations of two tokens of the same length, which are quick, and the sizes around its answer are
then analysed with all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np

from graphmem.answering import stages
from graphmem.answering.question import Question as Analysis
from graphmem.answering.runs import Progress, RunCache, labelled, silent
from graphmem.base.documents import shown
from graphmem.devices import Device
from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.serving.base import KVCache, Part, Question, Served
from graphmem.serving.configurations import without_encoder
from graphmem.serving.options import DTYPE, Option, flag, one_of, options_of, share, whole
from graphmem.serving.values import count, counted
from graphmem.sources.configurations import generation_values
from graphmem.trace import Category, EventKind, Place
from graphmem.training import WEIGHTS, Inference
from graphmem.training.generation import CACHE_IMPLEMENTATIONS, Generation
from graphmem.units import format_bytes

OPTIONS = {
    "batch_size": Option(whole(1, 1 << 20), "max_num_seqs"), "max_length": Option(whole(2), "max_model_len"),
    "max_new_tokens": Option(whole()), "dtype": DTYPE, "quantization": Option(one_of(*WEIGHTS), "quantization"),
    "cache_implementation": Option(one_of(*CACHE_IMPLEMENTATIONS)), "num_beams": Option(whole(1, 1 << 10)),
    "num_return_sequences": Option(whole(1, 1 << 10)), "do_sample": Option(flag), "top_k": Option(whole(0)),
    "top_p": Option(share), "prefill_chunk_size": Option(whole()), "disable_compile": Option(flag),
}  # fmt: skip
#: Fields of :class:`Generation`; other options of the generation are arguments of it.
_OF_GENERATION = ("do_sample", "num_beams", "num_return_sequences", "cache_implementation", "prefill_chunk_size")
_ARGUMENTS = ("top_k", "top_p", "disable_compile")
#: transformers' own number of new tokens (``max_length`` 20 of GenerationConfig, counted from the prompt's end).
_NEW_TOKENS = 20
#: Tokens of the generations that a search goes by; a first one after the prompt, and one that reads the cache.
_FEW = 2
#: Lengths are looked for in steps of so many tokens, and no further than this; batches one by one.
_STEP, _MOST_LENGTH = 64, 1 << 24
#: Tokens of the largest batch that is looked at: a mask of so many is followed (capture/values/known_values.py), and
#: what a padding mask says decides which attention runs.
_MOST_TOKENS = 1 << 22
#: The precision of a configuration, as options name it.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
#: Beginnings of assumptions of an analysis that are left out: an answer's settings state them.
_ASSUMPTIONS_STATED_ELSEWHERE = ("the configuration's dtype", "1 iterations")
#: What the waterfall calls categories of storages; others are activations.
_PARTS = (
    ("weights", (Category.PARAMETER, Category.BUFFER)),
    ("library workspaces", (Category.WORKSPACE,)),
)


@dataclass(frozen=True)
class _Run:
    """A generation on a card, but for its batch and its length. ``name``: the model for :func:`graphmem.analyze`."""

    name: str
    device: Device
    alloc_conf: str | None
    generation: Generation
    dtype: str
    weights: str | None


@dataclass(frozen=True)
class _Analysis:
    """An estimate without its trace, the most bytes that the cache has on the card, and the memory, by category, when
    tensors have the most; ``phase``: of that moment."""

    estimate: Estimate
    cache_bytes: int
    at_peak: Mapping[Category, int]
    phase: str


def _analysis(estimate: Estimate) -> _Analysis:
    trace = estimate.trace
    assert trace is not None
    sizes = np.array([one.bytes if one.place is Place.DEVICE else 0 for one in trace.storages], dtype=np.int64)
    categories = np.array([one.category for one in trace.storages], dtype=np.int64)
    signs = np.where(trace.kinds == EventKind.ALLOC, 1, 0) - np.where(trace.kinds == EventKind.FREE, 1, 0)
    events = np.flatnonzero(signs)
    subjects = trace.subjects[events]
    grown, of = signs[events] * sizes[subjects], categories[subjects]
    cache = np.cumsum(np.where(of == Category.KV_CACHE, grown, 0)).max(initial=0)
    last = int(np.cumsum(grown).argmax())
    at_peak = {category: int(grown[: last + 1][of[: last + 1] == category].sum()) for category in Category}
    operator = trace.operators[trace.event_operators[events[last]]]
    return _Analysis(estimate.without_events(), int(cache), at_peak, trace.phases[operator.phase].name)


class Transformers:
    """The engine. One stands for one user's question, and its follow-ups: analyses are kept."""

    name = "hf"
    title = "transformers generate"
    #: An answer without a batch, or without a length, has looked for it.
    searches = True

    def __init__(self, say: Progress = silent) -> None:
        self._say = say
        try:  # the installed version, which is the one that is captured
            self.newest = ".".join(metadata.version("transformers").split(".")[:2])
        except metadata.PackageNotFoundError:
            raise UsageError("--engine hf runs transformers; install it with: pip install 'graphmem[hf]'") from None
        self._captures = RunCache()
        self._known: dict[tuple[_Run, int, int], _Analysis] = {}

    def serve(self, question: Question) -> Served:
        """See :class:`graphmem.serving.base.Engine`."""
        without_encoder(question.model)
        found = options_of(question, self, OPTIONS)
        return _Search(self, question, found, _run(question, found)).answer()

    def analysed(self, run: _Run, batch: int, length: int) -> _Analysis:
        """The analysis of so many texts of ``length`` tokens, prompt and answer together."""
        key = run, batch, length
        if key not in self._known:
            step = Inference(run.dtype, weights=run.weights, generate=run.generation)
            estimate = stages.estimate_of(
                Analysis(
                    run.name,
                    batch=batch,
                    seq_len=length - run.generation.max_new_tokens,
                    training=step,
                    device=run.device,
                    alloc_conf=run.alloc_conf,
                ),
                self._captures,
                labelled(self._say, f"batch {batch:,}, {length:,} tokens"),
            )
            self._known[key] = _analysis(estimate)
        return self._known[key]


class _Search:
    """One question: the sizes that are looked for, and the answer."""

    def __init__(self, engine: Transformers, question: Question, found: dict[str, Any], run: _Run) -> None:
        self._engine, self._question, self._found, self._run = engine, question, found, run
        self._captured: set[tuple[int, int, bool]] = set()

    def answer(self) -> Served:
        batch, length = self._found.get("batch_size"), self._found.get("max_length")
        new = self._run.generation.max_new_tokens
        if length is not None and length <= new:
            raise UsageError(
                f"--max-model-len {length} holds no prompt beside {new} new tokens; give more, or less --max-new-tokens"
            )
        if batch is not None and length is None:
            top = min(self._longest(), _MOST_TOKENS // batch)
            found = self._most(lambda few, at: self._at(batch, at, few), new + 1, top, _STEP)
            return self._served(batch, found) if found else self._refused(batch, new + 1, "")
        length = length or self._longest()
        if batch is None:
            found = self._most(lambda few, at: self._at(at, length, few), 1, _MOST_TOKENS // length, 1)
            return self._served(found, length) if found else self._refused(1, length, self._shorter(length))
        return self._served(batch, length) if _fits(self._at(batch, length)) else self._refused(
            batch, length, self._fewer(batch, length)
        )  # fmt: skip

    def _at(self, batch: int, length: int, few: bool = False) -> Estimate:
        return self._analysed(batch, length, few).estimate

    def _analysed(self, batch: int, length: int, few: bool = False) -> _Analysis:
        """Of ``few`` tokens, where that is quicker."""
        run = self._run
        few = few and run.generation.max_new_tokens > _FEW
        if few:
            run = replace(run, generation=replace(run.generation, max_new_tokens=_FEW))
        self._captured.add((batch, length, few))
        return self._engine.analysed(run, batch, length)

    def _longest(self) -> int:
        model = self._question.model
        length = count(model, "max_position_embeddings", 0, least=0) or count(model, "n_positions", 0, least=0)
        if not 0 < length <= _MOST_LENGTH:
            raise UsageError(f"{model.name} says no greatest length; give --max-model-len")
        return length

    def _fewer(self, batch: int, length: int) -> str:
        most = self._most(lambda few, at: self._at(at, length, few), 1, batch - 1, 1)
        return f"--max-num-seqs {most:,} would run" if most else f"not even one does; {self._shorter(length)}"

    def _shorter(self, length: int) -> str:
        least = self._run.generation.max_new_tokens + 1
        longest = self._most(lambda few, at: self._at(1, at, few), least, length - 1, _STEP)
        return f"the longest text that does has {longest:,} tokens (--max-model-len)" if longest else "no length does"

    # --- searching ----------------------------------------------------------------------------------------------------

    def _most(self, at: Callable[[bool, int], Estimate], least: int, top: int, step: int) -> int:
        """The largest size from ``least`` to ``top`` that runs, ``top`` itself or one in steps; 0 for none. By quick
        runs first; then full ones around their result."""
        first = -(-(least + 1) // step) * step
        sizes = sorted({least, *range(first, top, step), top}) if top >= least else []
        quick = _bracket(lambda index: at(True, sizes[index]), len(sizes))
        while quick >= 0 and not _fits(at(False, sizes[quick])):
            quick -= 1
        while quick + 1 < len(sizes) and quick >= 0 and _fits(at(False, sizes[quick + 1])):
            quick += 1
        return sizes[quick] if quick >= 0 else 0

    # --- answers ------------------------------------------------------------------------------------------------------

    def _refused(self, batch: int, length: int, instead: str) -> Served:
        estimate = self._at(batch, length)
        fit = estimate.fit
        assert fit is not None
        return replace(
            self._served(batch, length),
            refusal=(
                f"{_texts(batch)} of {length:,} tokens {'need' if batch > 1 else 'needs'} "
                f"{format_bytes(fit.unlimited_bytes or fit.device_bytes)}, {fit.gpu} has "
                f"{format_bytes(fit.capacity_bytes)}{'; ' if instead else ''}{instead}"
            ),
        )

    def _served(self, batch: int, length: int) -> Served:
        found, question = self._analysed(batch, length), self._question
        estimate, most = found.estimate, found.cache_bytes
        assert estimate.fit is not None
        capacity = estimate.fit.capacity_bytes
        parts = _parts(found)
        left = capacity - sum(part.bytes for part in parts)
        tokens = batch * length
        runs = _fits(estimate)
        return Served(
            engine=self._engine.title, version=self._engine.newest, model=question.model.name, gpu=estimate.fit.gpu,
            cards=1, total_bytes=capacity, requested_bytes=capacity, weights_bytes=parts[1].bytes,
            settings={
                "max_num_seqs": batch, "max_model_len": length, "dtype": self._run.dtype,
                "quantization": self._run.weights, **self._run.generation.keywords(),
            },
            parts=tuple(parts),
            kv_cache=KVCache(
                available_bytes=left, block_bytes=-(-most // tokens), block_size=1, blocks=tokens if runs else 0,
                tokens=tokens if runs else 0, concurrency=float(batch if runs else 0), longest=length if runs else 0,
                groups=(("keys and values", count(question.model, "num_hidden_layers", 1)),),
            ),
            fragmentation_bytes=estimate.breakdown.get("FRAGMENTATION", 0),
            request_blocks=lambda _: length, notes=self._notes(estimate, batch, length, most), basis="captures",
        )  # fmt: skip

    def _notes(self, estimate: Estimate, batch: int, length: int, most: int) -> tuple[str, ...]:
        new = self._run.generation.max_new_tokens
        said = "" if "max_new_tokens" in self._found else " (--max-new-tokens)"
        full = sum(not few for _, _, few in self._captured)
        return (
            f"every text has a prompt of {length - new:,} tokens, padded to that, and {new:,} new ones{said}",
            f"at the most {format_bytes(most)} of cache on the card, {format_bytes(estimate.reserved)} reserved",
            f"{len(self._captured)} captures, {full} of them with all tokens",
            *_bound(batch, length),
            *(line for line in estimate.assumptions if not line.startswith(_ASSUMPTIONS_STATED_ELSEWHERE)),
        )


def _bound(batch: int, length: int) -> tuple[str, ...]:
    if (batch + 1) * length <= _MOST_TOKENS:
        return ()
    return (f"no more than {_MOST_TOKENS:,} tokens together are looked at",)


def _bracket(at: Callable[[int], Estimate], count: int) -> int:
    """The last of ``count`` indexes whose run fits, -1 for none; more is taken to need more. The last one is tried
    after the first; between one that fits and one that does not goes a straight line through the two next to the edge,
    and the middle where that narrows little."""
    if not count or not _fits(first := at(0)):
        return -1
    low, high, needs = 0, count, {0: first.device}
    tried = _proportional(first, count)
    while high - low > 1:
        before = high - low
        estimate = at(tried)
        needs[tried] = estimate.device
        low, high = (tried, high) if _fits(estimate) else (low, tried)
        tried = _line(needs, _room(estimate), low, high)
        if before < 2 * (high - low) and len(needs) > 3 and high < count:
            tried = (low + high) // 2
    return low


def _proportional(first: Estimate, count: int) -> int:
    """Where memory ends if all but the weights and the context grows in proportion."""
    fixed = sum(first.breakdown.get(name, 0) for name in ("PARAMETER", "BUFFER", "CONTEXT", "WORKSPACE"))
    grows = max(1, first.device - fixed)
    return max(1, min(count - 1, (_room(first) - fixed) // grows))


def _line(needs: dict[int, int], room: int, low: int, high: int) -> int:
    """Where the line through two sizes next to the edge reaches the card's memory; strictly between the two ends."""
    near = sorted(needs, key=lambda size: abs(needs[size] - room))[:2]
    (x0, y0), (x1, y1) = ((size, needs[size]) for size in sorted(near))
    guess = x0 + (room - y0) * (x1 - x0) // (y1 - y0) if y1 > y0 else (low + high) // 2
    return max(low + 1, min(high - 1, guess))


def _room(estimate: Estimate) -> int:
    assert estimate.fit is not None
    return estimate.fit.capacity_bytes - estimate.fit.others_bytes


def _fits(estimate: Estimate) -> bool:
    return estimate.fit is not None and estimate.fit.fits


def _parts(found: _Analysis) -> list[Part]:
    """From the card to the memory left for the cache, at the moment when tensors have the most."""
    taken = dict(found.at_peak)
    cache = taken.pop(Category.KV_CACHE, 0)
    outside = found.estimate.breakdown["CONTEXT"]
    named = [Part(name, sum(taken.pop(one, 0) for one in categories)) for name, categories in _PARTS]
    kept = found.estimate.reserved - cache - sum(taken.values()) - sum(part.bytes for part in named)
    return [
        Part("outside the allocator", outside, "CUDA context, kernels and cuBLAS"),
        named[0],
        Part("activations", sum(taken.values()), f"when tensors have the most, in {found.phase}"),
        *named[1:],
        Part("kept by the allocator", kept, "rounding, fragmentation, segments of other moments"),
    ]


def _texts(batch: int) -> str:
    return "1 text" if batch == 1 else f"{batch:,} texts"


# --- what is run ------------------------------------------------------------------------------------------------------


def _run(question: Question, found: dict[str, Any]) -> _Run:
    model = question.model
    given = {name: found[name] for name in _OF_GENERATION if name in found}
    arguments = {name: found[name] for name in _ARGUMENTS if name in found}
    new = found.get("max_new_tokens") or _new_tokens(question) or _NEW_TOKENS
    return _Run(
        f"hf:{model.path or model.name}",
        question.device,
        question.alloc_conf or None,
        Generation(new, arguments=tuple(arguments.items()), **given),
        _dtype(question, found["dtype"]),
        found.get("quantization"),
    )


def _new_tokens(question: Question) -> int | None:
    """``max_new_tokens`` of the ``generation_config.json`` beside the model, None where it has none. Raises
    :class:`graphmem.errors.GraphmemError`."""
    path = question.model.path
    file = None if path is None else path.with_name("generation_config.json")
    value = None if file is None or not file.exists() else generation_values(file).get("max_new_tokens")
    return None if value is None else counted(question.model, "max_new_tokens", value)


def _dtype(question: Question, asked: str) -> str:
    """As ``from_pretrained`` of transformers 5 loads weights: ``auto`` is the configuration's type."""
    named: Any = asked
    if asked == "auto":
        config = question.model.config
        named = config.get("dtype") or config.get("torch_dtype") or "float32"
    named = str(named).removeprefix("torch.")
    if named not in _DTYPES:
        raise UsageError(f"dtype {shown(named)} is not followed; accepted: {', '.join(_DTYPES)}")
    return _DTYPES[named]
