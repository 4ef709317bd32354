"""The Slurm scripts without Slurm: `srun` and `scontrol` are stubs, everything else is the real shell."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SLURM = REPOSITORY / "integrations" / "slurm"

#: Node names one per line, more than a pipe holds: a reader that stops after the first line would kill the writer.
SCONTROL = 'test "$1 $2 $3" = "show hostnames big[1-9999]" && for i in $(seq 9999); do echo "big$i"; done'
#: Writes its words one per line, and the meeting point.
SRUN_RECORDS = 'printf "%s\\n" "$@" > "$RECORD"; echo "$MASTER_ADDR:$MASTER_PORT" > "$RECORD.address"'
#: Two nodes of two tasks, one after the other; options of srun itself all begin with --.
SRUN_RUNS = """
while [[ $1 == --* ]]; do shift; done
for task in 0 1 2 3; do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NTASKS=4 SLURM_NNODES=2 "$@" || exit
done
"""
PYTHON_TELLS = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $OMP_NUM_THREADS $MASTER_ADDR $*"'


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job script, with a folder of stubs in front of PATH."""
    return {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "RECORD": str(tmp_path / "words"),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "big[1-9999]",
        "SLURM_CPUS_PER_TASK": "6",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }


def stub(folder: Path, **programs: str) -> None:
    for name, body in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)


def bash(script: Path, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(script), *words], env=env, capture_output=True, text=True, timeout=60)


def test_launch_composes_one_task_per_gpu(tmp_path: Path, job: dict[str, str]) -> None:
    stub(tmp_path, scontrol=SCONTROL, srun=SRUN_RECORDS)
    done = bash(SLURM / "launch.sh", "--parallel", "tp=2,pp=2", "train.py", "--run_name", "two words", env=job)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "words").read_text().splitlines() == [
        *("--kill-on-bad-exit=1", "--export=ALL", "--cpus-per-task=6", "bash", str(SLURM / "rank.sh")),
        *("python", "-m", "hf_parallel", "--parallel", "tp=2,pp=2", "train.py", "--run_name", "two words"),
    ]
    assert (tmp_path / "words.address").read_text() == "big1:24567\n"


def test_every_task_gets_its_rank(tmp_path: Path, job: dict[str, str]) -> None:
    stub(tmp_path, scontrol=SCONTROL, srun=SRUN_RUNS, python=PYTHON_TELLS)
    done = bash(SLURM / "launch.sh", "--parallel", "tp=2", "train.py", env=job)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{rank} {local} 4 2 6 big1 -m hf_parallel --parallel tp=2 train.py"
        for rank, local in [(0, 0), (1, 1), (2, 0), (3, 1)]
    ]


def test_settings_of_the_user_win(tmp_path: Path, job: dict[str, str]) -> None:
    stub(tmp_path, scontrol=SCONTROL, srun=SRUN_RUNS, mypython=PYTHON_TELLS)
    chosen = {"MASTER_ADDR": "big1-ib0", "PYTHON": "mypython", "OMP_NUM_THREADS": "3"}
    done = bash(SLURM / "launch.sh", "train.py", env=job | chosen)

    assert done.stdout.splitlines()[0] == "0 0 4 2 3 big1-ib0 -m hf_parallel train.py"


def test_a_failed_rank_fails_the_job(tmp_path: Path, job: dict[str, str]) -> None:
    stub(tmp_path, scontrol=SCONTROL, srun=SRUN_RUNS, python="exit 7")
    assert bash(SLURM / "launch.sh", "train.py", env=job).returncode == 7


def test_a_task_that_does_not_see_its_gpu_says_what_to_ask_for(tmp_path: Path, job: dict[str, str]) -> None:
    stub(tmp_path, scontrol=SCONTROL, srun=SRUN_RUNS, python=PYTHON_TELLS)
    done = bash(SLURM / "launch.sh", "train.py", env=job | {"CUDA_VISIBLE_DEVICES": "0"})

    assert done.returncode == 2
    assert "local rank 1 sees 1 GPU(s)" in done.stderr
    assert "--gpus-per-node=2" in done.stderr


@pytest.mark.parametrize("words", [(), ("--parallel", "pp=4", "mine.py")], ids=["example", "own script"])
def test_job_script_hands_its_words_to_the_runner(tmp_path: Path, job: dict[str, str], words: tuple[str, ...]) -> None:
    stub(tmp_path, scontrol=SCONTROL, srun=SRUN_RECORDS)
    (tmp_path / "integrations").symlink_to(REPOSITORY / "integrations")
    done = bash(SLURM / "train.sbatch", *words, env=job)

    assert done.returncode == 0, done.stderr
    recorded = (tmp_path / "words").read_text().splitlines()
    given = recorded[recorded.index("hf_parallel") + 1 :]
    if words:
        assert given == list(words)
    else:
        assert given[:3] == ["--parallel", "tp=4,dp_shard=-1", "examples/train_language_model.py"]
        assert (REPOSITORY / given[2]).is_file()
