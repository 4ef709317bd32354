"""What a pipeline keeps from step to step: nothing for the lengths it has seen."""

from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule

from hf_parallel import parallelize
from tests import models
from tests.distributed import run

LENGTHS = (33, 7, 13)


def kept(schedule: str) -> tuple[int, int, int]:
    """Schedules, bytes of their buffers and votes after steps of several lengths."""
    votes = 0
    # Of each stage in torch 2.11 to 2.14, of a schedule in torch 2.15
    voting = (
        *((PipelineStage, name) for name in ("_warmup_forward_vote", "_get_init_p2p_neighbors_ops")),
        (_PipelineSchedule, "_initialize_pipeline_distributed_state"),
    )
    kind, name = next((kind, name) for kind, name in voting if hasattr(kind, name))
    vote: Any = getattr(kind, name)

    def counted(self, *args, **kwargs):
        nonlocal votes
        votes += 1
        return vote(self, *args, **kwargs)

    setattr(kind, name, counted)  # torch 2.11 tries connections
    model = parallelize(models.build("llama").train(), f"pp=2,pipeline_schedule={schedule}")
    for length in LENGTHS:
        ids = torch.arange(4 * length).view(4, length) % models.VOCABULARY
        model(input_ids=ids, labels=ids).loss.backward()
    found = model._hf_parallel.pipeline.schedules
    stages = [stage for _, stages in found.values() for stage in stages]
    infos = [
        info for s in stages for kind in (s.args_recv_info, s.grad_recv_info) for one in kind.values() for info in one
    ]
    buffers = [getattr(info, "buffer", None) for info in infos]  # torch 2.11 has none for what comes from the script
    held = sum(buffer.nbytes for buffer in buffers if buffer is not None and not buffer.is_meta)
    return len(found), held, votes // (len(stages) if kind is PipelineStage else 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_lengths_leave_nothing(schedule):
    assert run(kept, 2, schedule) == [(1, 0, 1), (1, 0, 1)]
