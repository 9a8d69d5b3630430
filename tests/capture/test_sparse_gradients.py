"""Sparse gradients of embeddings: held until the step, added up, coalesced. Loops: :mod:`tests.recorded.loops`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.diagnostics import Code  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402
from tests.recorded.cases.loops import CASES  # noqa: E402
from tests.recorded.loops import predict, recordings  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION, births, record  # noqa: E402

RECORDED = recordings()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("sparse_") and name != "sparse_adam"])
def test_recorded_loops_are_equal(name: str) -> None:
    assert predict(CASES[name]) == RECORDED[name]["changes"]


def _step(rows: int, tokens: int) -> None:
    """With indices that the device computes, and nobody knows."""
    model = torch.nn.Embedding(rows, 64, sparse=True, device="cuda")
    optimizer = torch.optim.SparseAdam(model.parameters())
    (model(torch.randn(tokens, 4096, device="cuda").argmax(1) % rows) * 2.0).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("rows", "tokens", "kept"), [(1000, 96, 96), (50, 96, 50)])
def test_coalesced_gradients_have_at_most_a_row_for_every_index(rows: int, tokens: int, kept: int) -> None:
    born = births(record(lambda: _step(rows, tokens)))
    (coalesced,) = (birth for birth in born if birth.operator.startswith("aten.new_empty") and birth.bytes % 256 == 0
                    and birth.bytes >= 50 * 256)  # fmt: skip
    assert coalesced.bytes == kept * 64 * 4


@pytest.mark.parametrize("ids", [[[1, 2, 2], [3, 1, 1]], [[0] * 96], [[5]]])
def test_known_indices_are_counted(ids: list[list[int]]) -> None:
    """The second time is a parameter that has rows left from the first, of the other tensor's indices."""
    rows = []

    def run(_: object) -> None:
        model = torch.nn.Embedding(100, 8, sparse=True, device="cuda")
        tensor = torch.tensor(ids).cuda()
        (model(tensor) * 2.0).sum().backward()
        rows.append(model.weight.grad.coalesce()._nnz())
        model(torch.tensor([7, 7, 1], device="cuda")).sum().backward()
        again = model.weight.grad.coalesce()
        rows.extend([again._nnz(), again._indices().tolist()])

    captured = capture(run, source="test", device=H100, torch_version=TORCH_VERSION)
    flat = {i for row in ids for i in row}
    assert rows == [len(flat), len(flat | {1, 7}), [sorted(flat | {1, 7})]]
    assert Code.SPARSE_INDICES.about() not in captured.assumed


def test_the_assumption_is_said() -> None:
    captured = capture(lambda _: _step(1000, 96), source="test", device=H100, torch_version=TORCH_VERSION)
    assert captured.assumed[Code.SPARSE_INDICES.about()] == 1


def _parts() -> tuple[torch.Tensor, ...]:
    """Real indices and, of random numbers, fake values."""
    return torch.tensor([0, 2, 3, 5]), torch.tensor([0, 2, 1, 0, 2]), torch.randn(5)


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.sparse_csr_tensor(*_parts(), (3, 3)).cuda(),
        lambda: torch.sparse_csr_tensor(*_parts(), (3, 3), device="cuda"),
        lambda: torch.sparse_csr_tensor(*(part.cuda() for part in _parts())),
        lambda: torch.sparse_csr_tensor([0, 2, 3, 5], [0, 2, 1, 0, 2], [1.0] * 5, (3, 3), device="cuda"),
        lambda: torch.sparse_csc_tensor(*_parts(), (3, 3)).cuda().t(),
        lambda: torch.tensor([[1.0, 0, 2], [0, 3, 0], [4, 0, 5]]).to_sparse_csr().cuda(),
        lambda: torch.tensor([[1.0, 0, 2], [0, 3, 0], [4, 0, 5]]).cuda().to_sparse_csr(),
        lambda: torch.tensor([[1.0, 0, 2], [0, 3, 0], [4, 0, 5]]).cuda().to_sparse_csr().t().to_sparse_csr(),
    ],
)  # fmt: skip
def test_a_compressed_matrix_keeps_its_parts_however_it_is_made(made: Callable[[], torch.Tensor]) -> None:
    def step() -> None:
        matrix, x = made(), torch.zeros(3, 4, device="cuda", requires_grad=True)
        assert (matrix.layout, matrix.shape, matrix._nnz()) == (torch.sparse_csr, (3, 3), 5)
        assert matrix.device == matrix.crow_indices().device == torch.device("cuda", 0)
        (matrix @ x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (3, 4)

    record(step)


_HOLES = [[1.0, 0, 2], [0, 0, 0], [4, 0, 5]]


@pytest.mark.parametrize(
    ("made", "indices"),
    [
        (lambda: torch.tensor(_HOLES).to_sparse().cuda(), [[0, 0, 2, 2], [0, 2, 0, 2]]),
        (lambda: torch.tensor(_HOLES).cuda().to_sparse(), [[0, 0, 2, 2], [0, 2, 0, 2]]),
        (lambda: torch.tensor(_HOLES).cuda().to_sparse(1), [[0, 2]]),
        (lambda: torch.tensor(_HOLES).bool().to_sparse(layout=torch.sparse_coo).cuda(), [[0, 0, 2, 2], [0, 2, 0, 2]]),
        (lambda: torch.tensor(_HOLES).to_sparse(1).cuda(), [[0, 2]]),
    ],
)
def test_a_dense_tensor_made_sparse_keeps_what_is_not_zero(
    made: Callable[[], torch.Tensor], indices: list[list[int]]
) -> None:
    def step() -> None:
        matrix = made()
        assert (matrix.layout, matrix.shape, matrix.is_coalesced()) == (torch.sparse_coo, (3, 3), True)
        assert matrix.device == torch.device("cuda", 0)
        assert matrix._indices().shape == (len(indices), len(indices[0]))
        assert matrix._values().shape[0] == len(indices[0])

    record(step)


def test_a_sparse_buffer_made_on_the_host_is_moved() -> None:
    """Two parts: where 100,000 ones are, and the ones."""

    def step() -> None:
        module, mask = torch.nn.Module(), torch.zeros(300, 500, dtype=torch.bool)
        mask[100:] = True
        module.register_buffer("mask", mask.to_sparse(), persistent=False)
        module.cuda()

    assert [birth.bytes for birth in births(record(step))] == [1_600_000, 100_000]


def test_of_values_that_nobody_knows_all_are_taken() -> None:
    def step(_: object) -> None:
        product = torch.randn(30, 4096, device="cuda") @ torch.randn(4096, 40, device="cuda")
        assert product.gt(0).to_sparse()._nnz() == 1200
        assert product.to_sparse(1)._nnz() == 30

    capture(step, source="test", device=H100, torch_version=TORCH_VERSION, data_dependent=1.0)


def test_the_indices_of_a_compressed_matrix_stay_known() -> None:
    def step() -> None:
        matrix = torch.sparse_csr_tensor(*_parts(), (3, 3), device="cuda")
        assert matrix.crow_indices().tolist() == [0, 2, 3, 5]

    record(step)


def test_what_is_not_followed_is_refused() -> None:
    def step() -> None:
        torch.zeros(4, 4).to_sparse_csr().to("cuda") * 2.0

    with pytest.raises(CaptureError, match="sparse tensors"):
        record(step)
