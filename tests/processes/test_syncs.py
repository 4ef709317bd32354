"""What makes the process wait for its accelerator: nothing of ours in a step once shapes have been seen."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from torch.distributed.pipelining.schedules import _PipelineSchedule

import hf_parallel
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.hooks.peft.planned_adapters import plan_lora
from hf_parallel.ranks.mesh import ParallelMesh
from tests import models
from tests.distributed import run_alone
from tests.pretend_gpu import NAME, CountSyncs, parallel, pretend_gpu, without_values

ADAPTERS = functools.partial(plan_lora, 4, lora_dropout=0.1)
#: (spec, rank, model, with adapters, autocast): both ends of pipelines, shared heads, rows that need padding.
CASES = [
    ("tp=4", 3, "llama", True, False),
    ("tp=2,tp_overlap=true", 1, "llama", False, True),
    ("pp=2", 0, "llama", False, False),
    ("pp=2,pipeline_schedule=zbv_zero_bubble", 1, "llama", False, True),
    ("dp_shard=2", 0, "gpt2", True, True),
    ("pp=2,tp=2,dp_shard=2", 7, "qwen3", False, True),
]


def counted(spec: str, rank: int, model: str, adapters: bool, autocast: bool) -> list[CountSyncs]:
    """Two steps' counts."""
    config = ParallelConfig.parse(spec)
    config = config.resolve(abs(config.world_size))
    seen = []
    with pretend_gpu(rank, config.world_size) as device:
        mesh = ParallelMesh.create(config, device)
        built = parallel(
            getattr(models, model)(num_hidden_layers=config.pipeline_stages), mesh, ADAPTERS() if adapters else None
        )
        with without_values(built, device):
            trained = [p for p in built.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
            for length in (33, 31):  # nothing is agreed on, or made, for another length
                ids = torch.zeros(2, length, dtype=torch.long, device=device)
                with CountSyncs() as syncs:
                    _step(built, ids, optimizer, autocast)
                seen.append(syncs)
    return seen


def _step(model, ids, optimizer, autocast):
    with torch.autocast(NAME, dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    hf_parallel.clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _ours(*case) -> list[dict[str, int]]:
    return [dict(syncs.ours) for syncs in counted(*case)]


@pytest.fixture(scope="module")
def found() -> list[list[dict[str, int]]]:
    """By case, from a process in which autograd has not run: it counts devices when it first does."""
    ran = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case[:3])) for case in CASES])
def test_a_step_waits_for_nothing(found, case):
    """The first one may: its pipeline connects, and rows of shared heads move to the device.

    A pipeline asks the batch's mask once, as one process does, in place of each micro-batch and stage.
    """
    waits = {place.partition(":")[0]: count for place, count in found[case][1].items()}
    assert waits == ({"model/known_masks.py": 1} if "pp=" in CASES[case][0] else {})


def test_the_first_step_waits_where_it_has_to(found):
    """And the counter sees it."""
    kinds = [{place.split()[1] for place in steps[0]} for steps in found]
    assert kinds[0] == {"copy"}
    is_of_2_15 = hasattr(_PipelineSchedule, "_initialize_pipeline_distributed_state")  # where no vote is copied
    assert kinds[2] == ({"item"} if is_of_2_15 else {"copy", "item"})


if __name__ == "__main__":
    import peft  # noqa: F401 - once, not in each process

    print(json.dumps([run_alone(_ours, *case) for case in CASES]))
