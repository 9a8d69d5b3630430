"""SGLang's scheduler: what a step computes, which requests wait, and which are retracted.

Followed from sglang 0.5.23, ``srt/managers/scheduler.py`` (``get_next_batch_to_run``) and
``srt/managers/schedule_policy.py`` (``PrefillAdder``), with the usual policy ``fcfs``: prompts come first, alone, and
one that is cut is finished before the next begins. A request is admitted where what all may still answer fits, by
their limits (``max_new_tokens``) times a ratio that falls with every step. Not followed: ``--enable-mixed-chunk``,
priorities, sliding windows, state-space layers, speculation, several pipeline stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from graphmem.errors import UsageError
from graphmem.serving.base import Batch, Request
from graphmem.serving.sglang.radix_tree import Node, RadixTree, Text

#: Most tokens that a request is taken to answer with yet (``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``).
_MOST_NEW = 4096
#: The ratio's first value, the part of it that is left at last, and in how many steps (``NewTokenRatioTracker``).
_FIRST_RATIO, _LEFT_OF_RATIO, _STEPS_OF_RATIO = 0.7, 0.14, 600
#: Tokens that everybody gets before a request may be retracted again (``SGLANG_RETRACT_DECODE_STEPS``).
_AFTER_RETRACTION = 20
#: Every so many passes the texts of so many that wait are looked up (``WAITING_PREFIX_REFRESH_INTERVAL``).
_REFRESH_EVERY, _REFRESHED = 32, 128
#: Where prompts are not cut.
_NO_CHUNK = float("inf")
#: Fewer steps that are alike are not worth it.
_FEWEST_ALIKE = 4


@dataclass(eq=False, slots=True)
class State:
    """A request. ``computed``: tokens with keys and values, ``kept`` of them in the tree, up to ``node``."""

    number: int
    prompt: int
    output: int
    text: Text
    node: Node
    generated: int = 0
    computed: int = 0
    kept: int = 0
    target: int = 0  #: the end of the part of its tokens that was read last
    retracted: bool = False
    finished: bool = False

    @property
    def tokens(self) -> int:
        """All that is to be computed."""
        return self.prompt + self.generated

    @property
    def left(self) -> int:
        """Tokens that it may still answer with, as admission counts them."""
        return min(self.output - self.generated, _MOST_NEW)


@dataclass(slots=True)
class _Budget:
    """What one pass may still admit (``PrefillBudget``, and what ``PrefillAdder`` counts)."""

    total: float
    current: float
    inputs: int
    chunk: float

    @property
    def has_memory(self) -> bool:
        """``has_capacity``."""
        return self.total > 0 and self.current > 0

    @property
    def is_spent(self) -> bool:
        """Whether the pass ends, while there is memory."""
        return self.has_memory and (self.inputs <= 0 or self.chunk <= 0)

    def charge(self, tokens: int, page: int, new: int) -> None:
        """A part of a prompt, in whole pages, and what may be answered to it."""
        self.total -= tokens + page + new
        self.current -= tokens + page
        self.inputs -= tokens
        self.chunk -= tokens


@dataclass(frozen=True)
class _Step:
    """A batch: its requests, whether it reads prompts, and the one of them that was cut."""

    states: list[State] = field(default_factory=list)
    reads: bool = False
    cut: State | None = None


class Scheduler:
    """The scheduler over ``tokens`` slots of the KV cache."""

    rules = (
        "SGLang 0.5's scheduler (fcfs, prompts before answers, retraction); requests are taken to be limited to what "
        "they answer"
    )

    def __init__(
        self, tokens: int, *, page_size: int, max_running_requests: int, chunked_prefill_size: int,
        max_prefill_tokens: int, context_length: int, batches_in_flight: int = 2, prefix_caching: bool = True,
        conservativeness: float = 1.0,
    ) -> None:  # fmt: skip
        self.batches_in_flight = batches_in_flight
        self._page, self._most_requests = page_size, max_running_requests
        self._chunk = chunked_prefill_size if chunked_prefill_size > 0 else _NO_CHUNK
        self._most_input, self._longest = max_prefill_tokens, min(context_length, tokens) - 1
        self._size = tokens - tokens % page_size
        self._caching = prefix_caching
        self.blocks = self._size // page_size
        self.lost_tokens = self.asked_tokens = self.found_tokens = self.loaded_tokens = 0
        self._tree = RadixTree(page_size)
        self._private = 0  #: tokens in pages that only one request has
        self._first_ratio = min(1.0, _FIRST_RATIO * conservativeness)
        self._ratio = self._first_ratio
        self._waiting: deque[State] = deque()
        self._running: list[State] = []
        self._cut: State | None = None
        self._last = _Step()
        self._under_way: deque[_Step] = deque()
        self._is_full = False
        self._rows = self._passes = 0

    @property
    def used_blocks(self) -> int:
        """See :class:`graphmem.serving.base.Scheduler`, as the other public names."""
        return (self._private + self._tree.held) // self._page

    @property
    def running(self) -> int:
        return self._rows

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def _free(self) -> int:
        return self._size - self._private - self._tree.held - self._tree.evictable

    def fits(self, request: Request) -> bool:
        return request.prompt < self._longest - 5 and self._output(request) > 0

    def _output(self, request: Request) -> int:
        """``init_req_max_new_tokens``, ``max_new_tokens_for_memory``."""
        prompt = self._paged(request.prompt)
        return min(request.output, self._longest - request.prompt - 1, self._size - prompt - self._page - 1)

    def _paged(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    def add(self, number: int, request: Request) -> None:
        text = (*(one for one in request.shared if one[1]), (number, request.prompt + request.output))
        self._waiting.append(State(number, request.prompt, self._output(request), text, self._tree.root))

    def schedule(self) -> Batch:
        batch = Batch(0, [], [], [])
        self._merge()
        states = self._read(batch)
        reads = bool(states)
        step = self._last = _Step(states or list(self._answer(batch)), reads, self._cut if reads else None)
        for state in step.states:
            tokens = state.target - state.computed if reads else 1
            state.computed += tokens
            batch.total += tokens
            batch.context += state.computed
            batch.pairs += tokens * state.computed - tokens * (tokens - 1) // 2
            batch.entries.append((state, tokens, state is not step.cut))
        if step.states:
            self._under_way.append(step)
        elif not self._under_way:
            self._ratio = self._first_ratio  # ``on_idle``
        return batch

    def _merge(self) -> None:
        """Requests that have read their prompts run from now on, and those that are finished do not."""
        cut, last = self._cut, self._last
        if cut is not None:
            self._keep(cut, cut.target)
        if last.reads:
            ready = [one for one in last.states if one not in (cut, last.cut) and not one.finished]
            if len(ready) < len(last.states) or not self._running:
                self._is_full = False
            self._running = [*self._running, *ready]
        running = [one for one in self._running if not one.finished]
        if len(running) < len(self._running):
            self._is_full = False
        self._running = running

    def _read(self, batch: Batch) -> list[State]:
        """``_get_new_batch_prefill_raw``: a part of the prompt that was cut, and requests that wait."""
        if not self._running:
            self._is_full = False
        if (self._is_full or not self._waiting) and self._cut is None:
            return []
        if self._room(0) <= 0 and self._cut is None:
            self._is_full = True
            return []
        self._refresh()
        budget, room = self._budget(), self._room(int(self._cut is not None))
        states: list[State] = []
        if self._cut is not None:
            states.append(self._cut)
            self._cut = self._continue(self._cut, budget)
        while self._waiting and not budget.is_spent:
            if len(states) >= room:
                self._is_full = True
                break
            state = self._waiting[0]
            admitted = self._admit(state, budget, alone=not states)
            if admitted:
                states.append(self._waiting.popleft())
                batch.admitted.append(state.number)
            if admitted is None or not budget.has_memory:
                self._is_full = bool(states or self._running)
                break
            if not admitted:
                break
        self._place(states)
        return states

    def _refresh(self) -> None:
        """``_touch_waiting_prefixes``: what those that wait will find stays, the first one's longest."""
        if self._caching and self._waiting:
            if not self._passes % _REFRESH_EVERY:
                for state in reversed(list(islice(self._waiting, _REFRESHED))):
                    self._tree.match(state.text, state.tokens)
            self._passes += 1

    def _room(self, held: int) -> int:
        """``get_num_allocatable_reqs``."""
        return min(self._most_requests - len(self._running), self._most_requests - self._rows + held)

    def _budget(self) -> _Budget:
        offset = sum(one.left * self._ratio for one in self._running)
        free = self._free + self._tree.evictable
        return _Budget(free - offset, free, self._most_input, self._chunk)

    def _continue(self, state: State, budget: _Budget) -> State | None:
        """``add_chunked_req``: the state again where more is left."""
        most = min(budget.chunk, int(budget.total)) if int(budget.total) > 0 else budget.chunk
        left = state.tokens - state.computed
        tokens = int(min(left, most))
        state.target = state.computed + tokens
        budget.charge(self._paged(tokens), self._page, min(state.output, _MOST_NEW) if tokens == left else 0)
        return state if tokens < left else None

    def _admit(self, state: State, budget: _Budget, alone: bool) -> bool | None:
        """``add_one_req``; None where the memory is not enough, False where it is not this pass's turn."""
        node = self._tree.match(state.text, state.tokens - 1) if self._caching else self._tree.root
        self._lock(node, budget)  # what is found can no longer make room
        found = node.stop
        left, new = state.tokens - found, min(state.output, _MOST_NEW)
        paged, tokens = self._paged(left), left
        fits = left + state.left + self._page < budget.total
        if fits and self._chunk == _NO_CHUNK and not alone and paged >= budget.inputs:
            tokens = 0
        elif fits and paged > budget.chunk:
            end = found + int(budget.chunk) // self._page * self._page
            tokens, new = end - end % self._page - found, 0
        if not fits or tokens <= 0:
            self._lock(node, budget, undo=True)
            return False if fits else None
        if state.retracted:
            self.lost_tokens -= found
        else:
            self.asked_tokens += state.tokens
            self.found_tokens += found
        state.node, state.computed, state.kept, state.target = node, found, found, found + tokens
        state.retracted = False
        self._rows += 1
        budget.charge(self._paged(tokens), self._page, new)
        if tokens < left:
            self._cut = state
        return True

    def _lock(self, node: Node, budget: _Budget, undo: bool = False) -> None:
        before = self._tree.evictable
        (self._tree.unlock if undo else self._tree.lock)(node)
        budget.total += self._tree.evictable - before
        budget.current += self._tree.evictable - before

    def _place(self, entries: list[State]) -> None:
        """Pages for the parts of prompts; more is made free than they need (``alloc_paged_token_slots_extend``)."""
        tokens = sum(state.target - state.computed for state in entries)
        self._make_free(tokens + (self._page * len(entries) if self._page > 1 else 0))
        self._private += sum(self._paged(state.target) - self._paged(state.computed) for state in entries)

    def _make_free(self, tokens: int) -> None:
        if tokens > self._free:
            self._tree.evict(tokens - self._free)

    def _answer(self, batch: Batch) -> list[State]:
        """``update_running_batch``: a token more of each, but for those whose last one is under way."""
        before = len(self._running)
        queued = self._under_way[-1].states if self._under_way else []  # none without overlap
        ending = {one for one in queued if one.generated + 1 >= one.output}
        running = self._running = [one for one in self._running if one not in ending]
        if not running:
            self._is_full = False
            return running
        if not self._can_answer(running):
            if ending:
                self._is_full = False
                return []
            self._retract(batch)
        else:
            self._fade(1)
        if len(self._running) < before:
            self._is_full = False
        self._make_free(len(self._running) * self._page)
        self._private += self._new_tokens(self._running)
        return self._running

    def _fade(self, steps: int) -> None:
        """``decay_step``."""
        last = self._first_ratio * _LEFT_OF_RATIO
        self._ratio = max(self._ratio - steps * (self._first_ratio - last) / _STEPS_OF_RATIO, last)

    def _new_tokens(self, states: list[State]) -> int:
        return self._page * sum(not one.computed % self._page for one in states)

    def _can_answer(self, states: list[State]) -> bool:
        needed = self._new_tokens(states)
        self._make_free(needed)
        return self._free >= needed

    def _retract(self, batch: Batch) -> None:
        """``retract_decode``: whoever has answered least goes, of those the longest prompt."""
        order = sorted(self._running, key=lambda one: (one.generated, -one.prompt), reverse=True)
        while len(order) > 1:
            state = order.pop()
            self.lost_tokens += state.computed
            self._release(state)
            self._make_free(len(order) * _AFTER_RETRACTION)
            state.retracted = True
            batch.preempted.append(state.number)
            self._waiting.append(state)
            if self._can_answer(order):
                break
        self._running = order
        done = sum(one.generated for one in order) + _AFTER_RETRACTION * len(order)
        self._ratio = min(1.0, done / (sum(one.output for one in order) + 1))

    def _keep(self, state: State, tokens: int) -> None:
        """``checkpoint_into_tree``: the request's first tokens are found by others from now on."""
        tree, tokens = self._tree, tokens - tokens % self._page
        if not self._caching or not tokens:
            return
        node = tree.insert(state.text, tokens)
        self._private -= tokens - state.kept
        prompt = state.prompt - state.prompt % self._page
        if 0 < prompt < tokens:  # so that answers can go without their prompts
            tree.insert(state.text, prompt)
        tree.lock(node)
        tree.unlock(state.node)
        state.node, state.kept = node, tokens

    def _release(self, state: State) -> None:
        self._private -= self._paged(state.computed) - state.kept
        self._tree.unlock(state.node)
        state.node, state.kept, state.computed = self._tree.root, 0, 0
        self._rows -= 1

    def update(self, batch: Batch) -> list[int]:
        finished: list[int] = []
        step = self._under_way.popleft() if batch.entries else _Step()
        for state in step.states:
            if state.finished or state.retracted or state is step.cut:
                continue
            state.generated += 1
            if state.generated == 1:
                batch.begun.append(state.number)
            if state.generated >= state.output:
                state.finished = True
                self._keep(state, state.computed)
                self._release(state)
                finished.append(state.number)
            elif step.reads:
                self._keep(state, state.target)
        return finished

    def alike(self, last: Batch) -> int:
        running = self._running
        if self._last.reads or self._last.states != running or (self._waiting and not self._is_full):
            return 0
        steps = min((one.output - one.generated for one in running), default=0) - 3
        while steps >= _FEWEST_ALIKE and self._new_pages(steps) > self._free + self._tree.evictable:
            steps //= 2
        return steps if steps >= _FEWEST_ALIKE else 0

    def _new_pages(self, steps: int) -> int:
        """Tokens of the pages of so many steps."""
        return sum(self._paged(one.computed + steps) - self._paged(one.computed) for one in self._running)

    def repeat(self, steps: int) -> None:
        self._make_free(self._new_pages(steps - 1) + len(self._running) * self._page)
        self._private += self._new_pages(steps)
        self._fade(steps)
        for state in self._running:
            state.computed += steps
            state.generated += steps

    def transfers(self) -> list[tuple[int, int]]:
        return []

    def transferred(self, number: int) -> None:
        raise AssertionError(number)


def following(settings: Mapping[str, Any], tokens: int) -> Callable[..., Scheduler]:
    """What makes the scheduler of an engine with these settings. Raises :class:`UsageError` for a part of one."""

    def made(role: str = "") -> Scheduler:
        if role:
            raise UsageError("SGLang: --disaggregated is not followed; it wants --engine vllm")
        return Scheduler(
            tokens, page_size=settings["page_size"], max_running_requests=settings["max_num_seqs"],
            chunked_prefill_size=settings["chunked_prefill_size"], max_prefill_tokens=settings["max_prefill_tokens"],
            context_length=settings["max_model_len"],
            batches_in_flight=1 if settings.get("disable_overlap_schedule") else 2,
            prefix_caching=not settings.get("disable_radix_cache"),
            conservativeness=settings.get("schedule_conservativeness", 1.0),
        )  # fmt: skip

    return made
