"""The usual formulas beside a captured step of several processes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from graphmem.analyze import analyze  # noqa: E402
from graphmem.training import Training  # noqa: E402

P = 1024 * 1024 + 1024 * 512


class Model(nn.Module):
    """Two layers; its configuration says of what size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.empty(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp() -> None:
    dist.init_process_group("nccl")
    model = DistributedDataParallel(Model().cuda())
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1))


def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    model = Model().cuda()
    fully_shard(model)
    trained(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("step", "formula", "size"),
    [(ddp, "8P, P=1,572,864", 8 * P), (fsdp2, "16P/N, P=1,572,864, N=4", 4 * P)],
)
def test_model_states_by_the_formula_stand_beside_the_simulation(step: object, formula: str, size: int) -> None:
    estimate = analyze(step, training=Training(world_size=4), device="A100")
    told = estimate.details["formulas"]
    assert told["model_states"] == {"formula": formula, "bytes": size}
    assert sum(told["difference"].values()) == estimate.reserved - size
    report = estimate.report(details=True)
    assert "Beside the usual formulas" in report
    assert formula in " ".join(report.split())


def test_a_step_of_one_process_has_no_formula_beside_it() -> None:
    estimate = analyze(Model(), torch.empty(8, 1024), device="A100")
    assert "formulas" not in estimate.details
