"""How long collectives may take: on every group what the script asks for; and on which device they run."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run


def limits() -> set[float]:
    """Seconds, over all groups of this process."""
    groups = dist.distributed_c10d._world.pg_map
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [
        (["--ddp_timeout", "70"], "60", 70),
        (["--ddp_timeout=70", "--other"], "", 70),
        ([], "60", 60),
        ([], "", 1800),  # the default of TrainingArguments, as without a layout; NCCL's own is 600
    ],
)
def test_groups_of_the_runner(flags, variable, expected, tmp_path):
    def start():
        from transformers import TrainingArguments

        from hf_parallel.hooks import activation, runtime
        from hf_parallel.ranks import groups

        sys.argv = ["train.py", *flags]
        activation.activate("tp=2", source="test")
        runtime.mesh().host_group  # noqa: B018 - made when it is first asked for
        found = [limits()]
        TrainingArguments(str(tmp_path), use_cpu=True, **({"ddp_timeout": 70} if flags else {}))
        found.append(limits())
        TrainingArguments(str(tmp_path), use_cpu=True, ddp_timeout=45)  # built in code
        groups.make_host_group()
        return [*found, limits()]

    for found in run(start, 2, init=False, env={"HF_PARALLEL_TIMEOUT": variable}):
        assert found == [{expected}, {expected}, {45}]


def test_groups_of_a_scripts_own():
    """A script that has made the process group has said how long; TrainingArguments leave that as it is."""

    def start():
        from transformers import TrainingArguments

        from hf_parallel.ask.config import ParallelConfig
        from hf_parallel.hooks import activation
        from hf_parallel.ranks.mesh import ParallelMesh

        ParallelMesh.create(ParallelConfig.parse("pp=2"), torch.device("cpu"))
        found = limits()
        activation.activate("tp=2", source="test")
        TrainingArguments("unused", use_cpu=True, ddp_timeout=45)
        return found | limits()

    assert run(start, 2, timeout=99) == [{99}, {99}]


class Accelerator:
    """Stands for `torch.accelerator` on a machine with `count` devices, of which `index` is chosen."""

    def __init__(self, count: int, index: int):
        self.count, self.index = count, index

    def is_available(self):
        return True

    def current_accelerator(self):
        return torch.device("cuda")

    def device_count(self):
        return self.count

    def current_device_index(self):
        return self.index

    def set_device_index(self, index):
        self.index = index


@pytest.mark.parametrize(
    ("count", "chosen", "local_rank", "expected"),
    [
        (4, 0, "2", 2),  # nothing was set
        (4, 3, "2", 3),  # the script has chosen
        (1, 0, "2", 0),  # its launcher shows each process its own device
        (4, 0, None, 0),
    ],
)
def test_default_device(monkeypatch, count, chosen, local_rank, expected):
    from hf_parallel.apply.parallelize import choose_default_device

    fake = Accelerator(count, chosen)
    monkeypatch.setattr(torch, "accelerator", fake)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setitem(os.environ, "LOCAL_RANK", local_rank)
    assert choose_default_device() == torch.device("cuda", expected)
    assert fake.index == expected  # kernels without a device go there too
