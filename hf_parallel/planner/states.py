"""Bytes of weights, gradients and optimizer states, on the GPU or offloaded to the host, and the seconds that costs.

ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840): 16-bit weights stay on the GPU, gradients go down and updated
weights come back, 2 bytes each per parameter and step over PCIe (section 3); the CPU's Adam is as fast as its memory
(table 4). ZeRO-Infinity (Rajbhandari et al., 2021, arXiv:2104.07857): the optimizer's state is read from NVMe and
written back, twice its size per step (section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_parallel.ask.keys.data import parameters_rest
from hf_parallel.ask.spec import refuse
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job

#: Bytes per number of quantised transfers: the code, and a scale of 2 bytes for each 64.
CODE_BYTES = {"int8": 1 + 2 / 64, "fp8": 1 + 2 / 64, "int4": 0.5 + 2 / 64}
ADAPTER_WIDTH = 4  # bytes: peft keeps adapters in fp32 beside a 16-bit base
#: Bytes per weight in 4 bits: its code, and its part of the largest value of a block of 64 weights: fp32, or,
#: doubly quantised, in 8 bits with a scale in fp32 for 256 (Dettmers et al., 2023, arXiv:2305.14314, section 3).
PACKED_BYTES = {"nf4": 1 / 2 + 4 / 64, "nf4_double": 1 / 2 + 1 / 64 + 4 / (64 * 256)}
_READ_AND_WRITTEN = 7  # states on the host: weight, gradient, two moments read; weight and two moments written
#: Of two 8-bit moments, with a scale in fp32 for each block of 256 (Dettmers et al., 2022, arXiv:2110.02861).
_EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of weights that compute, of gradients, and of what the optimizer alone reads (K)."""

    weights: float = 2.0
    gradients: float = 2.0
    optimizer: float = 12.0


def zero_states(parameters: float, shards: int, stage: int, state: StateBytes | None = None) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer on each of `shards` ranks: ZeRO's table 1.

    Stage 0 holds (2 + 2 + K) x parameters, 1 divides K by the shards, 2 the gradients too, 3 everything.
    """
    state = state or StateBytes()
    return {
        "weights": parameters * state.weights / (shards if stage >= 3 else 1),
        "gradients": parameters * state.gradients / (shards if stage >= 2 else 1),
        "optimizer": parameters * state.optimizer / (shards if stage >= 1 else 1),
    }


def count_moment_bytes(optimizer: str, width: float) -> float:
    """Return the bytes that an optimizer keeps per parameter of `width` bytes, besides master weights."""
    known = {"adamw": 2 * width, "adamw_8bit": _EIGHT_BIT_MOMENTS, "sgd": 0.0, "sgd_momentum": width}
    if optimizer not in known:
        refuse(f"optimizer={optimizer}", f"not one of {', '.join(known)}", "adamw")
    return known[optimizer]


def count_summed_width(job: Job) -> float:
    """Return the bytes per gradient while ranks and micro-batches add to it."""
    return max(4.0, job.stored) if job.habits.fp32_sums else float(job.stored)


def state_bytes(job: Job, zero_stage: int) -> StateBytes:
    """Return the bytes that training keeps per parameter that is not an adapter's.

    Gradients are summed as `Job.gradient_bytes` says. Under ZeRO-3 the sharded master copy is the only one: the 16-bit
    weights exist in gathered layers alone, and so do 16-bit gradients beside their sum. Without master weights, and in
    fp32, all states have the weights' own dtype.
    """
    habits, width = job.habits, job.stored
    if job.lora:
        return StateBytes(width, 0, 0)
    if width == 4 or not habits.master_weights:
        state = StateBytes(width, width, count_moment_bytes(job.optimizer, width))
    else:
        gradients = min(4, job.gradient_bytes) if zero_stage == 3 else job.gradient_bytes
        state = StateBytes(0 if zero_stage == 3 else 2, gradients, 4 + count_moment_bytes(job.optimizer, 4))
    if job.offload == "none":
        return state
    if habits.fsdp2 and parameters_rest(job.offload):
        return StateBytes(0, 0, 0)
    return StateBytes(width, state.gradients if habits.fsdp2 else 0, 0)


def count_packed_width(job: Job) -> float:
    """Return the bytes per weight of a linear in 4 bits.

    This package keeps the largest values in fp32, as they were rounded.
    """
    return PACKED_BYTES["nf4" if job.engine == "hf_parallel" else job.four_bit]


def count_adapter_width(job: Job) -> int:
    """Return the bytes of an adapter's number as layers compute with it."""
    return job.stored if job.lowered else ADAPTER_WIDTH


def count_adapter_bytes(job: Job) -> StateBytes:
    """Return the bytes that training keeps per parameter of an adapter."""
    if job.habits.fsdp2 and parameters_rest(job.offload):
        return StateBytes(0, 0, 0)
    moments = count_moment_bytes(job.optimizer, ADAPTER_WIDTH) if job.offload == "none" else 0.0
    return StateBytes(ADAPTER_WIDTH, ADAPTER_WIDTH, moments)


# ---- offloading -----------------------------------------------------------------------------------------------------


def state_width(job: Job) -> float:
    """Return the bytes of one element of the optimizer's state: fp32, except where training has no fp32 weights."""
    return 4.0 if job.habits.master_weights else float(job.stored)


def count_host_bytes(parameters: float, job: Job) -> float:
    """Return the bytes of host memory for `parameters` whose optimizer runs there: gradient, weight, two moments."""
    if job.offload == "optimizer":
        return parameters * 2 * state_width(job)
    if job.offload == "nvme_all":
        return parameters * job.stored
    return parameters * (job.stored + 3 * state_width(job)) if job.offload == "cpu" else 0.0


def count_nvme_bytes(parameters: float, job: Job) -> float:
    """Per step: master weights and moments, read and written; weights that are gathered from files."""
    gathered = 2 * job.stored if job.offload == "nvme_all" else 0  # of the parameters; once in each direction
    return (2 * 3 * state_width(job) + gathered) * parameters if job.offload.startswith("nvme") else 0.0


def offload_seconds(parameters: float, job: Job, cluster: Cluster, backward: float) -> dict[str, float]:
    """Return the seconds after the last backward; all ranks of a node share its memory and its NVMe.

    Args:
        parameters: those that this rank updates.
        backward: seconds of the last backward, behind which gradients go down as they are made.
    """
    host, ranks = cluster.gpu.host, min(cluster.per_node, cluster.gpus)
    down = up = parameters * job.stored / host.pcie  # gradients, updated weights
    adam = ranks * parameters * _READ_AND_WRITTEN * state_width(job) / host.bandwidth
    disk = ranks * count_nvme_bytes(parameters, job) / host.nvme
    return {
        "gradients to the host": max(0.0, down - backward),
        "optimizer": max(adam, disk, up),  # in tiles: one is updated while others travel (ZeRO-Offload, section 4.1)
    }
