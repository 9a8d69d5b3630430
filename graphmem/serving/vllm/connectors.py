"""Connectors of the scheduler, which bring keys and values from elsewhere: from the host, or from an engine that only
prefills. What they bring arrives between steps; meanwhile a request holds its blocks and computes nothing.

Followed from vllm 0.32.0: ``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` with
``v1/kv_offload/cpu/manager.py`` and its policy LRU; ``.../v1/nixl/pull_scheduler.py``. Blocks of prompts alone are kept
on the host (``offload_prompt_only``); a store is over with the step behind its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from graphmem.errors import UsageError
from graphmem.serving.vllm.kv_cache import Layout
from graphmem.serving.vllm.layers import cdiv

if TYPE_CHECKING:
    from graphmem.serving.vllm.scheduler import State

#: Bytes that a block's place on the host is rounded up to (``mmap.PAGESIZE``).
_PAGE = 4096


def connector_for(role: str, layout: Layout, host_bytes: int, ranks: int) -> Connector:
    """That of an engine that only does ``prefill`` or ``decode``; else of one that keeps the blocks of so many ranks on
    the host. Raises :class:`UsageError` for a role of a model with several groups of layers."""
    is_plain = [group.spec.window for group in layout.groups] == [None]
    if role and not is_plain:
        raise UsageError("--disaggregated is followed for models with one group of layers, all with full attention")
    if role:
        return (Sender if role == "prefill" else Receiver)(host_bytes > 0)
    blocks = host_bytes // (cdiv(layout.block_bytes * ranks, _PAGE) * _PAGE)
    return Host(blocks, layout.block_size) if blocks and is_plain else Connector()


class Connector:
    """None: nothing is brought, and nothing sent."""

    #: Whether a finished request holds its blocks until they have been sent.
    sends = False
    #: What is asked for and not followed, as the scheduler's rules end.
    leaves_out = ""

    @property
    def is_idle(self) -> bool:
        """True if steps that are alike change nothing here."""
        return True

    def matched(self, request: State, start: int) -> int | None:
        """Tokens that can be brought behind the first ``start``; None where that cannot be said yet."""
        return 0

    def load(self, request: State, start: int, tokens: int) -> None:
        """So many are being brought from now on."""

    def loaded(self, request: State) -> None:
        """They have arrived."""

    def scheduled(self, requests: Sequence[State], finished: Sequence[State]) -> None:
        """A step computes for these, and those have finished since the one before."""

    def returned(self) -> None:
        """The oldest step has come back."""


class _OfOneRole(Connector):
    """Of an engine that only prefills, or only decodes; it has no further one for the host."""

    def __init__(self, has_host: bool = False) -> None:
        if has_host:
            self.leaves_out = "; engines of one role keep nothing on the host (--kv-offloading-size)"


class Sender(_OfOneRole):
    """Of an engine that prefills."""

    sends = True


class Receiver(_OfOneRole):
    """Of one that decodes: it gets all of a prompt, once; after a preemption it computes it itself."""

    def matched(self, request: State, start: int) -> int | None:
        return 0 if request.preempted else max(0, request.prompt - start)


class Host(Connector):
    """Blocks of prompts on the host, as many as have room: whoever was used longest ago makes room."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._free, self._size = blocks, block_size
        self._uses: OrderedDict[Hashable, int] = OrderedDict()  #: loads under way; -1 while it is being stored
        self._idle = 0
        self._loading: dict[int, list[Hashable]] = {}
        self._under_way: set[Hashable] = set()
        self._stores: deque[list[tuple[State, list[Hashable]]]] = deque([[]])
        self._is_full = False

    @property
    def is_idle(self) -> bool:
        return not self._is_full and not any(self._stores)

    def matched(self, request: State, start: int) -> int | None:
        if request.transfers:
            return None
        found = []
        for key in request.keys[start // self._size :]:
            if key not in self._uses:
                break
            found.append(key)
        if any(self._uses[key] < 0 or key in self._under_way for key in found):
            return None
        return len(found) * self._size

    def load(self, request: State, start: int, tokens: int) -> None:
        request.stored = (start + tokens) // self._size
        blocks = range(start // self._size, request.stored)
        keys = [request.keys[block] for block in blocks]
        for key in keys:
            self._idle -= not self._uses[key]
            self._uses[key] += 1
        request.transfers += 1
        request.seen.update(blocks)
        self._loading[id(request)] = keys
        self._under_way.update(keys)

    def loaded(self, request: State) -> None:
        keys = self._loading.pop(id(request))
        for key in keys:
            self._uses[key] -= 1
            self._idle += not self._uses[key]
        self._under_way.difference_update(keys)
        request.transfers -= 1

    def scheduled(self, requests: Sequence[State], finished: Sequence[State]) -> None:
        self._stores.append([])
        self._is_full = False
        for request in (*requests, *finished):
            most = min(request.computed, request.prompt) // self._size
            if most > request.stored:
                if self._store(request, range(request.stored, most)):
                    request.stored = most
                else:
                    self._is_full = True
        for request in finished:  # the last of its blocks make room first
            for block in sorted(request.seen, reverse=True):
                if request.keys[block] in self._uses:
                    self._uses.move_to_end(request.keys[block])

    def _store(self, request: State, blocks: range) -> bool:
        """Store what is not there yet; False where there is no room (``prepare_store``)."""
        keys = [request.keys[block] for block in blocks]
        new = [key for key in keys if key not in self._uses]
        request.seen.update(block for block, key in zip(blocks, keys, strict=True) if self._uses.get(key, 0) >= 0)
        missing = len(new) - self._free
        if missing > 0 and not self._make_room(missing, set(keys)):
            return False
        if new:
            self._free -= len(new)
            self._uses.update(dict.fromkeys(new, -1))
            request.transfers += 1
            self._stores[-1].append((request, new))
        return True

    def _make_room(self, blocks: int, protected: set[Hashable]) -> bool:
        if blocks > self._idle:
            return False
        chosen = []
        for key, uses in self._uses.items():
            if not uses and key not in protected:
                chosen.append(key)
                if len(chosen) == blocks:
                    break
        else:
            return False
        for key in chosen:
            del self._uses[key]
        self._idle -= blocks
        self._free += blocks
        return True

    def returned(self) -> None:
        for request, keys in self._stores.popleft():
            request.transfers -= 1
            for key in keys:
                self._uses[key] = 0
            self._idle += len(keys)
