"""Follow the subgraphs of ``If``, ``Loop`` and ``Scan``: which of them run, how often, and with which shapes.

Of an ``If`` whose condition is not known both branches are followed and the one that holds more at once is taken. A
``Loop`` runs as often as its trip count and its condition give, as far as their values are known; where they depend on
data, as often as the user's bound. Rules of the operators: https://onnx.ai/onnx/operators."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphmem.base.records import dataclass
from graphmem.errors import ShapeError
from graphmem.graph.loop_counts import CountingBody
from graphmem.graph.model import Dimension, Node, TensorSpec
from graphmem.units import format_bytes

if TYPE_CHECKING:
    from graphmem.graph.folding import Value
    from graphmem.graph.shapes import ModelFacts, Propagation

#: Runs of one subgraph whose shapes are followed one by one; from 50 to 100 nodes a millisecond are.
MOST_FOLLOWED = 2048
#: Runs of a loop that collects what each of them gives.
MOST_COLLECTED = 100_000
#: A trip count from here on is how exporters write "until the condition is false".
ENDLESS = 1 << 31
#: Runs after which a loop is not expected to settle any more.
_SETTLING = 2
OPERATORS = frozenset(("If", "Loop", "Scan"))


@dataclass(frozen=True)
class Given:
    """An input of a subgraph: its type and shape, and its value where that is known."""

    spec: TensorSpec
    value: Value | None = None


@dataclass(frozen=True)
class FollowedBody:
    """A subgraph as followed: the shapes of its runs, equal ones once, and (index, how often in a row)."""

    facts: ModelFacts
    states: tuple[Propagation, ...]
    runs: tuple[tuple[int, int], ...]


#: Runs a subgraph inside the scope it stands in. Raises :class:`ShapeError`.
RunBody = Callable[["ModelFacts", Sequence[Given]], "Propagation"]


@dataclass(frozen=True)
class Followed:
    """The outputs of a node with subgraphs, in order, the subgraphs by attribute, and notes for the reader."""

    outputs: tuple[Given, ...]
    bodies: Mapping[str, FollowedBody]
    notes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _Scope:
    """A node with subgraphs, and what is known where it stands."""

    state: Propagation
    node: Node
    bodies: Mapping[str, ModelFacts]
    run: RunBody

    def value(self, position: int) -> Value | None:
        name = self._name(position)
        return self.state.values.get(name) if name else None

    def has(self, position: int) -> bool:
        return bool(self._name(position))

    def _name(self, position: int) -> str:
        return self.node.inputs[position] if position < len(self.node.inputs) else ""

    def given(self, position: int) -> Given:
        name = self.node.inputs[position]
        return Given(self.state.specs[name], self.state.values.get(name))

    def deciding(self, position: int) -> str:
        """``--input-value NAME=...`` for each input of the model that the input at ``position`` is computed from."""
        names = self.state.sources_of(self._name(position))
        return " ".join(f"--input-value {name}=VALUE" for name in names)

    def try_body(self, attribute: str, given: Sequence[Given] = ()) -> Propagation | ShapeError:
        try:
            return self.run(self.bodies[attribute], given)
        except ShapeError as error:
            return error


def follow(state: Propagation, node: Node, bodies: Mapping[str, ModelFacts], run: RunBody) -> Followed:
    """The outputs of ``node`` and the runs of its subgraphs. Raises :class:`ShapeError`."""
    scope = _Scope(state, node, bodies, run)
    try:
        return {"If": _if, "Loop": _loop, "Scan": _scan}[node.op_type](scope)
    except (KeyError, IndexError):
        raise ShapeError(f"{node} lacks a subgraph or an input that {node.op_type} has") from None


def _outputs(state: Propagation, skip: int = 0) -> tuple[Given, ...]:
    """The outputs of a subgraph that was followed."""
    names = [name for name, _ in state.facts.outputs][skip:]
    return tuple(Given(state.specs[name], state.values.get(name)) for name in names)


# --- If ---------------------------------------------------------------------------------------------------------------


def _if(scope: _Scope) -> Followed:
    """The branch that the condition takes; where it is not known, the one that holds more at once, with a note."""
    branches = ("then_branch", "else_branch")
    condition = scope.value(0)
    tried = {name: scope.try_body(name) for name in branches}
    states = {name: state for name, state in tried.items() if not isinstance(state, ShapeError)}
    notes: tuple[tuple[str, str], ...] = ()
    if condition is not None:
        taken = branches[0] if condition.any() else branches[1]
    elif states:
        sizes = {name: held_at_once(state) for name, state in states.items()}
        taken = max(sizes, key=lambda name: sizes[name])
        notes = (_branches_note(scope, taken, sizes),)
    else:
        taken = branches[0]
    error = tried[taken]
    if isinstance(error, ShapeError):
        raise error
    bodies = {}
    for name in branches:
        followed = states.get(name) or scope.state.unfollowed(scope.node, name)
        bodies[name] = FollowedBody(scope.bodies[name], (followed,), ((0, 1),) if name == taken else ())
    return Followed(_outputs(states[taken]), bodies, notes)


def _branches_note(scope: _Scope, taken: str, sizes: Mapping[str, int]) -> tuple[str, str]:
    other = "else_branch" if taken == "then_branch" else "then_branch"
    one = f"{scope.node.name}: {taken} ({format_bytes(sizes[taken])} at once)"
    left = f"not {other} ({format_bytes(sizes[other])})" if other in sizes else f"not {other}, which does not fit"
    return f"branches taken as the larger{_decided(scope.deciding(0))}", f"{one}, {left}"


def _decided(options: str) -> str:
    return f" (decide with {options})" if options else " (data decides)"


def held_at_once(state: Propagation) -> int:
    """Bytes of the tensors of a subgraph that are alive at once at most, each from its node to its last reader."""
    facts = state.facts
    kept = {name for name, _ in facts.outputs}
    last = {name: index for index, node in enumerate(facts.nodes) for name in node.reads}
    live: dict[str, int] = {}
    most = 0
    for index, node in enumerate(facts.nodes):
        live.update((name, state.specs[name].nbytes) for name in node.outputs if name in state.specs)
        inner = (held_at_once(body.states[i]) for body in state.bodies.get(node.key, {}).values() for i, _ in body.runs)
        most = max(most, sum(live.values()) + max(inner, default=0))
        for name in [name for name in live if last.get(name, index) <= index and name not in kept]:
            del live[name]
    return most


# --- Loop -------------------------------------------------------------------------------------------------------------


def _loop(scope: _Scope) -> Followed:
    """Inputs: trip count, condition, what is carried. A run of the body takes (number of the run, condition, carried)
    and gives (condition, carried, what is collected)."""
    facts = scope.bodies["body"]
    carried = [scope.given(position) for position in range(2, len(scope.node.inputs))]
    most = _trip_count(scope)
    condition = Given(TensorSpec("", "bool", ()), np.array(True))
    if scope.has(1):
        condition = Given(condition.spec, scope.value(1))
    if most == 0 or (condition.value is not None and not condition.value.any()):
        body = FollowedBody(facts, (_any_run(scope, carried),), ())
        collected = [_collected(one, 0) for one in _outputs(body.states[0], 1 + len(carried))]
        return Followed((*carried, *collected), {"body": body})
    followed = _Iterations(scope, facts, most)
    followed.follow(condition, carried)
    last = _outputs(followed.states[followed.runs[-1][0]], 1)
    count = sum(times for _, times in followed.runs)
    if len(last) > len(carried) and count > MOST_COLLECTED:
        raise ShapeError(f"{scope.node}: it collects what {count} runs give; at most {MOST_COLLECTED} are followed")
    outputs = (*followed.carried, *(_collected(one, count) for one in last[len(carried) :]))
    body = FollowedBody(facts, tuple(followed.states), tuple(followed.runs))
    return Followed(outputs, {"body": body}, followed.notes)


def _any_run(scope: _Scope, carried: Sequence[Given]) -> Propagation:
    """A body that does not run, as far as it can be followed."""
    number = Given(TensorSpec("", "int64", ()))
    tried = scope.try_body("body", (number, Given(TensorSpec("", "bool", ())), *carried))
    return scope.state.unfollowed(scope.node, "body") if isinstance(tried, ShapeError) else tried


def _collected(one: Given, count: int) -> Given:
    return Given(TensorSpec(one.spec.name, one.spec.dtype, (count, *one.spec.shape)))


def _trip_count(scope: _Scope) -> int | None:
    """As often as the loop runs at most; None where that is not known."""
    value = scope.value(0)
    if value is not None and value.size == 1 and int(value.flat[0]) < ENDLESS:
        return max(0, int(value.flat[0]))
    return None


@dataclass
class _Iterations:
    """The runs of a body, followed one after the other until they repeat or end."""

    scope: _Scope
    facts: ModelFacts
    most: int | None

    def __post_init__(self) -> None:
        self.states: list[Propagation] = []
        self.runs: list[tuple[int, int]] = []
        self.carried: list[Given] = []
        self.notes: tuple[tuple[str, str], ...] = ()

    def follow(self, condition: Given, carried: Sequence[Given]) -> None:
        """Run the body until it ends or does the same with every run, noting the runs; :attr:`carried` then has what
        the last one gives. Raises :class:`ShapeError` for more runs than can be followed."""
        self.carried = list(carried)
        can_end = _can_end(self.facts)
        counted: int | None = None
        for number in range(MOST_FOLLOWED):
            state = self._run(number, condition, self.carried)
            after, *rest = _outputs(state)
            if number == 0:
                self.counting = self._counting(state, carried)
                counted = self.counting.runs(self.facts.outputs[0][0])
            is_known = after.value is not None
            if after.value is not None and not after.value.any():
                self._add(state, 1)
                self.carried = rest[: len(carried)]
                return
            limit = self._limit(after, can_end)
            if counted is not None:
                limit = counted if limit is None else min(limit, counted)
            may_settle = number < _SETTLING and (counted is not None or not (is_known and can_end))
            steady = self._steady(after, number, limit, state) if may_settle else None
            if steady is not None and limit is not None:
                self._add(steady, limit - number)
                given = (self._given(position, limit) for position in range(len(carried)))
                self.carried = [
                    replace(now, spec=one.spec) for now, one in zip(given, _outputs(steady, 1), strict=False)
                ]
                return
            if limit is not None and limit > MOST_FOLLOWED and number >= _SETTLING:
                break
            self._add(state, 1)
            self.carried = rest[: len(carried)]
            if number + 1 == limit:
                return
            condition = after
        options = "--trip-count N" if self.scope.state.binding.trip_count else self.scope.deciding(0)
        raise ShapeError(
            f"{self.scope.node}: it runs more than {MOST_FOLLOWED} times, and its shapes or its end change with every "
            f"run{_hint(options, '; bind fewer with ')}"
        )

    def _steady(self, condition: Given, number: int, limit: int | None, state: Propagation) -> Propagation | None:
        """A run that stands for all that are left: it gives the shapes that it takes, and its own follow from shapes
        alone, or are those of this run, the second, and of the last two: what reads by the number of the run has sizes
        that rise, fall or stay with it."""
        unknown = [
            one if self.counting.is_kept(name) else Given(one.spec)
            for name, one in zip(self.counting.carried, self.carried, strict=True)
        ]
        steady = self._repeating(Given(_NUMBER), condition, unknown)
        if steady is not None or number != 1 or limit is None or limit <= _SETTLING + 2:
            return steady
        for last in (limit - 2, limit - 1):
            counted = [self._given(position, last) for position in range(len(unknown))]
            steady = self._repeating(_numbered(last), condition, counted)
            if steady is None or steady.own_specs != state.own_specs:
                return None
        return steady

    def _repeating(self, number: Given, condition: Given, carried: Sequence[Given]) -> Propagation | None:
        """The run of this number, where it gives the shapes that it takes."""
        state = self.scope.try_body("body", (number, condition, *carried))
        if isinstance(state, ShapeError):
            return None
        kept = _outputs(state, 1)[: len(carried)]
        return state if all(_kind(a) == _kind(b) for a, b in zip(kept, carried, strict=True)) else None

    def _counting(self, first: Propagation, carried: Sequence[Given]) -> CountingBody:
        """The body as one that counts, its first run being ``first``."""
        names = self.facts.inputs[2:]
        before = {name: one.value for name, one in zip(names, carried, strict=True) if one.value is not None}
        becomes = dict(zip(names, [name for name, _ in self.facts.outputs[1:]], strict=False))
        return CountingBody(self.facts.nodes, self.facts.inputs[0], becomes, ChainMap(before, first.values))

    def _given(self, position: int, runs: int) -> Given:
        """A carried tensor after ``runs`` runs, with its value where it counts or never changes."""
        one, name = self.carried[position], self.facts.inputs[2 + position]
        if one.value is None or self.counting.is_kept(name):
            return one
        line = self.counting.line(name)
        return replace(one, value=None if line is None else np.full_like(one.value, line.at(runs)))

    def _limit(self, condition: Given, can_end: bool) -> int | None:
        """As often as the loop runs unless its condition is seen to end it before; None for no limit. Raises
        :class:`ShapeError` where nothing bounds it."""
        most_runs = self.scope.state.binding.trip_count
        if condition.value is not None and (self.most is not None or (can_end and most_runs is None)):
            return self.most
        bounds = [bound for bound in (self.most, most_runs) if bound is not None]
        if not bounds:
            options = self.scope.deciding(0) if self.most is None else ""
            raise ShapeError(
                f"{self.scope.node}: how often it runs depends on data; bound it with --trip-count N"
                f"{_hint(options, ', or decide it with ')}"
            )
        self.notes = (("loops that data ends, taken at most", f"{self.scope.node.name} {min(bounds)} times"),)
        return min(bounds)

    def _run(self, number: int, condition: Given, carried: Sequence[Given]) -> Propagation:
        return self.scope.run(self.facts, (_numbered(number), condition, *carried))

    def _add(self, state: Propagation, times: int) -> None:
        shapes = state.own_specs
        index = next((i for i, known in enumerate(self.states) if known.own_specs == shapes), len(self.states))
        if index == len(self.states):
            self.states.append(state)
        if self.runs and self.runs[-1][0] == index:
            times += self.runs.pop()[1]
        self.runs.append((index, times))


_NUMBER = TensorSpec("", "int64", ())


def _numbered(run: int) -> Given:
    return Given(_NUMBER, np.array(run, dtype=np.int64))


def _kind(given: Given) -> tuple[Any, ...]:
    return given.spec.dtype, given.spec.shape, given.spec.items


def _hint(options: str, words: str) -> str:
    return f"{words}{options}" if options else ""


def _can_end(facts: ModelFacts) -> bool:
    """Whether the condition that a body gives is another one than it was given."""
    given, gives = facts.inputs[1], facts.outputs[0][0]
    made_by = {name: node for node in facts.nodes for name in node.outputs}
    while gives in made_by and made_by[gives].op_type == "Identity":
        gives = made_by[gives].inputs[0]
    return gives != given and gives not in facts.values


# --- Scan -------------------------------------------------------------------------------------------------------------


def _scan(scope: _Scope) -> Followed:
    """Inputs: states, then tensors that are read slice by slice. A run takes (states, slices) and gives (states,
    slices of the outputs). Opset 8 has a batch dimension and a length for each of it, which nobody writes any more."""
    if scope.state.opsets.get("", 9) < 9:
        raise ShapeError(f"{scope.node}: Scan of opset 8 is not planned; convert the model to opset 9 or later")
    facts, node = scope.bodies["body"], scope.node
    scanned = int(node.attributes["num_scan_inputs"])
    count = len(node.inputs) - scanned
    states = [Given(scope.given(position).spec) for position in range(count)]
    axes = tuple(node.attributes.get("scan_input_axes", (0,) * scanned))
    slices, lengths = [], []
    for position, axis in zip(range(count, len(node.inputs)), axes, strict=True):
        spec = scope.given(position).spec
        place = axis % len(spec.shape)
        lengths.append(int(spec.shape[place]))
        slices.append(Given(TensorSpec(spec.name, spec.dtype, (*spec.shape[:place], *spec.shape[place + 1 :]))))
    if len(set(lengths)) != 1:
        raise ShapeError(f"{node}: it reads tensors of different lengths side by side: {', '.join(map(str, lengths))}")
    state = scope.run(facts, (*states, *slices))
    outputs = _outputs(state)
    placed = tuple(node.attributes.get("scan_output_axes", (0,) * (len(outputs) - count)))
    stacked = [_stacked(one, lengths[0], axis) for one, axis in zip(outputs[count:], placed, strict=True)]
    body = FollowedBody(facts, (state,), ((0, lengths[0]),) if lengths[0] else ())
    return Followed((*states, *stacked), {"body": body})


def _stacked(one: Given, length: int, axis: int) -> Given:
    place = axis % (len(one.spec.shape) + 1)
    shape: tuple[Dimension, ...] = (*one.spec.shape[:place], length, *one.spec.shape[place:])
    return Given(TensorSpec(one.spec.name, one.spec.dtype, shape))


def inner_reads(bodies: Mapping[str, ModelFacts]) -> Iterator[str]:
    """The tensors that subgraphs read from around them, each once, in the order in which they are read."""
    seen = set()
    for facts in bodies.values():
        inside = {*facts.inputs, *facts.specs, *(name for node in facts.nodes for name in node.outputs)}
        for name in (name for node in facts.nodes for name in node.reads):
            if name not in inside and name not in seen:
                seen.add(name)
                yield name
