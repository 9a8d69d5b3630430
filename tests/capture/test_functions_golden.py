"""Single functions and modules against recordings of the CUDA build, with a ratchet.

``functions_ratchet.json`` beside the recordings says of every case whether the whole sequence of allocations and frees
is the recorded one, and how far the peak of requested bytes is off. A case may get closer, never further away;
``pytest --update-goldens -m "slow or not slow"`` writes it anew. ``python -m tests.recorded functions differ NAME``
shows a difference.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from tests.recorded.cases.functions import CASES  # noqa: E402
from tests.recorded.device import peak_bytes  # noqa: E402
from tests.recorded.differences import expected  # noqa: E402
from tests.recorded.functions import FOLDER, predict, recordings  # noqa: E402
from tests.support import ratchet  # noqa: E402
from tests.support.examples import parts  # noqa: E402

RATCHET = FOLDER.parent / "functions_ratchet.json"
RECORDINGS = recordings()
GROUPS = list(dict.fromkeys(case.group for case in CASES.values()))
RECORDED = [case for case in CASES.values() if "changes" in RECORDINGS[case.name]]

#: Of each group, every run takes a sixth; ``.ci/slow`` the rest.
PARTS = 6

SELECTED_BY_KNOWN_VALUES = (
    "bincount",
    "index_mask",
    "index_mask_elements",
    "masked_select",
    "masked_select_row",
    "repeat_interleave_tensor",
    "unique",
    "unique_inverse",
    "unique_rows_consecutive",
    "where_positions",
)


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """Every case collects garbage first; what was there before the tests need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", parts(PARTS))
@pytest.mark.parametrize("group", GROUPS)
def test_functions_are_predicted_no_worse_than_before(group: str, part: int, request: pytest.FixtureRequest) -> None:
    reached = {}
    for case in [case for case in RECORDED if case.group == group][part::PARTS]:
        recorded, predicted = RECORDINGS[case.name]["changes"], predict(case)
        error = peak_bytes(predicted) - peak_bytes(recorded)
        reached[case.name] = {"equal": predicted == recorded, "peak_error_bytes": error}
    if request.config.getoption("--update-goldens"):
        known = {case.name for case in RECORDED}
        entries = ratchet.read(RATCHET) | reached
        ratchet.write(RATCHET, {name: entry for name, entry in entries.items() if name in known})
        return
    entries = ratchet.read(RATCHET)
    otherwise = expected("functions")
    for name, now in reached.items():
        if name in otherwise:
            assert not now["equal"], f"{name} is as recorded; take it out of tests/recorded/differences.py"
            continue
        before = entries[name]
        hint = f"see python -m tests.recorded functions differ {name}"
        assert now["equal"] or not before["equal"], f"{name}: the sequence was the recorded one; {hint}"
        assert abs(now["peak_error_bytes"]) <= abs(before["peak_error_bytes"]), f"{name}: the peak is worse; {hint}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SELECTED_BY_KNOWN_VALUES)
def test_known_values_say_how_much_is_selected(name: str) -> None:
    """Masks and indices of the cases are zeros, here as in the recordings: nobody has to say a share."""
    assert predict(CASES[name], None) == predict(CASES[name])


@pytest.mark.parametrize("name", ["complex_mm_of_conjugates", "complex_bmm_of_conjugates"])
def test_conjugates_by_rows_are_copied_for_cublas(name: str) -> None:
    assert predict(CASES[name]) == RECORDINGS[name]["changes"]


def test_every_recorded_case_is_in_the_ratchet() -> None:
    assert sorted(ratchet.read(RATCHET)) == sorted(case.name for case in RECORDED)


def test_every_recording_is_of_a_case() -> None:
    assert set(RECORDINGS) == set(CASES)
