"""A job of Slurm's that is requeued once its run was told to end and is saved: ``Policy(requeue=True)``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from apportion.core.policy import Policy
from apportion.process import in_slurm_job

_SECONDS = 10.0
"""The seconds that Slurm may take to answer."""


def refuse_requeue(policy: Policy, environment: Mapping[str, str]) -> None:
    """Raises ValueError where a policy asks for what only a job of Slurm's can have."""
    if not policy.requeue:
        return
    if not in_slurm_job(environment):
        raise ValueError(
            "policy(requeue=True) has Slurm requeue the job that the run is in, and SLURM_JOB_ID is not set here: "
            "start the run by sbatch, or leave requeue out"
        )
    if shutil.which("scontrol") is None:
        raise ValueError(
            "policy(requeue=True) needs scontrol, which is not on PATH: load Slurm's module, or install slurm-client, "
            "or leave requeue out"
        )


def requeue_job(policy: Policy) -> None:
    """Has Slurm requeue the job of this process, where the policy says so. Slurm ends what is left of the job for it,
    this process with it: nothing comes after this. What goes wrong is said on standard error."""
    job = os.environ.get("SLURM_JOB_ID")
    if not policy.requeue or not job:
        return
    sys.stderr.write(f"job {job} is requeued\n")
    sys.stderr.flush()
    try:
        command = ["scontrol", "requeue", job]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        why = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    if why:
        sys.stderr.write(f"job {job} was not requeued: {why}; submit it again\n")
