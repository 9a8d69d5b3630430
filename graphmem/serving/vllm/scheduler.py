"""vLLM's scheduler, step by step: which requests compute how many tokens, who takes blocks, who is preempted.

Followed from vllm 0.32.0, ``v1/core/sched/{scheduler,async_scheduler}.py``, ``v1/core/kv_cache_manager.py`` and
``v1/core/block_pool.py``: first come, first served; chunked prefill; preemption by recomputing; prefix caching, of what
requests say that they share and of what they had before a preemption, but not for models with several groups of layers.
What a connector brings (``connectors.py``) holds blocks until it has arrived. Not followed: priorities, speculative
decoding, encoders. Tokens are counted, never made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from functools import lru_cache

from graphmem.serving.base import Batch, Request
from graphmem.serving.vllm.block_pool import BlockPool, Cached
from graphmem.serving.vllm.connectors import Connector
from graphmem.serving.vllm.kv_cache import Layout
from graphmem.serving.vllm.layers import cdiv


class State:
    """A request in the engine. Counts are tokens, but for blocks."""

    __slots__ = (
        "arrived", "blocks", "cached", "computed", "finished", "generated", "in_flight", "keys", "last", "loading",
        "number", "output", "placeholders", "preempted", "prompt", "removed", "room", "running", "seen", "shared",
        "shares", "stale", "stored", "tokens", "transfers",
    )  # fmt: skip

    def __init__(self, number: int, request: Request, groups: int) -> None:
        self.number = number
        self.prompt, self.output = request.prompt, request.output
        self.tokens = request.prompt  #: known ones: the prompt and what was generated
        self.generated = self.computed = 0
        self.placeholders = 0  #: sampled in steps that have not come back
        self.in_flight = self.stale = 0
        self.blocks = self.cached = 0  #: held; of these, those found again by their hash
        self.shares = request.shared
        self.shared: list[Cached] = []  #: the first of them, which others may hold too
        self.removed = [0] * groups  #: blocks of a window's group that were given back
        self.room = 0  #: tokens that its blocks hold; 0 where a look is needed at each step
        self.last = 0  #: computed tokens from which its end is near
        self.running = self.finished = self.preempted = False
        self.loading = self.arrived = False  #: keys and values that a connector brings
        self.keys: Sequence[Hashable] = ()  #: the connector's
        self.seen: set[int] = set()
        self.stored = self.transfers = 0


#: Steps that are not worth making at once, where they are fewer.
_FEWEST_ALIKE = 4


@lru_cache(maxsize=256)
def _keys(shared: tuple[tuple[str, int], ...], size: int) -> tuple[tuple[str, int], ...]:
    """What the blocks are found by that lie in what a prompt shares with others (:class:`Request`)."""
    blocks = range(shared[-1][1] // size if shared else 0)
    ends = iter(shared)
    name, end = next(ends, ("", 0))
    keys = []
    for block in blocks:
        while end < (block + 1) * size:
            name, end = next(ends)
        keys.append((name, block))
    return tuple(keys)


class Scheduler:
    """See :class:`graphmem.serving.base.Scheduler`."""

    rules = (
        "the scheduler is vLLM 0.32's, whatever the version: first come, first served; prompts are alike where the "
        "load says so, answers never"
    )

    def __init__(
        self, layout: Layout, blocks: int, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
        batches_in_flight: int = 2, prefix_caching: bool = True, connector: Connector | None = None,
    ) -> None:  # fmt: skip
        self._layout = layout
        self._block_size = layout.block_size
        self._specs = tuple(group.spec for group in layout.groups)
        self._plain = tuple(spec.window for spec in self._specs) == (None,)
        self._most_requests, self._most_tokens = max_num_seqs, max_num_batched_tokens
        self._longest = max_model_len
        self.batches_in_flight = batches_in_flight
        self._asynchronous = batches_in_flight > 1
        self._caching = prefix_caching and self._plain
        self.blocks = max(0, blocks - 1)  #: one is the null block
        self._pool = BlockPool(self.blocks)
        self._running: list[State] = []
        self._waiting: deque[State] = deque()
        self._connector = connector or Connector()
        self._connects = type(self._connector) is not Connector
        self._loading: deque[State] = deque()  #: requests that wait and hold blocks (``kv_holding_waiting``)
        self._is_blocked = False  #: whether who waits first has no room
        self._prefilling: set[State] = set()  #: whose blocks are reserved before others' that load
        self._ended: list[State] = []
        self._sending: dict[int, State] = {}
        self._transfers: list[tuple[int, int]] = []
        self.lost_tokens = self.asked_tokens = self.found_tokens = self.loaded_tokens = 0
        self.rules += self._connector.leaves_out
        if not self._plain:
            self.rules += "; with several groups of layers the prefix cache is not followed, which would help"

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.blocks - self._pool.free

    @property
    def running(self) -> int:
        """Requests that are in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that are not, preempted ones among them."""
        return len(self._waiting) + len(self._loading)

    def fits(self, request: Request) -> bool:
        """True if the request could ever run alone."""
        last = min(request.prompt + request.output, self._longest)
        return 0 < request.prompt < self._longest and self._admission(last) <= self.blocks

    def add(self, number: int, request: Request) -> None:
        """A request arrives; ``number`` names it from now on."""
        state = State(number, request, len(self._specs))
        state.last = min(state.prompt + state.output, self._longest) - 2
        if self._connects and self._caching:
            own = range(state.prompt // self._block_size)
            shared = _keys(state.shares, self._block_size)
            state.keys = (*shared, *((number, block) for block in own[len(shared) :]))
        self._waiting.append(state)

    def transfers(self) -> list[tuple[int, int]]:
        """What has begun to be brought or sent since this was asked last: (request, tokens)."""
        begun, self._transfers = self._transfers, []
        return begun

    def transferred(self, number: int) -> None:
        """What was brought or sent has arrived."""
        if (sent := self._sending.pop(number, None)) is not None:
            self._give_back(sent)
            return
        state = next(one for one in self._loading if one.number == number)
        state.arrived = True
        self._connector.loaded(state)

    def schedule(self) -> Batch:
        """The next step's batch (``Scheduler.schedule``)."""
        batch = Batch(self._most_tokens, [], [], [])  # total is what is left until the end
        running, size, entries, asynchronous = self._running, self._block_size, batch.entries, self._asynchronous
        index = 0
        while index < len(running) and batch.total > 0:
            state = running[index]
            index += 1
            after = state.computed + 1
            if after < state.room and after < state.last and after == state.tokens + state.placeholders:
                # One more token, where there is room: what most are, most of the time (see ``_choose``).
                state.computed = after
                state.in_flight += 1
                state.placeholders += asynchronous
                batch.total -= 1
                batch.context += after
                batch.pairs += after
                entries.append((state, 1, True))
                continue
            tokens = self._next_tokens(state, batch.total)
            if not tokens:
                continue
            if not self._make_room(state, tokens, batch.preempted):
                break
            state.room = state.blocks * size if self._plain else 0
            self._choose(batch, state, tokens)
        if not batch.preempted:
            self._admit(batch)
        batch.total = self._most_tokens - batch.total
        if self._connects:
            self._connector.scheduled([entry[0] for entry in batch.entries], self._ended)
        self._ended = []
        return batch

    def alike(self, last: Batch) -> int:
        """How many steps will each compute one token more of the requests of the last one, and nothing else happens."""
        running = self._running
        if not self._plain or not len(last.entries) == last.total == len(running) > 0:
            return 0
        may_begin = len(running) < self._most_requests and (self._loading or (self._waiting and not self._is_blocked))
        if may_begin or (self._connects and (self._waiting or self._loading or not self._connector.is_idle)):
            return 0
        steps = self._longest
        for state, _, _ in last.entries:
            if not (state.running and state.generated and state.computed + 1 == state.tokens + state.placeholders):
                return 0
            steps = min(steps, state.last - 1 - state.computed)
            if steps < _FEWEST_ALIKE:
                return 0
        while steps > 0 and self._new_blocks(steps) > self._pool.free:
            steps //= 2
        return max(0, steps)

    def _new_blocks(self, steps: int) -> int:
        size = self._block_size
        return sum(max(0, cdiv(state.computed + steps, size) - state.blocks) for state in self._running)

    def repeat(self, steps: int) -> None:
        """So many steps that are alike are asked for, and as many come back."""
        self._pool.take(self._new_blocks(steps))
        for state in self._running:
            state.computed += steps
            state.tokens += steps
            state.generated += steps
            state.blocks = max(state.blocks, cdiv(state.computed, self._block_size))
            state.room = state.blocks * self._block_size
            self._cache(state, state.computed - state.placeholders)

    def _choose(self, batch: Batch, state: State, tokens: int) -> None:
        """Add tokens of a request to the batch; they count as computed from now on (``_update_after_schedule``)."""
        batch.total -= tokens
        state.computed += tokens
        state.in_flight += tokens
        batch.context += state.computed
        batch.pairs += tokens * state.computed - tokens * (tokens - 1) // 2
        sampled = state.computed >= state.tokens + state.placeholders
        if sampled and self._asynchronous:
            state.placeholders += 1
        if self._connects:
            (self._prefilling.discard if sampled else self._prefilling.add)(state)
        batch.entries.append((state, tokens, sampled))

    def _next_tokens(self, state: State, budget: int) -> int:
        if state.placeholders and state.computed + 2 - state.placeholders >= state.prompt + state.output:
            return 0  # its last token is under way
        left = state.tokens + state.placeholders - state.computed
        return min(left, budget, self._longest - state.computed - 1)

    def _make_room(self, state: State, tokens: int, preempted: list[int]) -> bool:
        """Slots for a running request: whoever came last makes room. False where that is the request itself."""
        while not self._allocate(state, state.computed + tokens):
            victim = self._running[-1]
            if self._connects and victim.in_flight:  # ``_request_blocks_can_be_freed``
                return False
            self._running.pop()
            self._preempt(victim)
            preempted.append(victim.number)
            if victim is state:
                return False
        return True

    def _allocate(self, state: State, tokens: int) -> bool:
        """``KVCacheManager.allocate_slots`` for so many tokens in all."""
        needed = cdiv(tokens, self._block_size) if self._plain else self._windowed(state, tokens)
        missing = needed - state.blocks
        if missing > 0:
            if missing > self._pool.free:
                return False
            self._pool.take(missing)
            state.blocks = needed
        self._cache(state, min(tokens, state.tokens))
        return True

    def _windowed(self, state: State, tokens: int) -> int:
        """Blocks of all groups; those before a window are given back first, as far as steps have come back."""
        needed = 0
        for number, spec in enumerate(self._specs):
            size, held = self._block_size * spec.times, state.removed[number]
            skipped = spec.unread(max(0, state.computed - state.in_flight)) // size
            if skipped > held and state.blocks:
                state.removed[number] = skipped
                state.blocks -= skipped - held
                self._pool.give_back(skipped - held, 0, ())
            needed += cdiv(tokens, size) - state.removed[number]
        return needed

    def _cache(self, state: State, tokens: int) -> None:
        blocks = tokens // self._block_size
        if self._caching and blocks > state.cached:
            if state.shares and state.cached < state.shares[-1][1] // self._block_size:
                keys = _keys(state.shares, self._block_size)[state.cached : blocks]
                state.shared += [self._pool.publish(key, holders=1) for key in keys]
            state.cached = blocks

    def _preempt(self, state: State) -> None:
        """``_preempt_request``: all blocks are given back, and everything is computed again."""
        state.running, state.preempted = False, True
        self._prefilling.discard(state)
        self.lost_tokens += state.computed
        self._give_back(state, state.number)
        state.computed = state.placeholders = 0
        state.stale = state.in_flight
        self._waiting.appendleft(state)

    def _give_back(self, state: State, owner: int | None = None) -> None:
        cached = min(state.cached, state.blocks)
        self._pool.give_back(state.blocks - cached, cached - len(state.shared), state.shared, owner)
        state.blocks = state.cached = state.room = 0
        state.shared = []
        state.removed = [0] * len(self._specs)

    def _admit(self, batch: Batch) -> None:
        """Requests that wait, in their order, while all that they have fits (``scheduler_reserve_full_isl``); those
        that hold blocks already come first."""
        skipped: list[State] = []
        loading: list[State] = []
        self._is_blocked = False
        room = self._most_requests - len(self._running)
        while batch.total > 0 and (queue := self._loading or self._waiting) and len(batch.admitted) < room:
            state = queue[0]
            if state.stale or (state.loading and not state.arrived):
                (loading if state.loading else skipped).append(queue.popleft())
                continue
            if state.loading:
                self._arrive(state)
            shared, own, brought = ([], 0, 0) if state.blocks else self._found(state)
            if brought is None:  # not known yet
                skipped.append(queue.popleft())
                continue
            held = state.blocks + sum(one.holders > 0 for one in shared)  # by others, so that they take no room
            if self._admission(min(state.tokens, self._longest)) - held > self._pool.free:
                self._is_blocked = not skipped
                break
            start = state.computed if state.blocks else (len(shared) + own) * self._block_size
            if brought:
                if not self._load(state, shared, own, brought, held):
                    break
                loading.append(queue.popleft())
                continue
            tokens = min(state.tokens - start, batch.total)
            if self._first_blocks(start + tokens) - held > self._pool.free:
                break
            if not state.blocks:
                self._begin(state, shared, own)
            self._allocate(state, start + tokens)
            state.room = state.blocks * self._block_size if self._plain else 0
            queue.popleft()
            state.running = True
            self._running.append(state)
            batch.admitted.append(state.number)
            self._choose(batch, state, tokens)
        self._waiting.extendleft(reversed(skipped))
        self._loading.extendleft(reversed(loading))

    def _load(self, state: State, shared: list[Cached], own: int, brought: int, held: int) -> bool:
        """The request takes blocks for what is brought to it; False where those that are still in their prompts need
        them (``_inflight_prefill_reserved_blocks``)."""
        start = (len(shared) + own) * self._block_size
        needed = cdiv(start + brought, self._block_size)
        reserved = sum(cdiv(min(one.tokens, self._longest), self._block_size) - one.blocks for one in self._prefilling)
        if needed - held > self._pool.free - reserved:
            return False
        if not state.preempted:
            self.loaded_tokens += brought
        self._begin(state, shared, own)
        self._pool.take(needed - state.blocks)
        state.blocks, state.computed = needed, start + brought
        state.loading = True
        self._prefilling.add(state)
        self._transfers.append((state.number, brought))
        self._connector.load(state, start, brought)
        return True

    def _arrive(self, state: State) -> None:
        """What was brought counts as computed, but for a prompt's last token (``_update_waiting_for_remote_kv``)."""
        self._cache(state, state.computed)
        state.computed = min(state.computed, state.tokens - 1)
        state.loading = state.arrived = False

    def _found(self, state: State) -> tuple[list[Cached], int, int | None]:
        """What a request need not compute: (blocks that it shares, how many of its own, tokens behind them that the
        connector can bring). Its last token is always computed (``get_computed_blocks``)."""
        if not self._caching:
            return [], 0, self._connector.matched(state, 0)
        most = (state.tokens - 1) // self._block_size
        keys = _keys(state.shares, self._block_size)
        shared = self._pool.found(keys[:most])
        own = min(self._pool.kept(state.number), most - len(shared)) if len(shared) == len(keys) else 0
        found = (len(shared) + own) * self._block_size
        return shared, own, self._connector.matched(state, found)

    def _begin(self, state: State, shared: list[Cached], own: int) -> None:
        """The request holds what was found."""
        start = (len(shared) + own) * self._block_size
        if state.preempted:
            self.lost_tokens -= start
        else:
            self.asked_tokens += state.tokens
            self.found_tokens += start
        self._pool.hold(shared)
        self._pool.take_back(state.number, own)
        state.shared = shared
        state.blocks = state.cached = len(shared) + own
        state.computed = start

    def _first_blocks(self, tokens: int) -> int:
        return sum(cdiv(tokens, self._block_size * spec.times) for spec in self._specs)

    def _admission(self, tokens: int) -> int:
        """Blocks that a request is admitted by (``max_admission_blocks_per_request``)."""
        return sum(
            min(cdiv(tokens, self._block_size * spec.times), self._layout.group_blocks(spec, self._longest))
            for spec in self._specs
        )

    def update(self, batch: Batch) -> list[int]:
        """A batch comes back: a token for each request that is no longer in its prompt. Those that are finished
        (``update_from_output``)."""
        self._connector.returned()
        finished: list[int] = []
        size, asynchronous = self._block_size, self._asynchronous
        for state, tokens, sampled in batch.entries:
            state.in_flight -= tokens
            if sampled and state.running and state.generated and state.computed < state.last:
                state.tokens += 1  # not its first token, nor near its last: what most are (see ``_token``)
                state.generated += 1
                if asynchronous:
                    state.placeholders -= 1
                    if not (state.computed - state.placeholders) % size:
                        self._cache(state, state.computed - state.placeholders)
                continue
            if state.finished:
                continue
            stale = state.stale > 0
            if stale:
                state.stale -= tokens
            if sampled:
                self._token(state, stale)
                if state.generated == 1:
                    batch.begun.append(state.number)
                if state.finished:
                    finished.append(state.number)
        if finished:
            self._is_blocked = False
            running = [state for state in self._running if not state.finished]
            if len(self._running) - len(running) < len(finished):  # one that was preempted: few are, and many may wait
                self._waiting = deque(state for state in self._waiting if not state.finished)
            self._running = running
        return finished

    def _token(self, state: State, stale: bool) -> None:
        state.tokens += 1
        state.generated += 1
        if self._asynchronous:
            if not stale:
                state.placeholders -= 1
            if state.running and not (state.computed - state.placeholders) % self._block_size:
                self._cache(state, state.computed - state.placeholders)
        if state.generated >= state.output or state.tokens >= self._longest:
            state.finished = True
            self._ended.append(state)
            if state.running and self._connector.sends:
                self._sending[state.number] = state
                self._transfers.append((state.number, state.prompt))
            elif state.running:
                self._give_back(state)
            else:
                self._pool.take_back(state.number, 0)
