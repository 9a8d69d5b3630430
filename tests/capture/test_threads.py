"""A capture belongs to its thread: others neither see it nor are seen by it."""

from __future__ import annotations

import copy
import json
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from graphmem import Inference, Training, analyze  # noqa: E402
from graphmem.capture.patches import Patches, _Answer, _ObjectView  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402
from graphmem.trace import Place  # noqa: E402
from tests.support.captures import record  # noqa: E402


class Elsewhere:
    """A thread that was there before the capture and runs what it is given."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                self._answers.put((work(), None))
            except BaseException as error:
                self._answers.put((None, error))

    def __call__(self, work: Callable[[], Any]) -> Any:
        self._work.put(work)
        result, error = self._answers.get(timeout=60)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    thread = Elsewhere()
    yield thread
    thread.close()


def during_capture(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in the middle of a step."""
    results: list[Any] = []

    def step() -> None:
        model = nn.Linear(4, 4).cuda()
        model(torch.zeros(2, 4, device="cuda")).sum().backward()
        results.append(work())

    record(step)
    return results[0]


# --- what other threads see -------------------------------------------------------------------------------------------


def _world() -> dict[str, Any]:
    """What a thread finds of PyTorch, by the ways programs look."""
    with FakeTensorMode():
        fake = torch.empty(2, 3)
    convolution, layer = nn.Conv2d(3, 4, 3), nn.Linear(3, 2)
    table = torch.utils.data.TensorDataset(torch.arange(4.0))
    return {
        "available": torch.cuda.is_available(),
        "initialized": torch.cuda.is_initialized(),
        "count": torch.cuda.device_count(),
        "accelerator": torch.accelerator.is_available() if hasattr(torch, "accelerator") else None,
        "cuda": torch.version.cuda,
        "generators": torch.cuda.default_generators,
        "C functions": [hasattr(torch._C, name) for name in ("_cuda_emptyCache", "_cuda_memoryStats", "_cuda_init")],
        "streams": [isinstance(torch.cuda.Stream, type), torch.cuda.Stream.__name__, torch.Stream.__name__],
        "generator": (torch.Generator().device, isinstance(torch.Generator(), torch.Generator)),
        "subclass": _subclass().__mro__[1].__module__,
        "new tensors": [type(made).__name__ for made in (torch.tensor([1.0]), torch.ones(2), torch.as_tensor([1]))],
        "fake": [type(fake).__name__, fake.is_cuda, fake.is_meta, fake.get_device(), str(fake.device)],
        "copy": type(copy.deepcopy(layer).weight.data).__name__,
        "initialised": [parameter.abs().sum().item() > 0 for parameter in (layer.weight, convolution.weight)],
        "loaded": [batch[0].tolist() for batch in DataLoader(table, batch_size=2)],
        "numpy": torch.ones(2).numpy().tolist(),
        "text": f"{torch.tensor(1.5):.1f}",
        "pinned": torch.ones(1).is_pinned(),
        "moved": torch.ones(1).to("cpu").item(),
        "set": _assigned(),
        "cudnn": torch.backends.cudnn.enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "modes": torch._C._len_torch_dispatch_stack(),
        "compile": torch.compiler.is_compiling(),
        "distributed": torch.distributed.is_nccl_available() if torch.distributed.is_available() else None,
    }


def _subclass() -> type:
    class Mine(torch.cuda.Event):
        pass

    return Mine


def _assigned() -> list[float]:
    made = torch.zeros(3)
    made[1] = 2.0
    return list(made.tolist())


def test_another_thread_finds_pytorch_as_it_is(elsewhere: Elsewhere) -> None:
    before = elsewhere(_world)
    assert during_capture(lambda: elsewhere(_world)) == before
    assert during_capture(lambda: torch.cuda.is_available() and torch.version.cuda is not None)


#: Replaced for every thread by what harms none: a list with a type more, which compiled code has to see as a list.
_FOR_ALL = {"_foreach_supported_types"}


def test_every_replaced_name_gives_another_thread_what_was_there(elsewhere: Elsewhere) -> None:
    """Each function, class, property and constant is looked at from both sides of the same moment."""

    def compare() -> tuple[int, list[str]]:
        entries = [entry for patches in Patches._active for entry in patches._undo]
        wrong = []
        for entry in entries:
            if entry.name in _FOR_ALL:
                right = set(entry.view) > set(entry.before)
            elif isinstance(entry.view, _Answer):
                seen = elsewhere(partial(getattr, entry.owner, entry.name, "absent"))
                right = seen is entry.before or seen == "absent"
            elif isinstance(entry.view, _ObjectView):
                right = elsewhere(entry.view._now) is entry.view._found
            else:
                right = _tells_threads_apart(entry.view)
            if not right:
                wrong.append(f"{entry.owner}.{entry.name}")
        return len(entries), wrong

    count, wrong = during_capture(compare)
    assert count > 250
    assert wrong == []


def _tells_threads_apart(view: Any) -> bool:
    function: Any = view.__func__ if isinstance(view, staticmethod) else getattr(view, "fget", view)
    return "threads" in function.__code__.co_freevars


def test_another_threads_modules_and_optimizers_are_not_recorded(elsewhere: Elsewhere) -> None:
    def train() -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()

    def step(beside: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            model = nn.Linear(4, 4).cuda()
            for _ in range(2):
                beside()
                model(torch.zeros(2, 4, device="cuda")).sum().backward()
                beside()

        return run

    alone = json.dumps(analyze(step(lambda: None)).to_dict())
    assert json.dumps(analyze(step(lambda: elsewhere(train))).to_dict()) == alone


def test_random_numbers_of_another_thread_are_not_rewound(elsewhere: Elsewhere) -> None:
    torch.manual_seed(0)
    expected = [torch.rand(1).item() for _ in range(3)]
    torch.manual_seed(0)
    drawn = [elsewhere(lambda: torch.rand(1).item())]

    def work() -> None:
        torch.manual_seed(7)
        list(DataLoader(TensorDataset(torch.zeros(4)), shuffle=True))
        drawn.append(elsewhere(lambda: torch.rand(1).item()))

    during_capture(work)
    drawn.append(elsewhere(lambda: torch.rand(1).item()))
    assert drawn == expected


def test_switches_of_the_step_are_its_own(elsewhere: Elsewhere) -> None:
    def flags() -> list[Any]:
        return [
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cuda.math_sdp_enabled(),
            torch.get_float32_matmul_precision(),
        ]

    def work() -> tuple[list[Any], list[Any]]:
        torch.backends.cudnn.enabled = False
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return flags(), elsewhere(flags)

    before = flags()
    assert during_capture(work) == ([False, True, False, "high"], before)
    assert flags() == before


def test_variables_of_torchrun_are_the_captures(elsewhere: Elsewhere) -> None:
    def environment() -> tuple[str | None, str | None, bool]:
        return os.environ.get("WORLD_SIZE"), os.getenv("RANK"), "MASTER_ADDR" in os.environ

    seen: list[Any] = []
    before = environment()
    record(lambda: seen.extend((environment(), elsewhere(environment))), world_size=2)
    assert seen == [("2", "0", True), before]


def test_filters_of_warnings_in_another_thread_stay(elsewhere: Elsewhere) -> None:
    """``catch_warnings`` swaps a list of the process: one that ends inside another's would put back the wrong one."""
    during_capture(lambda: None)  # the first capture silences one warning that comes once
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        found, entries = warnings.filters, list(warnings.filters)
        assert during_capture(lambda: warnings.filters) is found
        assert warnings.filters is found
        assert list(found) == entries


# --- who belongs to a capture -----------------------------------------------------------------------------------------


def test_a_thread_that_the_step_starts_belongs_to_the_capture() -> None:
    def work() -> list[bool]:
        seen: list[bool] = []

        def outer() -> None:
            seen.append(torch.cuda.is_available())
            inner = threading.Thread(target=lambda: seen.append(torch.cuda.is_available()))
            inner.start()
            inner.join()

        thread = threading.Thread(target=outer)
        thread.start()
        thread.join()
        return seen

    assert during_capture(work) == [True, True]
    assert threading.Thread.start.__module__ == "threading"


def test_what_a_started_thread_allocates_is_recorded() -> None:
    """As transformers loads weights (``core_model_loading.spawn_materialize``): four threads, the host's and the
    card's tensors."""
    sizes = [1024 * (n + 1) for n in range(40)]

    def step() -> None:
        with ThreadPoolExecutor(4) as pool:
            loaded = list(pool.map(lambda size: torch.empty(size).to("cuda"), sizes))
        assert all(tensor.is_cuda and type(tensor) is type(loaded[0]) for tensor in loaded)
        (loaded[0] * 2).sum()

    trace = record(step)
    taken = sorted(storage.bytes for storage in trace.storages if storage.place is Place.DEVICE)
    assert [size for size in taken if size >= 8192] == [4 * size for size in sizes if 4 * size >= 8192]


def test_a_fake_kernel_of_one_thread_hides_no_device_from_another() -> None:
    """A thread that loads works beside the one that trains under autocast, which asks where its tensors are."""
    shown = []

    def step() -> None:
        x = torch.zeros(4, device="cuda")
        running, read = threading.Event(), threading.Event()

        def load() -> None:
            with in_kernel_invocation_manager(x.fake_mode):
                running.set()
                read.wait(10)

        thread = threading.Thread(target=load)
        thread.start()
        running.wait(10)
        shown.append(x.device.type)
        read.set()
        thread.join()

    record(step)
    assert shown == ["cuda"]


def test_a_thread_that_outlives_its_capture_has_no_modes() -> None:
    go, seen = threading.Event(), []

    def wait() -> None:
        go.wait(60)
        seen.append(type(torch.ones(2) + 1))

    def work() -> threading.Thread:
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread

    thread = during_capture(work)
    go.set()
    thread.join()
    assert seen == [torch.Tensor]


def test_a_thread_that_outlives_its_capture_is_free() -> None:
    go, seen = threading.Event(), []

    def wait() -> None:
        go.wait(60)
        seen.append(torch.cuda.is_available())

    def work() -> threading.Thread:
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread

    thread = during_capture(work)
    real = torch.cuda.is_available()

    def end() -> None:
        go.set()
        thread.join()

    during_capture(end)
    assert seen == [real]


def test_a_data_loader_with_pinned_memory_works_in_a_capture() -> None:
    """Its thread pins what it hands over, which a machine without a card could not."""
    loader = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=4, pin_memory=True)

    def step() -> None:
        model = nn.Linear(4, 2).cuda()
        for (batch,) in loader:
            model(batch.to("cuda", non_blocking=True)).sum().backward()

    assert analyze(step).peak.reserved_bytes > 0


# --- one at a time ----------------------------------------------------------------------------------------------------


def _model() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)), torch.zeros(2, 8)


def test_a_second_analysis_waits(elsewhere: Elsewhere) -> None:
    order: list[str] = []
    begun = threading.Event()

    def first() -> None:
        def step() -> None:
            begun.set()
            second.start()
            second.join(0.5)
            torch.zeros(4, device="cuda")
            order.append("first")

        analyze(step)

    def second_analysis() -> None:
        analyze(_model)
        order.append("second")

    second = threading.Thread(target=second_analysis)
    # Started by the capture it would belong to it; a thread that is there already starts it.
    second.start = partial(elsewhere, second.start)  # type: ignore[method-assign]
    first()
    second.join(60)
    assert order == ["first", "second"]


def test_an_analysis_inside_another_is_refused() -> None:
    def inside() -> str:
        with pytest.raises(CaptureError) as raised:
            analyze(_model)
        return str(raised.value)

    assert "an analysis is running on this thread already" in during_capture(inside)

    def in_a_thread_of_the_capture() -> str:
        told: list[str] = []
        thread = threading.Thread(target=lambda: told.append(inside()))
        thread.start()
        thread.join()
        return told[0]

    assert "cannot wait for it" in during_capture(in_a_thread_of_the_capture)
    assert analyze(_model).peak.reserved_bytes > 0


STEPS = (Training(), Training(amp="bf16"), Inference(dtype="bf16"))


def test_threads_get_the_answers_of_one(elsewhere: Elsewhere) -> None:
    """A share of ``benchmarks/thread_stress.py``."""

    def answer(step: Training | Inference) -> str:
        return json.dumps(analyze(_model, training=step).to_dict())

    def training(stop: threading.Event | None, least: int) -> tuple[int, list[Any]]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        generator, made = torch.Generator().manual_seed(0), 0
        while made < least or (stop is not None and not stop.is_set()):
            model(torch.randn(4, 8, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            made += 1
        return made, [parameter.tolist() for parameter in model.parameters()]

    alone = [answer(step) for step in STEPS[1:]]
    stop, beside, answers = threading.Event(), [], []
    trainer = threading.Thread(target=lambda: beside.append(training(stop, 10)))
    workers = [threading.Thread(target=lambda: answers.append([answer(step) for step in STEPS[1:]])) for _ in range(2)]
    for thread in (trainer, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    stop.set()
    trainer.join()
    assert answers == [alone] * 2
    steps, weights = beside[0]
    assert weights == training(None, steps)[1]


def test_what_a_program_puts_over_a_replaced_name_stays_when_all_is_lifted() -> None:
    """Libraries put functions of their own over ``torch.cuda.set_stream``; ours are lifted when the compiler opens."""

    class Owner:
        @staticmethod
        def name() -> str:
            return "before"

        other = name

    with Patches() as first, Patches() as second:
        first.table(Owner, {name: staticmethod(lambda: "first") for name in ("name", "other")})
        second.set(Owner, "name", staticmethod(lambda: "second"))
        ours = Owner.name
        Owner.name = staticmethod(lambda: f"the program's, over {ours()}")  # type: ignore[method-assign]
        for _ in range(2):
            with Patches.lifted():
                assert (Owner.name(), Owner.other()) == ("the program's, over second", "before")
            assert (Owner.name(), Owner.other()) == ("the program's, over second", "first")
    assert (Owner.name(), Owner.other()) == ("before", "before")
