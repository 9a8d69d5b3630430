"""What a program reads back of values it gave is what a card would answer: programs run for real and in a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.examples import examples

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.devices import device_named  # noqa: E402
from tests.support.captures import record  # noqa: E402

#: Functions of one integer tensor of at least one dimension, as data pipelines and models use them.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 3,
    "add in place": lambda x: x.add_(2),
    "a view written": lambda x: (x[..., :1].fill_(7), x)[1],
    "masked fill": lambda x: x.masked_fill(x > 4, 0),
    "a mask assigned": lambda x: _assigned(x),
    "where": lambda x: torch.where(x > 2, x, -x),
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1).values,
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "concatenated": lambda x: torch.cat([x, x[:1]]),
    "stacked": lambda x: torch.stack([x, x]),
    "transposed": lambda x: x.transpose(0, -1),
    "selected": lambda x: x[x != 1],
    "unique": lambda x: x.unique(),
    "distinct columns": lambda x: x.reshape(1, -1).unique(dim=1),
    "columns in a row": lambda x: torch.unique_consecutive(x.reshape(1, -1), dim=1),
    "positions": lambda x: x.nonzero(),
    "repeated": lambda x: x.reshape(-1).repeat_interleave(x.reshape(-1).abs() % 3),
    "counted": lambda x: torch.bincount(x.reshape(-1).abs()),
    "one-hot": lambda x: torch.nn.functional.one_hot(x.abs() % 5),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 1), value=9),
    "scattered": lambda x: torch.zeros_like(x).scatter_(0, (x * 0), x),
    "gathered": lambda x: x.gather(0, x * 0),
    "less than its mean": lambda x: (x < x.float().mean()).long(),
    "largest": lambda x: x.max(0, keepdim=True).values,
    "triangle": lambda x: x.reshape(1, -1).tril(),
    "copied from": lambda x: torch.empty_like(x).copy_(x * 2),
    "to bytes and back": lambda x: x.to(torch.uint8).long(),
    "cut": lambda x: x[: max(1, int(x.reshape(-1)[0]) % x.shape[0])],
    "split": lambda x: torch.cat(x.split(1)[::-1]),
}


def _assigned(x: Any) -> Any:
    x[x == 2] = -100
    return x


@given(
    numbers=st.lists(st.integers(0, 6), min_size=2, max_size=24),
    program=st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=1, max_size=6),
)
@settings(max_examples=examples(60), deadline=None)
def test_programs_read_back_what_they_would_on_a_card(numbers: list[int], program: list[str]) -> None:
    def run(device: str, seen: list[Any]) -> None:
        x = torch.tensor(numbers).to(device)
        x = x.view(2, -1) if len(numbers) % 2 == 0 else x
        for name in program:
            x = FUNCTIONS[name](x)
            if x.numel() == 0 or x.dim() == 0 or x.numel() > 5000:
                break
            seen.append((name, tuple(x.shape), x.tolist(), int(x.sum()), bool((x > 3).any()), x.max().item()))

    expected: list[Any] = []
    run("cpu", expected)
    found: list[Any] = []
    record(lambda: run("cuda", found))
    assert found == expected


def test_what_a_model_computes_is_not_known() -> None:
    """Values of floats that came from unknown ones are assumed, as before."""
    seen = []

    def step() -> None:
        x = torch.randn(8, 4096, device="cuda", requires_grad=True)
        mask = torch.ones(8, device="cuda", dtype=torch.bool)
        loss = x[mask].sum()
        loss.backward()
        seen.append((bool(mask.all()), loss.item()))

    record(step)
    assert seen == [(True, 1.0)]


def test_a_few_numbers_that_nothing_trains_are_known() -> None:
    """Moments of a distribution decide branches; weights that are trained, and many frozen ones, have no values."""
    seen: list[bool] = []

    def step() -> None:
        module = torch.nn.Module()
        for name, size, is_trained in (("moments", 16, False), ("weights", 16, True), ("frozen", 1 << 13, False)):
            setattr(module, name, torch.nn.Parameter(torch.full((size,), 3.0), requires_grad=is_trained))
        seen.extend(parameter.sum().item() == 3.0 * parameter.numel() for parameter in module.parameters())
        torch.ones(1, device="cuda")

    record(step)
    assert seen == [True, False, False]


def test_values_die_with_what_overwrites_them() -> None:
    seen = []

    def step() -> None:
        counts = torch.tensor([1, 2, 3]).to("cuda")
        seen.append(counts.max().item())
        counts.copy_(torch.randn(3, 5000, device="cuda").argmax(1))
        seen.append(counts.max().item())  # assumed: nobody knows where the largest are

    record(step)
    assert seen == [3, 1]


def test_libraries_do_not_recognise_the_tensors() -> None:
    namespace: dict[str, Any] = {"__name__": "some_library"}
    code = "import torch\ndef is_fake(x):\n    return isinstance(x, torch._subclasses.FakeTensor)"
    exec(code, namespace)
    seen = []
    record(lambda: seen.append(namespace["is_fake"](torch.ones(2, device="cuda"))))
    with torch._subclasses.FakeTensorMode():
        seen.append(namespace["is_fake"](torch.ones(2)))
    assert seen == [False, True]


def test_a_mask_that_was_assumed_to_select_everything_stays_so() -> None:
    """Positions drawn from it, as detectors sample boxes, are known, and so is a mask that is made of them."""
    sizes = []

    def step() -> None:
        unknown = torch.rand(10_000, device="cuda") > 0.5
        positions = torch.where(unknown)[0]
        chosen = positions[torch.randperm(positions.numel(), device="cuda")[:64]]
        mask = torch.zeros(10_000, dtype=torch.uint8, device="cuda")
        mask[chosen] = 1
        sizes.append((positions.numel(), torch.where(mask)[0].numel(), int(unknown.sum())))

    capture(lambda _: step(), source="sampler", device=device_named("H100"), torch_version=(2, 13), data_dependent=1.0)
    assert sizes == [(10_000, 64, 10_000)]


def test_a_generator_takes_a_state_that_went_by_way_of_the_card() -> None:
    seen: list[Any] = []

    def step() -> None:
        first, second = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
        second.set_state(first.get_state().to("cuda").cpu())  # as accelerate makes the processes' samplers agree
        seen.extend(torch.randperm(50, generator=generator).tolist() for generator in (first, second))

    record(step)
    assert seen[0] == seen[1] == torch.randperm(50, generator=torch.Generator().manual_seed(7)).tolist()


def test_a_known_flag_goes_through_operators_of_several_overloads() -> None:
    seen: list[Any] = []
    record(lambda: seen.append(torch.quantile(torch.randn(64, 100, device="cuda", requires_grad=True), 0.9).shape))
    assert seen == [()]


def test_one_hot_masks_in_floats_select_what_they_mark() -> None:
    shapes: list[int] = []

    def step() -> None:
        labels = torch.randint(0, 500, (32,))
        scores = torch.randn(32, 500, device="cuda", requires_grad=True)
        mask = torch.zeros_like(scores)
        mask.scatter_(1, labels.cuda().view(-1, 1), 1.0)
        shapes.append(len(scores[mask == 1]))
        mask = scores.new_zeros(32, 500)
        mask[torch.arange(32), labels.cuda()] = 1
        shapes.extend([len(scores[mask > 0.5]), len(scores[mask.bool()])])

    record(step)
    assert shapes == [32, 32, 32]


LABELS = torch.arange(96) % 7
FLOAT_MASKS = {
    "all but the diagonal": lambda scores: torch.ones_like(scores) - torch.eye(96, device=scores.device),
    "above the diagonal": lambda scores: torch.triu(torch.ones_like(scores), diagonal=1),
    "filled diagonal": lambda scores: scores.new_ones(96, 96).fill_diagonal_(0),
    "scattered": lambda scores: torch.scatter(
        torch.ones_like(scores), 1, torch.arange(96, device=scores.device).view(-1, 1), 0
    ),
    "other views of the same": lambda scores: torch.diag(torch.ones(48), 48).to(scores.device) * 2,
    "of blocks": lambda scores: torch.block_diag(*[torch.ones(12, 12, device=scores.device)] * 8),
    "rows of a part": lambda scores: torch.zeros_like(scores).index_fill(0, LABELS.to(scores.device), 1),
    "equal labels of others": lambda scores: (
        torch.eq(LABELS[:, None], LABELS[None, :]).float().to(scores.device) * (1 - torch.eye(96, device=scores.device))
    ),
}


@pytest.mark.parametrize("name", FLOAT_MASKS)
def test_masks_computed_in_floats_select_what_they_mark(name: str) -> None:
    """As losses of contrastive learning leave out a sample's likeness to itself."""
    selected: list[int] = []

    def step(device: str) -> None:
        scores = torch.randn(96, 96, device=device)
        mask = FLOAT_MASKS[name](scores)
        selected.extend([len(scores[mask.bool()]), len(scores.masked_select(mask == 0))])

    record(lambda: step("cuda"))
    step("cpu")
    assert selected[:2] == selected[2:]


def test_masks_in_floats_are_known_on_the_card() -> None:
    """A one-hot mask of the host selects as many elements as it marks; other floats of its size are not followed."""
    shapes = []

    def step() -> None:
        mask = torch.zeros(32, 500).scatter_(1, torch.randint(500, (32, 1)), 1).cuda()
        scores = torch.randn(32, 500, device="cuda")
        shapes.append(len(scores[mask == 1]))
        mask.mul_(2)
        shapes.append(len(scores[mask == 1]))

    record(step)
    assert shapes == [32, 0]


def test_numbers_changed_in_lists_are_known() -> None:
    numbers = []

    def step() -> None:
        one = torch.tensor(0.25).cuda()
        torch._foreach_mul_([one], [0.5])
        torch._foreach_add_([one], 1)
        numbers.append(one.item())

    record(step)
    assert numbers == [1.125]


@pytest.mark.parametrize("batch", [2, 64])
def test_the_sum_of_one_number_is_known_of_any_size(batch: int) -> None:
    """As transformers asks whether a mask selects everything, made of floats: ``mask.sum() == mask.numel()``."""
    answers = []

    def step() -> None:
        mask = torch.ones(batch, 512, device="cuda")
        answers.append(bool(mask.to(torch.bool).sum() == mask.numel()))
        answers.append(bool((mask * 0).sum() == 0))

    decided = capture(lambda _: step(), source="sums", device=device_named("T4"), torch_version=(2, 13)).decided
    assert (answers, decided) == ([True, True], {})
