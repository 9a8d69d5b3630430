"""What a job asks Slurm and Kubernetes for, by an estimate."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from graphmem.devices import device_named
from graphmem.estimate import Estimate
from graphmem.reports import format_named
from graphmem.reports.document import Document
from graphmem.reports.job import BESIDE_TENSORS_BYTES
from graphmem.units import MIB
from tests import places
from tests.support.estimates import training_estimate

SLICE = "A100-40GB:1g.10gb"


def _on(estimate: Estimate, gpu: str) -> Estimate:
    assert estimate.fit is not None
    fit = replace(estimate.fit, gpu=gpu, capacity_bytes=device_named(gpu).capacity_bytes)
    return replace(estimate, gpu=gpu, fit=fit)


def _asked(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return dict(line.split("=", 1) for line in lines)


def _manifest(text: str) -> Any:
    return pytest.importorskip("yaml").safe_load(text)


def _host_mib(estimate: Estimate, processes: int = 1) -> int:
    size = processes * (estimate.host_bytes + estimate.pinned_bytes + BESIDE_TENSORS_BYTES)
    return -(-size // MIB)


def test_a_whole_card() -> None:
    estimate = training_estimate()
    script = estimate.report("slurm")
    assert _asked(script) == {"nodes": "1", "gres": "gpu:1", "mem": f"{_host_mib(estimate)}M"}
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    found = _manifest(estimate.report("kubernetes"))
    template = found["spec"]["template"]["spec"]
    limits = template["containers"][0]["resources"]["limits"]
    assert limits == {"memory": f"{_host_mib(estimate)}Mi", "nvidia.com/gpu": 1}
    terms = template["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = terms[0]["matchExpressions"]
    most = max(estimate.device, estimate.interval("device")[1] or 0)
    assert expression["key"] == "nvidia.com/gpu.memory"
    assert int(expression["values"][0]) * MIB < most + device_named("H200").capacity_bytes
    assert (int(expression["values"][0]) + 1) * MIB >= most


def test_a_mig_instance() -> None:
    estimate = _on(training_estimate(), SLICE)
    assert _asked(estimate.report("slurm"))["gres"] == "gpu:1g.10gb:1"
    template = _manifest(estimate.report("k8s"))["spec"]["template"]["spec"]
    assert template["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 1
    assert "affinity" not in template


def test_processes_of_several_nodes() -> None:
    estimate = training_estimate().with_details(processes={"world_size": 16, "nproc_per_node": 8})
    memory = f"{_host_mib(estimate, 8)}M"
    assert _asked(estimate.report("slurm")) == {"nodes": "2", "gres": "gpu:8", "mem": memory}
    spec = _manifest(estimate.report("kubernetes"))["spec"]
    assert (spec["completions"], spec["parallelism"]) == (2, 2)


def test_names_are_no_directives() -> None:
    hostile = replace(training_estimate(), model="x\n#SBATCH --mem=1\nkind: Pod", step="y\rmetadata: {}")
    assert len(_asked(hostile.report("slurm"))) == 3
    assert _manifest(hostile.report("kubernetes"))["kind"] == "Job"
    assert _manifest(hostile.report("kubernetes"))["metadata"]["name"].replace("-", "").isalnum()


def test_jobs_that_share_cards_ask_for_one_card_each() -> None:
    jobs = [{"name": "a\nJOB", "device_bytes": 3 * MIB, "most_bytes": 4 * MIB, "host_bytes": MIB, "unbounded": []}] * 2
    cards = [{"gpu": gpu, "number": 1, "jobs": jobs} for gpu in (SLICE, "T4-16GB")]
    document = Document("pack", "Jobs on cards", [], lambda: {"schema": "graphmem.pack/1", "cards": cards})
    script = format_named("slurm").render(document)
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    heads = [_asked(one) for one in script.split("sbatch")[1:]]
    assert [head["gres"] for head in heads] == ["gpu:1g.10gb:1", "gpu:1"]
    assert {head["mem"] for head in heads} == {f"{2 * (1 + BESIDE_TENSORS_BYTES // MIB)}M"}
    manifests = format_named("kubernetes").render(document).split("---\n")
    of_slice, of_card = (_manifest(one) for one in manifests)
    assert of_slice["metadata"]["name"] != of_card["metadata"]["name"]
    assert "nvidia.com/mig-1g.10gb" in str(of_slice)
    assert "['7']" in str(of_card)


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_another_answer_is_no_job(name: str) -> None:
    document = Document("fit", "The largest batch", [], lambda: {"schema": "graphmem.fit/1"})
    assert format_named(name).render(document).startswith("# no job")


def test_the_example_of_prices_is_read() -> None:
    from graphmem.devices.prices import card_prices

    file = places.ROOT / "examples" / "prices.csv"
    assert len(card_prices(file)) == 12
    assert "https://" in file.read_text(encoding="utf-8")
