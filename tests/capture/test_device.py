"""The pretended device as training scripts use it: what ``torch.cuda`` answers, and what it says it cannot do."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence  # noqa: E402

from graphmem import Inference, analyze  # noqa: E402
from graphmem.capture.session.error_messages import explained  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.diagnostics import Code  # noqa: E402
from graphmem.errors import CaptureError, GraphmemError, SourceError  # noqa: E402
from graphmem.runtimes.base import Setting  # noqa: E402
from graphmem.runtimes.pytorch import RUNTIME  # noqa: E402
from graphmem.trace import Category, Place  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION, births, record  # noqa: E402


def told(function: Callable[[], Any]) -> Any:
    """What the function returns inside a capture."""
    answers = []
    record(lambda: answers.append(function()))
    return answers[0]


def test_tensors_inside_transforms_are_on_the_card() -> None:
    """``torch.func`` wraps them, and what is made on the device of one is made on the card."""
    places = []

    def loss(weight: Any) -> Any:
        places.append((str(weight.device), weight.is_cuda, weight.is_meta))
        rows = torch.arange(3, device=weight.device)
        return (weight[rows] * torch.ones(3, device=weight.device)).sum()

    told(lambda: torch.func.vmap(torch.func.grad(loss))(torch.randn(2, 5, device="cuda")))
    told(lambda: torch.func.grad(loss)(torch.ones(5)))
    assert places == [("cuda:0", True, False), ("cpu", False, False)]


def refused(function: Callable[[], Any]) -> str:
    with pytest.raises(CaptureError) as raised:
        record(function)
    text = str(raised.value)
    assert "\n" not in text
    return text


# --- devices by number ------------------------------------------------------------------------------------------------


def test_a_bare_number_is_a_cuda_device() -> None:
    def asked() -> None:
        made = torch.device(0)
        assert (made, type(made)) == (torch.device("cuda", 0), torch.device)
        assert torch.device(device=0) == torch.device(made) == made
        assert pickle.loads(pickle.dumps(made)) == made
        assert torch.device(1).index == 1
        assert torch.device("cpu").type == torch.device(type="cpu").type == "cpu"
        for wrong, kind in ((-1, Exception), ("nonsense", RuntimeError), (1.5, TypeError)):
            with pytest.raises(kind):
                torch.device(wrong)

    told(asked)
    assert torch.device("cuda:1").index == 1


@pytest.mark.skipif(torch.accelerator.is_available() if hasattr(torch, "accelerator") else True, reason="has a card")
def test_afterwards_a_number_is_what_it_was() -> None:
    before = vars(torch.device)["__new__"]
    told(lambda: torch.device(0))
    assert vars(torch.device)["__new__"] is before
    with pytest.raises(RuntimeError):
        torch.device(0)


# --- torch.cuda -------------------------------------------------------------------------------------------------------

#: Arguments of what cannot be called without.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "can_device_access_peer": (0, 0),
    "check_error": (0,),
    "device": (0,),
    "get_stream_from_external": (0,),
    "make_graphed_callables": (lambda: torch.zeros(1, device="cuda"), ()),
    "manual_seed": (1,),
    "manual_seed_all": (1,),
    "set_device": (0,),
    "set_per_process_memory_fraction": (0.5,),
    "set_rng_state": (None,),
    "set_rng_state_all": ([None],),
    "set_stream": (None,),
    "set_sync_debug_mode": (1,),
    "stream": (None,),
    "StreamContext": (None,),
    "change_current_allocator": (None,),
    "caching_allocator_alloc": (8,),
    "caching_allocator_delete": (8,),
    "CUDAPluggableAllocator": ("path", "alloc", "free"),
    "graph": (None,),
    "use_mem_pool": (None,),
    "CudaError": (0,),
}
#: Types of before PyTorch 1.5, which nobody makes.
OLD = ("Storage",)


def names() -> list[str]:
    return [name for name in torch.cuda.__all__ if not name.endswith(OLD)]


def trouble(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, str]:
    """What a call raises, unless it is an error of ours that names the function."""
    try:
        function(*arguments)
    except GraphmemError as error:
        return {} if name in str(error) else {name: str(error)}
    except Exception as error:
        return {name: f"{type(error).__name__}: {error}"}
    return {}


def test_every_public_name_of_torch_cuda_works_or_says_why_not() -> None:
    obscure: dict[str, str] = {}

    def step() -> None:
        for name in names():
            found = getattr(torch.cuda, name)
            if isinstance(found, (ModuleType, bool, tuple)):
                continue
            arguments = (torch.zeros(3, device="cuda"),) if name == "device_of" else ARGUMENTS.get(name, ())
            obscure.update(trouble(name, found, arguments))

    record(step)
    assert set(obscure) <= {"CudaError", "cudaStatus"}, obscure  # of a runtime error, and a list of codes


@pytest.mark.parametrize("module", ["memory", "random", "nvtx", "profiler"])
def test_functions_of_its_modules_work_or_say_why_not(module: str) -> None:
    obscure: dict[str, str] = {}

    def step() -> None:
        owner = getattr(torch.cuda, module)
        for name in getattr(owner, "__all__", ("range_push", "range_pop", "mark")):
            found = getattr(owner, name)
            if name == "profile" or (inspect.isfunction(found) and inspect.isgeneratorfunction(found)):
                continue
            arguments = ("text",) if module == "nvtx" and name != "range_pop" else ARGUMENTS.get(name, ())
            obscure.update(trouble(name, found, arguments))

    record(step)
    assert not obscure


def test_a_function_that_needs_a_driver_is_named() -> None:
    text = refused(lambda: torch.cuda.tunable.enable())
    assert "torch.cuda.enable cannot be analysed: it needs a driver" in text


def test_memory_statistics_have_every_documented_key() -> None:
    stats = told(lambda: dict(torch.cuda.memory_stats()))
    for kind in ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes"):
        for pool in ("all", "large_pool", "small_pool"):
            for metric in ("current", "peak", "allocated", "freed"):
                assert stats[f"{kind}.{pool}.{metric}"] == 0
    assert stats["num_ooms"] == stats["num_alloc_retries"] == stats["oversize_segments.peak"] == 0
    assert "Allocated memory" in told(lambda: torch.cuda.memory_summary("cuda:0"))
    assert told(lambda: torch.cuda.max_memory_allocated() + torch.cuda.memory_reserved(0)) == 0


def test_the_card_describes_itself() -> None:
    properties = told(lambda: torch.cuda.get_device_properties("cuda"))
    assert (properties.name, properties.multi_processor_count) == (H100.name, H100.sm_count)
    assert (properties.major, properties.minor) == H100.capability
    assert properties.shared_memory_per_block_optin == 232448  # 227 KiB, as a card of capability 9.0 says
    assert told(lambda: torch.cuda.get_device_capability()) == (9, 0)
    assert told(lambda: torch.cuda.get_device_name(0)) == H100.name
    assert told(lambda: torch.cuda.mem_get_info()) == (H100.capacity_bytes - H100.context_bytes, H100.capacity_bytes)
    assert "L2_cache_size" in refused(lambda: torch.cuda.get_device_properties(0).L2_cache_size)


def test_events_take_time_that_can_be_divided_by() -> None:
    def step() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        end.record()
        torch.cuda.synchronize()
        return 1 / begin.elapsed_time(end)

    assert told(step) == 1.0


def test_everything_is_put_back() -> None:
    before = {name: getattr(torch.cuda, name) for name in torch.cuda.__all__}
    generator, save, type_ = torch.Generator, torch.save, torch.Tensor.type
    record(lambda: None)
    assert {name: getattr(torch.cuda, name) for name in torch.cuda.__all__} == before
    assert (torch.Generator, torch.save, torch.Tensor.type) == (generator, save, type_)
    with torch.device("cpu"):
        assert torch.tensor([1.0]).tolist() == [1.0]


# --- tensors on the device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device=0),
        lambda: torch.empty_like(torch.zeros(3), device=0),
        lambda: torch.tensor([1.0, 2.0], device=0),
        lambda: torch.zeros(3).to(0),
        lambda: torch.zeros(3).cuda(0, non_blocking=True),
        lambda: torch.zeros(3).to("cuda:0", torch.half, non_blocking=True),
        lambda: torch.zeros(3, device="cuda").new_tensor([1, 2]),
        lambda: torch.cuda.FloatTensor(2, 3),
        lambda: torch.cuda.LongTensor([1, 2, 3]),
        lambda: torch.zeros(3).type("torch.cuda.HalfTensor"),
        lambda: torch.zeros(3).type(torch.cuda.FloatTensor),
        lambda: torch.randn(3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)),
        lambda: torch.randperm(3, device="cuda", generator=torch.Generator("cuda")),
        lambda: nn.Linear(2, 2).to(0).weight,
        lambda: nn.Linear(2, 2, device=0).weight,
    ],
)
def test_ways_to_make_a_device_tensor(make: Callable[[], Any]) -> None:
    assert told(lambda: make().device) == torch.device("cuda", 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_shape_as_a_tensor_is_known(device: str) -> None:
    def made() -> tuple[str, list[int]]:
        shape = torch._shape_as_tensor(torch.zeros(3, 5, device=device))
        return shape.device.type, shape.tolist()

    assert told(made) == ("cpu", [3, 5])


def test_data_is_read_into_pinned_memory() -> None:
    def made() -> tuple[bool, list[int], bool]:
        tensor = torch.tensor([1, 2], dtype=torch.int32, pin_memory=True)
        return tensor.is_pinned(), tensor.tolist(), tensor.to("cuda", non_blocking=True).is_cuda

    assert told(made) == (True, [1, 2], True)


@pytest.mark.parametrize("draw", ["cauchy_", "exponential_", "geometric_", "log_normal_"])
def test_a_generator_draws_in_place(draw: str) -> None:
    def made() -> bool:
        tensor = torch.empty(3, device="cuda")
        options = {"p": 0.5} if draw == "geometric_" else {}
        return getattr(tensor, draw)(**options, generator=torch.Generator("cuda")) is tensor

    assert told(made)


def test_a_default_device() -> None:
    def made() -> list[bool]:
        layer = nn.Linear(2, 2)
        return [t.is_cuda for t in (layer.weight, torch.zeros(2), torch.tensor([1.0]), torch.as_tensor([1]))]

    def by_context() -> list[bool]:
        with torch.device("cuda"):
            return made()

    def by_setting() -> list[bool]:
        torch.set_default_device("cuda")
        return made()

    def by_type() -> list[bool]:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        return made()

    for way in (by_context, by_setting, by_type):
        assert all(told(way)), way


def test_old_types_are_told_apart() -> None:
    assert told(lambda: torch.zeros(3).cuda().type()) == "torch.cuda.FloatTensor"
    assert told(lambda: isinstance(torch.zeros(3).cuda(), torch.cuda.FloatTensor))
    assert not told(lambda: isinstance(torch.zeros(3), torch.cuda.FloatTensor))


def test_logs_and_metrics_read_what_was_assumed() -> None:
    three = lambda: torch.randn(3, 5000, device="cuda")[:, 0]  # noqa: E731
    one = lambda: three().sum()  # noqa: E731
    assert told(lambda: f"{one():.3f}") == "1.000"
    assert told(lambda: one().cpu().item()) == 1.0
    assert told(lambda: torch.zeros(2, 3, device="cuda").cpu().numpy().shape) == (2, 3)
    assert told(lambda: three().cpu().tolist()) == [1.0, 1.0, 1.0]
    assert told(lambda: torch.zeros(3, device="cuda").cpu().tolist()) == [0.0, 0.0, 0.0]
    assert told(lambda: torch.equal(one(), one())) is False
    assert "call .cpu() first" in refused(lambda: torch.zeros(3, device="cuda").numpy())


def test_saving_a_checkpoint_writes_nothing(tmp_path: Path) -> None:
    record(lambda: torch.save(nn.Linear(2, 2).cuda().state_dict(), tmp_path / "model.pt"))
    assert not list(tmp_path.iterdir())


def test_lazy_modules_take_their_shape_from_the_first_forward() -> None:
    def step() -> None:
        model = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4)).to("cuda")
        model(torch.zeros(2, 5, 8, 8, device="cuda"))
        assert isinstance(model[0], nn.Conv2d)
        assert model[3].weight.shape == (4, 3 * 6 * 6)

    assert 4 * 3 * 36 * 4 in [born.bytes for born in births(record(step))]


def test_the_second_card_is_refused() -> None:
    for ask in (
        lambda: torch.zeros(2, device="cuda:1"),
        lambda: torch.zeros(2).to(1),
        lambda: nn.Linear(2, 2).to("cuda:1"),
        lambda: torch.cuda.set_device(1),
    ):
        refusal = refused(ask)
        assert "one card" in refusal
        assert refusal.startswith(f"tests/capture/test_device.py:{ask.__code__.co_firstlineno}: ")
    assert "'mps'" in refused(lambda: torch.zeros(2, device="mps"))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_storage_has_an_address_of_its_own(device: str) -> None:
    def step() -> None:
        first, second = torch.empty(1000, device=device), torch.empty(1000, device=device)
        addresses = [tensor.untyped_storage().data_ptr() for tensor in (first, second)]
        assert all(address and address % 512 == 0 for address in addresses)
        assert abs(addresses[0] - addresses[1]) >= 4000
        assert (first.data_ptr(), first[10:].data_ptr()) == (addresses[0], addresses[0] + 40)
        assert first[:0].data_ptr() == torch.empty(0, device=device).data_ptr() == 0
        second.untyped_storage().resize_(0)
        assert second.untyped_storage().data_ptr() == 0
        assert first.data_ptr() == addresses[0]

    record(step)


def test_meta_is_a_place_without_memory() -> None:
    """Whoever makes the tensor: a program, a module of PyTorch, a context, a move; until ``to_empty``."""

    def step() -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512))
            assert torch.tensor([1.0]).is_meta
            assert torch.get_default_device() == torch.device("meta")
        model.append(nn.Linear(512, 512, device="meta"))
        moved = (torch.ones(512).to("meta"), torch.ones(512, device="cuda").to("meta"), nn.Linear(8, 8).to("meta").bias)
        output = model(torch.empty(64, 512, device="meta"))
        output.sum().backward()
        for tensor in (*model.parameters(), *moved, output, model[0].weight.grad, torch.empty_like(output), output * 2):
            assert tensor.device == torch.device("meta")
            assert (tensor.is_meta, tensor.is_cuda, tensor.is_cpu, tensor.data_ptr()) == (True, False, False, 0)
        with pytest.raises(NotImplementedError, match="no data"):
            model.to("cuda")
        model.zero_grad()
        model.to_empty(device="cuda")
        assert all(parameter.is_cuda and not parameter.is_meta for parameter in model.parameters())

    trace = record(step)
    on_host = [storage.bytes for storage in trace.storages if storage.place is Place.HOST]
    assert sum(on_host) < 8192
    assert sum(storage.bytes for storage in births(trace)) < 4 * (2 * 512 * 512 + 8 * 512)


@pytest.mark.parametrize(("home", "away"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_data_of_another_device_moves_a_parameter(home: str, away: str) -> None:
    """As frameworks move models: the gradient stays behind until its own data is assigned."""

    def step() -> None:
        parameter = nn.Parameter(torch.ones(8, 8, device=home))
        parameter.sum().backward()
        gradient = parameter.grad
        parameter.data = parameter.data.to(away)
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.device.type == away
        assert parameter.grad is gradient
        assert gradient.device.type == home
        parameter.grad.data = parameter.grad.data.to(away)
        (parameter @ parameter).sum().backward()  # C++ finds it there, too
        assert parameter.grad.device.type == away

    record(step)


@pytest.mark.parametrize(
    "move",
    [lambda m: m.cpu(), lambda m: setattr(m.weight, "data", m.weight.data.cpu())],
    ids=["module", "data"],
)
def test_a_kept_graph_does_not_keep_what_a_moved_parameter_held(move: Callable[[nn.Linear], Any]) -> None:
    """Its node that accumulates a gradient holds the parameter, which is on the host now."""

    def step() -> None:
        model = nn.Linear(64, 64, bias=False, device="cuda")
        loss = model(torch.ones(2, 64, device="cuda")).sum()
        loss.backward()
        move(model)
        torch.empty(77, device="cuda")
        assert loss.requires_grad

    born = births(record(step))
    weight, after = (next(each for each in born if each.bytes == 4 * n) for n in (64 * 64, 77))
    assert weight.freed is not None
    assert weight.freed < after.event


def test_a_kept_graph_does_not_keep_the_gradient_of_a_moved_parameter() -> None:
    """As FSDP gives a parameter its shard of the host back, and then lets the gradient go, while the pass goes on."""

    def step() -> None:
        weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
        loss = (weight * 2).sum()
        loss.backward()
        weight.data = weight.data.cpu()
        assert weight.grad is not None
        weight.grad = None
        torch.empty(77, device="cuda")
        assert loss.requires_grad

    born = births(record(step))
    gradients = [each for each in born if each.category is Category.GRADIENT]
    after = next(each for each in born if each.bytes == 4 * 77)
    assert gradients
    assert all(each.freed is not None and each.freed < after.event for each in gradients)


def test_tensors_that_are_swapped_hold_each_others_data() -> None:
    """Also those of a kept graph, unlike those of a module that moves."""

    def step() -> None:
        first, second = (nn.Parameter(torch.ones(n, device="cuda")) for n in (512, 1024))
        loss = first.sum()
        torch.utils.swap_tensors(first, second)
        assert (first.numel(), second.numel()) == (1024, 512)
        torch.empty(77, device="cuda")
        assert loss.requires_grad

    born = births(record(step))
    data, after = (next(each for each in born if each.bytes == 4 * n) for n in (512, 77))
    assert data.freed is None or data.freed > after.event


# --- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], device="cuda"), "nested tensors"),
        (lambda: torch.zeros(4, 4, device="cuda").to_sparse_bsr((2, 2)), "sparse tensors"),
        (lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2))), "quantized"),
        (
            lambda: pack_padded_sequence(
                torch.zeros(9, 5, 2, device="cuda"),
                nn.Linear(4, 5).cuda()(torch.ones(4, device="cuda")).long().cpu(),
                enforce_sorted=False,
            ),
            "lengths of packed sequences",
        ),
        (lambda: torch.utils.dlpack.to_dlpack(torch.zeros(3, device="cuda")), "custom_op"),
        (lambda: torch.cuda.caching_allocator_alloc(8), "own allocator"),
        (lambda: torch.zeros(3, device="cuda") + torch.zeros(3), "move them with .to()"),
        (lambda: nn.DataParallel(nn.Linear(2, 2), device_ids=[0, 1]), "several cards"),
    ],
)
def test_what_cannot_be_done_is_said(ask: Callable[[], Any], said: str) -> None:
    assert said in refused(ask)


def test_errors_of_the_users_own_are_not_explained_away() -> None:
    assert explained(ValueError("no such checkpoint")) is None
    assert explained(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)")) is None


def test_models_with_lazy_layers_are_analysed_whole() -> None:
    """Given as an object and trained: the parameters are known as such once they have a shape."""
    lazy = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))
    plain = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    example = torch.zeros(8, 16)
    found, wanted = (analyze(model, example) for model in (lazy, plain))
    assert found.breakdown == wanted.breakdown
    assert found.breakdown["PARAMETER"] > 0
    assert isinstance(lazy[0].weight, nn.UninitializedParameter)


def test_programs_of_other_front_ends() -> None:
    model, example = nn.Linear(16, 4), torch.zeros(8, 16)
    exported = torch.export.export(model, (example,))
    assert analyze(exported, example).requested == analyze(model, example).requested
    with pytest.raises(SourceError, match=r"torch\.jit runs outside Python"):
        analyze(torch.jit.script(model), example)


def test_scripted_code_has_its_own_derivatives_from_the_second_run_on() -> None:
    """Peaks of four runs as recorded on the stub driver; plain autograd's is that of the first in all of them."""

    def gelu(bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = bias + y
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    def peaks(function: Callable[..., torch.Tensor]) -> list[int]:
        found = []

        def step() -> None:
            network = nn.Linear(256, 1024, bias=False).cuda()
            bias = nn.Parameter(torch.zeros(1024, device="cuda"))
            run = function(gelu)
            for _ in range(4):
                loss = run(bias, network(torch.randn(64, 256, device="cuda"))).mean()
                loss.backward()
                found.append(torch.cuda.max_memory_allocated())

        setting = Setting(H100, TORCH_VERSION)
        memory = RUNTIME.live(RUNTIME.parse("", setting), setting, room=0)
        capture(lambda _: step(), source="test", device=H100, torch_version=TORCH_VERSION, memory=memory)
        return found

    assert peaks(torch.jit.script) == [69542912, 72426496, 72426496, 72426496]


def test_tensors_of_other_sizes_are_not_equal() -> None:
    """Whatever is assumed of unknown values: constants of frozen code are kept once if they are equal."""

    def step() -> None:
        one, other = torch.randn(8, 8, device="cuda"), torch.randn(8, device="cuda")
        assert not torch.equal(one, other)
        assert torch.equal(one, one.view(8, 8))

    record(step)


def test_scripted_modules_are_moved_trained_and_frozen() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x) * self.scale)

    def step() -> None:
        network = torch.jit.script(Scaled()).cuda()
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        network(torch.randn(32, 64, device="cuda")).sum().backward()
        optimizer.step()
        assert all(one.is_cuda for one in network.state_dict().values())
        frozen = torch.jit.freeze(network.eval())
        with torch.no_grad():
            assert frozen(torch.randn(32, 64, device="cuda")).shape == (32, 64)

    assert sum(birth.category is Category.PARAMETER for birth in births(record(step))) == 3


@pytest.mark.parametrize(("other", "is_remarked"), [("cuda", False), ("cpu", True)])
def test_scripted_functions_that_ask_for_a_device(other: str, is_remarked: bool) -> None:
    """Where all their tensors are on the card it is the card; else they run as the Python that they are made of."""

    def zeros(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and not x.is_cpu and x.get_device() == 0:
            return torch.zeros(8, device=x.device)
        return y

    def step(_: object) -> None:
        scripted = torch.jit.script(zeros)
        for _ in range(3):
            assert scripted(torch.ones(8, device="cuda"), torch.ones(8, device=other)).is_cuda
        assert scripted(torch.ones(8), torch.ones(9)).shape == (9,)

    captured = capture(step, source="test", device=H100, torch_version=TORCH_VERSION)
    assert (Code.SCRIPT_AS_PYTHON.about() in captured.assumed) == is_remarked


def test_scripted_modules_that_ask_for_a_device_run_as_python() -> None:
    class Zeros(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(8, device=x.device)

    def step(_: object) -> None:
        assert torch.jit.script(Zeros())(torch.ones(8, device="cuda")).is_cuda

    captured = capture(step, source="test", device=H100, torch_version=TORCH_VERSION)
    assert captured.assumed[Code.SCRIPT_AS_PYTHON.about()] == 1


def test_classes_that_pytorch_itself_scripts_are_found_in_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first import of a module of PyTorch that scripts its classes may happen inside a step."""
    name = "torch.distributed.optim.functional_adadelta"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    events = record(lambda: (importlib.import_module(name), torch.ones(8, device="cuda")))
    assert len(births(events)) == 1


def test_pytorch_scripts_itself_after_something_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for ``torch.compiler.is_compiling`` since then is no TorchScript; the original is (mmengine)."""
    name = "torch.distributed.optim.functional_adam"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)

    def step() -> None:
        torch.compile(lambda x: x + 1)(torch.ones(8, device="cuda"))
        importlib.import_module(name)

    record(step)


def test_pytorch_scripts_derivatives_that_ask_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first derivative in forward mode imports them (``torch.func.jvp``, ``hessian``)."""
    name = "torch._decomp.decompositions_for_jvp"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    record(lambda: importlib.import_module(name))


def test_scripted_code_calls_what_is_scripted_if_it_is_traced() -> None:
    """Its names are looked up around the function (``torchvision.ops.batched_nms``), not around PyTorch's wrapper."""

    def step() -> None:
        doubled = torch.jit.script(calls_what_is_scripted_if_traced)
        assert doubled(torch.ones(8, device="cuda")).is_cuda

    record(step)


@torch.jit.script_if_tracing
def scripted_if_traced(x: torch.Tensor) -> torch.Tensor:
    return twice(x)


def calls_what_is_scripted_if_traced(x: torch.Tensor) -> torch.Tensor:
    return scripted_if_traced(x)


def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_a_kernel_outside_pytorch_is_counted_as_unknown() -> None:
    library = torch.library.Library("graphmem_kernels", "DEF")
    try:
        library.define("fused(Tensor x) -> Tensor")
        torch.library.register_fake("graphmem_kernels::fused", torch.empty_like, lib=library)

        class Uses(nn.Linear):
            def forward(self, x: Any) -> Any:
                return torch.ops.graphmem_kernels.fused(super().forward(x))

        estimate = analyze(Uses(4, 4), torch.zeros(2, 4), training=Inference())
        (said,) = [d for d in estimate.diagnostics if "graphmem_kernels.fused" in d.message]
        assert said.count == 2
    finally:
        library._destroy()


def test_meta_kernels_of_other_packages_make_their_outputs_on_meta() -> None:
    """As torchvision's do: ``torch.empty(shape, device="meta")`` in a kernel means what it says."""
    library = torch.library.Library("graphmem_meta_kernels", "DEF")
    try:
        library.define("pooled(Tensor x) -> (Tensor, Tensor)")
        source = "def kernel(x):\n    return x.new_empty(25), torch.empty(25, device='meta', dtype=torch.int32)\n"
        namespace = {"torch": torch, "__name__": "another_package"}
        exec(source, namespace)
        library.impl("pooled", namespace["kernel"], "Meta")
        pooled: list[Any] = []

        def step() -> None:
            tensors = torch.ops.graphmem_meta_kernels.pooled(torch.zeros(100, device="cuda"))
            pooled.extend((tensor.is_cuda, tensor.dtype) for tensor in tensors)

        record(step)
        assert pooled == [(True, torch.float32), (True, torch.int32)]
    finally:
        library._destroy()


def test_what_is_built_on_meta_is_not_on_the_device() -> None:
    """By a context, by a factory, by ``Tensor.to`` and by ``Module.to``: nothing of it is on the card."""
    allocated = []

    def step() -> None:
        with torch.device("meta"):
            layer = torch.nn.Linear(256, 256, bias=False)
        unread = torch.empty(1000, device="meta") + 1
        allocated.append((layer.weight.is_cuda, unread.is_cuda))
        layer.to_empty(device="cuda")
        layer(torch.zeros(1, 256, device="cuda")).sum().backward()
        layer.to("meta")
        layer.weight.grad = None
        allocated.append((layer.weight.is_cuda, torch.ones(3, device="cuda").to("meta").is_cuda))

    taken = [born.bytes for born in births(record(step))]
    assert allocated == [(False, False), (False, False)]
    assert taken.count(256 * 256 * 4) == 2  # the weight and its gradient
    assert 4000 not in taken


def test_lists_with_elements_of_the_card_are_read_back() -> None:
    """``torch.tensor`` reads them one by one into a host tensor, as torchtune's scaled rotary frequencies are."""
    made: list[torch.Tensor] = []

    def step() -> None:
        values = torch.arange(8.0, device="cuda")
        made.append(torch.tensor([value * 2 for value in values], dtype=torch.float64, device=values.device))
        made.append(torch.tensor([[1, values[0]], [values[1], 2]], device="cuda"))
        made.append(torch.tensor([values[0], 3]))
        found.extend((one.shape, one.dtype, one.is_cuda) for one in made)

    found: list[tuple[object, ...]] = []
    analyze(step, iterations=1)
    assert found[:3] == [((8,), torch.float64, True), ((2, 2), torch.float32, True), ((2,), torch.float32, False)]


@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="PyTorch has none")
def test_the_accelerators_index_is_the_cards() -> None:
    def step() -> None:
        if hasattr(torch.accelerator, "device_index"):
            with torch.accelerator.device_index(0):
                assert torch.ones(1, device="cuda").device.index == 0

    record(step)
