"""What libraries of sharded training bring along: kernels of their own, tensors around others, checkpoints in parts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from graphmem.capture.distributed.deepspeed_kernels import _BUILDERS  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402
from tests.support.captures import births, record, sizes  # noqa: E402

MIB = 1 << 20


def _builder(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A builder of kernels, as ``deepspeed.ops.op_builder`` has them."""

    class OpBuilder:
        def __init__(self) -> None:
            self.name = name

        def load(self, verbose: bool = False) -> Any:
            raise AssertionError("nothing is compiled")

    module = ModuleType(_BUILDERS)
    module.OpBuilder = OpBuilder  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, _BUILDERS, module)
    return OpBuilder()


def test_kernels_of_deepspeed_take_what_their_source_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``quantization/pt_binding.cpp``: of 2 x 512 halves in 4 groups, bytes and a scale each."""
    builder = _builder(monkeypatch, "quantizer")

    def step() -> None:
        kernels = builder.load()
        values = torch.empty(2, 512, dtype=torch.float16, device="cuda")
        packed, scales = kernels.quantize(values, 4, 4, kernels.Symmetric)
        assert (packed.shape, scales.shape) == ((2, 256), (4, 1))
        assert kernels.dequantize(packed, scales, 4, 4, kernels.Symmetric).shape == values.shape

    assert sizes(births(record(step))) == [2048, 16, 512, 2048]


def test_kernels_that_are_not_modelled_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = _builder(monkeypatch, "evoformer_attn")
    with pytest.raises(CaptureError, match="DeepSpeed's kernels 'evoformer_attn' are not modelled"):
        record(lambda: builder.load())


def test_what_goes_to_nvme_is_told_and_its_buffers_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = _builder(monkeypatch, "async_io")

    def step() -> None:
        disk = builder.load().aio_handle(block_size=1)
        buffer = disk.new_cpu_locked_tensor(MIB, torch.empty(0))
        assert disk.is_pinned(buffer)
        assert disk.async_pwrite(buffer, "a", 0) == 0
        assert (disk.wait(), disk.wait()) == (1, 0)

    assert sizes(births(record(step))) == []


class Halved(torch.Tensor):
    """A tensor kept in half precision, as quantised weights of torchao are kept."""

    kept: torch.Tensor

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> Halved:
        made: Halved = torch.Tensor._make_wrapper_subclass(
            cls, kept.size(), strides=kept.stride(), dtype=torch.float32, device=kept.device
        )
        made.kept = kept
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].kept)
        return func(*(arg.kept.float() if isinstance(arg, Halved) else arg for arg in args), **(kwargs or {}))


def test_a_tensor_around_another_is_on_the_card_and_what_it_calls_is_recorded() -> None:
    def step() -> None:
        weight = nn.Parameter(Halved(torch.empty(512, 512, dtype=torch.float16, device="cuda")), requires_grad=False)
        assert (weight.device, weight.is_cuda, weight.is_meta) == (torch.device("cuda", 0), True, False)
        x = torch.empty(64, 512, device="cuda", requires_grad=True)
        (x @ weight.t()).sum().backward()

    born = sizes(births(record(step)))
    assert born[:3] == [512 * 512 * 2, 64 * 512 * 4, 512 * 512 * 4]
    assert Halved.device is torch.Tensor.device  # put back


def test_a_library_may_put_its_own_factories_into_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """``deepspeed.zero.Init`` makes everything on the card for as long as it lasts; values are followed still."""

    def step() -> None:
        original = torch.empty

        def on_card(*args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("device", "cuda")
            return original(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", on_card)
            assert int(torch.arange(4).sum()) == 6
            assert torch.empty(4).is_cuda

    assert sizes(births(record(step)))[-1] == 16


def _sharded_step(mesh_shape: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("nccl", rank=0, world_size=8)
    mesh = init_device_mesh("cuda", mesh_shape, mesh_dim_names=("a", "b", "c")[: len(mesh_shape)])["b"]
    x = distribute_tensor(torch.empty(64, 64, device="cuda"), mesh, [Shard(0)])
    (x * 2).redistribute(mesh, [Replicate()])


def test_meshes_of_another_capture_are_forgotten() -> None:
    """DTensor remembers operators with their mesh, and one of the same shape is equal to it: its groups are gone."""
    record(lambda: _sharded_step((4, 2)))
    record(lambda: _sharded_step((2, 2, 2)))


def _fsdp1(unit: nn.Module) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(unit.cuda(), device_id=0, use_orig_params=True)


def test_fsdp1_gathers_the_states_of_optimizers_that_other_processes_hold() -> None:
    """Of one flat parameter of two layers, this process holds the first half: the second layer's states are others'."""

    def step() -> None:
        dist.init_process_group("nccl", rank=0, world_size=2)
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = _fsdp1(nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 256, device="cuda")).sum().backward()
        optimizer.step()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        assert {name: state["exp_avg"].shape for name, state in states.items()} == {
            "0.weight": (256, 256),
            "1.weight": (256, 256),
        }

    assert 2 * 256 * 256 * 4 in [storage.bytes for storage in births(record(step))]  # gathered


def test_a_sharded_checkpoint_is_saved_and_loaded() -> None:
    def step() -> None:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("nccl", rank=0, world_size=8)
        model = nn.Linear(256, 256).cuda()
        fully_shard(model)
        state = {"model": model.state_dict()}
        folder = tempfile.mkdtemp()
        checkpoint.save(state, checkpoint_id=folder)
        checkpoint.load(state, checkpoint_id=folder)
        assert not any(path.stat().st_size > 64 * 1024 for path in Path(folder).iterdir())

    record(step, world_size=8)
