"""Whole programs: run as Python runs them, left after some optimizer steps, told as they ended."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from graphmem.analyze import analyze
from graphmem.base.rewritten import AS_WRITTEN
from graphmem.capture.program import host_draws
from graphmem.capture.program.iterations import MOST_REPEATED
from graphmem.capture.program.loops import compiled
from graphmem.devices import custom_device
from graphmem.diagnostics import Code, Effect
from graphmem.errors import CaptureError, GraphmemError, SourceError, UsageError
from graphmem.estimate import Estimate
from graphmem.trace import EventKind, Place
from graphmem.training.program import OPTIMIZER_STEPS, Program, Steps
from tests.support.examples import but_slow, first_quick

MODEL = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
seen = []
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters())
def x(batch=16):
    return torch.randn(batch, 64, device="cuda")
def train_step():
    optimizer.zero_grad()
    model(x()).sum().backward()
    optimizer.step()
    seen.append("step")
"""


def run(folder: Path, source: str, *arguments: str, iterations: int | None = 3, prelude: str = MODEL) -> Estimate:
    path = folder / "train.py"
    path.write_text(prelude + source, encoding="utf-8")
    return analyze(Program(str(path), arguments), iterations=iterations)


def ending(estimate: Estimate) -> tuple[str, int, int, str]:
    told = estimate.details["program"]
    return told["how"], told["steps"], told["code"], told["error"]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.strip()


def test_checkpointing_of_a_model_in_eval_mode_is_told(tmp_path: Path) -> None:
    """What ``from_pretrained`` returns is in eval mode, and transformers recomputes nothing there."""
    source = """
model.gradient_checkpointing = True
for _ in range(2):
    train_step()
"""
    told = [
        any("call model.train()" in one.message for one in run(tmp_path, mode + source).diagnostics)
        for mode in ("model.eval()", "model.train()")
    ]
    assert told == [True, False]


def test_it_runs_as_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, path, main = list(sys.argv), list(sys.path), sys.modules["__main__"]
    (tmp_path / "beside.py").write_text("WIDTH = 8", encoding="utf-8")
    source = """
import argparse, pickle, beside
class Settings: pass
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
parser.add_argument("rest", nargs="*")
given = parser.parse_args()
pickle.loads(pickle.dumps(Settings()))  # found in __main__
print(__name__, __file__ == sys.argv[0], sys.path[0] in __file__, given.width + beside.WIDTH, given.rest)
train_step()
"""
    estimate = run(tmp_path, source, "--width", "3", "--", "-x", "--gpu")
    assert said(capsys) == "__main__ True True 11 ['-x', '--gpu']"
    assert ending(estimate) == ("itself", 1, 0, "")
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (argv, path, main)
    assert "beside" not in sys.modules


def test_a_module_runs_as_with_python_m(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("NAME = 'part'")
    (package / "__main__.py").write_text(
        MODEL + "from .part import NAME\nprint(__name__, __package__, NAME, sys.argv[1:], sys.path[0])\ntrain_step()"
    )
    monkeypatch.chdir(tmp_path)
    estimate = analyze(Program("mine", ("a",), is_module=True))
    assert said(capsys) == f"__main__ mine part ['a'] {tmp_path}"
    assert ending(estimate)[0] == "itself"


#: (loop, steps it makes, what it says at its end)
LOOPS = {
    "for": ("for _ in range(3000): train_step()\nprint(len(seen))", 3, "3"),
    "while": ("while True:\n    train_step()\n    if len(seen) > 3000: break\nprint(len(seen))", 3, "3"),
    "epochs": (
        "for epoch in range(9):\n    for _ in range(2): train_step()\n    seen.append('epoch')\nprint(*seen)",
        3,
        "step step epoch step epoch",
    ),
    "data loader": (
        "for (batch,) in DataLoader(TensorDataset(torch.zeros(99, 4)), batch_size=1): train_step()\nprint(len(seen))",
        3,
        "3",
    ),
    "data loader in a comprehension": (
        "[train_step() for _ in DataLoader(TensorDataset(torch.zeros(99, 4)))]\nprint(len(seen))",
        3,
        "3",
    ),
    "endless generator": (
        "def batches():\n    while True: yield 1\ndata = batches()\n"
        "for _ in range(99):\n    next(data)\n    train_step()\nprint(len(seen))",
        3,
        "3",
    ),
    "two optimizers": (
        "other = torch.optim.SGD(model.parameters(), lr=1)\nboth = [optimizer, other]\n"
        "for _ in range(99):\n    model(x()).sum().backward()\n    for one in both: one.step()\n    seen.append(1)\n"
        "print(len(seen))",
        3,
        "3",
    ),
    "micro-batches": (
        "for _ in range(99):\n    for micro in range(5): model(x()).sum().backward(); seen.append(1)\n"
        "    optimizer.step()\nprint(len(seen))",
        3,
        "15",
    ),
    "something every so often": (
        "for i in range(300):\n    train_step()\n    if i % 50 == 49: seen.append(i)\nprint(*seen)",
        7,
        "step step step step 49 step step 99 step",
    ),
    "something every so often beside a loader": (
        "def batches():\n    while True: yield from DataLoader(TensorDataset(torch.zeros(9, 4)))\ndata = batches()\n"
        "for i in range(300):\n    next(data)\n    train_step()\n    if i % 50 == 49: seen.append(i)\nprint(*seen)",
        7,
        "step step step step 49 step step 99 step",
    ),
    "something of the first step and every so often, beside a loader of several batches a step": (
        "loader = DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=8)\n"
        "def batches():\n    while True: yield from loader\ndata = batches()\n"
        "for i in range(300):\n    next(data), next(data)\n    train_step()\n"
        "    if i % 50 == 0: seen.append(i); x(1 << 12)\nprint(*seen)",
        6,
        "step 0 step step step step 50 step",
    ),
    "batches by hand from an iterator that is opened anew": (
        "loader = DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=8)\ndata = iter(loader)\n"
        "for i in range(300):\n    for _ in range(2):\n        try: next(data)\n"
        "        except StopIteration: data = iter(loader); next(data)\n"
        "    train_step()\n    if i == 0: x(1 << 12)\nprint(*seen, len(list(loader)))",
        4,
        "step step step step 8",
    ),
    "something every so often, counted by the loader's batches": (
        "for i, (batch,) in enumerate(DataLoader(TensorDataset(torch.zeros(600, 4)), batch_size=4)):\n"
        "    train_step()\n    if i % 50 == 49: seen.append(i)\nprint(len(batch), i, *seen)",
        7,
        "4 100 step step step step 49 step step 99 step",
    ),
    "something every so often, counted by a while loop": (
        "i = 0\nwhile i < 300:\n    train_step()\n    i += 1\n    if i % 50 == 0: seen.append(i)\nprint(i, *seen)",
        7,
        "101 step step step step 50 step step 100 step",
    ),
    "something every so often, before it is counted": (
        "i = 0\nwhile True:\n    if i % 50 == 49: seen.append(i)\n    train_step()\n    i = i + 1\n"
        "    if i >= 80: break\nprint(i, *seen)",
        5,
        "50 step step step step 49 step",
    ),
    "something every so often, counted over epochs": (
        "i = 0\nfor epoch in range(9):\n    for batch in DataLoader(TensorDataset(torch.zeros(40, 4)), batch_size=4):\n"
        "        train_step()\n        i += 1\n        if i % 60 == 0: seen.append(i)\n        if i % 91 == 0: 1 / 0\n"
        "print(i, *seen)",
        5,
        "61 step step step step 60 step",
    ),
    "something every so often, by a number of the loop's own": (
        "for i, batch in enumerate(DataLoader(TensorDataset(torch.zeros(600, 4)), batch_size=4)):\n"
        "    step = 7 * 100 + i\n    train_step()\n    if step % 80 == 79: seen.append(step)\nprint(*seen)",
        7,
        "step step step step 719 step step 799 step",
    ),
    "something every so many steps of several batches": (
        "i = 0\nfor at, batch in enumerate(DataLoader(TensorDataset(torch.zeros(900, 4)), batch_size=4)):\n"
        "    model(x()).sum().backward()\n    if at % 3 == 2:\n        optimizer.step()\n        i += 1\n"
        "        if i % 50 == 0: seen.append(i)\nprint(i, *seen)",
        5,
        "51 50",
    ),
    "a number that nothing was counted on": (
        "for batch in DataLoader(TensorDataset(torch.zeros(400, 4)), batch_size=4):\n"
        "    train_step()\n    if len(seen) > 9:\n        i += 1\n        if i % 5: pass\nprint(*seen)",
        3,
        "step step step",
    ),
    "a step left over": (
        "for i in range(99):\n    model(x()).sum().backward()\n    if i % 2: optimizer.step()\n"
        "optimizer.step()\nprint(i)",
        4,
        "5",
    ),
}


@pytest.mark.parametrize(
    "name",
    but_slow(
        LOOPS,
        {
            "something every so many steps of several batches",
            "something every so often, counted by the loader's batches",
            "a number that nothing was counted on",
        },
    ),
)
def test_loops_end_at_their_top(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, steps, says = LOOPS[name]
    estimate = run(tmp_path, source)
    assert said(capsys) == says
    assert ending(estimate) == ("shortened", steps, 0, "")


FIT = """
def fit(width, data, opt=None):
    net = nn.Linear(64, width).cuda()
    opt = opt or torch.optim.Adam(net.parameters())
    for epoch in range(9):
        for (batch,) in data:
            net(batch.cuda()).sum().backward()
            opt.step()
            seen.append(width)
data = DataLoader(TensorDataset(torch.zeros(40, 64)), batch_size=4)
"""
#: (loop around training, the widths of all steps, the items that are reported)
RUNS = {
    "a list": ("for width in (8, 64, 16): fit(width, data)", [8, 64, 16], ["8", "64", "16"]),
    "a product": (
        "import itertools\nfor width, lr in itertools.product((8, 16), (1, 2)): fit(width, data)",
        [8, 8, 16, 16],
        ["(8, 1)", "(8, 2)", "(16, 1)", "(16, 2)"],
    ),
    "numbers that decide": (
        "opt = torch.optim.SGD(model.parameters(), 0.1)\nfor epoch in range(50):\n"
        "    width = 8 if epoch < 20 else 32\n    for (batch,) in data:\n"
        "        model(batch.cuda()).sum().backward()\n        opt.step()\n        seen.append(width)",
        [8, 32],
        ["0", "20"],
    ),
    "epochs": ("opt = torch.optim.SGD(model.parameters(), 0.1)\nfor _ in range(50): fit(8, data, opt)", [8, 8], []),
    "called again": ("fit(8, data)\nfit(32, data)", [8, 32], []),
    "the same optimizer again": ("fit(8, data, optimizer)\nfit(16, data, optimizer)", [8, 16], []),
    "phases": (
        "for phase in ('train', 'val'):\n    if phase == 'train': fit(8, data)\n    else: seen.append(1)",
        [8],
        [],
    ),
    "a number that others are told": (
        "from operator import mul\nopt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for epoch in range(50):\n    width = mul(8, epoch)\n    for (batch,) in data:\n"
        "        model(batch.cuda()).sum().backward()\n        opt.step()\n        seen.append(width)",
        [0, 8, 392],
        [],
    ),
    "many that are alike": ("for fold in range(300): fit(8, data)", [8] * 7, ["0"] * 7),
}


@pytest.mark.parametrize("name", but_slow(RUNS, {"a product", "epochs", "the same optimizer again"}))
def test_loops_around_training_are_followed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, widths, items = RUNS[name]
    estimate = run(tmp_path, f"{FIT}\n{source}\nprint(*(w for w in seen if w != 1))")
    assert said(capsys).split() == [str(width) for width in widths for _ in range(3)]
    runs = estimate.details.get("runs", [])
    assert len(runs) == (len(items) if len(items) > 1 else 0)
    if name == "a list":
        assert [one["item"] for one in runs] == [f"width = {item}" for item in items]
        assert runs[1]["allocated_bytes"] == estimate.peak.allocated_bytes


EPOCH = """
sizes = [4] * 9 + [64] + [8] * 5 + [32]
class Rows(torch.utils.data.Dataset):
    def __len__(self): return len(sizes)
    def __getitem__(self, i): return torch.zeros(sizes[i], 64)
for batch in %s:
    model(batch.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.append(batch.shape[-2])
print(*seen)
"""


@pytest.mark.parametrize("items", ["DataLoader(Rows(), batch_size=None)", "[Rows()[i] for i in range(16)]"])
def test_the_largest_batches_of_an_epoch_follow(items: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And of the others the first of each shape."""
    estimate = run(tmp_path, EPOCH % items)
    assert said(capsys).split() == ["4", "4", "4", "64", "8", "32"]
    (epoch,) = estimate.details["epochs"]
    assert (epoch["read"], epoch["whole"], epoch["shapes"], epoch["largest"]) == (16, True, 4, 64 * 64)


IN_STEPS = """
def ahead(loader):
    batches = iter(loader)
    waiting = next(batches)
    for batch in batches:
        yield waiting
        waiting = batch
    yield waiting
sizes = [4] * 8 + [64] + [4] * 4 + [8] + [4] * 8 + [2]
for number, batch in enumerate(%s(DataLoader([torch.zeros(size, 64) for size in sizes], batch_size=None))):
    model(batch.cuda()).sum().backward()
    seen.append(len(batch))
    if number %% 2:
        optimizer.step()
        optimizer.zero_grad()
print(*seen)
"""


@pytest.mark.parametrize(("reader", "before"), [("iter", 6), pytest.param("ahead", 8, marks=pytest.mark.slow)])
def test_the_largest_batches_keep_their_place_among_those_of_a_step(
    reader: str, before: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 is the first of its two and meets no gradients; 8 is the second; with 2 there is no step."""
    run(tmp_path, IN_STEPS % reader)
    assert said(capsys).split() == ["4"] * before + ["64", "4", "4", "8"]


WITHIN_A_STEP = """
number = 0
loader = DataLoader([torch.zeros(4, 64)] * %s, batch_size=None)
for batch in loader:
    model(batch.cuda()).sum().backward()
    number += 1
    if number %% 3 == 0 or %s:
        optimizer.step()
        optimizer.zero_grad()
print(number, model.weight.grad is None)
"""


@pytest.mark.parametrize(
    ("batches", "also", "expected"),
    [
        (11, "False", "11 False"),
        (11, "number == len(loader)", "11 True"),
        pytest.param(12, "False", "9 True", marks=pytest.mark.slow),
    ],
)
def test_a_short_epoch_that_ends_within_a_step_is_followed(
    batches: int, also: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether there are gradients behind it is the program's to say."""
    run(tmp_path, WITHIN_A_STEP % (batches, also))
    assert said(capsys) == expected


OF_IMAGES = """
class Images(dict):
    @property
    def shape(self):
        width, height = self["data"].shape
        return width, height
    def __copy__(self): return Images(self)
loader = DataLoader([Images(data=torch.zeros(8, 64)) for _ in range(8)], batch_size=2)
for batch in loader:
    model(batch["data"].cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(*batch["data"].shape)
"""


def test_a_tuple_of_a_class_of_the_program_is_asked_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
class Irrep(tuple):
    def __len__(self): raise NotImplementedError
    def __iter__(self): raise NotImplementedError
for item in [Irrep((0, 1)), Irrep((1, -1))]:
    seen.append(item == (0, 1))
train_step()
print(seen)
"""
    assert ending(run(tmp_path, source)) == ("itself", 1, 0, "")
    assert said(capsys) == "[True, False, 'step']"


def test_a_batch_whose_shape_cannot_be_asked_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dictionary of TorchIO says the shape of images, and raises once a loader has stacked them."""
    estimate = run(tmp_path, OF_IMAGES)
    assert said(capsys).split() == ["2", "8", "64"]
    assert [epoch["largest"] for epoch in estimate.details["epochs"]] == [2 * 8 * 64]


AHEAD = """
from itertools import islice
def ahead(loader):
    batches = iter(loader)
    waiting = [batch.cuda() for batch in islice(batches, 2)]
    while waiting:
        yield waiting.pop(0)
        waiting += [batch.cuda() for batch in islice(batches, 1)]
sizes = [8, 4, 6, 2, 8, 6, 4, 2]
loader = DataLoader([torch.zeros(size, 64) for size in sizes], batch_size=None)
for epoch in range(2):
    seen.append("epoch")
    for batch in ahead(loader):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(str(len(batch)))
print(*seen)
"""


@pytest.mark.slow
def test_an_epoch_follows_one_that_ends_with_fewer_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps find blocks that were cut up for those."""
    source = """
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(300, 64)), batch_size=64)
for epoch in range(5):
    for (batch,) in data:
        model(batch.cuda()).sum().backward()
        optimizer.step()
        seen.append(len(batch))
print(*seen)
"""
    run(tmp_path, source, iterations=2)
    assert said(capsys) == "64 64 44 64 64 44"


READER = """
class Reader:
    def __init__(self, loader):
        self.batches = iter(loader)
        self.read()
    def read(self):
        try:
            self.waiting = next(self.batches).cuda()
        except StopIteration:
            self.waiting = None
    def next(self):
        batch = self.waiting
        self.read()
        return batch
loader = DataLoader([torch.zeros(size, 64) for size in [8] * 6 + [2]], batch_size=None)
reader = Reader(loader)
def train(batch):
    model(batch).sum().backward()
    optimizer.step()
    seen.append(len(batch))
%s
print(*seen)
"""


@pytest.mark.parametrize(
    "loop",
    [
        "batch = reader.next()\nwhile batch is not None:\n    train(batch)\n    batch = reader.next()",
        "while True:\n    batch = reader.next()\n    if batch is None: break\n    train(batch)",
        "for number in range(len(loader)):\n    train(reader.next())",
    ],
)
def test_batches_that_a_reader_has_read_ahead_come_to_the_loop(
    loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the equal ones in the middle some are left out."""
    run(tmp_path, READER % loop)
    assert said(capsys).split() in (["8"] * 4 + ["2"], ["8"] * 5 + ["2"])


CRITIC = """
critic = torch.nn.Linear(64, 64).cuda()
of_critic = torch.optim.Adam(critic.parameters())
batches = iter(DataLoader([torch.zeros(8, 64)] * 50, batch_size=None))
asked = 0
while asked < 50:
    for _ in range(5):
        asked += 1
        critic(next(batches).cuda()).sum().backward()
        of_critic.step()
    model(x()).sum().backward()
    optimizer.step()
    seen.append(asked)
print(len(seen))
"""


def test_batches_that_were_left_out_are_there_for_the_next_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop around asks for them, and handles no end."""
    estimate = run(tmp_path, CRITIC)
    assert ending(estimate)[3] == ""
    assert int(said(capsys)) >= 3


def test_a_batch_that_was_read_for_its_shape_is_not_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody handles that the loader is out: it is not asked again."""
    source = """
batches = iter(DataLoader([torch.zeros(8, 64)] * 9, batch_size=None))
width = next(batches).shape[1]
while len(seen) < 8:
    model(next(batches).cuda()).sum().backward()
    optimizer.step()
    seen.append("step")
print(len(seen))
"""
    run(tmp_path, source)
    assert said(capsys) == "3"


SHORT = """
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(300, 64)), batch_size=64)
for epoch in range(%d):
    for (batch,) in data:
        model(batch.cuda()).sum().backward()
        optimizer.step()
        seen.append(len(batch))
print(len(seen))
"""


@pytest.mark.parametrize(
    ("epochs", "iterations", "steps"),
    [
        pytest.param(6, None, 30, id="short"),
        pytest.param(6, 3, 8, id="asked", marks=pytest.mark.slow),
        pytest.param(10_000, None, 8, id="long"),
    ],
)
def test_a_program_of_few_events_is_followed_to_its_end(
    epochs: int, iterations: int | None, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no number of steps is asked for; then nothing is left out."""
    estimate = run(tmp_path, SHORT % epochs, iterations=iterations)
    assert said(capsys) == str(steps)
    assert ending(estimate)[:2] == (("itself" if steps == 30 else "shortened"), steps)


def test_batches_that_are_read_ahead_have_a_second_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are on the card when the loop is over belong to it, and not to the loop over the epochs."""
    run(tmp_path, AHEAD)
    assert said(capsys).split() == ["epoch", "8", "4", "6", "2"] * 2


def test_batches_that_cannot_be_read_make_it_more(tmp_path: Path) -> None:
    source = "for n in (x(8 * 2 ** i) for i in range(99)):\n    model(n).sum().backward()\n    optimizer.step()"
    estimate = run(tmp_path, source)
    assert "STEPS_DIFFER" in {one.code.name for one in estimate.diagnostics}


GROWS = """
for step in range(1000):
    size = min(160, 4 + 4 * step)
    seen.append(str(size))
    model(x(size)).sum().backward()
    optimizer.step()
print(len(seen), *seen[-3:])
"""


def test_the_largest_of_the_sizes_that_a_loop_computes_of_its_number_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last two steps, which are alike: nothing is in doubt."""
    estimate = run(tmp_path, GROWS)
    assert said(capsys).split() == ["34", "160", "160", "160"]
    assert not _doubts_of_loops(estimate)
    assert {Code.NUMBERS_COMPUTED, Code.SHORTENED} <= {one.code for one in estimate.diagnostics}


def test_a_loop_that_cannot_be_told_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``list(map(...))`` is no loop of the program's. What it does later may take more."""
    source = "try:\n    list(map(lambda _: train_step(), range(3000)))\nexcept Exception: print('caught')"
    estimate = run(tmp_path, source)
    assert said(capsys) == ""
    assert ending(estimate) == ("left", 4, 0, "")
    assert Code.PROGRAM_LEFT in {one.code for one in estimate.diagnostics}  # what follows it was not seen
    assert [estimate.interval(level)[1] for level in ("allocated", "reserved")] == [None, None]


_CALL = "timeit.timeit(train_step, number=99)"
#: (what calls a library that trains, what has been done behind it, how it ended)
LIBRARIES = {
    "called": (_CALL, "step step step", "shortened"),
    "called in a function": (f"def main():\n    {_CALL}\nmain()", "step step step", "shortened"),
    "called twice": (f"{_CALL}\n{_CALL}", "step " * 7, "shortened"),
    "taking turns": (
        "other = torch.optim.SGD(model.parameters(), 1.0)\ndef turn():\n    train_step()\n    loss = model(x()).sum()\n"
        "    loss.backward()\n    other.step()\n    seen.append('other')\ntimeit.timeit(turn, number=99)",
        "step other step other step other step",
        "shortened",
    ),
    "in a function that would go on": (f"def main():\n    value = {_CALL}\n    print(value)\nmain()", "", "left"),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_program_goes_on_behind_a_library_that_trains(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, says, how = LIBRARIES[name]
    estimate = run(tmp_path, f"import timeit\n{source}\nprint(*seen)")
    assert said(capsys) == says.strip()
    assert ending(estimate)[0] == how


def test_steps_for_every_parameter_in_one_backward_pass_are_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
for _ in range(300):
    model(x()).sum().backward()
    seen.append("pass")
print(*seen)
"""
    estimate = run(tmp_path, source)
    assert said(capsys) == "pass pass pass"
    assert ending(estimate)[:2] == ("shortened", 3)


#: (a function of an installed package that trains, what the program does with it, how that ended)
INSTALLED = {
    "for": ("for _ in range(300):\n        step()\n    return 'fitted'", "fitted step step step", "shortened"),
    "while": ("n = 0\n    while n < 300:\n        n += 1\n        step()\n    return 'fitted'",
              "fitted step step step", "shortened"),
    "epochs": ("for _ in range(20):\n        for _ in range(30):\n            step()\n    return 'fitted'",
               "fitted step step step", "shortened"),
    "an epoch without batches": (
        "from torch.utils.data import DataLoader\n    loader = DataLoader(range(300))\n    for _ in range(20):\n"
        "        for batch in loader:\n            step()\n        del batch\n    return 'fitted'",
        "fitted step step step", "shortened",
    ),
    "what is not done is missed": ("for n in range(300):\n        step()\n    return {299: 'fitted'}[n]", "", "left"),
    "no loop": ("return list(map(lambda _: step(), range(300)))", "", "left"),
}  # fmt: skip


@pytest.mark.parametrize("name", but_slow(INSTALLED, {"while", "epochs"}))
def test_loops_of_a_library_end_where_the_program_needs_what_it_gives(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second run; the library's functions are what they were behind it."""
    body, says, how = INSTALLED[name]
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "fitting.py").write_text(f"def fit(step):\n    {body}\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.delitem(sys.modules, "fitting", raising=False)
    estimate = run(tmp_path, "import fitting\nvalue = fitting.fit(train_step)\nprint(value, *seen)")
    assert said(capsys) == says
    assert ending(estimate)[0] == how
    done: list[int] = []
    with contextlib.suppress(KeyError):
        sys.modules["fitting"].fit(lambda: done.append(1))
    assert len(done) >= 300


def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A library ``fitting`` with a function ``fit(step, seen)``."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "fitting.py").write_text(f"def fit(step, seen):\n    {body}\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.delitem(sys.modules, "fitting", raising=False)


def test_what_a_library_does_behind_its_loop_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program could go on without it; what the library would have given back would stay."""
    _installed(tmp_path, monkeypatch, "for _ in range(300):\n        step()\n    seen.append('fitted')")
    estimate = run(tmp_path, "import fitting\nfitting.fit(train_step, seen)\nprint(*seen)")
    assert said(capsys).split()[-4:] == ["step", "step", "step", "fitted"]
    assert ending(estimate)[0] == "shortened"


READ_AHEAD = """import torch
    from torch.utils.data import DataLoader
    batches, number = iter(DataLoader([torch.zeros(4, 64)] * 6000, batch_size=None)), 1
    waiting = next(batches)
    for batch in batches:
        step(waiting, number % 2 == 0)
        waiting, number = batch, number + 1
    step(waiting, number % 2 == 0)"""


def test_a_library_that_reads_ahead_is_not_left_among_the_micro_batches_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients would still be there behind it."""
    _installed(tmp_path, monkeypatch, READ_AHEAD)
    step = """
def step(batch, ends):
    model(batch.cuda()).sum().backward()
    if ends:
        optimizer.step()
        optimizer.zero_grad()
import fitting
fitting.fit(step, seen)
print(model.weight.grad is None)
"""
    estimate = run(tmp_path, step)
    assert (said(capsys), ending(estimate)[:2]) == ("True", ("shortened", 4))


def test_of_two_runs_that_fail_the_one_that_comes_further_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fails for an epoch without batches, the second for an error of the program behind it."""
    loader = "from torch.utils.data import DataLoader\n    loader = DataLoader(range(300))\n    for _ in range(20):\n"
    epoch = "        for batch in loader:\n            step()\n        del batch"
    _installed(tmp_path, monkeypatch, loader + epoch)
    estimate = run(tmp_path, "import fitting\nfitting.fit(train_step, seen)\ntrain_step()\nraise ValueError('behind')")
    assert ending(estimate)[:2] == ("raised", 4)
    assert "behind" in ending(estimate)[3]


def test_as_many_iterations_as_asked_for(tmp_path: Path) -> None:
    assert ending(run(tmp_path, "for _ in range(99): train_step()", iterations=1))[1] == 1
    assert ending(run(tmp_path, "for _ in range(99): train_step()", iterations=7))[1] == 7


def _doubts_of_loops(estimate: Estimate) -> list[tuple[str, str]]:
    found = [one for one in estimate.diagnostics if one.code in (Code.STEPS_DIFFER, Code.STEPS_KEEP)]
    assert all((estimate.interval(level)[1] is None) == bool(found) for level in ("allocated", "reserved"))
    return [(one.code.name, one.place) for one in found]


@pytest.mark.parametrize(
    ("loop", "doubts"),
    [
        ("for _ in range(300): train_step()", []),
        ("for _ in range(3):\n    seen.append(x(16 * len(seen) + 16))\n    train_step()", []),
        ("for i in range(9999):\n    held = x(1 << len(seen))\n    train_step()", [("STEPS_DIFFER", "train.py:15")]),
        ("for i in range(30):\n    held = x(1 << len(seen) % 9)\n    train_step()", []),
        ("for i in range(300):\n    train_step()\n    held = x(64 << min(i, 1))", []),
        (
            "for i in DataLoader(range(9999)):\n    held = x(1 << int(i))\n    train_step()",
            [("STEPS_DIFFER", "train.py:15")],
        ),
        (
            "kept = []\nfor _ in range(300):\n    train_step()\n    kept.append(x(9999))",
            [("STEPS_KEEP", "train.py:16")],
        ),
        ("kept = []\nfor _ in range(300):\n    train_step()\n    kept.append(x())", []),
        ("kept = []\nfor _ in range(30):\n    train_step()\n    kept.append(x())", []),
        ("kept = []\nwhile len(kept) < 30:\n    train_step()\n    kept.append(x())", [("STEPS_KEEP", "train.py:16")]),
        ("kept = []\nfor _ in range(300):\n    train_step()\n    kept.append(x().sum())", []),
    ],
    ids=[
        "alike",
        "its own end",
        "differ",
        "differ to an end that is near",
        "the first differ",
        "differ with equal batches",
        "keep",
        "keep small ones",
        "keep to an end that is near",
        "keep in a while loop",
        "keep a number for a log",
    ],
)
def test_a_loop_whose_steps_do_not_show_the_later_ones_is_in_doubt(
    loop: str, doubts: list[tuple[str, str]], tmp_path: Path
) -> None:
    assert _doubts_of_loops(run(tmp_path, loop)) == doubts


@pytest.mark.parametrize(("kept", "doubts"), [("1", []), ("torch.ones(1, device='cuda')", ["STEPS_KEEP"])])
def test_a_number_that_each_step_of_a_library_keeps_is_a_doubt(
    kept: str, doubts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how many there would be: skrl collects a divergence in each step of an epoch."""
    _installed(tmp_path, monkeypatch, f"import torch; list(map(lambda _: (step(), seen.append({kept})), range(300)))")
    estimate = run(tmp_path, "import fitting\nfitting.fit(train_step, seen)")
    assert [name for name, _ in _doubts_of_loops(estimate)] == doubts


@pytest.mark.parametrize("steps", first_quick([31, 30], 1))
def test_steps_that_take_turns_are_written_to_the_end(steps: int, tmp_path: Path) -> None:
    """As where a discriminator learns every other step; what some of them keep is there at the end."""
    loop = f"kept = []\nfor i in range({steps}):\n    train_step()\n    if i % 2 == 1: kept.append(x(1 << 14))\n"
    few, all_ = run(tmp_path, loop), run(tmp_path, loop, iterations=steps)
    assert few.details["program"]["steps"] < steps == all_.details["program"]["steps"]
    assert "optimizer steps (more than 3: its steps differ)" in few.step
    assert all_.step == f"whole program, {steps} optimizer steps"
    assert 0 <= few.allocated - all_.allocated <= (1 << 14) * 64 * 4  # they end with a whole turn
    assert few.reserved >= all_.reserved > 14 * (1 << 14) * 64 * 4


def test_steps_of_a_loader_that_ends_by_itself_are_written_for_later_epochs(tmp_path: Path) -> None:
    loop = """
kept = []
for epoch in range(9):
    for i, batch in enumerate(DataLoader(torch.zeros(6, 4))):
        train_step()
        if i % 2 == 1: kept.append(x(1 << 14))
"""
    few, all_ = run(tmp_path, loop), run(tmp_path, loop, iterations=99)
    assert few.details["program"]["steps"] < 54 == all_.details["program"]["steps"]
    assert few.allocated == all_.allocated > 26 * (1 << 14) * 64 * 4


@pytest.mark.parametrize("items", ["batches()", "tqdm(batches())"])
def test_a_loop_keeps_no_batch_longer_than_the_program(
    items: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``enumerate`` makes a new tuple where somebody holds the one before, and then keeps that for one batch more; the
    frame of a generator keeps the variables that somebody has looked at."""
    source = f"""
import weakref
from tqdm import tqdm
made = []
def alive():
    print(sum(one() is not None for one in made))
def batches():
    for _ in range(4):
        batch = x()
        made.append(weakref.ref(batch))
        yield batch
        del batch
        alive()
for number, batch in enumerate({items}):
    train_step()
    alive()
"""
    run(tmp_path, source, iterations=9)
    assert said(capsys).split() == ["1"] * 8


def test_a_loop_in_a_module_beside_it_ends_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "engine.py").write_text("def fit(step):\n    for _ in range(999): step()\n    print('after')\n")
    assert ending(run(tmp_path, "import engine\nengine.fit(train_step)"))[:2] == ("shortened", 3)
    assert said(capsys) == "after"
    assert not list(tmp_path.glob("__pycache__/engine*"))


EVALUATE = """
kept = []
with torch.no_grad():
    for _ in range(%d):
        model(x(32))
        seen.append(1)
        %s
print(len(seen))
"""


def test_an_evaluation_is_left_when_it_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = run(tmp_path, EVALUATE % (3, "")), run(tmp_path, EVALUATE % (1000, ""))
    assert short.peak == long.peak
    assert said(capsys).split() == ["3", "4"]
    assert any("train.py:18" in line and "alike" in line for line in long.assumptions)


def test_an_evaluation_that_keeps_something_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, EVALUATE % (30, "kept.append(model(x(8)))"))
    assert said(capsys) == "30"


COLLECTED = """
kept = []
for epoch in range(%d):
    for _ in range(5): train_step()
    if epoch > 3: kept.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
print(len(kept))
"""


def test_epochs_that_collect_something_are_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, COLLECTED % 20)
    long = run(tmp_path, COLLECTED % 100)
    assert said(capsys).split() == ["16", str(MOST_REPEATED + 1)]
    assert [one.code for one in long.diagnostics if one.effect is Effect.MORE] == [Code.STEPS_KEEP]


def test_epochs_that_collected_once_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = (
        "    if epoch == 4: kept.append(x(999))\n    seen.append(epoch)\nprint(*[one for one in seen if one != 'step'])"
    )
    program = "kept = []\nfor epoch in range(100):\n    for _ in range(5): train_step()\n" + once
    estimate = run(tmp_path, program)
    assert len(said(capsys).split()) < 12
    assert not [one for one in estimate.diagnostics if one.effect is Effect.MORE]


@pytest.mark.slow
def test_small_numbers_that_steps_keep_are_counted(tmp_path: Path) -> None:
    kept = "kept = []\nfor _ in range(300):\n    train_step()\n    kept.append(torch.ones(8, device='cuda'))\n"
    few, all_ = run(tmp_path, kept), run(tmp_path, kept, iterations=300)
    assert few.allocated == all_.allocated


def test_a_loop_is_followed_when_what_it_would_have_collected_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = EVALUATE.replace("for _ in", "for i in") % (12, "if i > 8: kept.append(model(x(8)))")
    estimate = run(tmp_path, late + "print(torch.stack(kept).shape[0])")
    assert ending(estimate) == ("itself", 0, 0, "")
    assert said(capsys).split()[-1] == "3"


WARMUP = """
from collections import deque
from agent import Agent
buffer, agent, is_training = deque(maxlen=100), Agent(model, optimizer), %s
for step in range(20):
    with torch.no_grad():
        buffer.append(model(x()).cpu())
    %s
print(len(buffer), seen.count("step"))
"""
AGENT = """'An agent.'
from __future__ import annotations
class Agent:
    def __init__(self, model, optimizer): self.model, self.optimizer = model, optimizer
    def learn(self, buffer):
        if len(buffer) < 6: return
        self.optimize(buffer[0])
    def optimize(self, batch):
        self.model(batch.cuda()).sum().backward()
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("is_training", "trains", "iterations"),
    [
        (True, "if step >= 10 and step % 2 == 0: train_step()", "15 3"),  # a branch that counts
        (True, "if len(buffer) > 5: train_step()", "8 3"),  # a branch that asks
        (True, "agent.learn(buffer)", "8 0"),  # a function of another file that returns early
        (False, "if is_training: train_step()", "4 0"),  # a branch that is never taken
        (True, "model.train()", "4 0"),  # what has the name of training
    ],
)
def test_a_loop_that_may_yet_train_goes_on_until_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_training: bool, trains: str, iterations: str
) -> None:
    """As a buffer of replay is filled before the first step."""
    (tmp_path / "agent.py").write_text(AGENT)
    run(tmp_path, WARMUP % (is_training, trains))
    assert said(capsys) == iterations


def test_a_loop_over_a_loader_that_may_yet_train_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
for i, batch in enumerate(DataLoader(TensorDataset(torch.zeros(20, 64)))):
    with torch.no_grad(): model(batch[0].cuda())
    if i > 9: train_step()
print(i, len(seen))
"""
    run(tmp_path, source)
    assert said(capsys) == "12 3"


COLLECT = """
kept = []
with torch.no_grad():
    for _ in range(40):
        kept.append(model(x(4096)).cpu())
        seen.append(1)
%s
print(len(seen))
"""


def test_what_is_collected_on_the_host_may_stay_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, COLLECT % "scores = torch.cat(kept).softmax(1)")
    assert int(said(capsys)) < 40


@pytest.mark.parametrize("used", ["torch.cat(kept).cuda()", "model(torch.stack(kept)[0].to('cuda'))"])
def test_what_is_collected_on_the_host_is_all_there_for_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], used: str
) -> None:
    estimate = run(tmp_path, COLLECT % f"bank = {used}")
    assert said(capsys).split()[-1] == "40"
    if "cat" in used:
        assert estimate.peak.requested_bytes > 40 * 4096 * 64 * 4


def test_layers_of_a_model_are_no_repetitions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12)).cuda()
with torch.no_grad():
    y = x()
    for layer in layers:
        y = layer(y)
        seen.append(1)
print(len(seen))
"""
    run(tmp_path, source)
    assert said(capsys) == "12"


#: (what the program does after a step, how it ended)
ENDINGS = {
    "sys.exit(0)": ("exit", 0, ""),
    "sys.exit()": ("exit", 0, ""),
    "sys.exit(4)": ("exit", 4, ""),
    "sys.exit('no data')": ("exit", 1, "no data"),
    "raise ValueError('bad')": ("raised", 1, "train.py:16: ValueError: bad"),
    "{}['key']": ("raised", 1, "train.py:16: KeyError: 'key'"),
}


@pytest.mark.parametrize("source", ENDINGS)
def test_how_it_ended_is_told(source: str, tmp_path: Path) -> None:
    estimate = run(tmp_path, f"train_step()\n{source}")
    how, code, error = ENDINGS[source]
    told = ending(estimate)
    assert told[:3] == (how, 1, code)
    assert told[3].endswith(error)
    warned = [d.message for d in estimate.diagnostics if d.kind == "headline"]
    assert bool(warned) == bool(code)
    assert estimate.peak.allocated_bytes > 4 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("sys.exit(2)", r"train.py: the program called sys.exit\(2\) after 0 optimizer steps, and put nothing on"),
        ("print('done')", "ran to its end, with 0 optimizer steps, and put nothing on the GPU"),
        ("def f(:", r"train.py:2: SyntaxError"),
    ],
)
def test_a_program_without_a_card_is_refused(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        run(tmp_path, source, prelude="import sys\n")


def test_what_the_analysis_cannot_do_is_no_error_of_the_program(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="follows one card"):
        run(tmp_path, "torch.cuda.set_device(1)")


@pytest.mark.parametrize(
    ("target", "is_module", "message"),
    [
        ("missing.py", False, "missing.py does not exist"),
        ("", False, "not the name of a program"),
        (str(Path(__file__).parent), False, "without a __main__.py"),
        ("a-b", True, "not the name of a module"),
    ],
)
def test_targets_that_are_none(target: str, is_module: bool, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Program(target, is_module=is_module)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(GraphmemError, match="no Python module 'not_there'"):
        analyze(Program("not_there.train", is_module=True))


def test_loops_keep_their_meaning() -> None:
    """What is rewritten does what it did, with ``else``, ``break``, ``continue``, generators and nested loops."""
    source = """
def f():
    out = []
    for i, (a, b) in enumerate([(1, 2), (3, 4), (5, 6)]):
        if a == 3: continue
        out.append((i, a, b))
    else:
        out.append("else")
    n = 5
    while n > 0:
        n -= 1
        if n == 2: break
    else:
        out.append("never")
    while (n := n - 1) > 0: out.append(n)
    out.extend(x for x in g())
    try: out.index("nothing")
    except ValueError: out.append("not there")
    return out
def g():
    for i in range(2):
        while True:
            yield i
            break
class C:
    for k in range(3): pass
answer = f(), C.k
"""

    plain: dict[str, object] = {}
    exec(source, plain)
    rewritten: dict[str, object] = dict(AS_WRITTEN)
    exec(compiled(source, "train.py"), rewritten)
    assert rewritten["answer"] == plain["answer"]


def test_loops_that_are_compiled_break_no_graph(tmp_path: Path) -> None:
    """Of a model whose own file has loops: Dynamo sees them as they are written."""
    compiled_model = """
class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        n = 2
        while n > 0:
            x, n = x + 1, n - 1
        return x
blocks = Blocks().cuda()
compiled_blocks = torch.compile(blocks, fullgraph=True)
optimizer = torch.optim.SGD(blocks.parameters(), 0.1)
for _ in range(3000):
    compiled_blocks(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert run(tmp_path, compiled_model).details["program"]["steps"] == 3


def test_the_trace_is_that_of_all_steps(tmp_path: Path) -> None:
    """Byte for byte: a program of which every step is followed, and one that is left after three; what a list gathers
    on the way ends with it."""
    source = """
def train():
    losses = []
    for _ in range(9):
        train_step()
        losses.append(x(1))
train()
x()
"""
    traces = []
    for followed in (9, 3):
        trace = run(tmp_path, source, iterations=followed).trace
        assert trace is not None
        on_device = [e for e in trace.events() if trace.storages[e.subject].place is Place.DEVICE]
        sizes = [trace.storages[e.subject].bytes for e in on_device if e.kind == EventKind.ALLOC]
        traces.append(([e.kind for e in on_device], sizes))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("steps", first_quick([13, 12], 1))
def test_steps_that_take_turns_with_blocks_end_as_all_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    """An output that is held while the next one is made lies where the one before that lay."""
    source = f"""
for _ in range({steps}):
    output = model(x(4096))
    output.sum().backward()
    optimizer.step()
blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
print([(block["address"], block["size"]) for block in blocks if block["state"] == "active_allocated"])
"""
    ends = []
    for followed in (steps, 3):
        run(tmp_path, source, iterations=followed)
        ends.append(said(capsys))
    assert ends[0] == ends[1]


SAVE_AND_LOAD = """
import copy, io, os, shutil
from pathlib import Path
train_step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7, "seen": seen}, "last.pt")
os.replace("last.pt", "best.pt")
shutil.copy("best.pt", "copy.pt")
print(os.path.exists("last.pt"), os.path.isfile("best.pt"), Path("copy.pt").exists(), sorted(os.listdir(".")))
print(os.path.getsize("best.pt") > 3 * 64 * 64 * 4)
loaded = torch.load("best.pt", %s)
weight, state = loaded["model"]["weight"], loaded["optimizer"]["state"][0]
print(loaded["epoch"], loaded["seen"], weight.device, state["exp_avg"].shape)
model.load_state_dict(loaded["model"])
optimizer.load_state_dict(loaded["optimizer"])
os.remove("copy.pt")
buffer = io.BytesIO()
torch.save(model, buffer)
buffer.seek(0)
print(type(torch.load(buffer, weights_only=False)).__name__, os.path.exists("copy.pt"))
try: torch.load("never.pt")
except FileNotFoundError: print("not found")
try: torch.save(lambda: 1, "bad.pt")
except Exception as error: print(type(error).__name__)
train_step()
"""


@pytest.mark.parametrize("how", ["map_location='cpu'", "map_location='cuda'", "weights_only=True"])
def test_what_is_saved_is_loaded(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    estimate = run(tmp_path, SAVE_AND_LOAD % how)
    device = "cpu" if "cpu" in how else "cuda:0"
    assert said(capsys).splitlines() == [
        "False True True ['best.pt', 'copy.pt', 'train.py']",
        "True",
        f"7 ['step'] {device} torch.Size([64, 64])",
        "Linear False",
        "not found",
        "PicklingError",
    ]
    # PyTorch opens the file before it pickles.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
    trace = estimate.trace
    assert trace is not None
    loaded = [
        trace.storages[event.subject].bytes
        for event in trace.events()
        if event.kind == EventKind.ALLOC
        and trace.phases[trace.operators[event.operator].phase].name == "load"
        and trace.storages[event.subject].place.name == "DEVICE"
    ]
    # Weight and bias; of both: step (on the host, unless all is moved), exp_avg, exp_avg_sq; the module in the buffer.
    step = [4] if how == "map_location='cuda'" else []
    state = [16384, 256, *step, 16384, 16384, *step, 256, 256]
    assert loaded == [*([] if "cpu" in how else state), 16384, 256]


def test_safetensors_are_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    source = """
from safetensors import safe_open
from safetensors.torch import load_file, save_file
save_file(model.state_dict(), "model.safetensors", metadata={"format": "pt"})
loaded = load_file("model.safetensors", device="cuda")
print(sorted(loaded), loaded["weight"].shape, loaded["weight"].device)
with safe_open("model.safetensors", "pt") as file:
    print(file.metadata(), file.get_slice("weight").get_shape(), file.get_tensor("bias").device)
"""
    run(tmp_path, source)
    assert said(capsys).splitlines() == [
        "['bias', 'weight'] torch.Size([64, 64]) cuda:0",
        "{'format': 'pt'} [64, 64] cpu",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_phases_say_what_they_are(tmp_path: Path) -> None:
    source = """
def evaluate():
    model.eval()
    with torch.no_grad(): model(x())
    model.train()
def generate():
    model.eval()
    with torch.no_grad(): model(x())
    model.train()
evaluate()
for _ in range(9):
    train_step()
    evaluate()
generate()
torch.load(torch.save(model.state_dict(), "a.pt") or "a.pt")
"""
    phases = [(phase.iteration, phase.name) for phase in run(tmp_path, source, iterations=2).phases]
    steps = [(k, name) for k in (1, 2) for name in ("forward", "backward", "optimizer", "evaluate")]
    assert phases == [(0, "build"), (0, "evaluate"), *steps, (2, "generate"), (2, "load")]


@pytest.mark.parametrize(
    ("drawn", "told"),
    [
        ("random.choice([16, 32, 64])", ["train.py:19"]),
        ("16 + 0 * random.random()", []),
        ("numpy.random.choice([16, 64])", ["train.py:19"]),
        ("settings.draw.choice([16, 32, 64])", ["train.py:19"]),
        pytest.param("16 * (1 + torch.randint(0, 4, (1,)).item())", ["train.py:19"], marks=pytest.mark.slow),
        ("16 * (1 + (torch.rand(1, generator=own) < 0.5))", ["train.py:19"]),
        ("16 + torch.zeros(1).item()", []),
    ],
)
def test_steps_of_sizes_that_a_loop_draws(tmp_path: Path, drawn: str, told: list[str]) -> None:
    """Each size is held for three steps, which are alike: others are seen behind them, and more may follow."""
    source = f"""
import random, numpy, types
random.seed(0), numpy.random.seed(0)
settings, own = types.SimpleNamespace(draw=numpy.random.default_rng(0)), torch.Generator()
for at in range(60):
    if at % 3 == 0:
        size = int({drawn})
    model(x(size)).sum().backward()
    optimizer.step()
"""
    assert [place for code, place in _doubts_of_loops(run(tmp_path, source)) if code == "STEPS_DIFFER"] == told


def test_loops_without_steps_are_not_asked_what_they_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million host items would take a minute."""
    asked = [0]

    def count(own: object) -> tuple[int, ...]:
        asked[0] += 1
        return ()

    monkeypatch.setattr(host_draws, "count", count)
    run(tmp_path, "total = 0\nfor i in range(10000): total += i\nfor _ in range(3): train_step()")
    assert asked[0] < 50


@pytest.mark.parametrize(
    ("rows", "last", "is_short"),
    [("[64] * 9 + [7]", 7, False), pytest.param("itertools.repeat(64)", 64, True, marks=pytest.mark.slow)],
)
def test_batches_that_are_made_on_the_card_are_followed_to_their_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, last: int, is_short: bool
) -> None:
    """Nobody can read them ahead. A generator without an end is left, which the answer says."""
    source = f"""
import itertools
def batches():
    for size in {rows}:
        yield x(size)
for epoch in range(2):
    for batch in batches():
        model(batch).sum().backward()
        optimizer.step()
        if len(batch) > 64: break
print(len(batch))
"""
    estimate = run(tmp_path, source)
    assert said(capsys) == str(last)
    assert any(one.code is Code.SHORTENED for one in estimate.diagnostics) == is_short
    assert not _doubts_of_loops(estimate)


def test_what_a_loop_computes_ahead_is_no_part_of_it(tmp_path: Path) -> None:
    """Rows that a loop takes by its number are taken on the card once a step, though they tell which steps differ."""
    source = """
rows, order = x(1000), torch.randperm(1000, device="cuda")
for i in range(0, 1000, 8):
    model(rows[order[i : i + 8]]).sum().backward()
    optimizer.step()
"""
    trace = run(tmp_path, source).trace
    assert trace is not None
    names = [trace.operators[event.operator].name for event in trace.events() if event.kind == EventKind.ALLOC]
    step = ["aten.index.Tensor", "aten.sum.default"]
    taken = [name for name in names if name in step]
    assert len(taken) > 2
    assert taken == step * (len(taken) // 2)


@pytest.mark.parametrize("moved", first_quick([".clone().cuda(non_blocking=True)", "", ".to('cuda')"], 1))
def test_a_loop_comes_to_rows_that_are_fewer(tmp_path: Path, capsys: pytest.CaptureFixture[str], moved: str) -> None:
    """A range of numbers by which rows are taken ends with fewer of them; a data set is not read to its end for it."""
    source = f"""
class Rows(list):
    def __getitem__(self, at):
        seen.append("read")
        return super().__getitem__(at)
everything = x(1000)
for begin in range(0, 1000, 64):
    batch = everything[begin : begin + 64]{moved}
    model(batch).sum().backward()
    optimizer.step()
print(len(batch))
rows = Rows(x(1)[0] for _ in range(4000))
for at in range(4000):
    model(rows[at]).sum().backward()
    optimizer.step()
print(len(seen) < 1500)
"""
    run(tmp_path, source)
    assert said(capsys) == "40\nTrue"


def test_what_is_collected_before_training_is_all_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Games are played to their ends, before each training, though their moves are alike; an evaluation is not."""
    source = """
import numpy
def play():
    for move in range(12):
        with torch.no_grad():
            pool.append(model(x(4)).cpu().numpy())
pool, tested = [], 0
for epoch in range(2):
    play()
    for _ in range(20):
        model(torch.from_numpy(numpy.stack(pool[-100:])).cuda()).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for _ in range(50):
            model(x(4)).cpu()
            tested += 1
print(len(pool), tested < 50)
"""
    run(tmp_path, source)
    assert said(capsys).split() == ["24", "True"]


def held(estimate: Estimate) -> list[tuple[str, int]]:
    return [(one.source.rpartition("/")[2], one.bytes) for one in estimate.held]


def test_what_the_program_holds_is_named_with_its_line(tmp_path: Path) -> None:
    """An average of the weights, made before, and what is kept of the first step; not the last loss."""
    source = """
average = {name: p.detach().clone() for name, p in model.named_parameters()}
first = []
for _ in range(9):
    train_step()
    loss = model(x(512)).sum()
    if not first: first.append(torch.zeros(1000, device="cuda"))
"""
    estimate = run(tmp_path, source)
    assert held(estimate) == [("train.py:16", 64 * 64 * 4 + 64 * 4), ("train.py:21", 4000)]
    assert estimate.breakdown["HELD"] == 64 * 64 * 4 + 64 * 4 + 4000
    assert "HELD" not in run(tmp_path, "train_step()").breakdown


def test_a_cache_that_grows_while_generating_is_held(tmp_path: Path) -> None:
    source = """
def generate():
    model.eval()
    cache = torch.zeros(64, 0, 64, device="cuda")
    with torch.no_grad():
        for _ in range(8):
            cache = torch.cat([cache, model(x(64))[:, None]], 1)
generate()
"""
    assert held(run(tmp_path, source)) == [("train.py:21", 64 * 7 * 64 * 4)]


_SEARCH = """
batch, best = 2**20, 0
while batch:
    try:
        for _ in range(5):
            model(x(batch)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        best, batch = batch, batch * 2
    except torch.cuda.OutOfMemoryError:
        optimizer.zero_grad()
        break
print(best)
for _ in range(3000):
    train_step()
print(len(seen) <= 4)
"""

_MANY_BATCHES = """
for _ in range(3000):
    try:
        train_step()
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
print(len(seen))
"""


@pytest.mark.slow
def test_a_loop_that_looks_for_the_largest_batch_looks_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(MODEL + _SEARCH, encoding="utf-8")
    estimate = analyze(Program(str(path)), device=custom_device(4 << 30))
    assert said(capsys) == f"{2**22}\nTrue"  # 1 GiB of each of input, output and gradient
    assert estimate.fit is not None
    assert estimate.fit.fits


def test_a_loop_over_batches_that_skips_those_too_large_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, _MANY_BATCHES)
    assert said(capsys) == "3"


def test_a_loader_that_a_library_opens_anew_at_its_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless iterator over a loader (litgpt's ``CycleIterator``) finds no batch when it goes round."""
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "cycling.py").write_text(
        "def train(loader, step, steps):\n    iterator = iter(loader)\n    while steps:\n        try:\n"
        "            batch = next(iterator)\n        except StopIteration:\n            iterator = iter(loader)\n"
        "            batch = next(iterator)\n        step()\n        steps -= 1\n"
    )
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.delitem(sys.modules, "cycling", raising=False)
    source = (
        "import cycling\ncycling.train(DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2), train_step, 100)"
    )
    assert ending(run(tmp_path, source)) == ("shortened", 3, 0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_workers_compute_on_the_host_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loaders of one's own in processes (batchgenerators)."""
    source = """
import multiprocessing
def work(queue):
    row = torch.arange(4.0)
    queue.put((float(row.sum()), (row * int(torch.ones(3).sum())).tolist()))
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
worker = context.Process(target=work, args=(queue,))
worker.start()
total, row = queue.get()
worker.join()
print(total, row, torch.zeros(int(row[3]), device="cuda").numel())
"""
    run(tmp_path, source)
    assert said(capsys) == "6.0 [0.0, 3.0, 6.0, 9.0] 9"


@pytest.mark.parametrize("device", first_quick(["cuda", "cpu"], 1))
def test_a_loop_that_waits_for_fewer_elements_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    """Non-maximum suppression: how many boxes overlap is not known, and all are taken to stay."""
    source = f"""
scores = model(x(40))[:, 0].detach().to("{device}")
for image in range(20):
    order = torch.arange(40, device="{device}")
    while len(order):
        order = order[scores[order] < scores[order[0]]]
    print(image)
train_step()
"""
    estimate = run(tmp_path, source)
    assert ending(estimate) == ("itself", 1, 0, "")
    assert said(capsys).splitlines() == [str(image) for image in range(20)]


@pytest.mark.slow
def test_a_list_of_runs_that_is_short_at_first_stays_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that become longer: the first say that all are few events, the last are many."""
    monkeypatch.setattr(Steps.__new__, "__defaults__", (OPTIMIZER_STEPS, 1000))
    source = """
kept = []
for task in range(5):
    for _ in range(2 * 2 ** task):
        train_step()
    kept.append(torch.zeros(1024, device="cuda"))
    print(task, len(seen), len(kept))
"""
    estimate = run(tmp_path, source, iterations=None)
    assert ending(estimate) == ("itself", 62, 0, "")
    assert said(capsys).splitlines() == ["0 2 1", "1 6 2", "2 14 3", "3 30 4", "4 62 5"]
