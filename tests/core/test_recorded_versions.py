"""Which recordings of PyTorch the installed one is compared with."""

from __future__ import annotations

import pytest

from tests import places
from tests.recorded import differences

WHOLE = [(2, 11), (2, 13)]


@pytest.mark.parametrize(
    ("installed", "compared"),
    [((2, 13), (2, 13)), ((2, 14), (2, 13)), ((3, 0), (2, 13)), ((2, 12), (2, 11)), ((2, 4), (2, 11)), (None, (2, 13))],
)
def test_a_version_is_compared_with_the_nearest_that_was_recorded(
    installed: places.Version | None, compared: places.Version
) -> None:
    assert places.nearest(installed, WHOLE) == compared


def test_every_folder_of_recordings_is_a_version() -> None:
    folders = {folder.name for folder in places.PYTORCH_VERSIONS.iterdir()}
    assert folders == {places.of_torch(version).name for version in places.RECORDED}, "below golden/pytorch/<version>"
    assert set(places.WHOLE) <= set(places.RECORDED)
    assert {(2, 4), (2, 6), (2, 9), (2, 11), (2, 13)} <= set(places.RECORDED)
    assert places.PYTORCH_VERSION in places.WHOLE


def test_differences_are_expected_of_versions_after_the_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = max(places.WHOLE)
    first, second = (newest[0], newest[1] + 1), (newest[0], newest[1] + 2)
    listed = {first: {"functions": {"sum": "another kernel"}}, second: {"functions": {"sort": "no copy"}}}
    monkeypatch.setattr(differences, "EXPECTED", listed)
    assert differences.expected("functions", newest) == {}
    assert differences.expected("functions", first) == {"sum": "another kernel"}
    assert differences.expected("functions", second) == {"sum": "another kernel", "sort": "no copy"}
    assert differences.expected("loops", second) == {}


def test_an_expected_difference_must_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "expected", lambda kind: {"mlp": "another optimizer"})
    (expected,) = differences.marks("steps", "mlp", quick=True)
    assert (expected.name, expected.kwargs) == ("xfail", {"reason": "another optimizer", "strict": True})
    assert [mark.name for mark in differences.marks("steps", "gpt2", quick=False)] == ["slow"]
