"""One rank of several: DistributedDataParallel's buckets as on the CUDA build, and what a step finds around it."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from graphmem.analyze import analyze  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.diagnostics import Code  # noqa: E402
from graphmem.errors import CaptureError, UsageError  # noqa: E402
from graphmem.trace import Category, EventKind  # noqa: E402
from graphmem.training import DataParallel, Training  # noqa: E402
from graphmem.training.processes import Processes  # noqa: E402
from tests.recorded.parallel import CASES, load, predict  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION, births, of, record, sizes  # noqa: E402

RECORDED = load()
#: Loops whose order of frees differs, with the share that is equal in order.
ORDER_DIFFERS = {"ddp_wide_autocast"}
#: Loops whose peak with late events is not predicted.
LATE_DIFFERS = {"ddp_deep_mixed_precision"}
DDP = [name for name, case in CASES.items() if case.group == "ddp"]
QUICK = {"ddp_wide", "ddp_wide_static_graph_bucket_view", "ddp_some_unused", "ddp_wide_no_sync", "ddp_deep_compressed"}
MIB = 1024 * 1024


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DDP])
@pytest.mark.filterwarnings("ignore")
def test_a_recorded_loop_is_predicted_with_its_buckets(name: str) -> None:
    ours, recorded = predict(CASES[name]), RECORDED[name]
    ordered = sorted if name in ORDER_DIFFERS else list
    assert ordered(ours.events) == ordered(recorded.events), f"python -m tests.recorded parallel differ {name}"
    assert ours.reserved_bytes == recorded.reserved_bytes
    if name not in LATE_DIFFERS:
        assert ours.late_bytes == recorded.late_bytes


SHARDED = [name for name, case in CASES.items() if case.group == "sharded"]
QUICK_SHARDED = {"fsdp2", "zero_1"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_SHARDED else pytest.mark.slow) for name in SHARDED]
)
@pytest.mark.filterwarnings("ignore")
def test_a_recorded_loop_with_shards_is_predicted(name: str) -> None:
    ours, recorded = predict(CASES[name]), RECORDED[name]
    assert ours.events == recorded.events, f"python -m tests.recorded parallel differ {name}"
    assert ours.reserved_bytes == recorded.reserved_bytes


def test_every_loop_is_recorded_and_compared() -> None:
    assert sorted(RECORDED) == sorted(CASES)


@pytest.mark.parametrize("device_id", [0, torch.device("cuda", 0)])
def test_fsdp1_keeps_a_share_of_the_parameters(device_id: Any) -> None:
    """Of one flat parameter of all; the whole of it comes and goes."""

    def step() -> None:
        dist.init_process_group("nccl", rank=0, world_size=2)
        from torch.distributed.fsdp import FullyShardedDataParallel

        sharded = FullyShardedDataParallel(model().cuda(), device_id=device_id, use_orig_params=True)
        sharded(torch.ones(4, 512, device="cuda")).sum().backward()
        assert sum(p.numel() for p in sharded.parameters()) == 512 * 768 // 2

    whole = 512 * 768 * 4
    born = [storage.bytes for storage in births(record(step))]
    assert whole in born
    assert whole // 2 in born


def test_a_dtensor_is_a_tensor_of_the_card_to_the_dispatcher() -> None:
    """Norms stay whole, autocast casts, and what waits for a collective is the tensor that was waited for."""

    def step() -> None:
        dist.init_process_group("nccl", rank=0, world_size=8)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = init_device_mesh("cuda", (8,))
        x = DTensor.from_local(torch.randn(2, 64, 256, device="cuda"), mesh, [Shard(1)])
        for tensor in (x, nn.Parameter(x), x * 2):
            keys = torch._C._dispatch_keys(tensor)
            assert all(keys.has(getattr(torch._C.DispatchKey, name)) for name in ("CUDA", "AutocastCUDA"))
            assert tensor.device == torch.device("cuda", 0)
        with torch.autocast("cuda", torch.bfloat16):
            assert (x @ x.transpose(1, 2)).dtype is torch.bfloat16
        nn.functional.rms_norm(x, (256,))
        x.redistribute(mesh, [Replicate()])

    trace = record(step, world_size=8)
    named = [operator.name for operator in trace.operators]
    assert "aten._fused_rms_norm.default" in named
    waits = [index for index, name in enumerate(named) if name.startswith("_c10d_functional.wait_tensor")]
    assert waits
    assert not any(event.kind is EventKind.ALLOC and event.operator in waits for event in trace.events())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 256, bias=False))


def trained(**options: Any) -> None:
    dist.init_process_group("nccl", rank=0, world_size=4)
    parallel = DistributedDataParallel(model().cuda(), device_ids=[0], **options)
    for _ in range(2):
        parallel(torch.empty(8, 512, device="cuda")).sum().backward()
        parallel.zero_grad()


def test_the_kind_of_a_reduction_is_no_scripted_code() -> None:
    """It is asked of an object of C++, whose methods Python calls as TorchScript's."""

    def step(session: object) -> None:
        dist.init_process_group("nccl", rank=0, world_size=2)
        dist.all_reduce(torch.ones(8, device="cuda"))
        torch.jit.script(_doubled)(torch.ones(8, device="cuda"))

    run = capture(step, source="test", device=H100, torch_version=TORCH_VERSION)
    assert Code.SCRIPT_UNFUSED.about() not in run.assumed


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_buckets_are_communication_and_hold_every_gradient_once() -> None:
    trace = record(lambda: trained())
    buckets = [
        born for born in of(trace, Category.COMMUNICATION) if born.label == "DDP bucket" and born.bytes > MIB // 4
    ]
    assert sum(sizes(buckets[:1])) == 3 * MIB // 2  # one bucket before the order of gradients is known
    assert sizes(buckets[1:]) == [3 * MIB // 2]  # the last layer's 512 KiB do not fill the first MiB
    assert buckets[0].freed is not None
    assert buckets[0].freed < buckets[1].event


def test_buckets_that_gradients_are_views_of_are_gradients() -> None:
    trace = record(lambda: trained(gradient_as_bucket_view=True))
    labels = {born.label for born in of(trace, Category.GRADIENT)}
    assert "gradients in a DDP bucket" in labels
    assert not [born for born in of(trace, Category.COMMUNICATION) if born.label == "DDP bucket"]


def test_a_script_finds_what_torchrun_sets() -> None:
    seen: list[Any] = []

    def step(_: Any) -> None:
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        seen.append((dist.get_rank(), dist.get_world_size(), os.environ["WORLD_SIZE"], dist.is_nccl_available()))
        pair = dist.new_group([0, 1])
        x = torch.ones(1000, device="cuda")
        work = dist.all_reduce(x, group=pair, async_op=True)
        work.wait()
        whole = torch.empty(16 * 1000, device="cuda")
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(x, whole)
        dist.broadcast(x, 0)
        dist.barrier()
        parts = [torch.empty_like(x) for _ in range(16)]
        dist.all_gather(parts, x)

    before = dict(os.environ), sys.excepthook, dist.init_process_group, dist.distributed_c10d.rendezvous
    trace = capture(step, source="", device=H100, torch_version=TORCH_VERSION, processes=Processes(16)).trace
    assert seen == [(0, 16, "16", True)]
    assert before == (dict(os.environ), sys.excepthook, dist.init_process_group, dist.distributed_c10d.rendezvous)
    assert not dist.is_initialized()
    (flat,) = of(trace, Category.COMMUNICATION)
    assert (flat.bytes, flat.label) == (16 * 4000, "flat copy of a collective's list")


def test_the_number_of_processes_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(CaptureError, match="give --world-size"):
        record(lambda: dist.init_process_group("nccl"))
    assert not dist.is_initialized()


def test_a_storage_that_is_resized_comes_and_goes() -> None:
    def step() -> None:
        x = torch.empty(1000, device="cuda")
        x.untyped_storage().resize_(0)
        y = torch.empty(10, device="cuda")
        x.untyped_storage().resize_(4000)
        del y

    born = [one for one in births(record(step)) if one.bytes]
    assert sizes(born) == [4000, 40, 4000]
    assert born[0].freed is not None
    assert born[0].freed < born[1].event < born[2].event


def test_built_in_hooks_are_refused() -> None:
    def step() -> None:
        dist.init_process_group("nccl", rank=0, world_size=2)
        kind = dist.BuiltinCommHookType.FP16_COMPRESS
        DistributedDataParallel(model().cuda())._register_builtin_comm_hook(kind)

    with pytest.raises(CaptureError, match="default_hooks"):
        record(step)


@pytest.mark.parametrize("view", [False, True])
def test_the_default_loop_wraps_the_model(view: bool) -> None:
    x = torch.zeros(8, 512)
    ddp = DataParallel(8, gradient_as_bucket_view=view)
    wrapped = analyze(model(), x, training=Training("sgd", ddp=ddp, grad_accum=2))
    plain = analyze(model(), x, training=Training("sgd", grad_accum=2))
    extra = 0 if view else 3 * MIB // 2
    assert wrapped.breakdown["COMMUNICATION"] == extra
    assert wrapped.peak.requested_bytes >= plain.peak.requested_bytes + extra
    assert "DDP over 8 processes" in wrapped.step
    assert any("NCCL" in assumption for assumption in wrapped.assumptions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size is a whole number"),
        ({"world_size": 2, "bucket_cap_mb": -1}, "bucket_cap_mb is a number above 0"),
        ({"world_size": True}, "world_size is a whole number"),
    ],
)
def test_unaccepted_options_of_ddp(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DataParallel(**options)


def test_two_numbers_of_processes_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        Training(ddp=DataParallel(4), world_size=8)


def test_compiling_a_model_in_ddp_is_refused() -> None:
    with pytest.raises(UsageError, match="leave out compile or ddp"):
        Training(ddp=DataParallel(4), compile="default")


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_communicator_is_counted_outside_the_allocator(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "4")
    model, inputs = nn.Linear(8, 8), torch.zeros(4, 8)
    step = Training(ddp=DataParallel(ranks), world_size=ranks)
    alone = analyze(model, inputs, training=Training(), device="A100")
    together = analyze(model, inputs, training=step, device="A100")
    assert together.card is not None
    (one,) = together.card.loads.communicators
    assert (one.ranks, one.on_node, one.gathers, one.reduced_bytes) == (ranks, ranks, True, 4 * 72)
    rings, kernels = 4 * 12 * MIB, 228 * MIB
    assert (together.device - together.reserved) - (alone.device - alone.reserved) == rings + kernels
    assert "NCCL_MAX_NCHANNELS" in together.report(details=True)


@pytest.mark.parametrize(
    ("version", "avoids", "recorded"),
    [((2, 6), "", 6), ((2, 6), "1", 0), ((2, 7), "0", 6), ((2, 8), "", 0), (TORCH_VERSION, "", 0)],
)
def test_older_versions_record_the_use_of_collectives(
    version: tuple[int, int], avoids: str, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_AVOID_RECORD_STREAMS", avoids)

    def step(_: Any) -> None:
        dist.init_process_group("nccl")
        x = torch.ones(1 << 20, device="cuda")
        out = torch.empty(2 << 20, device="cuda")
        dist.all_reduce(x)  # the tensor
        dist.all_gather_into_tensor(out, x)  # waited for at once
        dist.all_gather_into_tensor(out, x, async_op=True).wait()  # both
        functional.all_gather_tensor(x, 0, dist.group.WORLD)  # both, through DTensor's operators
        dist.barrier()  # its tensor

    captured = capture(step, source="", device=H100, torch_version=version, processes=Processes(2))
    uses = [event for event in captured.trace.events() if event.kind is EventKind.RECORD_STREAM]
    assert len(uses) == recorded


def test_kernels_loaded_eagerly_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = nn.Linear(8, 8), torch.zeros(4, 8)
    lazy = analyze(model, inputs, training=False, device="A100")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    eager = analyze(model, inputs, training=False, device="A100")
    assert eager.reserved == lazy.reserved
    assert eager.device - lazy.device == (1024 - 70) * MIB


def test_a_module_of_dtensors_is_not_copied_to_where_it_is() -> None:
    shared: list[Any] = []

    def step() -> None:
        dist.init_process_group("nccl", rank=0, world_size=2)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        model = nn.Sequential(nn.Linear(64, 64, bias=False, device="meta"))
        parallelize_module(model, init_device_mesh("cuda", (2,)), {"0": ColwiseParallel()})
        model.to_empty(device="cuda")
        weight = model[0].weight
        model.to("cuda").cuda().to(torch.float32)
        shared.append(model[0].weight is weight)
        model.to("cpu")
        shared.append(model[0].weight.device.type)

    trace = record(step, world_size=2)
    assert shared == [True, "cpu"]
    assert sizes(births(trace)).count(64 * 32 * 4) == 1
