"""``torch.compile`` in a capture: the generated code's buffers, byte for byte, and what cannot be followed."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphmem
from graphmem.base.versions import COMPILER_FOLLOWED_SINCE
from graphmem.cli.main import cli
from graphmem.trace import EventKind
from graphmem.trace import to_json as trace_to_json
from graphmem.training.program import Program
from tests import places
from tests.recorded.steps import runs
from tests.support.captures import births, record

FOLDER = places.PYTORCH / "compiled"
_INSTALLED = tuple(int(part) for part in torch.__version__.split(".")[:2])

pytestmark = pytest.mark.skipif(_INSTALLED < COMPILER_FOLLOWED_SINCE, reason="torch.compile is not followed")

FAST = ("mlp_64_adam_fp32", "mlp_256_none_fp32")
FACTORY = """
    import torch
    from torch import nn

    @torch.compile
    def loss_of(output):
        return (output * output).mean()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.second(nn.functional.gelu(self.first(x)))

    def plain():
        return Model(), torch.zeros(1024, 64)

    def compiled():
        model, inputs = plain()
        return torch.compile(model), inputs

    def compiled_in_place():
        model, inputs = plain()
        model.compile()
        return model, inputs

    def own_step():
        model, inputs = plain()
        model, inputs = model.cuda(), inputs.cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            loss_of(model(inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()

    class Breaks(nn.Module):
        def forward(self, x):
            x = x * 2
            torch._dynamo.graph_break()
            return (x + 1).relu()

    def broken():
        return torch.compile(nn.Sequential(nn.Linear(64, 64), Breaks())), torch.zeros(8, 64)

    def refused():
        return torch.compile(nn.Sequential(nn.Linear(64, 64), Breaks()), fullgraph=True), torch.zeros(8, 64)
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "compiled_model.py"
    path.write_text(textwrap.dedent(FACTORY))
    return path


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in runs.names("", FOLDER)]
)
def test_a_compiled_step_allocates_what_the_cuda_build_does(name: str) -> None:
    compared = runs.compare(name, FOLDER, cudnn_workspaces=True)
    assert compared.predicted.replay.peak_allocated_bytes == compared.recorded.peak_allocated_bytes
    assert compared.predicted.replay.peak_reserved_bytes == compared.recorded.peak_reserved_bytes


@pytest.mark.parametrize("name", FAST)
def test_every_allocation_after_the_first_iteration_is_the_same(name: str) -> None:
    """In the first one the CUDA build also makes and drops constants of 4 bytes while it compiles."""
    recorded = runs.load(name, FOLDER)
    sizes, predicted = ([size for size in run.changes if size > 0] for run in (recorded, runs.predict(recorded)))
    later = len(sizes) - dict(recorded.marks)["end0"]
    assert later > 0
    assert predicted[-later:] == sizes[-later:]


def test_fused_intermediates_do_not_exist(factories: Path) -> None:
    eager = graphmem.analyze(f"{factories}:plain")
    compiled = graphmem.analyze(f"{factories}:compiled")
    assert compiled.peak.allocated_bytes < eager.peak.allocated_bytes
    assert any("torch.compile" in text for text in compiled.assumptions)
    assert not any("torch.compile" in text for text in eager.assumptions)


def test_the_ways_to_compile_a_model_agree(factories: Path) -> None:
    ways = [
        graphmem.analyze(f"{factories}:compiled"),
        graphmem.analyze(f"{factories}:compiled_in_place"),
        graphmem.analyze(f"{factories}:plain", training=graphmem.Training(compile="default")),
    ]
    assert len({estimate.peak.allocated_bytes for estimate in ways}) == 1
    assert len({estimate.peak.reserved_bytes for estimate in ways}) == 1


def test_functions_compiled_on_import_are_followed_in_a_step_of_ones_own(factories: Path) -> None:
    estimate = graphmem.analyze(f"{factories}:own_step")
    assert any("torch.compile" in text for text in estimate.assumptions)


def test_graph_breaks_run_between_compiled_parts(factories: Path) -> None:
    estimate = graphmem.analyze(f"{factories}:broken")
    assert any("torch.compile" in text for text in estimate.assumptions)


def test_a_library_that_looks_for_fake_tensors_is_compiled(tmp_path: Path) -> None:
    """Compiled code is valid while the class is the one it found: transformers asks so for a packed mask."""
    (tmp_path / "asks.py").write_text(
        "import torch\n"
        "def scaled(x):\n"
        "    return x if isinstance(x, getattr(torch, '_subclasses').FakeTensor) else x.repeat(64, 1)\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        x = scaled(x) * 2\n"
        "        torch._dynamo.graph_break()\n"
        "        return scaled(x) + 1\n"
        "def asking():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(64, 64), Model()), torch.zeros(512, 64)\n"
    )
    compiled = graphmem.analyze(f"{tmp_path / 'asks.py'}:asking", training=graphmem.Training(compile="default"))
    assert compiled.peak.allocated_bytes > 64 * 64 * 512 * 64 * 4


def test_what_does_not_compile_is_one_message(factories: Path) -> None:
    with pytest.raises(graphmem.GraphmemError, match=r"torch\.compile failed: Unsupported"):
        graphmem.analyze(f"{factories}:refused")


def _drops_its_argument(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    return x * 2


def _step_with_temporaries() -> None:
    _drops_its_argument(torch.ones(64, device="cuda") + 1)


def _does_not_compile(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x


def test_steps_after_a_failure_to_compile_are_what_they_were() -> None:
    """Dynamo leaves its frame evaluation on after a failure, and then callers hold on to arguments."""
    compiled = torch.compile(_does_not_compile, backend="eager", fullgraph=True)
    before = trace_to_json(record(_step_with_temporaries))
    with pytest.raises(graphmem.GraphmemError):
        record(lambda: compiled(torch.ones(2, device="cuda")))
    assert trace_to_json(record(_step_with_temporaries)) == before
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.ones(2))
    assert trace_to_json(record(_step_with_temporaries)) == before


def test_a_step_that_catches_the_failure_holds_arguments_longer() -> None:
    def step() -> None:
        with contextlib.suppress(graphmem.GraphmemError):
            torch.compile(_does_not_compile, backend="eager", fullgraph=True)(torch.ones(2, device="cuda"))
        _step_with_temporaries()

    without, after = ([event.kind.name for event in record(run).events()] for run in (_step_with_temporaries, step))
    assert "".join(kind[0] for kind in without) == "AAFAFAFF"
    assert "".join(kind[0] for kind in after[2:]) == "AAFAAFFF"


def test_functions_decorated_before_the_first_compilation_of_the_process() -> None:
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    tables = (
        TorchInGraphFunctionVariable._get_handlers,
        trace_rules.get_torch_obj_rule_map,
        trace_rules.get_tensor_method,
    )
    for table in tables:
        table.cache_clear()
    decorated = torch.compile(lambda x: (x * x).mean(), backend="eager")
    born = births(record(lambda: decorated(torch.ones(8, 64, device="cuda"))))
    assert [birth.bytes for birth in born] == [2048, 2048, 4]
    for table in tables:
        assert not any(str(getattr(entry, "__module__", "")).startswith("graphmem") for entry in table())


def test_what_is_compiled_after_a_process_group_began_is_followed(tmp_path: Path) -> None:
    """``init_process_group`` empties Dynamo's tables, which would find the functions of the pretended device."""
    source = """
import torch, torch.distributed as dist
@torch.compile
def first(x): return x + 1
dist.init_process_group("nccl", rank=0, world_size=2, store=dist.HashStore())
x = torch.compile(lambda x: first(x) * 2)(torch.ones(256, device="cuda"))
"""
    path = tmp_path / "train.py"
    path.write_text(source, encoding="utf-8")
    assert graphmem.analyze(Program(str(path))).details["program"]["how"] == "itself"


def test_names_are_the_users_and_storages_are_named_after_kernels() -> None:
    def step() -> None:
        model = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda())
        model(torch.ones(8, 64, device="cuda")).sum().backward()

    labels = {born.label for born in births(record(step))}
    assert {"0.weight", "0.bias"} <= labels
    assert any(label.startswith("triton_") for label in labels)


BREAKING = """
    import logging
    import torch
    from torch import nn

    LOG = logging.getLogger("breaking")

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

        @property
        def loss(self):
            LOG.debug("Dynamo does not follow loggers")
            return nn.functional.mse_loss

        def forward(self, x, target=None):
            hidden = self.second(torch.relu(self.first(x)))
            return self.loss(hidden, x) if target is None else hidden

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    def build():
        return Model(), (torch.zeros(8, 64),), lambda loss: loss
"""


def test_a_break_inside_a_module_leaves_the_rest_compiled(tmp_path: Path) -> None:
    """Dynamo converts the outer frames again, and must see modules, and the frames they call, as before."""
    file = tmp_path / "breaking.py"
    file.write_text(textwrap.dedent(BREAKING))
    estimate = graphmem.analyze(f"{file}:build", training=graphmem.Training(compile="default"))
    assert estimate.trace is not None
    names = {operator.name for operator in estimate.trace.operators}
    assert "aten.addmm.out" in names
    assert names.isdisjoint({"aten.addmm.default", "aten.relu.default"})


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import torch", "import torch, torch._dynamo"])
def test_a_file_may_compile_while_it_is_imported(first: str, tmp_path: Path) -> None:
    """In a process of its own: the compiler remembers the functions that it finds first."""
    (tmp_path / "model.py").write_text(
        f"{first}\n@torch.compile\ndef act(x):\n    return torch.nn.functional.gelu(x)\n"
        "class Model(torch.nn.Linear):\n    def forward(self, x):\n        return act(super().forward(x))\n"
        "def build():\n    return Model(64, 64), torch.zeros(4, 64)\n"
    )
    code = (
        "import graphmem, torch\nestimate = graphmem.analyze('model.py:build', device='T4')\n"
        "from torch._dynamo.trace_rules import get_torch_obj_rule_map\n"
        "print(estimate.allocated > 0, torch.cuda.manual_seed in get_torch_obj_rule_map())"
    )
    environment = {**os.environ, "PYTHONPATH": str(places.ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True True\n", 0), done.stderr


def test_autotuning_is_left_out_and_said(factories: Path) -> None:
    estimate = graphmem.analyze(f"{factories}:plain", training=graphmem.Training(compile="max-autotune"))
    messages = [diagnostic.message for diagnostic in estimate.diagnostics]
    assert any("max-autotune chooses kernels by timing" in message for message in messages)


def test_an_optimizers_step_is_compiled() -> None:
    """With a learning rate that moves; in one graph, as its tables are what they are in any run."""

    def step() -> None:
        linear = torch.nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.AdamW(linear.parameters(), lr=torch.tensor(1e-3))
        update = torch.compile(optimizer.step)
        for _ in range(3):
            linear(torch.ones(8, 64, device="cuda")).sum().backward()
            update()
            optimizer.zero_grad()

    trace = record(step)
    names = {operator.name for operator in trace.operators}
    assert not any(name.startswith("aten._foreach") for name in names)


def test_kernels_of_the_host_need_no_compiler(tmp_path: Path) -> None:
    """Whole programs start no process; a count that lies on the host is computed by a kernel there."""
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "scale = torch.compile(lambda x, count: (x * 2, (count + 1).sqrt()))\n"
        "scale(torch.ones(256, device='cuda'), torch.ones(()))\n"
    )
    assert graphmem.analyze(Program(str(path))).details["program"]["how"] == "itself"


def test_templates_need_no_triton() -> None:
    def step() -> None:
        query = torch.ones(1, 2, 128, 64, device="cuda")
        torch.compile(flex_attention)(query, query, query)

    assert 2 * 128 * 64 * 4 in [born.bytes for born in births(record(step))][1:]


def test_a_step_in_cuda_graphs_is_warmed_up_captured_and_replayed() -> None:
    """In the pool of the graphs: the first step, and the second with its input; the third takes nothing there. What is
    evaluated while gradients live is beside them, as they are in the pool again."""

    def step() -> None:
        linear = torch.nn.Linear(64, 64, bias=False).cuda()
        function = torch.compile(linear, mode="reduce-overhead")
        for _ in range(3):
            linear.zero_grad()
            function(torch.ones(128, 64, device="cuda")).sum().backward()
        with torch.no_grad():
            function(torch.ones(256, 64, device="cuda"))

    trace = record(step)
    pooled = [storage.bytes for storage in trace.storages if storage.pool and "workspace" not in storage.label]
    rows, weight = 128 * 64 * 4, 64 * 64 * 4
    assert pooled == [rows, weight, rows, rows, rows, weight, weight, 2 * rows]


def test_padded_products_are_not_tried() -> None:
    """Whether padding is faster is found on the disk, as after a first run: what is taken is what the graph takes."""

    def step() -> torch.Tensor:
        layers = torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 5003)
        model, inputs = torch.nn.Sequential(*layers).cuda(), torch.zeros(2048, 1024, device="cuda")
        return torch.compile(model)(inputs)

    for _ in range(2):  # nothing is remembered of the first
        sizes = [birth.bytes for birth in births(record(step))]
        assert [size for size in sizes if size in (8388608, 40984576, 20492288)] == [20492288, *3 * [8388608], 40984576]


@pytest.mark.parametrize("threaded", [False, True])
def test_regions_that_are_wrapped_for_modes_take_what_they_take_otherwise(threaded: bool) -> None:
    """torchtitan compiles its attention so, chooses what is checkpointed, and starts threads."""

    def peak(options: dict[str, bool] | None) -> int:
        activation = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2, options=options)

        def choose(*_: object, **__: object) -> CheckpointPolicy:
            return CheckpointPolicy.PREFER_RECOMPUTE

        def step() -> None:
            if threaded:
                thread = threading.Thread(target=lambda: torch.zeros(8, device="cuda"))
                thread.start()
                thread.join()
            x = torch.zeros(256, 64, device="cuda", requires_grad=True)
            contexts = functools.partial(create_selective_checkpoint_contexts, choose)
            checkpoint(lambda x: activation(x * 2), x, use_reentrant=False, context_fn=contexts).sum().backward()

        return graphmem.analyze(step, device="T4").peak.allocated_bytes

    assert peak({"wrap_inductor_compiled_regions": True}) == peak(None)


def test_regions_that_are_wrapped_for_modes_give_their_arguments_back_as_otherwise() -> None:
    """Without a mode of the program they are called as they are: what a backward pass saved goes when it was used."""

    def changes(options: dict[str, bool] | None) -> list[tuple[EventKind, int]]:
        function = torch.compile(lambda x, w: (x @ w).cos() @ w, options=options)

        def step() -> None:
            x, w = (torch.zeros(rows, 64, device="cuda", requires_grad=True) for rows in (256, 64))
            (function(x * 2, w) * 2).sum().backward()

        trace = record(step)
        return [(event.kind, trace.storages[event.subject].bytes) for event in trace.events()]

    assert changes({"wrap_inductor_compiled_regions": True}) == changes(None)


class _Weight(torch.nn.Parameter):
    """A parameter as vLLM makes them: a class of its own, which hands everything on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_parameters_of_a_librarys_class_are_compiled_as_others_are() -> None:
    def taken(kind: type[torch.nn.Parameter]) -> list[tuple[int, int, int | None]]:
        function = torch.compile(lambda x, w: torch.nn.functional.linear(x, w).relu() + 1, fullgraph=True)

        def step() -> None:
            with torch.no_grad():
                function(torch.empty(256, 64, device="cuda"), kind(torch.empty(32, 64, device="cuda")))

        return [(born.bytes, born.event, born.freed) for born in births(record(step))]

    assert taken(_Weight) == taken(torch.nn.Parameter)


def test_kernels_are_not_timed_on_the_card() -> None:
    """Nor those of code that is to be kept, nor whether several are quicker as one."""

    def taken(options: dict[str, bool] | None) -> list[tuple[int, int, int | None]]:
        function = torch.compile(lambda x, y: (x.cos() * 2, y.sin() + 1), options=options)
        trace = record(lambda: function(*(torch.empty(size, 64, device="cuda") for size in (256, 128))))
        return [(born.bytes, born.event, born.freed) for born in births(trace)]

    as_kept = {"triton.autotune_at_compile_time": True, "combo_kernels": True, "benchmark_combo_kernel": True}
    assert taken(as_kept) == taken(None)


def test_pytorch_is_left_as_it_was(factories: Path) -> None:
    from torch._dynamo import device_interface, eval_frame
    from torch.nn.modules import module as nn_module

    device_interface.init_device_reg()  # PyTorch does so when it is first asked for a device
    before = (torch.compile, eval_frame.set_eval_frame, device_interface.device_interfaces.get("cuda"))
    graphmem.analyze(f"{factories}:compiled")
    assert (torch.compile, eval_frame.set_eval_frame, device_interface.device_interfaces.get("cuda")) == before
    assert not nn_module._global_forward_pre_hooks
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_the_command_line_compiles(factories: Path) -> None:
    result = CliRunner().invoke(cli, ["analyze", f"{factories}:plain", "--compile"])
    assert result.exit_code == 0, result.output
    assert "torch.compile" in result.output


def test_the_command_line_names_the_modes(factories: Path) -> None:
    result = CliRunner().invoke(cli, ["analyze", f"{factories}:plain", "--compile-mode", "fast"])
    assert result.exit_code != 0
    assert "reduce-overhead" in result.output


def _sampled() -> None:
    """Validated, this looks at its parameters: comparisons of a byte an element, and their reductions."""
    mean = torch.ones(8, 64, device="cuda")
    torch.distributions.Normal(mean, mean.exp()).rsample()


def _compiled_and_sampled() -> None:
    torch.compile(lambda x: x + 1)(torch.ones(8, 64, device="cuda"))
    _sampled()


def test_compiling_ends_the_validation_of_distributions_in_its_own_run_only() -> None:
    validated = [born.bytes for born in births(record(_sampled))]
    compiled = [born.bytes for born in births(record(_compiled_and_sampled))]
    assert [born.bytes for born in births(record(_sampled))] == validated
    assert [born.bytes for born in births(record(_compiled_and_sampled))] == compiled
    assert 8 * 64 in validated
    assert 8 * 64 not in compiled
    assert torch.distributions.Distribution._validate_args is __debug__


def test_a_program_that_compiles_may_want_validation_all_the_same() -> None:
    def step() -> None:
        compiled = torch.compile(lambda x: x + 1)
        torch.distributions.Distribution.set_default_validate_args(True)
        compiled(torch.ones(8, 64, device="cuda"))
        _sampled()

    assert 8 * 64 in [born.bytes for born in births(record(step))]


def test_distributions_can_be_compiled() -> None:
    @torch.compile(fullgraph=True)
    def log_probability(x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(x, x.exp()).log_prob(x)

    assert births(record(lambda: log_probability(torch.ones(8, 64, device="cuda"))))


def test_functions_of_host_numbers_are_compiled_once() -> None:
    """A host tensor that is real, as optimizers' steps are, is the same to the guards of every call."""
    counts = []

    def step() -> None:
        compiled = torch.compile(lambda x, count: x * count, dynamic=False)
        for count in (1.0, 2.0, 3.0):
            compiled(torch.ones(8, 64, device="cuda"), torch.tensor(count))
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    record(step)
    assert len(set(counts)) == 1


def test_code_for_sizes_that_are_symbols_has_results_of_every_size() -> None:
    shapes: list[tuple[int, ...]] = []

    def step() -> None:
        gate = torch.compile(lambda x: torch.nn.functional.silu(x[..., :8]) * x[..., 8:], dynamic=True)
        shapes.extend(tuple(gate(torch.ones(rows, 16, device="cuda")).shape) for rows in (32, 4))

    record(step)
    assert shapes == [(32, 8), (4, 8)]
