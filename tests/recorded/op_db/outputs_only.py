"""Find out which operators take nothing but their outputs: ``python -m tests.recorded outputs_only record``.

Runs recorded cases on a CUDA build once more, under a mode that looks at the allocator's counters around every
operator: what was allocated meanwhile has to be the storages of its outputs, in number and in bytes. Then the operator
is called again with its inputs laid out otherwise (:data:`LAYOUTS`): a kernel may copy what is not contiguous. Writes
``graphmem/capture/kernels/parts/outputs_only.json``: by operator how many calls of each kind of recording proved it,
the bytes of the largest of these calls (inputs and outputs), and the layouts in which it takes no more either; and the
operators that were seen to take more.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.recorded import functions, loops
from tests.recorded.device import warm_up
from tests.recorded.op_db import runner
from tests.recorded.op_db.entries import entries
from tests.recorded.op_db.proven import read, write
from tests.recorded.op_db.record import recordings
from tests.recorded.record import launch_no_triton
from tests.recorded.sharded import PROGRAMS, ShardedProgram


def _permuted(tensor: torch.Tensor) -> torch.Tensor:
    """Dense, its last two dimensions the other way round in memory."""
    return torch.empty_like(tensor.mT, memory_format=torch.contiguous_format).mT if tensor.dim() > 1 else tensor


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = formats.get(tensor.dim())
    return tensor if found is None else torch.empty_like(tensor, memory_format=found)


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    """Every other element of rows that are twice as long."""
    if not tensor.dim():
        return tensor
    return tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2]


#: How inputs are laid out once more, as :func:`graphmem.capture.kernels.parts.known.layout_of` names it.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels_last": _channels_last,
    "permuted": _permuted,
    "sliced": _sliced,
}
#: Calls of an operator that are tried in another layout.
_TRIED = 3


class Watch(TorchDispatchMode):
    """Compares what every operator allocates with the storages of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = ""
        self.case = ""
        self.proofs: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.largest: collections.Counter[str] = collections.Counter()
        self.taking: dict[str, str] = {}
        self.tried: collections.Counter[tuple[str, str]] = collections.Counter()
        self.laid_out: dict[str, dict[str, bool]] = collections.defaultdict(dict)  # operator -> layout -> no more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # the operators on its parts come here
        before = _allocated()
        out = func(*args, **(kwargs or {}))
        after = _allocated()
        given, made = _storages((args, kwargs)), _storages(out)
        new = {key: size for key, size in made.items() if key not in given and size}
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs, out)))
        if is_fake or (not given and not made):  # DTensor asks what shapes would be
            return out
        name = str(func)
        if (after[0] - before[0], after[1] - before[1]) == (len(new), sum(new.values())):
            self.proofs[name][self.kind] += 1
            self.largest[name] = max(self.largest[name], sum(given.values()) + sum(new.values()))
            if name.startswith("aten."):
                self._lay_out(func, args, kwargs or {})
        else:
            self.taking.setdefault(name, f"{self.kind}: {self.case}")
        return out

    def _lay_out(self, func: Any, args: Any, kwargs: Any) -> None:
        """Call it once more in every layout that its inputs can have and that was tried too rarely."""
        name = str(func)
        found = self.laid_out[name]
        for layout, lay in LAYOUTS.items():
            if self.tried[name, layout] >= _TRIED:
                continue
            changed = [False]
            other = tree_map(functools.partial(_laid, lay, changed), (args, kwargs))
            if not changed[0]:
                continue
            self.tried[name, layout] += 1
            with contextlib.suppress(Exception):
                before = _allocated()
                out = func(*other[0], **other[1])
                after = _allocated()
                made, given = _storages(out), _storages(other)
                new = [size for key, size in made.items() if key not in given and size]
                is_no_more = (after[0] - before[0], after[1] - before[1]) == (len(new), sum(new))
                found[layout] = found.get(layout, True) and is_no_more
                del out, made


def _laid(lay: Callable[[torch.Tensor], torch.Tensor], changed: list[bool], leaf: Any) -> Any:
    """A tensor of the card as ``lay`` lays it out, of values that nobody knows; other leaves as they are."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda or leaf.layout is not torch.strided:
        return leaf
    made = lay(leaf)
    if made is leaf or made.is_contiguous():
        return leaf
    changed[0] = True
    return made


def _allocated() -> tuple[int, int]:
    """Allocations so far, and the bytes that they asked for."""
    stats = torch._C._cuda_memoryStats(0)
    return stats["allocation"]["all"]["allocated"], stats["requested_bytes"]["all"]["allocated"]


def _storages(values: Any) -> dict[int, int]:
    """Address and bytes of every device storage under ``values``."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
    strided = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage.data_ptr() or -storage._cdata: storage.nbytes() for storage in strided}


def record(parts: Sequence[str]) -> None:
    """Watch every recorded case of a few kinds and write the list; or add what the cases show whose kind and name,
    such as ``op_db/add/float32/small/0``, contain one of ``parts``."""
    launch_no_triton()
    warm_up()
    warm_up()
    gc.collect()
    gc.freeze()
    watch = Watch()
    for watch.kind, watch.case, run in _cases():
        if parts and not any(part in f"{watch.kind}/{watch.case}" for part in parts):
            continue
        with warnings.catch_warnings(), contextlib.suppress(Exception), watch:
            warnings.simplefilter("ignore")
            run()
    write(_document(watch, read() if parts else {}))


def _cases() -> Iterator[tuple[str, str, Callable[[], None]]]:
    for call, document in recordings().items():
        if "changes" in document:
            entry = entries()[call.split("/", 1)[0]]
            yield "op_db", call, functools.partial(runner.run, entry.op, document["sample"], _nothing)
            if entry.inplace_variant:
                in_place = functools.partial(_in_place, entry.inplace_variant)
                yield "in_place", call, functools.partial(runner.run, in_place, document["sample"], _nothing)
    for kind in (functions, loops):
        recorded = kind.recordings()
        for name, case in kind.CASES.items():
            if "changes" in recorded.get(name, {}):
                yield kind.__name__.rpartition(".")[2], name, functools.partial(kind.run, case, _nothing)

    for name in _SHARDED:
        yield "sharded", name, functools.partial(_as_one_of_several, PROGRAMS[name])


#: Programs of :mod:`tests.recorded.sharded` that together call every operator of several processes.
_SHARDED = (
    "f2_base", "f2_clip", "f2_hsdp", "f1_full", "tp_plain", "tp_sp", "tp_loss", "tp_2d", "cp_allgather",
    "option_ep", "option_pp_1f1b",
)  # fmt: skip


def _as_one_of_several(program: ShardedProgram) -> None:
    try:
        program.run()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _in_place(variant: Callable[..., Any], first: torch.Tensor, *others: Any, **named: Any) -> Any:
    return variant(first.detach(), *others, **named)  # a leaf that wants a gradient cannot be written


def _nothing() -> None:
    """Where a recording would begin and end."""


def _document(watch: Watch, before: dict[str, Any]) -> dict[str, Any]:
    """What was seen, added to what was known ``before``: the larger count of a kind, and the older case."""
    taking = watch.taking | before.get("taking", {})
    proven: dict[str, dict[str, int]] = {}
    seen = {name: {**proofs, "bytes": watch.largest[name]} for name, proofs in watch.proofs.items()}
    for proofs_by_name in (before.get("proven", {}), seen):
        for name, proofs in proofs_by_name.items():
            if name not in taking:
                known = proven.setdefault(name, {})
                known.update({what: max(count, known.get(what, 0)) for what, count in proofs.items()})
    return {"torch": torch.__version__, "proven": proven, "layouts": _layouts(watch, before, proven), "taking": taking}


def _layouts(watch: Watch, before: dict[str, Any], proven: Container[str]) -> dict[str, list[str]]:
    """The layouts in which an operator that is proven takes no more."""
    layouts: dict[str, list[str]] = dict(before.get("layouts", {}))
    for name, found in watch.laid_out.items():
        taken = {layout for layout, is_no_more in found.items() if not is_no_more}
        known = ({*layouts.get(name, ())} | {*found}) - taken
        # Who copies only what is in another order than its format's copies a matrix that is transposed, too.
        more = {"channels_last"} - taken if "permuted" in known else set()
        layouts[name] = sorted(known | more)
    return {name: found for name, found in layouts.items() if found and name in proven}
