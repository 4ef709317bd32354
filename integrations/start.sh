#!/usr/bin/env bash
# In every pod: torchrun over all pods of the job, and the runner on each of its processes.
#
#   start.sh --parallel SPEC train.py args…        what follows `start.sh` is what follows `python -m hf_parallel`
#
# The manifest says: NODES (pods), NODE_RANK (this one's index), HEAD (host name of pod 0), JOB (a name that no other
# job has), and may say GPUS (processes per pod; default: the GPUs of the pod, or one).
set -euo pipefail
: "${NODES:?}" "${NODE_RANK:?}" "${HEAD:?}" "${JOB:?}"

# A pod that comes back is a new launch: go on from the newest checkpoint of Trainer's folder, if it has one.
folder="" previous=""
for argument in "$@"; do
    if [[ $previous == --output_dir ]]; then
        folder=$argument
    elif [[ $argument == --output_dir=* ]]; then
        folder=${argument#*=}
    fi
    previous=$argument
done
if [[ -n $folder && " $* " != *" --resume_from_checkpoint"* ]]; then
    # A folder has this name only when all of it is written.
    newest=$({ find "$folder" -maxdepth 1 -type d -name 'checkpoint-*' 2> /dev/null || true; } | sort -V | tail -n 1)
    if [[ -n $newest ]]; then
        set -- "$@" --resume_from_checkpoint "$newest"
    fi
fi

if [[ -z ${GPUS:-} ]]; then
    GPUS=$(nvidia-smi --list-gpus 2> /dev/null | wc -l) || GPUS=0
fi
((GPUS > 0)) || GPUS=1
# Kubernetes sends SIGTERM before it takes a pod away: the ranks finish their step and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-90}
exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv-id "$JOB" --rdzv-backend c10d --rdzv-endpoint "$HEAD:29400" --rdzv-conf "is_host=$((NODE_RANK == 0))" \
    -m hf_parallel "$@"
