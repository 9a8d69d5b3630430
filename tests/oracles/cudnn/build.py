"""Builds a family's packed file: asks, grows every section's tree, measures with what was kept back, and packs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from graphmem.cudnn.predicted import choice
from graphmem.cudnn.predicted.choice import Plan, reached
from graphmem.cudnn.predicted.packed import Node, Trees, unpack
from graphmem.cudnn.predicted.workspaces import workspace_bytes
from graphmem.devices import device_named
from tests.oracles.cudnn.ask import RECORDED, Ask, Batch, answers
from tests.oracles.cudnn.forms import Answer, read
from tests.oracles.cudnn.grow import Parameters, grow
from tests.oracles.cudnn.manifest import Family, Manifest
from tests.oracles.cudnn.packing import pack
from tests.oracles.cudnn.shapes import Shape
from tests.oracles.cudnn.written import NETWORKS

#: Kinds of convolutions that hand-written networks have.
WRITTEN = (*NETWORKS, "volume")
#: Kinds of which many fall in sections of the former.
ALIKE = ("first", "loose")
#: The ends of sections of plain layers, which libraries and hand-written networks share: one tree serves both, and is
#: grown from both. Grown from those of libraries alone it was off by twice as many bytes in hand-written networks.
SHARED_KINDS = (", layer", ", first layer")
#: The ends of sections that libraries' layers grow.
LIBRARY_KINDS = (*SHARED_KINDS, ", groups", ", depthwise")

#: Grows the tree of a section: :func:`grow`, or a test's own.
Grow = Callable[[str, list[Answer], Parameters], Node]


def build(
    family: Family,
    manifest: Manifest,
    ask: Ask,
    folder: Path,
    grower: Grow = grow,
    tell: Callable[[str], None] = lambda _: None,
    before: Trees | None = None,
) -> bytes:
    """The packed file of a family. ``folder`` keeps the answers; ``tell`` hears what is done.

    ``before``: trees of which the sections of groups and depthwise layers, and those of the largest workspaces, stay as
    they are.
    """
    kept = {batch: _read(batch, ask, folder, family) for batch in manifest.kept_batches(family)}
    kept_shapes = {shape for found in kept.values() for shape, _, _ in found}
    by_section: dict[str, list[Answer]] = defaultdict(list)
    for batch in manifest.grown_batches(family):
        if before is not None and (batch.largest or batch.kind not in (*WRITTEN, *ALIKE, "layer")):
            continue
        tell(f"{family.name}: {batch.name}")
        for shape, section, answer in _read(batch, ask, folder, family):
            if shape not in kept_shapes:
                for one in _grown_sections(batch, section, answer, everything=before is None):
                    by_section[one].append(answer)
    by_section = {one: found for one, found in by_section.items() if len(found) >= manifest.trees.least_answers}
    trees = {} if before is None else _kept(before, by_section)
    for section, found in sorted(by_section.items()):
        tell(f"{family.name}: [{section}] from {len(found):,} answers")
        trees[section] = grower(section, found, manifest.trees)
    return pack(_header(family, manifest, by_section, _scores(trees, kept), before), trees)


def _grown_sections(batch: Batch, section: str, answer: Answer, everything: bool) -> set[str]:
    """The sections that grow from an answer. ``everything``: those of groups, depthwise layers and largest workspaces
    too, which libraries' kinds alone grow."""
    found = {section} if everything and batch.kind not in WRITTEN else set()
    if batch.kind != "layer" and _is_of_written(section):
        found.add(section)
    if not section.startswith((Plan.DETERMINISTIC.value, Plan.LARGEST.value)):
        reached_here = choice.section(answer.problem, answer.direction, general=choice.is_of_libraries(answer.problem))
        found |= {reached_here} if reached_here.endswith(SHARED_KINDS) else set()
    return found


def _is_of_written(section: str) -> bool:
    """Whether a section is one of layers that hand-written networks have and libraries have few of. For the largest
    workspaces they were not asked."""
    if section.startswith(Plan.LARGEST.value):
        return False
    return not section.endswith(LIBRARY_KINDS) or section.startswith(Plan.DETERMINISTIC.value)


def _kept(before: Trees, grown: Mapping[str, list[Answer]]) -> dict[str, Node]:
    """The trees that stay: of libraries' kinds that are not grown anew."""
    stay = (section for section in before.sections if not _is_of_written(section) and section not in grown)
    return {section: tree for section in stay if (tree := before.get(section)) is not None}


def _read(batch: Batch, ask: Ask, folder: Path, family: Family) -> list[tuple[Shape, str, Answer]]:
    capability = device_named(batch.card).compute_capability
    assert capability is not None
    found = list(read(answers(batch, ask, folder / family.name), capability))
    if batch.largest:  # the first plans of these convolutions would count twice
        return [(shape, section, answer) for shape, section, answer in found if section.startswith("largest")]
    return found


# --- scores -----------------------------------------------------------------------------------------------------------


@dataclass
class Score:
    """Workspaces within 10 % (or one block of 512 bytes) of cuDNN's."""

    close: int = 0
    count: int = 0

    def __str__(self) -> str:
        return f"{100 * self.close / max(self.count, 1):.1f} % of {self.count}"


def _scores(trees: Mapping[str, Node], kept: Mapping[Batch, list[tuple[Shape, str, Answer]]]) -> dict[str, Score]:
    """Scores by kind of what was kept back, and of all random kinds together."""
    packed = unpack(pack({}, trees), "the trees")
    scores: dict[str, Score] = defaultdict(Score)
    for batch, found in kept.items():
        names = [f"largest, {batch.kind}", "largest"] if batch.largest else [batch.kind, "all"]
        for _, section, answer in found:
            if section.startswith(Plan.DETERMINISTIC.value):
                continue
            leaf = reached(packed, answer.problem, answer.direction, Plan.LARGEST if batch.largest else Plan.FIRST)
            size = workspace_bytes(leaf.form, answer.problem, answer.direction) if leaf else 0
            close = abs(size - answer.bytes) <= max(answer.bytes // 10, 512)
            for name in names if batch.kind != RECORDED else names[:1]:
                scores[name].count += 1
                scores[name].close += close
    return scores


def _header(
    family: Family,
    manifest: Manifest,
    by_section: Mapping[str, list[Answer]],
    scores: Mapping[str, Score],
    before: Trees | None,
) -> dict[str, str]:
    capability = device_named(family.card).compute_capability
    assert capability is not None
    header = {
        "family": family.name,
        "what": "decision trees fitted to answers of NVIDIA's cuDNN about random convolutions",
        "asked for": f"{family.card}, compute capability {capability[0]}.{capability[1]}",
        "cuDNN": manifest.cudnn,
        "scikit-learn": manifest.scikit_learn,
        "grown on": _counts(family.grown),
    }
    if family.largest:
        header["grown on, largest workspaces"] = _counts(family.largest)
    header["seeds"] = f"'{family.card} grown KIND {False} 1' and so on, {manifest.batch} convolutions each"
    answers = sum(map(len, by_section.values()))
    if before is not None:
        header["kept from before"] = "sections of groups and depthwise layers, and largest workspaces"
        answers += int(before.header["answers"])
    header["answers"] = str(answers)
    for name in sorted(scores):
        header[f"kept back, {name}"] = f"{scores[name]} workspaces within 10 %"
    return header


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
