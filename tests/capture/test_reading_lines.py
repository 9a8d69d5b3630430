"""What a program's source tells of a number that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from graphmem.capture.values.callers import Where
from graphmem.capture.values.reading_lines import becomes_whole, compares_idly, only_logs, only_warns

#: Bodies of a function; the read is at the line that ends with "# read".
_ONLY_LOGGED = {
    "printed": "print(loss.item())  # read",
    "the_beginning_of_each_text": "print([text[:5] for text in tokens.tolist()])  # read",
    "a_name_that_others_use": "t = 3\nprint([t[:5] for t in tokens.tolist()])  # read\nreturn torch.zeros(t)",
    "the_first_of_a_list": "print(tokens.tolist()[0][:8])  # read",
    "a_metric_of_the_caller": "correct += hits.sum().item()  # read\nreturn correct / total, total",
    "written_as_json": "for row in out.tolist():  # read\n    f.write(json.dumps({'tokens': row}) + '\\n')",
    "words_of_a_list": "print([words[j] for j in found.tolist()])  # read",
    "text_of_a_function": "spell = lambda ids: ''.join(words[i % 9] for i in ids)\nprint(spell(x.tolist()))  # read",
    "a_share_by_numpy": "hits.append(top.numpy())  # read\nprint(np.mean([np.isin(h, seen).mean() for h in hits]))",
    "an_array_in_a_file": "np.savez(path, neighbours=found.cpu().numpy())  # read",
    "a_checkpoint": "kept = {'steps': steps.item() if fast else 0}  # read\ntorch.save(kept, path)",
    "a_score_under_any_key": "scores[name] = hits.sum().item()  # read\nfor n in scores.values():\n    print(n)",
    "a_picture": "pixels = grid.to('cpu').numpy()  # read\nim = Image.fromarray(pixels)\nim.save(path, format=format)",
    "the_state_of_a_scaler": "state = scaler.state_dict()  # read\ntorch.save(state, path)",
    "a_name_that_was_another": "state = model\nuse(state)\nstate = x.item()  # read\nprint(state)",
    "a_float_that_is_printed": "print('loss', round(float(x), 3))  # read",
    "a_share_in_percent": "correct = hits.sum().item()  # read\nshare = 100 * correct / total\nreturn {'acc': share}",
}
_DECIDING = {
    "a_size": "n = lengths.max().item()  # read\nreturn torch.zeros(n)",
    "returned": "n = lengths.max().item()  # read\nreturn n",
    "a_branch_on_a_share": "n = hits.sum().item()  # read\nif n / total > 0.5:\n    return torch.zeros(5)",
    "a_share_rounded_to_a_size": "n = hits.sum().item()  # read\nreturn torch.zeros(int(n / total))",
    "a_size_in_a_function": "make = lambda n: torch.zeros(n)\nprint(make(x.max().item()))  # read",
    "given_away": "use(x.max().item())  # read",
    "a_batch_for_each": "for n in lengths.tolist():  # read\n    torch.zeros(n)",
    "returned_to_nobody": "def size():\n    return x.max().item()  # read\nregister(size)",
    "a_row_that_is_kept": "kept = rows[x.argmax().item()]  # read\nreturn kept",
    "a_size_for_each": "x = [torch.zeros(n) for n in lengths.tolist()]  # read\nreturn x",
    "a_bound_from_a_list": "n = lengths.tolist()  # read\nreturn x[: n[0]]",
    "a_choice": "n = 3 if lengths.max().item() else 4  # read\nreturn torch.zeros(n)",
    "a_size_under_any_key": "sizes[name] = lengths.max().item()  # read\nfor n in sizes.values():\n    torch.zeros(n)",
    "kept_by_an_object": "n = lengths.max().item()  # read\nstore.save(n)",
    "a_picture_that_is_cropped": "im = Image.fromarray(x.numpy())  # read\nreturn im.crop((0, 0, n, n))",
    "used_in_the_next_round": "n = 1\nfor _ in rounds:\n    torch.zeros(n)\n    n = x.item()  # read",
    "a_state_that_is_loaded": "state = scaler.state_dict()  # read\nother.load_state_dict(state)",
    "floor_division": "n = hits.sum().item()  # read\nreturn n // 2",
}


#: The same of floating-point numbers, of which what is not seen to decide is taken to be logged.
_NUMBERS = {
    "to the caller, who makes a size of it": (
        "return float(x)  # read\n\ndef other():\n    return int(step() * 9)",
        False,
    ),
    "to the caller, who writes it down": ("return float(x)  # read\n\ndef other():\n    print(step() * 9)", True),
    "a whole number that is written down": ("n = float(x)  # read\nprint(int(n))", True),
    "an answer for a metric": ("p = x.numpy()  # read\nhits.append((p > 0.5).mean())\nprint(sum(hits))", True),
    "to arrays under their keys": (
        "a = {k: v.numpy() for k, v in x.items()}  # read\nprint({k: np.append(v, y[k]) for k, v in a.items()})",
        True,
    ),
    "a key that is a value": ("p = x.numpy()  # read\nreturn [y[n] for n in p]", False),
    "an answer for a branch": ("p = float(x)  # read\nis_best = p > best\nif is_best:\n    best = p", False),
    "positions of an array": ("p = x.numpy()  # read\nreturn np.where(p > 0.5)", False),
}
_WARNING = {
    "a text": (
        "if 3 in ids:  # read\n    text = 'pads'\n    if x:\n        text += str(3)\n    log.warning(text)",
        True,
    ),
    "a text that goes on": ("text = ''\nif 3 in ids:  # read\n    text = 'pads'\nuse(text)", False),
    "more than a text": ("if 3 in ids:  # read\n    log.warning('pads')\n    ids = pad(ids)", False),
    "another branch": ("if 3 in ids:  # read\n    log.warning('pads')\nelse:\n    ids = pad(ids)", False),
}
_COMPARED = {
    "the best, and its weights in a file": (
        "acc = x.item()\nif acc > best:  # read\n    best, at = acc, 0\n    torch.save(model.state_dict(), path)\n"
        "elif verbose:\n    print(acc)\nprint(best)",
        True,
    ),
    "the lesser of two": ("print(math.exp(min(20, total)))  # read", True),
    "an answer for a file": ("is_best = acc > best  # read\nif is_best and rank == 0:\n    copyfile(a, b)", True),
    "weights that are kept": ("if acc > best:  # read\n    best, kept = acc, copy.deepcopy(weights)", False),
    "an output that is kept": ("if acc > best:  # read\n    best = acc\n    kept = out", False),
    "patience": ("if acc > best:  # read\n    bad = 0\nelse:\n    bad += 1\nif bad > 3:\n    return", False),
    "a size": ("n = min(total, 20)  # read\nreturn torch.zeros(int(n))", False),
    "a loop": ("while loss > 3:  # read\n    print(loss)", False),
    "more than a file": ("if acc > best:  # read\n    model.eval()", False),
}
_LOST = {
    "behind a function": ("r = x.item()  # read\nside = math.sqrt(1 - r)\nn = int(32 * side)", True),
    "in the open": ("r = x.item()  # read\nn = int(32 * r)", False),
    "never": ("r = math.exp(x.item())  # read\nprint(r)", False),
}


def _written(body: str, folder: Path) -> tuple[str, int]:
    """A function of these lines in a file, and the line that reads."""
    text = "def step():\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    text = text.replace("    \n    def ", "\ndef ")
    file = folder / "program.py"
    file.write_text(text, encoding="utf-8")
    return str(file), 1 + next(i for i, line in enumerate(text.splitlines()) if line.endswith("# read"))


@pytest.mark.parametrize(("body", "expected"), _NUMBERS.values(), ids=_NUMBERS)
def test_a_number_is_followed_to_where_it_goes(body: str, expected: bool, tmp_path: Path) -> None:
    assert only_logs(*_written(body, tmp_path), True) is expected


@pytest.mark.parametrize(("body", "expected"), _WARNING.values(), ids=_WARNING)
def test_a_question_for_a_warning_decides_nothing(body: str, expected: bool, tmp_path: Path) -> None:
    assert only_warns(*_written(body, tmp_path)) is expected


@pytest.mark.parametrize(("body", "expected"), _COMPARED.values(), ids=_COMPARED)
def test_what_is_compared_may_decide_only_what_is_written_down(body: str, expected: bool, tmp_path: Path) -> None:
    assert compares_idly((Where(*_written(body, tmp_path), "step"),)) is expected


@pytest.mark.parametrize(("body", "expected"), _LOST.values(), ids=_LOST)
def test_a_number_is_lost_behind_functions(body: str, expected: bool, tmp_path: Path) -> None:
    assert becomes_whole((Where(*_written(body, tmp_path), "step"),)) is expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [(body, True) for body in _ONLY_LOGGED.values()] + [(body, False) for body in _DECIDING.values()],
    ids=[*_ONLY_LOGGED, *_DECIDING],
)
def test_a_whole_number_is_followed_to_where_it_goes(body: str, expected: bool, tmp_path: Path) -> None:
    assert only_logs(*_written(body, tmp_path)) is expected
