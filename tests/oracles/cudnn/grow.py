"""Grows decision trees from answers: which form a plan's workspace has, by features of the convolution.

scikit-learn looks for the branches; what a leaf says, and which branches stay, is decided by how many workspaces come
within 10 % of cuDNN's. Needs scikit-learn, which nothing else here does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from graphmem.cudnn.predicted.choice import features
from graphmem.cudnn.predicted.packed import Branch, Leaf
from graphmem.cudnn.predicted.workspaces import TIGHT_SLACK, has_tiles, slack, workspace_bytes
from tests.oracles.cudnn.forms import Answer, label


@dataclass(frozen=True)
class Parameters:
    """How large trees grow; recorded in the manifest."""

    #: Sections with fewer answers are not grown.
    least_answers: int
    #: Answers for every leaf that a tree may have before it is pruned, of filter gradients and of the others.
    answers_per_leaf_of_gradients: float
    answers_per_leaf: float
    #: Answers of the smallest leaf.
    smallest_leaf: int
    #: A leaf's form is chosen among those that name so many answers of the section.
    least_named: int
    #: A branch stays if it adds more hits than this to those of one leaf in its place.
    prune: float
    #: What a workspace within 1 % counts on top of one within 10 %.
    fine: float
    #: What one counts besides that takes as many blocks of 512 bytes.
    exact: float
    #: scikit-learn's measure of a branch.
    criterion: str

    def leaves(self, section: str, answers: int) -> int:
        share = self.answers_per_leaf_of_gradients if "backward weight" in section else self.answers_per_leaf
        return max(8, int(answers / share))


def grow(section: str, answers: list[Answer], parameters: Parameters) -> Branch | Leaf:
    """A tree over the answers of one section."""
    from sklearn.tree import DecisionTreeClassifier

    labels = [label(answer) for answer in answers]
    named = Counter(labels)
    forms = sorted(form for form, count in named.items() if count >= parameters.least_named and form != "other")
    rows = [features(answer.problem, answer.direction) for answer in answers]
    values = np.array([list(row.values()) for row in rows], np.float32)
    tree = DecisionTreeClassifier(
        max_leaf_nodes=parameters.leaves(section, len(answers)),
        min_samples_leaf=parameters.smallest_leaf,
        criterion=parameters.criterion,
        random_state=0,
    )
    tree.fit(values, [_coarse(one) for one in labels])
    counted = _count(answers, forms or ["needed"], tree.apply(values), parameters)
    return _Pruning(tree.tree_, list(rows[0]), counted, parameters.prune).node(0)[0]


def _coarse(form: str) -> str:
    """Numbers of splits that are within a third of each other count as one when a tree looks for branches."""
    if form.startswith("bytes"):
        return "bytes"
    base, _, last = form.removesuffix("+tight").rpartition(" ")
    if not base.endswith(("split", "parts")) and "tiles" not in base:
        return form.removesuffix("+tight")
    return f"{base} {round(np.log(int(last)) / np.log(1.35))}"


# --- hits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """By leaf and form: answers within 10 %, and their score."""

    forms: list[str]
    close: Any
    score: Any


def _count(answers: list[Answer], forms: list[str], leaves: Any, parameters: Parameters) -> Counted:
    real, sizes = np.array([answer.bytes for answer in answers]), Sizes(answers)
    close = np.zeros((int(leaves.max()) + 1, len(forms)), np.float32)
    score = np.zeros_like(close)
    for column, form in enumerate(forms):
        size = sizes.of(form)
        error = np.abs(size - real)
        near = error <= np.maximum(real // 10, 512)
        scores = near + parameters.fine * (error <= np.maximum(real * 0.01, 512))
        scores = scores + parameters.exact * (-(-size // 512) == -(-real // 512))
        close[:, column] = np.bincount(leaves, near, len(close))
        score[:, column] = np.bincount(leaves, scores, len(close))
    return Counted(forms, close, score)


class Sizes:
    """Bytes of forms for many answers at once: a part of a form is sized once, and a number of splits or of partial
    filters is that many times one of them."""

    def __init__(self, answers: list[Answer]) -> None:
        self._answers = answers
        self._columns: dict[str, Any] = {}

    def of(self, form: str) -> Any:
        """What :func:`workspace_bytes` says of the form for every answer."""
        parts = [self._part(part) for part in form.split("+")]
        total = sum(parts)
        more = np.where(total > parts[-1], TIGHT_SLACK, 0) if has_tiles(form) else 0
        return np.where(total != 0, total + slack(form) + more, 0)

    def _part(self, part: str) -> Any:
        words = part.split()
        if words[0] in ("split", "parts"):
            return int(words[-1]) * self._column(" ".join([*words[:-1], "1"]))
        if words[0] in ("tiles", "vtiles"):  # and flags, one more than parts
            flags, one = (self._column(" ".join([*words[:-1], count])) for count in "01")
            return flags + int(words[-1]) * (one - flags)
        return self._column(part)

    def _column(self, part: str) -> Any:
        if part not in self._columns:
            sizes = np.array([workspace_bytes(part, answer.problem, answer.direction) for answer in self._answers])
            self._columns[part] = np.where(sizes != 0, sizes - slack(part), 0)
        return self._columns[part]


# --- pruning ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pruning:
    tree: Any
    feature_names: list[str]
    counted: Counted
    prune: float

    def node(self, at: int) -> tuple[Branch | Leaf, Any, Any, float]:
        """The subtree, pruned to where its score less ``prune`` for every leaf is most; its counts and that score."""
        tree, count = self.tree, int(self.tree.n_node_samples[at])
        if tree.children_left[at] < 0:
            close, score = self.counted.close[at], self.counted.score[at]
            return self._leaf(close, score, count), close, score, float(score.max()) - self.prune
        low, low_close, low_score, low_best = self.node(tree.children_left[at])
        high, high_close, high_score, high_best = self.node(tree.children_right[at])
        close, score = low_close + high_close, low_score + high_score
        alone = float(score.max()) - self.prune
        if low_best + high_best <= alone:
            return self._leaf(close, score, count), close, score, alone
        threshold = _fp32_below(float(tree.threshold[at]))
        return Branch(self.feature_names[tree.feature[at]], threshold, low, high), close, score, low_best + high_best

    def _leaf(self, close: Any, score: Any, count: int) -> Leaf:
        best = int(np.argmax(score))
        return Leaf(self.counted.forms[best], int(100 * close[best] / count))


@cache
def _fp32_below(threshold: float) -> float:
    """The largest fp32 value that is not above a threshold. Values are fp32 and some lies below it, so no value changes
    sides."""
    rounded = np.float32(threshold)
    return float(rounded if float(rounded) <= threshold else np.nextafter(rounded, np.float32(-np.inf)))
