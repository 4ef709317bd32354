"""The rank of this process: by torch's variables, else by those of Slurm or MPI, which become torch's."""

from __future__ import annotations

import os
import subprocess

from hf_parallel.ask.spec import refuse

_PORTS = 20000  # of Slurm's jobs, each its own, above 10000
#: Names of WORLD_SIZE, RANK and LOCAL_RANK elsewhere. SLURM_NTASKS is none: a job's script has it, too.
_OTHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),  # MPICH and Intel MPI
)


def settle_launcher() -> bool:
    """Return whether a launcher has started this rank. Names of Slurm and MPI become torch's.

    Raises:
        SpecError: the variables do not say which rank this is, or where the ranks meet.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        given = (names for names in _OTHERS if names[1] in os.environ and _read_launcher_number(names[0], 1, "2") > 1)
        found = next(given, None)
        if found is None:
            return False
        os.environ.update(WORLD_SIZE=os.environ[found[0]], RANK=os.environ[found[1]])
        os.environ.setdefault("LOCAL_RANK", os.environ.get(found[2], "0"))
        if "SLURM_PROCID" in os.environ:
            if not os.environ.get("MASTER_ADDR"):  # a job's script may set it where scontrol does not answer
                os.environ["MASTER_ADDR"] = _read_first_host()
            os.environ.setdefault("MASTER_PORT", str(10000 + int(os.environ.get("SLURM_JOB_ID") or 0) % _PORTS))
        elif os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ["WORLD_SIZE"]:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    world_size = _read_launcher_number("WORLD_SIZE", 1, "2")
    os.environ.setdefault("WORLD_SIZE", "1")
    if world_size > 1 and "RANK" not in os.environ:
        refuse("RANK", f"not set, where WORLD_SIZE={world_size}", "RANK=0", alone=True)
    if "RANK" in os.environ and (rank := _read_launcher_number("RANK", 0, "0")) >= world_size:
        refuse(f"RANK={rank}", f"of WORLD_SIZE={world_size} the last is {world_size - 1}", "RANK=0", alone=True)
    if world_size > 1 and not os.environ.get("MASTER_ADDR"):
        refuse("MASTER_ADDR", f"not set, where WORLD_SIZE={world_size}", do="give rank 0's machine")
    return True


def _read_first_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    try:
        found = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30)
        return found.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        if nodes and not set(nodes) & set("[,"):
            return nodes
        refuse("MASTER_ADDR", "not set, and scontrol does not name the first host", "MASTER_ADDR=node1", cause=error)


def _read_launcher_number(name: str, default: int, works: str) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        refuse(f"{name}={text}", "not a number", f"{name}={works}")
    return int(text)


def read_local_world_size() -> int:
    """Return the number of processes on this machine, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
