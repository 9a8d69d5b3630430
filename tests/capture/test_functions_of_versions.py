"""Single functions of older and newer versions of PyTorch, predicted by the installed one.

``golden/pytorch/<version>/functions.jsonl.gz`` has cases of ``recorded/cases/functions`` as that version's CUDA build
ran them. Of those that a version does otherwise than the one that all kinds are recorded of, every sequence of
allocations is predicted, but for the cases in ``functions_of_versions_ratchet.json``: there is how far the peak is off.
``python -m tests.recorded functions_of_versions differ NAME`` shows a difference.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests import places  # noqa: E402
from tests.recorded import functions  # noqa: E402
from tests.recorded.cases.functions import CASES  # noqa: E402
from tests.recorded.device import peak_bytes  # noqa: E402
from tests.support import ratchet  # noqa: E402

RATCHET = places.PYTORCH / "functions_of_versions_ratchet.json"
VERSIONS = functions.other_versions()
#: Those of ``.ci/versions``; of the others, what differs between their neighbours.
MATRIX = ((2, 6), (2, 9), (2, 11), (2, 15))
#: One or two of each rule: done otherwise by some version, and predicted in a second or two together.
QUICK = (
    "atan2", "bincount", "clamp_tensors", "deterministic_gather", "embedding_bag_sum", "group_norm_bf16",
    "histogram_like", "index_list", "index_mask", "large_unique_slices_inverse", "large_unique_slices_inverse_counts",
    "linear_relu", "maximum", "multinomial", "nonzero", "repeat_interleave_tensor", "rms_norm", "sdpa_bf16",
    "take_along_dim", "topk_1d",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [pytest.param("quick"), pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: ".".join(map(str, version)))
def test_functions_of_another_version(version: places.Version, part: str, request: pytest.FixtureRequest) -> None:
    recorded = functions.other_recordings(version)
    names = functions.done_otherwise(version)
    if part == "quick":
        names = [name for name in names if name in QUICK]
    prefix = ".".join(map(str, version))
    reached = {}
    for name, predicted in functions.predict_version(names, version).items():
        assert predicted is not None, f"{name} cannot be analysed for {prefix}"
        if predicted != recorded[name]:
            reached[f"{prefix}/{name}"] = peak_bytes(predicted) - peak_bytes(recorded[name])
    known = ratchet.read(RATCHET)
    if request.config.getoption("--update-goldens") and part == "all":
        others = {name: error for name, error in known.items() if not name.startswith(f"{prefix}/")}
        ratchet.write(RATCHET, others | reached)
        return
    for name, error in reached.items():
        hint = f"see python -m tests.recorded functions_of_versions differ {name.partition('/')[2]}"
        assert name in known, f"{name}: the sequence was the recorded one; {hint}"
        assert abs(error) <= abs(known[name]), f"{name}: the peak is worse; {hint}"


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: ".".join(map(str, version)))
def test_hundreds_of_cases_are_recorded_of_the_versions_of_the_matrix(version: places.Version) -> None:
    documents = functions.load(places.of_torch(version))
    assert set(documents) <= set(CASES)
    assert len(documents) >= 200 or version not in MATRIX
    assert all(document["torch"].startswith(".".join(map(str, version)) + ".") for document in documents.values())


def test_the_versions_of_the_matrix_have_functions() -> None:
    assert set(MATRIX) <= set(VERSIONS)
