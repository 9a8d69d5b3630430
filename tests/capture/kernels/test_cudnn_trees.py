"""The packed trees of cuDNN's choices: what the files hold, how damage shows, and that a rebuild gives the same."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")  # graphmem.capture needs it

from graphmem.cudnn.plans import Convolution
from graphmem.cudnn.predicted import choice
from graphmem.cudnn.predicted.packed import (
    MAGIC,
    Branch,
    Leaf,
    Node,
    PackedError,
    read_header,
    unpack,
)
from graphmem.cudnn.predicted.problem import Direction, Problem
from graphmem.cudnn.predicted.workspaces import workspace_bytes
from graphmem.errors import GraphmemError
from tests.oracles.cudnn.__main__ import PLANS
from tests.oracles.cudnn.build import build
from tests.oracles.cudnn.forms import Answer, problem_of
from tests.oracles.cudnn.grow import Parameters, Sizes, _fp32_below, grow
from tests.oracles.cudnn.manifest import Family, Manifest, read_manifest
from tests.oracles.cudnn.packing import pack, render
from tests.oracles.cudnn.shapes import draw

MANIFEST = read_manifest()
FEATURES = st.sampled_from(["batch", "channels", "taps"])
LEAVES = st.builds(Leaf, st.sampled_from(["none", "needed", "copy IOF"]), st.integers(0, 100))
TREES = st.recursive(
    LEAVES,
    lambda node: st.builds(Branch, FEATURES, st.floats(width=32, allow_nan=False, allow_infinity=False), node, node),
    max_leaves=12,
)
FILES = st.dictionaries(st.sampled_from(["forward, half, layer", "forward, fp32, groups"]), TREES, min_size=1)


# --- the format -------------------------------------------------------------------------------------------------------


@given(FILES)
def test_what_was_packed_is_unpacked(trees: dict[str, Node]) -> None:
    packed = pack({"family": "test"}, trees)
    found = unpack(packed, "a file")
    assert {section: found.get(section) for section in found.sections} == trees
    assert found.header == {"family": "test"}
    assert found.get("backward data, half, layer") is None
    assert pack(found.header, {section: found.get(section) or Leaf("none", 0) for section in found.sections}) == packed


@given(FILES, st.data())
def test_a_damaged_file_is_named(trees: dict[str, Node], data: st.DataObject) -> None:
    packed = pack({"family": "test"}, trees)
    _, start = read_header(packed)
    at = data.draw(st.integers(start, len(packed) - 1))
    damaged = bytearray(packed)
    damaged[at] ^= data.draw(st.integers(1, 255))
    for broken in (bytes(damaged), packed[:at], packed + b"\0", b"", packed[:start], packed[1:]):
        with pytest.raises(PackedError, match=r"a file is damaged: .*; install graphmem again"):
            unpack(broken, "a file")


def _with_sum(content: bytes) -> bytes:
    """A file of that content, whose header agrees with it."""
    line = f"content: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}"
    return f"{MAGIC}\n{line}\n\n".encode() + content


@pytest.mark.parametrize(
    ("nodes", "count"),
    [
        (b"", 0),
        (b"\0" * 5, 1),  # a branch without sides
        (b"\xff\0\0\x63\0" * 2, 2),  # two leaves
        (b"\xff\x09\0\x63\0", 1),  # a form that is not in the table
        (b"\x07" + b"\0" * 4 + b"\xff\0\0\x63\0" * 2, 3),  # no such feature
        (b"\0\0\0\xc0\x7f" + b"\xff\0\0\x63\0" * 2, 3),  # compares with no number
    ],
)
def test_nodes_that_make_no_tree_are_refused(nodes: bytes, count: int) -> None:
    trees = unpack(_with_sum(f"batch\n\nnone\n\na: {count}\n\n".encode() + nodes), "a file")
    with pytest.raises(GraphmemError, match="trees of cuDNN's plans are damaged"):
        trees.get("a")


@pytest.mark.parametrize("content", [b"", b"batch\n\nnone\n\na: 2\n\n", b"batch\n\nnone\n\na\n\n", b"\xff\n\n\n\n\n"])
def test_tables_that_do_not_agree_are_refused(content: bytes) -> None:
    with pytest.raises(PackedError, match="a file is damaged"):
        unpack(_with_sum(content), "a file")


def test_what_the_format_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="no fp32 value"):
        pack({}, {"a": Branch("batch", 0.1, Leaf("none", 0), Leaf("none", 0))})
    with pytest.raises(ValueError, match="neither empty nor broken"):
        pack({"a": "one\ntwo"}, {"a": Leaf("none", 0)})


def test_a_file_that_is_gone_is_an_error_of_one_line() -> None:
    with pytest.raises(PackedError, match=r"cannot read .*atlantis\.trees: No such file"):
        choice.load("atlantis")


def test_a_tree_is_shown_as_text() -> None:
    tree = Branch("batch", 8.5, Leaf("none", 98), Branch("taps", 1.0, Leaf("needed", 100), Leaf("copy IOF", 7)))
    assert render(tree).splitlines() == [
        "batch <= 8.5",
        "  = none, 98 %",
        "| taps <= 1",
        "|   = needed, 100 %",
        "| | = copy IOF, 7 %",
    ]


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(MANIFEST.families))
def test_a_file_says_what_it_was_grown_from(family: str) -> None:
    trees, planned = choice.load(family), MANIFEST.families[family]
    header = trees.header
    assert header["family"] == family
    assert header["cuDNN"] == MANIFEST.cudnn
    assert header["scikit-learn"] == MANIFEST.scikit_learn
    assert planned.card in header["asked for"]
    assert header["grown on"] == ", ".join(f"{count} {kind}" for kind, count in planned.grown.items())
    for kind in [*(kind for kind in MANIFEST.kept if kind in planned.grown), "all", "recorded"]:
        assert re.fullmatch(r"\d+\.\d % of \d+ workspaces within 10 %", header[f"kept back, {kind}"])
    assert trees.sections == tuple(sorted(trees.sections))
    assert (
        pack(header, {name: tree for name in trees.sections if (tree := trees.get(name))})
        == (PLANS / f"{family}.trees").read_bytes()
    )


def test_every_file_is_in_the_manifest() -> None:
    assert {path.name for path in PLANS.iterdir()} == {f"{family}.trees" for family in MANIFEST.families}


# --- building ---------------------------------------------------------------------------------------------------------

TINY = Manifest(
    cudnn="9.20.0",
    scikit_learn="none",
    batch=20,
    trees=Parameters(8, 6, 10, 3, 1, 1.5, 0.5, 0.25, "gini"),
    kept={"layer": 15, "first": 10},
    kept_largest={"layer": 4},
    families={},
)
FAMILY = Family("tiny", "A100-40GB", {"layer": 50, "first": 60, "groups": 20}, {"layer": 20})


class _Library:
    """Answers like a cuDNN that copies all tensors in NCHW, and for the largest workspace pads them besides."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, question: Convolution, largest: bool) -> list[str]:
        self.asked += 1
        if question.channels_last:
            return ["0 engine 1 2=3", "same", "0 engine 1 2=3"][: 2 + largest]
        size = {"float32": 4, "float64": 8}.get(question.dtype, 2)
        values = sum(_product(shape) for shape in (question.input, question.output, question.filter))
        return [f"{values * size + 147} engine 2 3=1", "same", f"{2 * values * size} engine 3"][: 2 + largest]


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _by_layout(section: str, answers: list[Answer], parameters: Parameters) -> Node:
    """Grows a branch by hand, for scikit-learn is not among what the tests need."""
    return Branch("channels_last", 0.5, Leaf("copy IOF", 99), Leaf("none", 99))


def test_a_rebuild_gives_the_same_bytes(tmp_path: Path) -> None:
    library = _Library()
    first = build(FAMILY, TINY, library, tmp_path / "a", _by_layout)
    asked = library.asked
    assert asked > 3 * (50 + 30 + 20 + 20 + 15 + 10 + 4)
    assert build(FAMILY, TINY, library, tmp_path / "b", _by_layout) == first
    assert library.asked == 2 * asked
    assert build(FAMILY, TINY, library, tmp_path / "b", _by_layout) == first
    assert library.asked == 2 * asked  # all answers were kept
    assert _files(tmp_path / "a") == _files(tmp_path / "b")


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.txt")}


def test_answers_that_were_cut_off_are_asked_again(tmp_path: Path) -> None:
    class Breaks(_Library):
        def __call__(self, question: Convolution, largest: bool) -> list[str]:
            if self.asked == 40:
                raise KeyboardInterrupt
            return super().__call__(question, largest)

    with pytest.raises(KeyboardInterrupt):
        build(FAMILY, TINY, Breaks(), tmp_path, _by_layout)
    whole = build(FAMILY, TINY, _Library(), tmp_path / "other", _by_layout)
    assert build(FAMILY, TINY, _Library(), tmp_path, _by_layout) == whole


def test_what_is_kept_back_is_never_grown_on(tmp_path: Path) -> None:
    seen: list[Answer] = []

    def remember(section: str, answers: list[Answer], parameters: Parameters) -> Node:
        seen.extend(answers)
        return Leaf("none", 0)

    trees = unpack(build(FAMILY, TINY, _Library(), tmp_path, remember), "it")
    kept = {problem_of(shape) for batch in TINY.kept_batches(FAMILY) for shape in batch.shapes()}
    # Sides that differ by padding alone are one problem to graphmem and two to cuDNN, so some may meet.
    both = {answer.problem for answer in seen} & kept
    assert len(kept) > 500
    assert len(both) < 10
    assert trees.header["kept back, layer"].endswith("of 45 workspaces within 10 %")


def test_the_score_is_that_of_what_was_kept_back(tmp_path: Path) -> None:
    """Of trees that know the library's rule everything is right but paddings; of trees that know nothing only zeros."""
    good = unpack(build(FAMILY, TINY, _Library(), tmp_path, _by_layout), "it").header
    bad = unpack(build(FAMILY, TINY, _Library(), tmp_path, lambda *_: Leaf("bytes 7000", 0)), "it").header
    assert _percent(good["kept back, layer"]) == 100
    assert _percent(bad["kept back, layer"]) == 0
    assert _percent(good["kept back, largest"]) < 100
    assert _percent(good["kept back, recorded"]) > 95


def _percent(text: str) -> float:
    return float(text.partition(" ")[0])


@given(st.floats(min_value=-1e30, max_value=1e30))
def test_a_threshold_in_fp32_moves_no_value_to_another_side(threshold: float) -> None:
    rounded = _fp32_below(threshold)
    assert rounded <= threshold
    assert abs(rounded - threshold) <= abs(threshold) * 2**-22 + 1e-37


@pytest.mark.parametrize(
    "form",
    ["none", "needed", "copy IF+winograd", "needed+split 13", "some IO+somesplit 3", "copy F+parts 64x16 142",
     "bytes 640", "needed+tight", "copy IO+tiles 64x32 7", "none+vtiles 16x64 3", "all+split 4+tight",
     "stream 128x64 1x2", "packed all+split 5", "offsets", "groupv IOF+split 400", "bytes 147", "images"],
)  # fmt: skip
def test_forms_are_sized_at_once_as_one_by_one(form: str) -> None:
    pick = random.Random(form)
    answers = [
        Answer(problem_of(draw(pick, kind)), direction, 0, 0, {})
        for kind in ("layer", "groups", "depthwise", "first")
        for direction in Direction
        for _ in range(20)
    ]
    sizes = [workspace_bytes(form, answer.problem, answer.direction) for answer in answers]
    assert Sizes(answers).of(form).tolist() == sizes


def test_trees_grown_by_scikit_learn_find_the_rule() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn grows the trees; nothing else needs it")
    answers = list(_answers())
    tree = grow("forward, fp32, layer", answers, TINY.trees)
    assert tree == grow("forward, fp32, layer", answers, TINY.trees)
    trees = unpack(pack({}, {"forward, fp32, layer": tree}), "it")
    for answer in answers:
        leaf = choice.reached(trees, answer.problem, answer.direction)
        assert leaf is not None
        assert workspace_bytes(leaf.form, answer.problem, answer.direction) == answer.bytes


def _answers() -> Iterator[Answer]:
    for batch in range(1, 40):
        for last in (False, True):
            problem = Problem(batch, 64, 96, 28 * 28, 28 * 28, (3, 3), 1, 4, last)
            form = "none" if last else "copy IOF" if batch <= 20 else "copy I"
            yield Answer(problem, Direction.FORWARD, workspace_bytes(form, problem, Direction.FORWARD), 1, {})
