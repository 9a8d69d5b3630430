"""A Job for Kubernetes that asks for what a job needs, with NVIDIA's device plugin and GPU feature discovery."""

from __future__ import annotations

import re

from graphmem.reports import Format
from graphmem.reports.document import Document
from graphmem.reports.job import NO_JOB, Job, jobs_of, whole_mebibytes


class _Kubernetes(Format):
    name = "kubernetes"
    spellings = ("k8s",)

    def render(self, document: Document, width: int | None = None) -> str:
        """Manifests in YAML, with the reasons as comments; of a job with several nodes the part of one."""
        jobs = jobs_of(document)
        manifests = ["\n".join((*(f"# {line}" for line in job.about), *_manifest(job))) + "\n" for job in jobs]
        return "---\n".join(manifests) or NO_JOB


FORMAT = _Kubernetes()


def _manifest(job: Job) -> list[str]:
    """``nvidia.com/mig-…`` is the device plugin's resource under its strategy "mixed"; ``nvidia.com/gpu.memory`` is a
    label in MiB, of whole cards."""
    name = re.sub(r"[^a-z0-9]+", "-", job.model.lower()).strip("-")[:50].strip("-") or "job"
    resource = f"nvidia.com/mig-{job.profile}" if job.profile else "nvidia.com/gpu"
    memory = f"{whole_mebibytes(job.host_bytes)}Mi"
    least = whole_mebibytes(job.card_bytes) - 1
    affinity = [
        "      affinity:",
        "        nodeAffinity:",
        "          requiredDuringSchedulingIgnoredDuringExecution:",
        "            nodeSelectorTerms:",
        "            - matchExpressions:",
        f'              - {{key: nvidia.com/gpu.memory, operator: Gt, values: ["{least}"]}}',
    ]
    return [
        "apiVersion: batch/v1",
        "kind: Job",
        f"metadata: {{name: {name}}}",
        "spec:",
        f"  completions: {job.nodes}",
        f"  parallelism: {job.nodes}",
        "  template:",
        "    spec:",
        "      restartPolicy: Never",
        *([] if job.profile else affinity),
        "      containers:",
        "      - name: step",
        "        image: IMAGE",
        "        resources:",
        f"          requests: {{memory: {memory}}}",
        f"          limits: {{memory: {memory}, {resource}: {job.cards}}}",
    ]
