"""What a step costs when gradients and optimizer state live on the host, or on its NVMe, and the CPU runs Adam.

ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840): 16-bit weights stay on the GPU, gradients go down and updated
weights come back, 2 bytes each per parameter and step over PCIe (section 3); the CPU's Adam is as fast as its memory
(table 4). ZeRO-Infinity (Rajbhandari et al., 2021, arXiv:2104.07857): the optimizer's state is read from NVMe and
written back, twice its size per step (section 4.1).
"""

from __future__ import annotations

from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job

_READ_AND_WRITTEN = 7  # states: weight, gradient and two moments read; weight and two moments written


def state_width(job: Job) -> float:
    """Bytes of one element of the optimizer's state: fp32, except where this package's engine trains in bf16."""
    return job.stored if job.engine == "hf_parallel" else 4.0


def host_bytes(parameters: float, job: Job) -> float:
    """What `parameters` whose optimizer runs on the host take there: gradient, weight, two moments."""
    return parameters * (job.stored + 3 * state_width(job)) if job.offload == "cpu" else 0.0


def pcie_bytes(parameters: float, job: Job) -> tuple[float, float]:
    """Per step: gradients down, updated weights up."""
    return parameters * job.stored, parameters * job.stored


def nvme_bytes(parameters: float, job: Job) -> float:
    """Per step: master weights and moments, read and written."""
    return 2 * 3 * state_width(job) * parameters if job.offload.startswith("nvme") else 0.0


def offload_times(parameters: float, job: Job, cluster: Cluster, backward: float) -> dict[str, float]:
    """Seconds after the last backward; all ranks of a node share its memory and its NVMe.

    Args:
        parameters: those that this rank updates.
        backward: seconds of the last backward, behind which gradients go down as they are made.
    """
    host, ranks = cluster.gpu.host, min(cluster.per_node, cluster.gpus)
    down, up = (size / host.pcie for size in pcie_bytes(parameters, job))
    adam = ranks * parameters * _READ_AND_WRITTEN * state_width(job) / host.bandwidth
    disk = ranks * nvme_bytes(parameters, job) / host.nvme
    return {
        "gradients to the host": max(0.0, down - backward),
        "optimizer": max(adam, disk, up),  # in tiles: one is updated while others travel (ZeRO-Offload, section 4.1)
    }
