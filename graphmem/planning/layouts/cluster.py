"""The question of a plan: the cards, and the batch of one optimizer step."""

from __future__ import annotations

import re
from dataclasses import dataclass

from graphmem.devices import Device, device_named
from graphmem.errors import UsageError
from graphmem.training.processes import Processes

_COUNT = r"[1-9][0-9]{0,5}"
#: K and M are binary here, as those who count in powers of two mean them: 1M tokens are 128 sequences of 8192.
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Cluster:
    """``count`` equal cards, ``on_node`` of them in each machine."""

    card: Device
    count: int
    on_node: int

    @property
    def nodes(self) -> int:
        """How many machines there are."""
        return self.count // self.on_node

    def describe(self) -> str:
        """``16 x H100-80GB in 2 machines``."""
        machines = f" in {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.count} x {self.card.name}{machines}"


def cluster_of(gpus: str, nodes: int | None = None, card: Device | None = None) -> Cluster:
    """``16xH100-80GB`` in ``nodes`` machines; None: of 8 cards each where more cards fill such machines, else one.
    ``card``: with what was said of it beside its name. Raises :class:`UsageError`."""
    match = re.fullmatch(rf"({_COUNT})\s*[xX*]\s*(.+)", str(gpus).strip())
    if match is None:
        raise UsageError(f"cannot read the cards {gpus!r}; write how many and which: 16xH100-80GB")
    count = int(match[1])
    named = card or device_named(match[2])
    if nodes is not None and (type(nodes) is not int or nodes < 1 or count % nodes):
        raise UsageError(f"{count} cards cannot be divided among {nodes!r} machines of equal size")
    each = None if nodes is None else count // nodes
    return Cluster(named, count, Processes(count, 0, each).on_node)


def half_of(card: Device) -> str:
    """The half type that this card computes in: bf16, where it has it."""
    return "bf16" if card.limits.bfloat16 else "fp16"


def sequences_of(global_batch: str | int, seq_len: int | None) -> int:
    """Rows of the batch of one optimizer step, over all cards: a number of them, or of ``tokens`` (``1M-tokens``).
    Raises :class:`UsageError`."""
    if type(global_batch) is int and global_batch >= 1:
        return global_batch
    match = re.fullmatch(r"([0-9]{1,13}(?:\.[0-9]{1,6})?)\s*([kmg]?)(?:[- ]?(tokens?|sequences?|seqs?))?",
                         str(global_batch).strip().lower())  # fmt: skip
    if match is None or (match[2] and match[3] is None):
        raise UsageError(f"cannot read the global batch {global_batch!r}; write 1M-tokens, or 128 (sequences)")
    wanted = float(match[1]) * _FACTORS[match[2]]
    if not (match[3] or "").startswith("token"):
        if wanted != int(wanted) or wanted < 1:
            raise UsageError(f"a global batch of {global_batch} is no whole number of sequences")
        return int(wanted)
    if seq_len is None:
        raise UsageError("a global batch in tokens needs the length of a sequence: --seq-len")
    if wanted < seq_len:
        raise UsageError(f"a global batch of {global_batch} is less than one sequence of {seq_len:,} tokens")
    if wanted % seq_len:
        near = max(1, round(wanted / seq_len))
        raise UsageError(
            f"a global batch of {global_batch} ({wanted:,.0f} tokens; K and M are binary) is no whole number of "
            f"sequences of {seq_len:,}: write --global-batch {near} (sequences)"
        )
    return int(wanted) // seq_len
