"""``--trust``: programs that need more than data are refused, unless the user says that the file is trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import graphmem  # noqa: E402
from graphmem.errors import SourceError  # noqa: E402
from tests.fuzz import samples  # noqa: E402
from tests.support.examples import parts  # noqa: E402


class Doubled(torch.nn.Module):
    """Calls an operator of another library than PyTorch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = torch.ops.graphmem_trust.double(x)
        return doubled


def test_an_operator_of_another_library_needs_trust(tmp_path: Path) -> None:
    with torch.library._scoped_library("graphmem_trust", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        path = tmp_path / "doubled.pt2"
        torch.export.save(torch.export.export(Doubled(), (torch.zeros(4, 4),)), path)
        with pytest.raises(SourceError, match=r"graphmem_trust.*--trust \(trust=True\)") as refused:
            graphmem.analyze(str(path), training=False)
        assert len(str(refused.value).splitlines()) == 1
        estimate = graphmem.analyze(str(path), training=False, trust=True)
        assert estimate.breakdown["INPUT"] == 64


@pytest.mark.parametrize("which", parts(3))
def test_trusted_and_untrusted_answers_are_equal(which: int, tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_bytes(samples.programs()[which])
    for training in (True, False):
        try:
            trusted = graphmem.analyze(str(path), training=training, trust=True).to_json()
        except graphmem.GraphmemError as error:
            trusted = str(error)
        try:
            untrusted = graphmem.analyze(str(path), training=training).to_json()
        except graphmem.GraphmemError as error:
            untrusted = str(error)
        assert untrusted == trusted
