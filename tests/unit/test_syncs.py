"""What makes the process wait for its accelerator: nothing of ours in a step once shapes have been seen."""

import functools

import pytest
import torch

import hf_parallel
from hf_parallel.config import ParallelConfig
from hf_parallel.hooks.peft.planned_adapters import lora
from hf_parallel.mesh import ParallelMesh
from tests import models
from tests.distributed import run_alone
from tests.pretend_gpu import NAME, CountSyncs, parallel, pretend_gpu, without_values

ADAPTERS = functools.partial(lora, 4, lora_dropout=0.1)
#: (spec, rank, model, with adapters, autocast): both ends of pipelines, shared heads, rows that need padding.
CASES = [
    ("tp=2", 1, "llama", False, True),
    ("tp=4", 3, "llama", True, False),
    ("tp=2,sequence_parallel=false", 0, "qwen3", True, True),
    ("tp=2,tp_overlap=true", 1, "llama", False, True),
    ("pp=2", 0, "llama", False, False),
    ("pp=2", 1, "qwen3", True, True),
    ("pp=2,pipeline_schedule=zbv_zero_bubble", 0, "llama", False, False),
    ("dp_shard=2", 0, "gpt2", True, True),
    ("pp=2,tp=2,dp_shard=2", 7, "qwen3", False, True),
]


def counted(spec: str, rank: int, model: str, adapters: bool, autocast: bool, train: bool = True) -> list[CountSyncs]:
    """Two steps' counts."""
    config = ParallelConfig.parse(spec)
    config = config.resolve(abs(config.world_size))
    seen = []
    with pretend_gpu(rank, config.world_size) as device:
        mesh = ParallelMesh.create(config, device)
        built = parallel(
            getattr(models, model)(num_hidden_layers=2 * config.pp_size), mesh, ADAPTERS() if adapters else None
        )
        with without_values(built, device):
            trained = [p for p in built.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
            for length in (33, 31):  # nothing is agreed on, or made, for another length
                ids = torch.zeros(4, length, dtype=torch.long, device=device)
                with CountSyncs() as syncs:
                    _step(built, ids, optimizer, autocast, train)
                seen.append(syncs)
    return seen


def _step(model, ids, optimizer, autocast, train):
    with torch.autocast(NAME, dtype=torch.bfloat16, enabled=autocast), torch.set_grad_enabled(train):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    if train:
        loss.backward()
        hf_parallel.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _ours(*case, **kwargs) -> list[dict[str, int]]:
    return [dict(syncs.ours) for syncs in counted(*case, **kwargs)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_a_step_waits_for_nothing(case):
    assert run_alone(_ours, *case)[1:] == [{}]
