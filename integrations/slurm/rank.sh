#!/usr/bin/env bash
# In every task: Slurm's names for ranks become torch's, then the command runs in place of this shell.
set -euo pipefail
export RANK=$SLURM_PROCID
export LOCAL_RANK=$SLURM_LOCALID
export WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
    if ((LOCAL_RANK >= ${#gpus[@]})); then
        echo "rank.sh: local rank $LOCAL_RANK sees ${#gpus[@]} GPU(s); every task must see all GPUs of its node:" \
            "ask for --gpus-per-node=$LOCAL_WORLD_SIZE and not for --gpus-per-task" >&2
        exit 2
    fi
fi
exec "$@"
