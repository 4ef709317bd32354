"""What a dry run leaves out, runs once or looks up changes none of its numbers: nothing is less than a step needs."""

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hf_parallel.planner.dryrun import dry_run
from hf_parallel.planner.dryrun.recorder import Recorder
from hf_parallel.planner.dryrun.world import Shapes, pretend_world
from tests import models
from tests.distributed import run_alone
from tests.planner.measuring import numbers

#: Larger weights than activations: all forwards first are fullest at their end only if they are many.
HEAVY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SCHEDULES = {"1f1b": 9, "gpipe": 9, "interleaved_1f1b": 14, "zbv_zero_bubble": 9, "looped_bfs": 14}


def few_and_all(schedule, tp, sizes, rank):
    """Of so many micro-batches, told by fewer, and all run."""
    several = schedule not in ("1f1b", "gpipe")
    spec = f"pp=2,tp={tp},pipeline_schedule={schedule},pipeline_microbatches={SCHEDULES[schedule]}"
    config = models.CONFIGS["llama"](num_hidden_layers=4 if several else 2, **sizes)
    given = {"rows": SCHEDULES[schedule], "seq": 8, "precision": "fp32", "rank": rank}
    return [numbers(dry_run(config, spec, whole=whole, **given)) for whole in (False, True)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("heavy", [False, True])
def test_a_schedule_of_many_micro_batches_is_told_by_few(schedule, tp, heavy):
    few, all_ = run_alone(few_and_all, schedule, tp, HEAVY if heavy else {}, tp)  # a rank of the last stage
    assert few == all_
    assert min(few["peak"].values()) >= 0


def made_by_a_sum():
    """Bytes that appear while DTensors are added that no operation has met, and then again."""
    found = []
    with pretend_world(0, 4), contextlib.ExitStack() as fake:
        mesh = init_device_mesh("cpu", (4,))
        fake.enter_context(Shapes(allow_non_fake_inputs=True))
        given = DTensor.from_local(torch.empty(33, 515), mesh, [Shard(0)])
        for _ in range(2):
            with Recorder({}) as recorder:
                given + given
            found.append(sorted(size for _, size in recorder._events if size > 0))
    return found


def test_shapes_that_dtensors_ask_for_are_no_memory():
    """They make whole tensors once in a process: what ran before must not change a dry run."""
    assert run_alone(made_by_a_sum) == [[33 * 515 * 4]] * 2
