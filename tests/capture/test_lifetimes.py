"""When storages live and die in a captured step, where eager mode on a card has a mind of its own.

Figures are requested bytes of float32 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from graphmem import Inference, Training, analyze  # noqa: E402
from graphmem.trace import Category, EventKind  # noqa: E402
from tests.support.captures import Born, births, lasts, live_bytes, of, record, sizes  # noqa: E402
from tests.support.examples import first_quick  # noqa: E402


def device_tensor(*shape: int, **options: Any) -> Any:
    return torch.empty(*shape, device="cuda", **options)


def made_by(operator: str, step: Callable[[], Any]) -> list[Born]:
    """Device storages that an operator made, in the whole run."""
    return [born for born in births(record(step)) if born.operator.startswith(f"aten.{operator}")]


# --- views and in-place operators -------------------------------------------------------------------------------------


def test_views_and_in_place_operators_allocate_nothing() -> None:
    def step() -> None:
        x = device_tensor(8, 4)
        x.view(4, 8)[1:].t().unsqueeze(0).expand(3, -1, -1)
        x.add_(1).relu_().clamp_(min=0)
        x.split(2)
        x[2:4].zero_()

    assert sizes(births(record(step))) == [8 * 4 * 4]


def test_a_storage_lives_as_long_as_its_last_view() -> None:
    def step() -> None:
        x = device_tensor(100)
        part = x[:1]
        del x
        device_tensor(1)
        del part
        device_tensor(2)

    trace = record(step)
    whole, between, after = births(trace)
    assert whole.freed is not None
    assert between.event < whole.freed < after.event


def test_operators_that_must_copy_do() -> None:
    def step() -> None:
        x = device_tensor(8, 4)
        x.contiguous()
        x.t().contiguous()
        x.reshape(-1)
        x.t().reshape(-1)

    assert [born.operator for born in births(record(step))[1:]] == ["aten.clone.default"] * 2


def test_tensors_die_when_python_lets_them_go() -> None:
    def step() -> None:
        x = device_tensor(1000)
        x = device_tensor(1000)  # the second is made before the first goes
        del x
        device_tensor(1)

    trace = record(step)
    levels = [live_bytes(trace, event) for event in range(len(trace))]
    assert levels == [4000, 8000, 4000, 0, 4, 0]


def test_an_empty_tensor_has_no_bytes() -> None:
    assert sizes(births(record(lambda: device_tensor(0, 3)))) == [0]


def test_a_storage_resized_in_place_is_a_new_allocation() -> None:
    def step() -> None:
        x = device_tensor(10)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(80)

    trace = record(step)
    assert max(live_bytes(trace, event) for event in range(len(trace))) <= 120


# --- gradients --------------------------------------------------------------------------------------------------------


def test_accumulated_gradients_stay_between_micro_batches() -> None:
    estimate = analyze(nn.Linear(16, 16), torch.zeros(4, 16), training=Training(grad_accum=3), iterations=2)
    trace = estimate.trace
    assert trace is not None
    for iteration in (1, 2):
        gradients = [b for b in of(trace, Category.GRADIENT) if b.phase.iteration == iteration]
        assert {born.label for born in gradients} == {"weight.grad", "bias.grad"}
        assert sizes(gradients) == [16 * 16 * 4, 16 * 4]


def test_gradients_zeroed_in_place_are_made_once() -> None:
    estimate = analyze(nn.Linear(16, 16), torch.zeros(4, 16), training=Training(zero_grad="zeros"), iterations=3)
    assert estimate.trace is not None
    gradients = of(estimate.trace, Category.GRADIENT)
    assert [str(born.phase) for born in gradients] == ["iteration 1 backward"] * 2


def fan_in(hold: bool) -> Callable[[], None]:
    """``hidden`` receives three gradients."""

    def step() -> None:
        kept: list[Any] = []
        hidden = device_tensor(64, requires_grad=True) * 2
        branches = [hidden.sin(), hidden.cos(), hidden.exp()]
        if hold:
            hidden.register_hook(kept.append)
            branches[-1].register_hook(kept.append)
        total = branches[0] + branches[1] + branches[2]
        del branches
        (total * 3).sum().backward()

    return step


def test_gradients_that_meet_are_added_in_place() -> None:
    """The engine owns the first one and adds the others to it (torch/csrc/autograd/input_buffer.cpp)."""
    trace = record(fan_in(hold=False))
    assert [b for b in births(trace) if b.operator == "aten.add.Tensor" and not _is_forward_add(b)] == []


def test_gradients_of_which_others_are_made_are_added_anew() -> None:
    """With ``create_graph`` gradients are recorded themselves, and nothing is written into them (input_buffer.cpp)."""

    def adds(create_graph: bool) -> int:
        def step() -> None:
            hidden = device_tensor(64, requires_grad=True) * 2
            total = (hidden.sin() + hidden.cos() + hidden.exp()).sum()
            torch.autograd.grad(total, hidden, create_graph=create_graph)

        return len(made_by("add.Tensor", step))

    assert (adds(False), adds(True)) == (2, 4)


def test_a_backward_pass_counts_its_nodes_from_where_the_program_began() -> None:
    """Nodes are numbered by thread, and higher ones run first. On a card both threads begin with the program: neither
    what the caller made before, nor what a host tensor becomes fake with, may be ahead of the other thread."""

    def numbers() -> tuple[int, int]:
        found: list[int] = []

        def step() -> None:
            begin = torch.autograd._get_sequence_nr()
            on_host = torch.tensor(numpy.ones((4, 1)), requires_grad=True).float()
            x = on_host.to("cuda")
            gradient = torch.autograd.grad(torch.tanh(x).sum(), x, create_graph=True)[0]
            made = torch.autograd._get_sequence_nr() - begin
            found.extend((made, gradient.grad_fn._sequence_nr() - begin))

        record(step)
        return found[0], found[1]

    made, of_gradient = numbers()
    assert (
        made - 4 == of_gradient == 1
    )  # float, to, tanh, sum; tanh_backward is the other's first; one for the fake tensor
    leaf = torch.zeros((), requires_grad=True)
    for _ in range(1000):
        leaf.neg()
    assert numbers() == (made, of_gradient)


def test_what_checkpoints_compute_anew_is_counted_by_the_backward_pass() -> None:
    """A plain pass that makes nodes makes them on the card's thread, whose later nodes have higher numbers then. Not on
    the caller's, which is as far ahead here as it made them itself."""

    def first_number(parts: int) -> int:
        found: list[int] = []

        def step() -> None:
            x = device_tensor(4, requires_grad=True)
            begin = torch.autograd._get_sequence_nr()
            for _ in range(parts):
                checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum().backward()
            gradient = torch.autograd.grad(torch.tanh(x).sum(), x, create_graph=True)[0]
            found.append(gradient.grad_fn._sequence_nr() - begin)

        record(step)
        return found[0]

    anew = 2  # sin, exp
    assert [first_number(parts) - first_number(0) for parts in (1, 3)] == [2 * anew, 3 * 2 * anew]


def _is_forward_add(born: Born) -> bool:
    return bool(born.source)  # backward operators outside modules have no line of their own


def test_a_gradient_that_someone_holds_is_not_written_to() -> None:
    class Keep(torch.autograd.Function):
        """Passes on a gradient that it keeps."""

        kept: list[Any]

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            Keep.kept.append(gradient)
            return gradient

    def step() -> None:
        Keep.kept = []
        hidden = device_tensor(64, requires_grad=True) * 2
        early = hidden.sin()  # its gradient comes last
        ((Keep.apply(hidden) * 3).sum() + early.sum()).backward()
        Keep.kept.clear()

    adds = [born for born in births(record(step)) if born.operator == "aten.add.Tensor" and born.bytes == 256]
    assert len(adds) == 1


def test_a_leaf_input_gets_a_gradient_too() -> None:
    def step() -> None:
        x = device_tensor(16, requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (16,)

    assert sizes(of(record(step), Category.GRADIENT)) == [64]


def test_saved_tensors_die_as_the_backward_pass_uses_them() -> None:
    def step() -> None:
        x = device_tensor(1000, requires_grad=True)
        loss = x.sin().sin().sin().sum()
        loss.backward()
        device_tensor(1)

    trace = record(step)
    saved = made_by("sin.default", step)
    end = births(trace)[-1].event
    assert len(saved) == 3
    assert all(born.freed is not None and born.freed < end for born in saved)


def test_the_graph_can_be_retained() -> None:
    def step() -> None:
        x = device_tensor(1000, requires_grad=True)
        loss = x.sin().sum()
        hidden = loss.grad_fn
        loss.backward(retain_graph=True)
        loss.backward()
        del hidden

    assert sizes(of(record(step), Category.GRADIENT)) == [4000]


def test_without_gradients_nothing_is_saved() -> None:
    def chain() -> None:
        x = device_tensor(1000, requires_grad=True)
        x.sin().sin().sin()
        device_tensor(1)

    def peak(mode: Any) -> int:
        def step() -> None:
            with mode():
                chain()

        trace = record(step)
        return max(live_bytes(trace, event) for event in range(len(trace)))

    assert peak(torch.enable_grad) == 16_000
    assert peak(torch.no_grad) == 12_000
    assert peak(torch.inference_mode) == 12_000


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_modes_record_the_same_operators(mode: Any) -> None:
    """In inference mode composites reach a recorder whole; they must come out as what they are made of."""

    def forward(context: Any) -> list[tuple[str, int]]:
        def step() -> None:
            layers = nn.Sequential(
                nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(16), nn.Softmax(-1)
            ).cuda()
            with context():
                functional.scaled_dot_product_attention(*[layers(device_tensor(2, 4, 8)).view(2, 2, 4, 8)] * 3)

        return [(born.operator, born.bytes) for born in births(record(step)) if born.category is not Category.WORKSPACE]

    with_gradients = [row for row in forward(torch.enable_grad) if "attention" not in row[0]]
    assert [row for row in forward(mode) if "attention" not in row[0]] == with_gradients


# --- checkpointing ----------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks whose activations are either kept or made again."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        )

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _allocated(model: nn.Module, **options: Any) -> int:
    return analyze(model, torch.zeros(512, 64), training=Training(optimizer="sgd", **options)).allocated


@pytest.mark.parametrize("reentrant", first_quick([False, True], 1))
def test_checkpointed_blocks_are_made_again_one_at_a_time(reentrant: bool) -> None:
    inside = 2 * 512 * 256 * 4  # GELU's input and output of one block
    saved = _allocated(Stack(None)) - _allocated(Stack(reentrant))
    assert 2 * inside < saved < 4 * inside


def test_the_checkpointing_option_finds_the_blocks() -> None:
    assert _allocated(Stack(None), checkpoint_activations=True) == _allocated(Stack(False))


def test_recomputation_belongs_to_the_backward_pass() -> None:
    estimate = analyze(Stack(False), torch.zeros(512, 64), iterations=1)
    assert estimate.trace is not None
    phases = [str(phase) for phase in estimate.trace.phases]
    assert phases == ["build", "iteration 1 forward", "iteration 1 backward", "iteration 1 optimizer"]
    again = [b for b in births(estimate.trace) if b.operator == "aten.gelu.default" and b.phase.name == "backward"]
    assert sizes(again) == [512 * 256 * 4] * 4


def test_recomputed_operators_name_their_module() -> None:
    estimate = analyze(Stack(False), torch.zeros(512, 64), iterations=1)
    assert estimate.trace is not None
    again = [b for b in births(estimate.trace) if b.operator == "aten.gelu.default" and b.phase.name == "backward"]
    assert [born.module for born in again] == [f"blocks.{n}.1" for n in (3, 2, 1, 0)]


# --- autocast ---------------------------------------------------------------------------------------------------------


def test_autocast_casts_a_weight_once_and_drops_it_with_the_context() -> None:
    def step() -> None:
        layer = nn.Linear(32, 32).cuda()
        x = device_tensor(4, 32)
        with torch.autocast("cuda", torch.bfloat16):
            layer(layer(x))
            inside = device_tensor(1)
        del inside
        device_tensor(2)

    trace = record(step)
    casts = [
        born for born in births(trace) if born.operator == "aten._to_copy.default" and born.phase.name == "forward"
    ]
    weight = [born for born in casts if born.bytes == 32 * 32 * 2]
    assert len(weight) == 1
    (last,) = [born for born in births(trace) if born.bytes == 8]
    assert weight[0].freed is not None
    assert weight[0].freed < last.event


def test_a_weight_without_gradient_is_not_cached() -> None:
    def step() -> None:
        layer = nn.Linear(32, 32, bias=False).cuda().requires_grad_(False)
        x = device_tensor(4, 32)
        with torch.autocast("cuda", torch.bfloat16):
            layer(x)
            layer(x)

    assert [b.bytes for b in made_by("_to_copy", step) if b.phase.name == "forward"].count(32 * 32 * 2) == 2


def test_autocast_runs_normalization_in_float32() -> None:
    def step() -> None:
        x = device_tensor(4, 32, dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            assert functional.layer_norm(x, (32,)).dtype is torch.float32
            assert functional.linear(x, x).dtype is torch.bfloat16
            assert torch.cat([x, x.float()]).dtype is torch.float32

    record(step)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_keeps_a_mask_of_one_byte_an_element() -> None:
    def step() -> None:
        x = device_tensor(1000, requires_grad=True)
        functional.dropout(x, 0.1).sum()

    assert sizes(made_by("native_dropout", step)) == [1000, 4000]


def test_dropout_that_drops_nothing_allocates_nothing() -> None:
    def step() -> None:
        x = device_tensor(1000, requires_grad=True)
        functional.dropout(x, 0.0)
        functional.dropout(x, 0.5, training=False)
        nn.Dropout(0.5).eval()(x)

    assert sizes(births(record(step))) == [4000]


# --- the cache and the end --------------------------------------------------------------------------------------------


def test_cache_and_synchronization_events_are_recorded() -> None:
    def step() -> None:
        device_tensor(1)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    kinds = [event.kind for event in record(step).events()]
    assert kinds == [EventKind.ALLOC, EventKind.FREE, EventKind.SYNCHRONIZE, EventKind.EMPTY_CACHE]


def test_a_model_that_the_step_drops_is_gone() -> None:
    def step() -> None:
        first = nn.Linear(100, 100).cuda()
        first(device_tensor(1, 100)).sum().backward()
        del first
        device_tensor(7)

    trace = record(step)
    (marker,) = [born for born in births(trace) if born.bytes == 28]
    weights = [b for b in births(trace) if b.category in (Category.PARAMETER, Category.GRADIENT)]
    assert len(weights) == 4
    assert all(born.freed is not None and born.freed < marker.event for born in weights)


def test_outputs_of_inference_live_until_they_are_dropped() -> None:
    estimate = analyze(nn.Linear(8, 8), torch.zeros(4, 8), training=Inference(), iterations=3)
    assert estimate.trace is not None
    outputs = [born for born in of(estimate.trace, Category.ACTIVATION) if born.bytes == 128]
    assert len(outputs) == 3
    for output, following in pairwise(outputs):
        assert output.freed is not None
        assert output.freed < following.event


def test_the_same_step_gives_the_same_trace() -> None:
    def once() -> list[tuple[Any, ...]]:
        estimate = analyze(Stack(False), torch.zeros(512, 64), training=Training(amp="bf16"))
        assert estimate.trace is not None
        return [(b.bytes, b.category, b.operator, b.module, b.event, b.freed) for b in births(estimate.trace)]

    assert once() == once()


def test_a_capture_does_not_run_the_collector_into_the_trace() -> None:
    """Reference cycles of the step go when the collector runs, as in a real process; here they outlast the step."""

    def step() -> None:
        cycle: dict[str, Any] = {"tensor": device_tensor(10)}
        cycle["self"] = cycle

    trace = record(step)
    (held,) = births(trace)
    assert lasts(trace, held)
