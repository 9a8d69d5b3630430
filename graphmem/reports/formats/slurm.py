"""The head of a batch script for Slurm that asks for what a job needs."""

from __future__ import annotations

from graphmem.reports import Format
from graphmem.reports.document import Document
from graphmem.reports.job import NO_JOB, Job, jobs_of, whole_mebibytes


class _Slurm(Format):
    name = "slurm"
    suffixes = (".sbatch",)

    def render(self, document: Document, width: int | None = None) -> str:
        """Directives with the reasons for them as comments; of several jobs a script that submits a script of each."""
        scripts = [_script(job) for job in jobs_of(document)]
        if len(scripts) == 1:
            return scripts[0]
        return "".join(f"sbatch \"$@\" <<'JOB'\n{script}JOB\n" for script in scripts) or NO_JOB


def _script(job: Job) -> str:
    cards = f"gpu:{job.profile}:{job.cards}" if job.profile else f"gpu:{job.cards}"
    said = [f"# {line}" for line in job.about]
    if job.profile:
        said.append("# the type of a MIG instance is as the site calls it: sinfo -o %G lists them")
    else:
        said.append(f"# cards of at least {whole_mebibytes(job.card_bytes)} MiB: --constraint as the site calls them")
    asked = [
        f"#SBATCH --nodes={job.nodes}",
        f"#SBATCH --gres={cards}",
        f"#SBATCH --mem={whole_mebibytes(job.host_bytes)}M",
    ]
    return "\n".join(("#!/bin/bash", *said, *asked, "", 'srun "$@"')) + "\n"


FORMAT = _Slurm()
