"""How lines of plans and serving reports are folded."""

from hypothesis import given
from hypothesis import strategies as st

from graphmem.reports.lines import columns, folded

WORDS = st.lists(st.text("abc-/", min_size=1, max_size=12), min_size=1, max_size=30)


@given(WORDS, st.integers(40, 120), st.sampled_from(["", "  - ", "model    ", "             "]))
def test_a_folded_line_keeps_its_words_and_its_width(words: list[str], width: int, begin: str) -> None:
    line = begin + " ".join(words)
    parts = folded(line, width)
    assert " ".join(parts).split() == line.split()
    assert all(len(part) <= width for part in parts)


def test_what_follows_stands_under_the_first_word_after_the_name() -> None:
    line = "  assumed    " + "speed is not predicted " * 5
    assert [part[:13] for part in folded(line, 80)] == ["  assumed    ", " " * 13]
    assert folded("1  FSDP  10.54 GiB  4.03 GiB " + "x" * 90, 80) == ["1  FSDP  10.54 GiB  4.03 GiB " + "x" * 90]


def test_columns_without_figures_are_left_out_and_words_are_folded() -> None:
    rows = [
        ("", "layout", "a card", "far", "waits", ""),
        ("1", "FSDP grad-op, micro-batch 8, recompute", "10.54 GiB", "-", "0.00", "tight"),
        ("2", "DDP", "11.54 GiB", "-", "0.00", ""),
    ]
    wide = columns(rows, 110, words=1)
    assert wide[0].split() == ["layout", "a", "card"]
    assert len(wide) == 3
    narrow = columns(rows, 40, words=1)
    assert all(len(line) <= 40 for line in narrow)
    assert len(narrow) > 3
    assert narrow[1].endswith("10.54 GiB  tight")
