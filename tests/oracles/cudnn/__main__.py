"""Builds the trees of cuDNN's choices, and shows them.

    python -m tests.oracles.cudnn build --cudnn LIBCUDNN [--family hopper ...]
    python -m tests.oracles.cudnn networks --cudnn LIBCUDNN [--family hopper ...]
    python -m tests.oracles.cudnn show FAMILY [SECTION]

``build`` follows ``manifest.toml`` and writes ``graphmem/cudnn/predicted/plans/FAMILY.trees``; ``LIBCUDNN`` is
the path of ``libcudnn.so.9`` in the folders of NVIDIA's wheels. Answers are kept (``--answers``), so that only new
questions are asked. ``networks`` measures how far the trees move peaks (:mod:`tests.oracles.cudnn.networks`) and writes
it into ``graphmem/answering/causes/measured.json``; a minute a family. ``show`` prints a file's header and its trees,
or the trees of sections whose names contain a text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from graphmem.cudnn.predicted import choice
from tests.oracles.cudnn.ask import Ask, asker
from tests.oracles.cudnn.build import build
from tests.oracles.cudnn.manifest import Family, Manifest, read_manifest
from tests.oracles.cudnn.networks import measured
from tests.oracles.cudnn.packing import render
from tests.recorded import spreads

PLANS = Path(choice.__file__).parent / choice.FOLDER
ANSWERS = Path(__file__).parents[3] / ".cudnn_answers"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.cudnn", description="Trees of cuDNN's choices.")
    commands = parser.add_subparsers(required=True)
    building = commands.add_parser("build", help="ask, grow and pack")
    building.add_argument("--cudnn", type=Path, required=True, metavar="LIBCUDNN", help="path of libcudnn.so.9")
    building.add_argument("--family", nargs="+", metavar="FAMILY", help="families of the manifest; all by default")
    building.add_argument("--answers", type=Path, default=ANSWERS, help="folder that keeps cuDNN's answers")
    building.add_argument("--into", type=Path, default=PLANS, help="folder of the packed files")
    building.add_argument("--written", action="store_true", help="only what hand-written networks grow; keep the rest")
    building.set_defaults(run=_build)
    measuring = commands.add_parser("networks", help="measure how far the trees move the peaks of networks")
    measuring.add_argument("--cudnn", type=Path, required=True, metavar="LIBCUDNN", help="path of libcudnn.so.9")
    measuring.add_argument("--family", nargs="+", metavar="FAMILY", help="families of the manifest; all by default")
    measuring.set_defaults(run=_measure)
    showing = commands.add_parser("show", help="print trees as text")
    showing.add_argument("family")
    showing.add_argument("section", nargs="?", default="")
    showing.set_defaults(run=_show)
    options = parser.parse_args()
    options.run(options)


def _build(options: argparse.Namespace) -> None:
    manifest = read_manifest()
    _check_scikit_learn(manifest)
    for family, ask in _asked_families(options, manifest):
        before = choice.load(family.name) if options.written else None
        packed = build(family, manifest, ask, options.answers / manifest.cudnn, tell=_tell, before=before)
        (options.into / f"{family.name}.trees").write_bytes(packed)


def _measure(options: argparse.Namespace) -> None:
    for family, ask in _asked_families(options, read_manifest()):
        _tell(family.name)
        spreads.replace_rows("networks", family.name, [measured(family, choice.load(family.name), ask)])


def _asked_families(options: argparse.Namespace, manifest: Manifest) -> Iterator[tuple[Family, Ask]]:
    """The families that the options name, and what answers for their cards."""
    for name in options.family or manifest.families:
        if name not in manifest.families:
            sys.exit(f"the manifest has no family {name}; it has {', '.join(manifest.families)}")
        family = manifest.families[name]
        ask, version = asker(options.cudnn, family.card)
        if version != manifest.cudnn:
            sys.exit(f"{options.cudnn} is cuDNN {version}, and the manifest is for {manifest.cudnn}")
        yield family, ask


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_scikit_learn(manifest: Manifest) -> None:
    try:
        from sklearn import __version__ as installed
    except ImportError:
        sys.exit(f"trees are grown by scikit-learn: pip install scikit-learn=={manifest.scikit_learn}")
    if installed != manifest.scikit_learn:
        sys.exit(f"this is scikit-learn {installed}, and the manifest is for {manifest.scikit_learn}")


def _show(options: argparse.Namespace) -> None:
    trees = choice.load(options.family)
    print("\n".join(f"# {key}: {value}" for key, value in trees.header.items()))
    for section in trees.sections:
        tree = trees.get(section)
        if options.section in section and tree is not None:
            print(f"\n[{section}] {trees.nodes(section)} nodes")
            print(render(tree), end="")


if __name__ == "__main__":
    main()
