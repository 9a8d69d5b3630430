"""What every storage of a captured step is for, and which operator, module, phase and line made it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphmem import Inference, Training, analyze  # noqa: E402
from graphmem.capture.patches import Patches  # noqa: E402
from graphmem.capture.record.cublas_workspaces import LARGE_WORKSPACE  # noqa: E402
from graphmem.trace import Category, Place, Trace  # noqa: E402
from tests.support.captures import births, lasts, of, record, sizes  # noqa: E402

BATCH, WIDTH, HIDDEN, CLASSES = 32, 64, 128, 10


class Net(nn.Module):
    """Every category in a few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.BatchNorm1d(HIDDEN))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Any) -> Any:
        hidden = self.body(x)
        return self.head(hidden)


def trained(**options: Any) -> Trace:
    estimate = analyze(Net(), torch.zeros(BATCH, WIDTH), training=Training(**options), iterations=2)
    assert estimate.trace is not None
    return estimate.trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trained(optimizer="adamw")


# --- categories -------------------------------------------------------------------------------------------------------


def test_parameters_are_named_and_counted_once(trace: Trace) -> None:
    found = {born.label: born.bytes for born in of(trace, Category.PARAMETER)}
    assert found == {
        "body.0.weight": WIDTH * HIDDEN * 4,
        "body.0.bias": HIDDEN * 4,
        "body.2.weight": HIDDEN * 4,
        "body.2.bias": HIDDEN * 4,
        "head.weight": HIDDEN * CLASSES * 4,
        "head.bias": CLASSES * 4,
    }
    assert len(of(trace, Category.PARAMETER)) == len(found)
    assert all(born.phase.iteration == 0 for born in of(trace, Category.PARAMETER))


def test_buffers(trace: Trace) -> None:
    found = {born.label: born.bytes for born in of(trace, Category.BUFFER)}
    assert found == {
        "body.2.running_mean": HIDDEN * 4,
        "body.2.running_var": HIDDEN * 4,
        "body.2.num_batches_tracked": 8,
    }


def test_every_parameter_has_one_gradient_an_iteration(trace: Trace) -> None:
    parameters = {born.label: born.bytes for born in of(trace, Category.PARAMETER)}
    for iteration in (1, 2):
        found = {b.label: b.bytes for b in of(trace, Category.GRADIENT) if b.phase.iteration == iteration}
        assert found == {f"{name}.grad": size for name, size in parameters.items()}
    assert all(born.phase.name == "backward" for born in of(trace, Category.GRADIENT))
    assert all(born.freed is not None for born in of(trace, Category.GRADIENT))


def test_optimizer_state_is_born_once_and_stays(trace: Trace) -> None:
    state = of(trace, Category.OPTIMIZER_STATE)
    parameters = sorted(sizes(of(trace, Category.PARAMETER)))
    for name in ("exp_avg", "exp_avg_sq"):
        assert sorted(born.bytes for born in state if born.label == name) == parameters
    assert len(state) == 2 * len(parameters)
    assert {str(born.phase) for born in state} == {"iteration 1 optimizer"}
    assert all(lasts(trace, born) for born in state)


def test_activations_are_what_the_forward_pass_makes(trace: Trace) -> None:
    made = [born for born in of(trace, Category.ACTIVATION) if born.phase.iteration == 2 and born.module]
    assert [(born.operator.split(".")[1], born.bytes) for born in made] == [
        ("addmm", BATCH * HIDDEN * 4),
        ("relu", BATCH * HIDDEN * 4),
        ("native_batch_norm", BATCH * HIDDEN * 4),
        ("native_batch_norm", HIDDEN * 4),
        ("native_batch_norm", HIDDEN * 4),
        ("addmm", BATCH * CLASSES * 4),
    ]
    assert [lasts(trace, born) for born in made] == [False] * 5 + [True]  # the loop holds the output


def test_inputs_live_through_the_run(trace: Trace) -> None:
    (given,) = of(trace, Category.INPUT)
    assert (given.bytes, given.label, lasts(trace, given)) == (BATCH * WIDTH * 4, "input", True)


def test_what_the_backward_pass_and_the_optimizer_drop_is_temporary(trace: Trace) -> None:
    dropped = [born for born in of(trace, Category.TEMPORARY) if born.phase.iteration == 2]
    assert {born.phase.name for born in dropped} == {"backward", "optimizer"}
    assert all(born.freed is not None for born in dropped)


def test_one_workspace_a_thread_for_the_whole_run(trace: Trace) -> None:
    taken = of(trace, Category.WORKSPACE)
    assert [(born.bytes, str(born.phase), born.freed) for born in taken] == [
        (LARGE_WORKSPACE, "iteration 1 forward", None),
        (LARGE_WORKSPACE, "iteration 1 backward", None),
    ]
    assert [born.label for born in taken] == ["cuBLAS workspace (main thread)", "cuBLAS workspace (autograd thread)"]


def test_a_backward_pass_without_threads_of_its_own_takes_no_workspace_of_its_own() -> None:
    """torchtitan switches them off."""

    def step() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            x = torch.zeros(8, 8, device="cuda", requires_grad=True)
            (x @ x).sum().backward()

    trace = analyze(step).trace
    assert trace is not None
    taken = of(trace, Category.WORKSPACE)
    assert [born.label for born in taken] == ["cuBLAS workspace (main thread)"]


def test_nothing_on_the_device_is_unexplained(trace: Trace) -> None:
    # Held is what a whole program holds on to; COMMUNICATION takes several cards, KV_CACHE a generation.
    known = set(Category) - {Category.UNKNOWN, Category.COMMUNICATION, Category.HELD, Category.KV_CACHE}
    assert {born.category for born in births(trace)} == known


# --- modules, lines, phases -------------------------------------------------------------------------------------------


def test_operators_name_their_module(trace: Trace) -> None:
    forward = [born for born in births(trace) if str(born.phase) == "iteration 2 forward" and born.module]
    assert [born.module for born in forward] == ["body.0", "body.1", "body.2", "body.2", "body.2", "head"]


def test_gradients_name_the_module_of_the_forward_pass(trace: Trace) -> None:
    for born in of(trace, Category.GRADIENT):
        assert born.label.startswith(f"{born.module}.")


def test_backward_operators_name_the_module_they_belong_to(trace: Trace) -> None:
    (relu,) = [b for b in births(trace) if "threshold_backward" in b.operator and b.phase.iteration == 2]
    assert relu.module == "body.1"


def test_sources_are_lines_of_the_users_code(trace: Trace) -> None:
    lines, first = inspect.getsourcelines(Net.forward)
    line = {part: first + n for n, text in enumerate(lines) for part in ("body", "head") if f"self.{part}(" in text}
    here = Path(__file__).name
    for born in births(trace):
        part = born.module.partition(".")[0]
        if part in line and born.phase.name == "forward":
            assert born.source.endswith(f"{here}:{line[part]}")


def test_phases_come_in_the_order_of_the_loop(trace: Trace) -> None:
    assert [str(phase) for phase in trace.phases] == [
        "build",
        *(f"iteration {n} {stage}" for n in (1, 2) for stage in ("forward", "backward", "optimizer")),
    ]


def test_events_never_go_back_to_an_earlier_phase(trace: Trace) -> None:
    phases = [trace.operators[operator].phase for operator in trace.event_operators.tolist()]
    assert phases == sorted(phases)


def test_accumulated_micro_batches_are_one_iteration() -> None:
    found = [str(phase) for phase in trained(grad_accum=2).phases]
    assert found[:4] == ["build", "iteration 1 forward", "iteration 1 backward", "iteration 1 optimizer"]


# --- shared and host storages -----------------------------------------------------------------------------------------


def test_tied_weights_are_one_storage_and_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(50, 8)
            self.scores = nn.Linear(8, 50, bias=False)
            self.scores.weight = self.token.weight

        def forward(self, ids: Any) -> Any:
            return self.scores(self.token(ids))

    estimate = analyze(Tied(), torch.zeros(3, dtype=torch.long), iterations=1)
    assert estimate.trace is not None
    assert sizes(of(estimate.trace, Category.PARAMETER)) == [50 * 8 * 4]
    assert sizes(of(estimate.trace, Category.GRADIENT)) == [50 * 8 * 4]
    assert sizes(of(estimate.trace, Category.OPTIMIZER_STATE)) == [50 * 8 * 4] * 2


def test_host_tensors_are_not_on_the_device() -> None:
    def step() -> None:
        host = torch.zeros(1000)
        host.add_(1)
        copied = host.to("cuda")
        copied.cpu()

    found = births(record(step), place=None)
    assert [(born.place, born.bytes) for born in found] == [
        (Place.HOST, 4000),
        (Place.DEVICE, 4000),
        (Place.HOST, 4000),
    ]


def test_a_model_built_on_the_host_and_moved_is_there_only_once(trace: Trace) -> None:
    host = [born for born in births(trace, Place.HOST) if born.bytes == WIDTH * HIDDEN * 4]
    assert host
    assert all(born.freed is not None for born in host)


def test_a_model_built_on_the_device_leaves_no_host_copy() -> None:
    estimate = analyze(lambda: (Net(), torch.zeros(BATCH, WIDTH)), build_on="device", iterations=1)
    assert estimate.trace is not None
    assert sum(sizes(births(estimate.trace, Place.HOST))) == 0
    assert len(of(estimate.trace, Category.PARAMETER)) == 6


def test_pinned_memory_is_told_apart() -> None:
    def step() -> None:
        pinned = torch.empty(1000, pin_memory=True)
        also = torch.empty(500).pin_memory()
        pinned.to("cuda", non_blocking=True)
        assert pinned.is_pinned()
        assert also.is_pinned()

    assert sizes(births(record(step), Place.PINNED)) == [4000, 2000]


def test_memory_is_pinned_while_no_name_is_replaced() -> None:
    """A thread of the program pins what it loaded, while another one imports."""

    def step() -> None:
        with Patches.lifted():
            loaded = torch.zeros(500).pin_memory()
        assert loaded.is_pinned()

    assert sizes(births(record(step), Place.PINNED)) == [2000]


def test_inference_holds_parameters_inputs_and_a_workspace_only() -> None:
    estimate = analyze(Net(), torch.zeros(BATCH, WIDTH), training=Inference())
    trace = estimate.trace
    assert trace is not None
    for absent in (Category.GRADIENT, Category.OPTIMIZER_STATE, Category.TEMPORARY):
        assert of(trace, absent) == []
    assert len(of(trace, Category.WORKSPACE)) == 1
    assert all(born.freed is not None for born in of(trace, Category.ACTIVATION))


def test_weights_in_half_precision_are_half_as_large() -> None:
    halved = {born.label: born.bytes for born in of(trained(dtype="bf16"), Category.PARAMETER)}
    assert halved["body.0.weight"] == WIDTH * HIDDEN * 2


def test_the_breakdown_sums_to_the_device_figure_at_the_peak() -> None:
    estimate = analyze(Net(), torch.zeros(BATCH, WIDTH), training=Training())
    assert sum(estimate.breakdown.values()) == estimate.device
    state = sum(sizes(of(trained(), Category.OPTIMIZER_STATE)))
    assert estimate.breakdown["OPTIMIZER_STATE"] in (0, state)


def test_a_step_without_modules_has_phases() -> None:
    def step() -> None:
        weight = torch.zeros(64, 64, device="cuda", requires_grad=True)
        optimizer = torch.optim.Adam([weight])
        for _ in range(2):
            (weight @ weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    phases = dict.fromkeys(str(born.phase) for born in births(record(step)))
    assert [phase for phase in phases if "backward" in phase or "optimizer" in phase] == [
        "iteration 1 backward", "iteration 1 optimizer", "iteration 2 backward", "iteration 2 optimizer",
    ]  # fmt: skip


def test_the_gradient_of_the_loss_belongs_to_the_backward_pass() -> None:
    trace = record(lambda: nn.Linear(4, 4).cuda()(torch.zeros(2, 4, device="cuda")).sum().backward())
    (root,) = [born for born in births(trace) if born.operator == "aten.ones_like.default"]
    assert str(root.phase) == "iteration 1 backward"
    assert root.category is not Category.ACTIVATION


def test_a_model_called_by_name_begins_its_iteration() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, *, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.linear(pixels), labels)

    def step() -> None:
        model = Named().cuda()
        pixels, labels = torch.randn(4096, 64, device="cuda"), torch.zeros(4096, dtype=torch.long, device="cuda")
        model(pixels=pixels, labels=labels).backward()

    found = record(step)
    named = [(phase.iteration, phase.name) for phase in found.phases]
    assert named == [(0, "build"), (1, "forward"), (1, "backward")]
    pixels = next(storage for storage in found.storages if storage.bytes == 4096 * 64 * 4)
    assert pixels.category is Category.INPUT


def test_a_module_may_have_a_list_named_buffers() -> None:
    """As Megatron's ``DistributedDataParallel`` has; and its method is not asked for."""

    class Bucketed(nn.Linear):
        buffers = ()

    found = births(record(lambda: Bucketed(4, 4).cuda()(torch.zeros(2, 4, device="cuda"))))
    assert [born.category for born in found][:2] == [Category.PARAMETER, Category.PARAMETER]
