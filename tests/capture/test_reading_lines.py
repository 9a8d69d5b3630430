"""What a program's source tells of a number that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from graphmem.capture.values.reading_lines import only_logs

#: Bodies of a function; the read is at the line that ends with "# read".
_ONLY_LOGGED = {
    "printed": "print(loss.item())  # read",
    "a_metric_of_the_caller": "correct += hits.sum().item()  # read\nreturn correct / total, total",
    "a_share_in_percent": "correct = hits.sum().item()  # read\nshare = 100 * correct / total\nreturn {'acc': share}",
}
_DECIDING = {
    "a_size": "n = lengths.max().item()  # read\nreturn torch.zeros(n)",
    "returned": "n = lengths.max().item()  # read\nreturn n",
    "a_branch_on_a_share": "n = hits.sum().item()  # read\nif n / total > 0.5:\n    return torch.zeros(5)",
    "a_share_rounded_to_a_size": "n = hits.sum().item()  # read\nreturn torch.zeros(int(n / total))",
    "floor_division": "n = hits.sum().item()  # read\nreturn n // 2",
}


@pytest.mark.parametrize(
    ("body", "expected"),
    [(body, True) for body in _ONLY_LOGGED.values()] + [(body, False) for body in _DECIDING.values()],
    ids=[*_ONLY_LOGGED, *_DECIDING],
)
def test_a_whole_number_is_followed_to_where_it_goes(body: str, expected: bool, tmp_path: Path) -> None:
    text = "def step():\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    file = tmp_path / "program.py"
    file.write_text(text, encoding="utf-8")
    line = 1 + next(i for i, text_line in enumerate(text.splitlines()) if text_line.endswith("# read"))
    assert only_logs(str(file), line) is expected
