"""Host tensors are real: what a program draws, computes and reads on the host is what it would without an analysis."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.examples import examples

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info  # noqa: E402

from graphmem.capture.values import generators  # noqa: E402
from graphmem.trace import Place  # noqa: E402
from tests.support.captures import births, record  # noqa: E402


def same(program: Callable[[], Any]) -> Any:
    """What the program returns for real and in a capture, which must be equal; so must what is drawn afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generators.DEFAULT_SEED)
        expected = program(), torch.get_rng_state().tolist()
        before = torch.get_rng_state()
        found: list[Any] = []
        record(lambda: found.append((program(), torch.get_rng_state().tolist())))
        assert torch.equal(torch.get_rng_state(), before), "the process's own generator was touched"
    assert found[0][0] == expected[0]
    assert found[0][1] == expected[1], "the generator ends elsewhere"
    return expected[0]


# --- random numbers ---------------------------------------------------------------------------------------------------

SIZES = [(1,), (7,), (15,), (16,), (17,), (5, 4), (30, 31), (3, 100, 100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", ["uniform_", "normal_", "exponential_", "bernoulli_"])
def test_draws(fill: str, dtype: Any) -> None:
    """Those that are computed at once, those that wait, and those that only a number of words stands for."""

    def program() -> list[Any]:
        seen = []
        for size in SIZES:
            getattr(torch.empty(size, dtype=dtype), fill)()  # nobody reads it
            seen.append(float(getattr(torch.empty(size, dtype=dtype), fill)().sum()))
            weight = nn.Parameter(torch.empty(size, dtype=dtype))
            module = nn.Module()
            module.weight = weight
            with torch.no_grad():
                getattr(module.weight, fill)()
            seen.append(torch.rand(2).tolist())
        return seen

    same(program)


INITIALIZERS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda w: nn.init.uniform_(w, -1, 1),
    "normal": lambda w: nn.init.normal_(w, 0, 0.02),
    "kaiming uniform": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "kaiming normal": nn.init.kaiming_normal_,
    "xavier": nn.init.xavier_uniform_,
    "xavier normal": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.1) if w.dim() == 2 else w,
    "truncated far away": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=1.0),
    "ones": nn.init.ones_,
    "direct": lambda w: w.data.normal_(0, 0.02),
    "not contiguous": lambda w: w.data.transpose(0, 1).normal_(),
}


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_initializers_draw_as_many(name: str, dtype: Any) -> None:
    if name == "orthogonal" and dtype is torch.bfloat16:
        return  # there is no decomposition of bfloat16 matrices

    def program() -> list[float]:
        for size in [(3, 3), (33, 21), (64, 3, 7, 7)]:
            module = nn.Module()
            module.weight = nn.Parameter(torch.empty(size, dtype=dtype))
            INITIALIZERS[name](module.weight)
        return [float(torch.rand(())), float(torch.randn(()))]

    same(program)


def test_draws_that_nobody_reads_wait() -> None:
    """A batch is drawn and moved to the card, what is read later is drawn where it would be."""

    def program() -> Any:
        torch.manual_seed(5)
        images = torch.randn(4, 3, 224, 224)
        labels, order = torch.randint(0, 10, (64,)), torch.randperm(1000)
        moved, flipped = labels.to(images.dtype) * 2, labels.view(8, 8)[0]
        more, few = torch.rand(200_000), torch.randint(-3, 1 << 30, (5,))
        state = torch.rand(3).tolist()
        first = labels.sum().item()
        labels[3] = 77  # what was made of it stays
        return state, first, moved.tolist(), flipped.tolist(), order.tolist(), few.tolist(), float(more.sum())

    same(program)


def test_a_model_is_built_before_its_data_is_drawn() -> None:
    def program() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Embedding(3000, 300, padding_idx=0), nn.LSTM(300, 50), nn.Linear(50, 3000), nn.Conv2d(3, 8, 3),
            nn.MultiheadAttention(32, 4), nn.LayerNorm(32), nn.BatchNorm1d(32), nn.Bilinear(4, 5, 6),
        )  # fmt: skip
        nn.Parameter(torch.randn(1, 50, 300) * 0.02)
        del model
        return torch.randint(0, 1000, (5,)).tolist(), torch.randperm(10).tolist()

    same(program)


@given(words=st.integers(0, 1 << 34), before=st.integers(0, 2000))
@settings(max_examples=examples(5), deadline=None)
def test_jumps_compose(words: int, before: int) -> None:
    """Two jumps of any length lead where one does; and short ones where drawing does (the tests above)."""
    once, twice = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for generator in (once, twice):
        torch.rand(before, generator=generator)
    generators.advance(once, words)
    generators.advance(twice, words // 3)
    generators.advance(twice, words - words // 3)
    assert torch.equal(once.get_state(), twice.get_state())


@pytest.mark.parametrize("before", [0, 1, 623, 624, 625])
def test_a_jump_ends_where_drawing_does(before: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(generators, "_FAR", 1248)  # two blocks
    for words in (0, 1, 623, 624, 625, 1871, 1872, 1873, 2496, 99_999):
        jumped, drawn = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        for generator in (jumped, drawn):
            torch.rand(before, generator=generator)
        generators.advance(jumped, words)
        torch.rand(words, generator=drawn)
        assert torch.equal(jumped.get_state(), drawn.get_state())


# --- programs ---------------------------------------------------------------------------------------------------------

#: Steps of a program: a host tensor of at least one dimension to another.
STEPS: dict[str, Callable[[Any], Any]] = {
    "plus": lambda x: x + 1.5,
    "times itself": lambda x: x * x,
    "in place": lambda x: x.mul_(0.5),
    "row in place": lambda x: (x[0].fill_(3), x)[1],
    "noise in place": lambda x: x.add_(torch.randn(x.shape)),
    "part redrawn": lambda x: (x[..., :2].uniform_(), x)[1],
    "like": lambda x: torch.rand_like(x) + x,
    "dropped": lambda x: nn.functional.dropout(x, 0.4),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full(x.shape, 0.5)),
    "shuffled": lambda x: x[torch.randperm(x.shape[0])],
    "chosen": lambda x: x[torch.randint(0, x.shape[0], (3,))],
    "masked": lambda x: x.masked_fill(x > 0.5, 0.25),
    "selected": lambda x: x[x > x.mean()],
    "sorted": lambda x: x.sort(0).values,
    "transposed": lambda x: x.transpose(0, -1),
    "flat": lambda x: x.reshape(-1),
    "stacked": lambda x: torch.stack([x, x.flip(0)]),
    "padded": lambda x: nn.utils.rnn.pad_sequence([x, x[:1]], batch_first=True),
    "normalized": lambda x: (x - x.mean()) / (x.std(correction=0) + 1),
    "empty, then filled": lambda x: torch.empty_like(x).copy_(x),
    "filled by rows": lambda x: _by_rows(x),
    "by numpy": lambda x: torch.from_numpy(np.ascontiguousarray(x.numpy() + 1)),
    "numpy shares": lambda x: _through_numpy(x),
    "list": lambda x: torch.tensor(x.tolist()),
    "largest": lambda x: x[: 1 + int(x.abs().max()) % x.shape[0]],
    "seeded": lambda x: (torch.manual_seed(x.numel()), x)[1],
    "own generator": lambda x: x + torch.rand(x.shape, generator=torch.Generator().manual_seed(5)),
    "doubled and back": lambda x: x.double().normal_().float(),
    "histogram": lambda x: torch.bincount((x.abs() * 3).long().reshape(-1) % 7).float(),
    "multinomial": lambda x: torch.multinomial(x.reshape(-1).abs() + 0.1, min(2, x.numel())).float(),
    "state kept": lambda x: _state_kept(x),
    "cat": lambda x: torch.cat([x, torch.zeros(2, *x.shape[1:]), torch.arange(0.0, 1.0, 0.5).sum() + x]),
}


def _by_rows(x: Any) -> Any:
    out = torch.empty(x.shape)
    for row in range(x.shape[0]):
        out[row] = x[row] * row
    return out


def _through_numpy(x: Any) -> Any:
    array = x.contiguous().numpy()
    array[...] = 2 * array
    return torch.as_tensor(array)


def _state_kept(x: Any) -> Any:
    state = torch.get_rng_state()
    first = torch.rand(x.shape)
    torch.set_rng_state(state)
    return x + first - torch.rand(x.shape)


@given(
    seed=st.integers(0, 1 << 40),
    size=st.sampled_from([(4,), (3, 5), (2, 3, 4), (170, 120), (40_000,)]),
    start=st.sampled_from(["rand", "randn", "zeros", "ones"]),
    program=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=7),
)
@settings(max_examples=examples(25), deadline=None)
def test_programs(seed: int, size: tuple[int, ...], start: str, program: list[str]) -> None:
    def run() -> list[Any]:
        torch.manual_seed(seed)
        x = getattr(torch, start)(size)
        seen: list[Any] = []
        for name in program:
            x = STEPS[name](x)
            if x.numel() == 0 or x.dim() == 0 or x.numel() > 500_000:
                break
            seen.append((name, tuple(x.shape)))
        seen.append(repr(x.reshape(-1)[:50].tolist()))  # NaN differs from itself
        return [*seen, torch.rand(3).tolist()]

    same(run)


# --- as people write them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensor", "array", "memmap"])
def test_batches_of_nanogpt(kind: str, tmp_path: Any) -> None:
    """``get_batch`` of nanoGPT's ``train.py``, with its data as a tensor, an array, and a file."""
    tokens = np.random.default_rng(0).integers(0, 50_000, 300_000).astype(np.uint16)
    data: Any = tokens
    if kind == "memmap":
        tokens.tofile(tmp_path / "train.bin")
        data = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r")
    if kind == "tensor":
        data = torch.from_numpy(tokens.astype(np.int64))

    def batch() -> Any:
        torch.manual_seed(1337)
        nn.Linear(700, 400)  # the model is built first
        ix = torch.randint(len(data) - 64, (12,))
        if kind == "tensor":
            x = torch.stack([data[i : i + 64] for i in ix])
        else:
            x = torch.stack([torch.from_numpy(data[i : i + 64].astype(np.int64)) for i in ix])
        return tuple(x.shape), x.tolist(), x.sum().item()

    assert same(batch)[0] == (12, 64)


def test_what_the_issue_names() -> None:
    def program() -> list[Any]:
        torch.manual_seed(0)
        lengths = torch.tensor([3, 5])
        return [
            int(torch.ones(16, 300).sum(1).max()),
            int(torch.empty(1).uniform_(0, 1000).item()),
            torch.randperm(20).tolist(),
            str(torch.arange(3) * 2),
            np.asarray(torch.full((2,), 7)).tolist(),
            f"{torch.rand(()):.6f}",
            nn.utils.rnn.pack_padded_sequence(torch.ones(2, 5, 1), lengths, True, False).batch_sizes.tolist(),
        ]

    assert same(program)[0] == 300


def _distributions() -> Any:
    beta, normal = torch.distributions.Beta(0.4, 0.4), torch.distributions.Normal(0.0, 1.0)
    chosen = torch.distributions.Categorical(torch.ones(4))
    return float(beta.sample()), normal.sample((2,)).tolist(), chosen.sample((3,)).tolist()


def _forked() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        inside = torch.rand(3).tolist()
    return inside, torch.rand(2, generator=torch.default_generator).tolist()


def _mixed() -> Any:
    """Real tensors and followed ones write into each other."""
    real, followed = torch.arange(10), torch.zeros(10, dtype=torch.long)
    real += followed + 1
    followed[2:4] = real[2:4]
    followed.numpy()[5] = 7
    real[6:8] = followed[5]
    counts = followed.scatter_add_(0, real % 3, real)
    return real.tolist(), counts.tolist(), torch.equal(real, followed)


def _masks() -> Any:
    torch.manual_seed(4)
    padded = nn.utils.rnn.pad_sequence([torch.randint(1, 9, (n,)) for n in (3, 7, 2)], True, -100)
    mask = padded != -100
    lengths = mask.sum(1)
    return [int(n) for n in lengths], max(lengths).item(), tuple(padded[mask].shape), torch.where(mask)[1].tolist()


PROGRAMS: dict[str, Callable[[], Any]] = {
    "random_split": lambda: list(torch.utils.data.random_split(range(20), [15, 5])[0].indices),
    "weighted sampler": lambda: list(torch.utils.data.WeightedRandomSampler([0.1, 0.9, 0.5], 10)),
    "deep copy": lambda: copy.deepcopy(torch.randn(4, 5)).tolist(),
    "pickle": lambda: pickle.loads(pickle.dumps(torch.randn(4, 5).to(torch.bfloat16))).tolist(),
    "distributions": _distributions,
    "forked generator": _forked,
    "mixed": _mixed,
    "masks": _masks,
    "image": lambda: torch.from_numpy((torch.rand(3, 8, 8) * 255).byte().permute(1, 2, 0).numpy()).float().sum().item(),
    "linear algebra": lambda: torch.linalg.inv(torch.eye(4) + torch.rand(4, 4)).tolist(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_people_do_with_them(name: str) -> None:
    same(PROGRAMS[name])


class Ragged(Dataset[Any]):
    """Sequences of many lengths, with draws of every generator that a dataset uses."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return torch.arange(index + 1), random.random(), float(np.random.rand()), torch.rand(1)


class Numbers(IterableDataset[Any]):
    """A stream that its workers share."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, 11, step):
            yield number + torch.rand(1).item()


def _collate(items: list[Any]) -> Any:
    padded = nn.utils.rnn.pad_sequence([item[0] for item in items], batch_first=True)
    return padded, torch.tensor([len(item[0]) for item in items]), [(*item[1:3], item[3].item()) for item in items]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_loaders_shuffle_as_they_would(workers: int, pinned: bool) -> None:
    def program() -> list[Any]:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        loader = DataLoader(Ragged(), 4, shuffle=True, collate_fn=_collate, num_workers=workers, pin_memory=pinned)
        seen = []
        for _ in range(2):
            for ids, lengths, drawn in loader:
                assert ids.shape[1] == int(lengths.max())
                seen.append((tuple(ids.shape), ids.tolist(), lengths.tolist(), drawn))
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without an accelerator, nothing is pinned
        same(program)


def test_workers_that_stay_and_streams() -> None:
    def program() -> Any:
        data = TensorDataset(torch.randn(10, 3), torch.arange(10))
        loader = DataLoader(data, 3, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True)
        seen: list[Any] = [[(float(x.sum()), y.tolist()) for x, y in loader] for _ in range(2)]
        return seen, [batch.tolist() for batch in DataLoader(Numbers(), 2, num_workers=3)]

    same(program)


@pytest.mark.parametrize("made", [torch.randn, lambda *sides: torch.arange(24.0).view(*sides)])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_pinned(made: Callable[..., Any], workers: int) -> None:
    def step() -> None:
        for (batch,) in DataLoader(TensorDataset(made(8, 3)), 4, num_workers=workers, pin_memory=True):
            assert batch.is_pinned()
            batch.cuda(non_blocking=True)

    assert [one.bytes for one in births(record(step), Place.PINNED)] == [48, 48]


def test_a_copy_to_the_device_with_a_type_is_one_in_inference_mode_too() -> None:
    """``aten.to.device``, with the device by its position, is not taken apart there."""
    places = []

    def step() -> None:
        with torch.inference_mode():
            places.append(torch.as_tensor([0.4, 0.5], device="cuda").device.type)
            places.append(torch.ones(3).to("cuda", torch.float16).device.type)
            places.append(torch.tensor([1, 2]).to("cuda", torch.float32).device.type)

    record(step)
    assert places == ["cuda"] * 3


def test_a_copy_to_the_host_that_nobody_waits_for_is_pinned() -> None:
    def step() -> None:
        gradient = torch.empty(1 << 20, device="cuda")
        waited = gradient.to("cpu")
        offloaded = gradient.to("cpu", non_blocking=True)
        assert (waited.is_pinned(), offloaded.is_pinned()) == (False, True)

    found = [(born.place, born.bytes) for born in births(record(step), place=None)]
    assert [size for place, size in found if place is Place.PINNED] == [4 << 20]
    assert [size for place, size in found if place is Place.HOST] == [4 << 20]


def test_a_list_of_host_numbers_that_are_drawn_becomes_a_tensor() -> None:
    def step() -> None:
        number = torch.randn([])
        made = torch.tensor([[number, 0], [2**number, 1]], dtype=torch.float32)
        assert (made.shape, made.dtype, made.device.type) == ((2, 2), torch.float32, "cpu")
        made.cuda()

    assert [born.bytes for born in births(record(step))] == [16]
