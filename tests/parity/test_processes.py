"""Sharding by hand: `num_processes` and `process_index` are a pair that counts data ranks; the main process is one."""

import time

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import ProfileKwargs, set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, TrainingArguments

from tests.distributed import run, run_alone
from tests.rows import Rows
from tests.training import axes, close, none

SPEC, WORLD, DATA_RANKS = "tp=2,dp_shard=2", 4, 2
GLOBAL_BATCH, STEPS = 6, 3


def loop(folder: str, data_ranks: int) -> list[float]:
    """As accelerate's users shard by hand; the loader is not prepared."""
    accelerator = Accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = Rows(GLOBAL_BATCH * STEPS, seed=11, length=15)
    mine = DistributedSampler(rows, accelerator.num_processes, accelerator.process_index, shuffle=False)
    losses = []
    for batch in DataLoader(rows, GLOBAL_BATCH // data_ranks, sampler=mine):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def parallel_loop(spec: str, *args) -> list[float]:
    from hf_parallel import hooks

    hooks.activate(spec, source="test")
    return loop(*args, axes(spec)["data_ranks"])


@pytest.mark.parametrize("spec", ["tp=2", "pp=2,dp_shard=2"])
def test_same_losses_as_one_process(runs, spec):
    folder = runs.initial("llama")
    expected = run_alone(loop, folder, 1)
    for rank, losses in enumerate(run(parallel_loop, axes(spec)["world"], spec, folder, init=False)):
        assert len(losses) == len(expected) == STEPS
        pairs = zip(losses, expected, strict=True)
        none([line for ours, theirs in pairs for line in close(f"rank {rank}", ours, theirs, 1e-5)])


def who(out: str) -> dict:
    """What every way to ask says on this rank, and what runs here."""
    from hf_parallel import hooks

    hooks.activate(SPEC, source="test")
    arguments, profiled = TrainingArguments(out, use_cpu=True), ProfileKwargs(output_trace_dir=f"{out}/traces")
    accelerator, state = Accelerator(cpu=True, kwargs_handlers=[profiled]), PartialState()
    ran = []
    for index in range(accelerator.num_processes):
        accelerator.on_process(lambda index=index: ran.append(index), process_index=index)()
    accelerator.on_main_process(lambda: ran.append("main"))()
    accelerator.on_last_process(lambda: ran.append("last"))()
    with arguments.main_process_first(local=False):
        time.sleep(0.2 * state.is_main_process)
        entered = time.monotonic()
    with accelerator.profile():
        pass
    with accelerator.split_between_processes(list(range(5))) as part:
        rows = Dataset.from_dict({"row": range(6)}).shard(accelerator.num_processes, accelerator.process_index)["row"]
    set_seed(7, device_specific=True)
    return {
        "counts": {accelerator.num_processes, state.num_processes, arguments.world_size},
        "indices": {accelerator.process_index, state.process_index, arguments.process_index},
        "main": {state.is_main_process, accelerator.is_main_process, arguments.should_save},
        "last": {state.is_last_process, accelerator.is_last_process},
        "draw": float(torch.rand(())),
        "part": part,
        "rows": list(rows),
        "entered": entered,
        "ran": ran,
    }


def test_indices_are_of_data_ranks_and_the_main_process_is_one(tmp_path):
    found = run(who, WORLD, str(tmp_path), init=False)
    assert [rank["counts"] for rank in found] == [{DATA_RANKS}] * WORLD
    assert [rank["indices"] for rank in found] == [{0}, {0}, {1}, {1}]
    assert [rank["main"] for rank in found] == [{True}, {False}, {False}, {False}]
    assert [rank["last"] for rank in found] == [{False}, {False}, {False}, {True}]
    assert [rank["part"] for rank in found] == [[0, 1, 2]] * 2 + [[3, 4]] * 2
    assert [rank["rows"] for rank in found] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2
    assert [rank["ran"] for rank in found] == [[0, "main"], [], [1], ["last"]]
    assert found[0]["draw"] == found[1]["draw"] != found[2]["draw"] == found[3]["draw"]
    assert all(rank["entered"] >= found[0]["entered"] for rank in found)
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {f"profile_{rank}.json" for rank in range(WORLD)}
