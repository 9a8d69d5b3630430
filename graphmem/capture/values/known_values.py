"""Values that a program knows before it runs on a card: host tensors, and what follows from them on the device.

Host tensors are real: within a budget their values are kept here, beside the fake tensor, and every operator on the
host is computed with PyTorch's own kernels and the program's own random numbers. What is large, and what a parameter
holds, has a shape only. A small integer or boolean tensor on the device keeps the values that it came with through
the operators that follow. So what the program reads back (a batch's lengths, ``attention_mask.all()``, the size of
``nonzero()``) is what a card would answer.

Values belong to storages: views share them, and writing into a view changes them for all. Random integers on the
device are a possible draw; whatever a model computes stays unknown.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphmem.capture.torch_internals import FakeTensor, OpOverload, disable_current_modes, unset_fake_temporarily
from graphmem.capture.values import callers, generators
from graphmem.capture.values.host_operators import (
    FAILURES,
    LOOK_UPS,
    RESIZING,
    HostCall,
    has_real,
    host_operator,
    on_host,
)
from graphmem.capture.values.mirrors import LEAST, Budget, Deferred, Geometry, Mirrors
from graphmem.capture.values.tensors import NOWHERE, tensors_in
from graphmem.capture.values.uniform_numbers import Mark, Number
from graphmem.units import MIB

_aten = torch.ops.aten
#: Bound before a library puts its own there (``deepspeed.zero.Init``).
_full, _ones = torch.full, torch.ones

#: Largest tensors on the device whose values are followed, in elements. Integers and booleans decide what a program
#: does (masks of a batch of 512 sequences of 8,192 tokens fit); floats seldom do, and cost time.
INTEGER_LIMIT, FLOAT_LIMIT = 1 << 22, 1 << 12
#: Operators that write numbers at some places of a tensor.
_MARKING = {
    _aten.scatter_.value, _aten.index_put_.default, _aten.index_fill_.int_Scalar, _aten.masked_fill_.Scalar,
}  # fmt: skip
#: Operators that make a mask in floats of tensors that hold one number, or of none.
_MAKING_MASKS = {
    _aten.eye.default, _aten.eye.m, _aten.tril.default, _aten.triu.default, _aten.diag_embed.default,
    _aten.block_diag.default, _aten.scatter.value, _aten.index_fill.int_Scalar, _aten.masked_fill.Scalar,
}  # fmt: skip
_TO_COPY = _aten._to_copy.default
#: Most floats are no masks, as their first elements show.
_GLANCE = 256
#: Parameters with so few elements are configuration (a temperature, a scale), and keep their values.
_SMALL_PARAMETER = 1

#: Random numbers that are drawn though nobody reads them, because nobody could count them: one or two seconds.
_MOST_ASIDE = 1 << 26


#: Random numbers of the host, which are the program's, and of the card: integers may stand for data.
_HOST, INTEGERS, FLOATS = 1, 2, 3
#: What real tensors of random numbers are known by.
_DRAWN = "_graphmem_drawn"


class KnownValues:
    """The values of one capture's tensors, by storage."""

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self._book = Mirrors(self.budget)
        self._current = self._book.current
        self.numbers = self._book.numbers
        self.guessed_draws = 0  # host operators whose random numbers could not be counted
        self.host_draws_read = 0  # how often a number or a size was read that comes from random ones of the host
        self._has_drawn = False  # whether anything was drawn
        self._has_masks = False  # whether there are large tensors of floats whose values are known
        self._aside = 0
        self._stale: dict[int, Any] = {}  # real tensors that hold other values than the program's
        with unset_fake_temporarily():
            self._draws = torch.Generator().manual_seed(0)

    @property
    def exceeded(self) -> int:
        """How many host tensors found no room in the budget."""
        return self._book.exceeded

    # --- asking -------------------------------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's values as a host tensor of its shape and strides, which shares memory with what is kept here;
        None where they are not known."""
        if tensor.layout is not torch.strided:
            return None
        if not isinstance(tensor, FakeTensor):
            return tensor if self._is_true(tensor) and tensor.nbytes <= self.budget.one else None
        mirror = self._current(tensor)
        if mirror is None or not mirror.is_known:
            return None
        data = self._book.read(mirror)
        if data is None:
            self.forget(tensor)
            return None
        with unset_fake_temporarily():
            return Geometry.of(tensor).on(data)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a fake tensor are known, or can be computed."""
        mirror = self._current(tensor)
        return mirror is not None and mirror.is_known

    def number(self, tensor: torch.Tensor) -> Number | None:
        """The number that every element of the tensor holds; None where it is not known."""
        if not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                return tensor.item() if tensor.device.type == "cpu" and tensor.dim() == 0 else None
        number = self.numbers.of(tensor)
        if number is not None or not 0 < tensor.numel() <= FLOAT_LIMIT or not self.is_known(tensor):
            return number
        known = self.of(tensor)
        if known is None:
            return None
        with unset_fake_temporarily():
            first = known.reshape(-1)[0]
            return first.item() if bool((known == first).all()) else None

    def mark_of(self, value: object) -> Mark:
        """The mark of a tensor's storage."""
        return self.numbers.mark_of(value) if isinstance(value, FakeTensor) else Mark.NONE

    def result(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """The result of ``func`` for these arguments, computed on the host; None where one is not known."""
        if not self._book and not has_real(args):
            return None
        return self._computed(HostCall(func, args, kwargs))

    def is_stale(self, storage: torch.UntypedStorage) -> bool:
        """Whether a real host storage holds other values than the program's."""
        return storage._cdata in self._stale

    def _is_true(self, tensor: torch.Tensor) -> bool:
        """Whether a real tensor is the host's, and holds what the program's does."""
        if tensor.device.type != "cpu":
            return False
        return not self._stale or not self.is_stale(tensor.untyped_storage())

    # --- host tensors that are no fakes -------------------------------------------------------------------------------

    def runs_for_real(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Whether an operator of tensors goes on outside the fake mode: all are real, or it writes known values into
        real ones."""
        tensors = list(tensors_in((args, kwargs) if kwargs else args))
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if len(fakes) == len(tensors) or any(tensor.fake_device.type == "cuda" for tensor in fakes):
            return False
        call = HostCall(func, args, kwargs)
        if call.names_device() or not all(tensor.device.type == "cpu" for tensor in tensors):
            return False
        if fakes:
            targets = call.targets
            if not targets or any(isinstance(tensor, FakeTensor) for tensor in targets):
                return False
            return all(self.of(tensor) is not None for tensor in tensors)
        return call.operator.is_view or (all(map(self._is_true, tensors)) and self._has_room(call, tensors))

    def run_for_real(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """The result of an operator that :meth:`runs_for_real`. Raises what it raises."""
        call = HostCall(func, args, kwargs)
        known = {
            id(tensor): tensor if not isinstance(tensor, FakeTensor) else self.of(tensor) for tensor in call.tensors
        }
        with unset_fake_temporarily():
            out = call.on_host(known).draw()
        if call.operator.is_random or any(hasattr(tensor, _DRAWN) for tensor in call.tensors):
            self._note_drawn(call, out)
        if isinstance(out, torch.Tensor) and out.nbytes >= MIB:
            self._book.hold_real(out)
        return out

    def _note_drawn(self, call: HostCall, out: object) -> None:
        """Random numbers of the host have a part in real tensors, in a number that is read, or in how much is taken."""
        drawn = list(tensors_in(out))
        for tensor in drawn:
            setattr(tensor, _DRAWN, True)
        if not drawn or torch.Tag.dynamic_output_shape in call.func.tags:
            self._count_read()

    def _has_room(self, call: HostCall, tensors: Sequence[torch.Tensor]) -> bool:
        if any(tensor.nbytes > self.budget.one for tensor in tensors) and call.func not in LOOK_UPS:
            return False
        most = self._book.room
        return bool(call.operator.written) or 8 * call.elements_at_most() <= most or call.bytes_on_meta() <= most

    # --- following ----------------------------------------------------------------------------------------------------

    def follow(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> None:
        """Note what is known after ``func`` has run on fake tensors and returned ``out``."""
        operator = host_operator(func)
        if operator.is_view:
            return
        if not (operator.written or operator.is_random) and isinstance(out, FakeTensor) and not self._fits(out):
            if func is _TO_COPY:
                self._copy_mask(args[0], out)
            elif self._has_masks or func in _MAKING_MASKS:
                self._make_mask(HostCall(func, args, kwargs), out)
            return  # as most results
        call = HostCall(func, args, kwargs)
        if operator.written:
            self._begin_mask(call)
        for target in call.targets if operator.written else ():
            self.numbers.forget(target)
        if operator.is_random and self._draw_on_host(call, out):
            return
        if operator.written:
            self._write(call)
        elif operator.follows:
            self._make(call, out)

    def _make(self, call: HostCall, out: object) -> None:
        """An operator has made ``out``: compute its values, or put that off, where all that it reads is known."""
        outputs = list(tensors_in(out))
        fakes = [tensor for tensor in outputs if isinstance(tensor, FakeTensor)]
        if not fakes or not all(map(self._fits, fakes)):
            return
        if call.operator.is_unwritten:
            self._book.of(fakes[0])
            return
        if len(outputs) != 1 or not self._defer(call, fakes[0]):
            computed = self._computed(call)
            if computed is None:
                return
            self._learn_all(outputs, computed)
        drawn = _kind(fakes[0]) if call.operator.is_random else self._drawn((call.args, call.kwargs))
        for tensor in fakes if drawn else ():
            self._mark_drawn(tensor, drawn)

    def drawn(self, args: Sequence[object]) -> int:
        """The kind of the card's random numbers that known values of these tensors, which are read, come from: what was
        drawn there is a possible draw. 0: none; :data:`INTEGERS`: integers alone; :data:`FLOATS`."""
        drawn = self._drawn(args)
        if drawn == _HOST:
            self._count_read()
        return 0 if drawn == _HOST else drawn

    def _count_read(self) -> None:
        if not callers.called_for_batches() and not callers.called_to_validate_distribution():
            self.host_draws_read += 1

    def _drawn(self, values: object) -> int:
        """The kind of random numbers that known values of the tensors in ``values`` come from."""
        if not self._has_drawn:
            return 0
        mirrors = map(self._current, tensors_in(values))
        return max((mirror.drawn for mirror in mirrors if mirror is not None), default=0)

    def _mark_drawn(self, tensor: torch.Tensor, drawn: int) -> None:
        mirror = self._current(tensor)
        if mirror is not None:
            mirror.drawn = drawn
            self._has_drawn = self._has_drawn or bool(drawn)

    def _learn_all(self, outputs: Sequence[torch.Tensor], computed: object) -> None:
        values = list(tensors_in(computed))
        if len(values) != len(outputs):
            return
        for tensor, value in zip(outputs, values, strict=True):
            if isinstance(tensor, FakeTensor) and tensor.shape == value.shape and tensor.dtype is value.dtype:
                self.learn(tensor, value)

    def learn(self, tensor: FakeTensor, value: torch.Tensor) -> None:
        """From now on the tensor has these values."""
        self.numbers.forget(tensor)
        data = self._book.write(tensor)
        if data is not None:
            with unset_fake_temporarily(), torch.no_grad():
                Geometry.of(tensor).on(data).copy_(value)

    def fill(self, tensor: FakeTensor, number: Number) -> None:
        """From now on every element of the tensor is this number."""
        with unset_fake_temporarily():
            value = _full(tuple(tensor.shape), number, dtype=tensor.dtype)
        self.learn(tensor, value)

    def overwrite(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """From now on the tensor, which may be a real one, has these values; a parameter's stay unknown."""
        if isinstance(tensor, FakeTensor):
            self.learn(tensor, value)
            return
        with unset_fake_temporarily(), torch.no_grad():
            tensor.copy_(value)
        self._stale.pop(tensor.untyped_storage()._cdata, None)

    def assume_selected(self, mask: torch.Tensor, rows: int) -> None:
        """So many elements of an unknown mask were taken to be true: from now on they are, the first ones, so that what
        is asked of them next, of their complement, or computed of their positions, agrees."""
        if not self._is_whole(mask):
            return
        if rows in (0, mask.numel()):
            self.fill(mask, rows > 0)
        elif self._fits(mask):
            with unset_fake_temporarily():
                first = (torch.arange(mask.numel()) < rows).reshape(mask.shape)
            self.learn(mask, first)

    def _write(self, call: HostCall) -> None:
        """An operator writes to tensors: compute their new values where what it reads is known, else forget them."""
        operator = call.operator
        tensors = [tensor for tensor in call.targets if not isinstance(tensor, FakeTensor) or self._fits(tensor)]
        if not tensors:
            return
        if call.func in RESIZING:
            for tensor in tensors:
                self._resized(tensor)
            return
        mirrors = [self._current(tensor) for tensor in tensors]
        if self._overwrites(call, tensors):
            if mirrors[0] is not None and mirrors[0].is_weight:
                return
        elif all(mirror is None or mirror.is_weight for mirror in mirrors) and not has_real(tensors):
            return
        is_known = self._known_sources(call, tensors) and all(
            self._book.write(tensor) is not None for tensor in tensors if isinstance(tensor, FakeTensor)
        )
        if not is_known or self._computed(call) is None:
            self._forget_all(tensors)
        elif operator.is_random or self._has_drawn:
            self._mark_written(call, tensors)

    def _begin_mask(self, call: HostCall) -> None:
        """A tensor of one number, too large to be followed, gets other numbers at known places: it is a mask written in
        floats, and decides how much is selected as one of booleans does."""
        target = call.args[0] if call.args else None
        if not isinstance(target, FakeTensor) or (number := self.numbers.of(target)) is None:
            return
        if self.is_known(target) or (call.func not in _MARKING and self._is_whole(target)):
            return
        storage = target.untyped_storage()
        elements = storage.nbytes() // target.element_size()
        if not FLOAT_LIMIT < elements <= INTEGER_LIMIT:
            return
        if any(isinstance(one, FakeTensor) and not self.is_known(one) for one in call.tensors[1:]):
            return
        data = self._book.write(target)
        if data is not None:
            self._has_masks = True
            with unset_fake_temporarily():
                Geometry(target.dtype, 0, (elements,), (1,)).on(data).fill_(number)

    def _make_mask(self, call: HostCall, out: FakeTensor) -> None:
        """A mask in floats is made, or computed from others and from tensors of one number."""
        tensors = call.tensors
        is_known = [not isinstance(one, FakeTensor) or self.is_known(one) for one in tensors]
        if out.numel() > INTEGER_LIMIT or not (any(is_known) or call.func in _MAKING_MASKS):
            return
        if call.operator.follows and all(
            known or self.numbers.of(one) is not None for one, known in zip(tensors, is_known, strict=True)
        ):
            computed = self._computed(call)
            if computed is not None:
                self._has_masks = True
                self._learn_all([out], computed)

    def _copy_mask(self, source: object, out: FakeTensor) -> None:
        """A mask written in floats goes to the card: nothing but zeros and ones, which are there already."""
        if not isinstance(source, torch.Tensor) or self._waits(source) or source.numel() > INTEGER_LIMIT:
            return
        known = self.of(source)
        if known is None:
            return
        with unset_fake_temporarily():
            numbers = known.reshape(-1)
            is_mask = all(bool(((part == 0) | (part == 1)).all()) for part in (numbers[:_GLANCE], numbers))
        if is_mask:
            self._has_masks = True
            self.learn(out, known)

    def _overwrites(self, call: HostCall, targets: Sequence[torch.Tensor]) -> bool:
        """Whether all that a storage holds is written, and none of it read."""
        return len(targets) == 1 and call.operator.overwrites and self._is_whole(targets[0])

    def _mark_written(self, call: HostCall, targets: Sequence[torch.Tensor]) -> None:
        """Note whether random numbers of the card have a part in what was written."""
        sources = call.tensors
        if self._overwrites(call, targets):
            sources = [tensor for tensor in sources if tensor is not targets[0]]
        drawn = max(self._drawn(sources), _kind(targets[0]) if call.operator.is_random else 0)
        for tensor in targets:
            self._mark_drawn(tensor, drawn)

    def _resized(self, tensor: torch.Tensor) -> None:
        """The tensor's storage may have grown: its elements are there, at the beginning."""
        if not isinstance(tensor, FakeTensor):
            self.forget(tensor)
            return
        mirror, size = self._book.before_resizing(tensor), tensor.untyped_storage().nbytes()
        if mirror is None or mirror.is_weight:
            return
        known = mirror.bytes
        self.forget(tensor)
        if known is None or not known.nbytes() <= size <= self.budget.one:
            return
        data = self._book.write(tensor)
        if data is not None:
            with unset_fake_temporarily():
                torch.UntypedStorage.copy_(data[: known.nbytes()], known)

    def _known_sources(self, call: HostCall, targets: Sequence[torch.Tensor]) -> bool:
        """Whether all that an operator reads is known: of what it writes, what it does not overwrite."""
        written = {id(tensor) for tensor in targets}
        for tensor in call.tensors:
            if id(tensor) not in written:
                if self.of(tensor) is None:
                    return False
            elif isinstance(tensor, FakeTensor) and not call.operator.overwrites:
                mirror = self._current(tensor)
                if mirror is None or mirror.is_weight:
                    return False
        return True

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all of its storage."""
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return False
        return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())

    def _computed(self, call: HostCall) -> Any:
        """The call's result on the host, where it writes into what is kept here, () for nothing; None where an argument
        is not known or it fails."""
        known: dict[int, torch.Tensor] = {}
        tensors = call.tensors
        if self._book.waiting and any(
            isinstance(one, FakeTensor) and self._current(one) is None and self.numbers.of(one) is None
            for one in tensors
        ):
            return None  # before what waits is computed in vain
        for tensor in tensors:
            value = self.of(tensor)
            if value is None:
                value = self._of_one_number(tensor)
            if value is None:
                return None
            known[id(tensor)] = value
        real: HostCall | None = call.on_host(known)
        if real is not None and call.operator.is_random:
            real = real.drawing_from(self._draws)
        try:
            with unset_fake_temporarily(), torch.no_grad():
                out: Any = None if real is None else real.run()
                return () if real is not None and out is None else out
        except FAILURES:
            return None  # the host cannot, or will not: then nothing is known of the result

    def _of_one_number(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor that holds one number; None where it does not."""
        number = self.numbers.of(tensor)
        if number is None or tensor.numel() > INTEGER_LIMIT:
            return None
        with unset_fake_temporarily():
            return _full((), number, dtype=tensor.dtype).expand(tensor.shape)

    # --- values that wait ---------------------------------------------------------------------------------------------

    def _defer(self, call: HostCall, out: FakeTensor) -> bool:
        """Let the result of an operator wait, if one of its arguments does."""
        if not self._book.waiting or not any(map(self._waits, tensors_in(call.args))):
            return False
        mirror = self._book.of(out)
        waiting = None if mirror is None else self._waiting((call.args, call.kwargs))
        if mirror is None or waiting is None:
            return False
        later = Deferred(call.func, waiting[0], waiting[1], out, False, None)
        if later.may_wait:
            self._book.wait(mirror, out, later)
        return later.may_wait

    def _waits(self, tensor: torch.Tensor) -> bool:
        mirror = self._current(tensor)
        return mirror is not None and mirror.later is not None

    def _waiting(self, value: object) -> Any:
        """Arguments as they are now, for later; None where one is unknown, or large and may change."""
        if isinstance(value, torch.Tensor):
            mirror = self._current(value)
            if mirror is not None and mirror.later is not None:
                return mirror.later.part(Geometry.of(value))
            known = self.of(value) if value.numel() <= LEAST else None
            if known is None:
                return None
            with unset_fake_temporarily():
                return known.clone()
        if isinstance(value, dict):
            kept = {name: self._waiting(item) for name, item in value.items() if name not in ("device", "pin_memory")}
            return None if any(kept[name] is None and value[name] is not None for name in kept) else kept
        if isinstance(value, (list, tuple)):
            items = [self._waiting(item) for item in value]
            is_lost = any(new is None and old is not None for new, old in zip(items, value, strict=True))
            return None if is_lost else items
        return torch.device("cpu") if isinstance(value, torch.device) else value

    # --- random numbers of the host -----------------------------------------------------------------------------------

    def _draw_on_host(self, call: HostCall, out: object) -> bool:
        """Follow a random operator on the host: its numbers are the program's, and its generator goes on as there.
        False for one on the device."""
        target = next(tensors_in((call.targets, out)), None)
        if not isinstance(target, FakeTensor) or target.fake_device.type == "cuda":
            return False
        if target.fake_device == NOWHERE:
            return True  # nothing is drawn
        words, generator = call.words_drawn(target), generators.named(call.kwargs.get("generator"))
        if self.is_weight(target) or not self._fits(target):
            self._skip(self._drawn_for_nothing(call, target) if words is None else words, generator)
            if not self.is_weight(target):
                self.forget(target)
        elif words is None or generator is not None or not self._draw_later(call, target, words):
            self._draw_now(call, target, out)
        self._mark_drawn(target, _HOST)
        return True

    def _draw_later(self, call: HostCall, target: FakeTensor, words: int) -> bool:
        """Let a draw wait; False where it cannot: it is short, or another argument may change meanwhile."""
        host = generators.current()
        if not (target.numel() > LEAST or host.is_far_behind) or not self._is_whole(target):
            return False
        mirror, seeded, is_in_place = self._book.of(target), call.drawing_from(None), bool(call.operator.written)
        rest = self._waiting((call.args[1:] if is_in_place else call.args, call.kwargs))
        if mirror is None or seeded is None or rest is None:
            return False
        self._book.wait(mirror, target, Deferred(seeded.func, rest[0], rest[1], target, is_in_place, host.mark()))
        host.skip(words)
        return True

    def _draw_now(self, call: HostCall, target: FakeTensor, out: object) -> None:
        if call.operator.written and (self._overwrites(call, [target]) or self._current(target) is not None):
            self._book.write(target)
        known = {id(tensor): self.of(tensor) for tensor in call.tensors}
        try:
            with unset_fake_temporarily(), torch.no_grad():
                # Unknown tensors are ones: the draws are as many.
                filled = {
                    id(tensor): _ones(tensor.shape, dtype=tensor.dtype) if (v := known[id(tensor)]) is None else v
                    for tensor in call.tensors
                }
                drawn = call.on_host(filled).draw()
        except FAILURES:
            self.guessed_draws += 1
            self.forget(target)
            return
        if None in known.values():
            self.forget(target)
        elif not call.operator.written:
            self._learn_all(list(tensors_in(out)), drawn)

    def draw_aside(
        self,
        tensor: torch.Tensor,
        draw: Callable[[torch.Tensor, torch.Generator], object],
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        """Let ``draw`` fill a real tensor in place of a host one with a generator, and keep what it draws there,
        unless the tensor is a parameter's; the host tensor."""
        if not self._may_draw_aside(tensor):
            self.guessed_draws += 1
            return tensor
        with disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
            real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            draw(real, generators.current().settled() if generator is None else generator)
        if not self.is_weight(tensor):
            self.learn(tensor, real)
        return tensor

    def _drawn_for_nothing(self, call: HostCall, target: FakeTensor) -> int:
        """Draw what nobody will read, where nobody knows how much it is; 0 further words are to be skipped."""
        if next(tensors_in(call.args[1:]), None) is not None or not self._may_draw_aside(target):
            self.guessed_draws += 1
            return 0
        try:
            with unset_fake_temporarily(), torch.no_grad():
                scratch = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
                HostCall(call.func, on_host(call.args, {id(target): scratch}), call.kwargs).draw()
        except FAILURES:
            self.guessed_draws += 1
        return 0

    def _may_draw_aside(self, tensor: torch.Tensor) -> bool:
        if tensor.nbytes > self.budget.one or self._aside + tensor.numel() > _MOST_ASIDE:
            return False
        self._aside += tensor.numel()
        return True

    def _skip(self, words: int, generator: torch.Generator | None) -> None:
        if generator is None:
            generators.current().skip(words)
        else:
            generators.advance(generator, words)

    # --- the book -----------------------------------------------------------------------------------------------------

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a parameter's, whose values nobody follows."""
        mirror = self._current(tensor)
        return mirror is not None and mirror.is_weight

    def hold_weight(self, tensor: torch.Tensor) -> None:
        """The tensor is a parameter from now on: it has a shape only, unless it is a handful of numbers, or some
        that nothing trains: moments of a distribution, a table of places."""
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return
        if tensor.numel() <= (_SMALL_PARAMETER if tensor.requires_grad else FLOAT_LIMIT):
            return
        self.forget(tensor)
        self._book.new(tensor).is_weight = True

    def _fits(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        elements = tensor.numel()
        if elements <= FLOAT_LIMIT:
            return True
        if elements <= INTEGER_LIMIT and (self.is_known(tensor) or not _is_inexact(tensor)):
            return True
        return bool(tensor.fake_device.type != "cuda" and tensor.nbytes <= self.budget.one)

    def forget(self, tensor: torch.Tensor) -> None:
        """Nobody knows the values of the tensor's storage any longer."""
        if tensor.layout is not torch.strided:
            return
        if isinstance(tensor, FakeTensor):
            self._book.forget(tensor)
        elif tensor.device.type == "cpu":
            key = tensor.untyped_storage()._cdata
            self._stale[key] = weakref.ref(tensor.untyped_storage(), lambda _: self._stale.pop(key, None))

    def _forget_all(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self.forget(tensor)


def _kind(tensor: torch.Tensor) -> int:
    """The kind of random numbers that was drawn into a tensor."""
    return FLOATS if _is_inexact(tensor) or tensor.dtype is torch.bool else INTEGERS


def _is_inexact(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())
