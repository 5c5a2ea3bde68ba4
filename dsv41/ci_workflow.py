"""The GitHub workflow, made from the matrix by `ci/workflow.yml.j2`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from dsv41.ci_matrix import Job
from dsv41.errors import InputError
from dsv41.hal.device import TORCH_INSTALL, TORCH_VENDORS

TEMPLATE = Path("ci/workflow.yml.j2")
WORKFLOW = Path(".github/workflows/ci.yml")


def template() -> str:
    """The checkout's. Raises InputError where there is none."""
    try:
        return TEMPLATE.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{TEMPLATE} cannot be read ({error}): run this at the root of a checkout") from error


def render(jobs: Sequence[Job], template: str) -> str:
    """The workflow's text. In the template `<<` and `<%` are ours, since GitHub has the braces."""
    environment = Environment(
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.from_string(template).render(
        no_gpu=[_entry(job) for job in jobs if not job.needs_gpu],
        gpu=[job for job in jobs if job.needs_gpu],
        script={"nvidia": "ci/run-cuda.sh", "amd": "ci/run-rocm.sh"},
        # Not "dev" on ROCm: it names PyPI's Triton, which would overwrite the one that torch brings there.
        extra={"nvidia": "dev", "amd": "test"},
        install_torch=_install_torch,
    )


def _entry(job: Job) -> str:
    """A line of GitHub's matrix; JSON is YAML."""
    return json.dumps({"job": job.name, "python": job.python, "torch": job.torch})


def _install_torch(job: Job) -> str:
    return TORCH_INSTALL[TORCH_VENDORS[job.vendor]].replace("install torch", f"install 'torch=={job.torch}.*'")
