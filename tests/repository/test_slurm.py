"""srun starts the ranks, with Slurm's own daemons on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lossycoll.cli.launcher import on_one_machine
from tests.support.harness import free_port, warm_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONF = """\
ClusterName=one
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES State=UP
"""
RANK = (
    'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$0" "$@"'
)
"""What docs/several-machines.md has srun run."""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Slurm's daemons; variables for its commands."""
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(folder=folder, control=free_port(), node=free_port(), cpus=os.cpu_count())
    )
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    env = {**os.environ, "SLURM_CONF": str(conf)}
    munge = [
        *("munged", "--foreground", "--force", f"--key-file={key}"),
        *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"),
        *(f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"),
    ]
    running = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]):
            log = (folder / f"{command[0]}.out").open("w")
            running.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
            log.close()
            time.sleep(0.5)
        end = time.monotonic() + 60
        while (
            "idle"
            not in subprocess.run(
                ["sinfo"], env=env, capture_output=True, text=True, check=False
            ).stdout
        ):
            logs = "".join(each.read_text() for each in folder.glob("*.out"))
            assert time.monotonic() < end, logs
            time.sleep(0.5)
        yield env
    finally:
        for each in reversed(running):
            each.terminate()
            each.wait()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, ("srun", "slurmctld", "slurmd", "munged"))),
    reason="needs root and Slurm: apt-get install slurmctld slurmd slurm-client munge",
)
def test_srun_starts_the_ranks(tmp_path: Path) -> None:
    with cluster(tmp_path) as env:
        env |= {k: v for k, v in on_one_machine().items() if v is not None}
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "LOSSYCOLL_INJECT": "loss=0.05,seed=7",
            "LOSSYCOLL_LOG": "warning",
        }
        found = subprocess.run(
            [
                *("srun", "--ntasks=2", "bash", "-c", RANK),
                *(warm_python(), str(EXAMPLES / "ddp_buffers.py")),
            ],
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"ddp_buffers: .* [1-9]\d* packets dropped", found.stdout), found.stdout
