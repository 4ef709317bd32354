#!/usr/bin/env bash
# Inside a Slurm job: one task per GPU (or per CPU process), each running the hf_parallel runner.
#
#   launch.sh --parallel SPEC train.py args…        what follows `launch.sh` is what follows `python -m hf_parallel`
#
# The first node of the job is the meeting point. When one rank fails, --kill-on-bad-exit ends all others and srun
# names the task and its node.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${MASTER_ADDR:-${nodes%%$'\n'*}}
export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))} # two jobs on one node must not meet

# Since Slurm 22.05 srun no longer takes --cpus-per-task from sbatch; --export=ALL holds under `sbatch --export=NONE`.
exec srun --kill-on-bad-exit=1 --export=ALL --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    bash "$here/rank.sh" "${PYTHON:-python}" -m hf_parallel "$@"
