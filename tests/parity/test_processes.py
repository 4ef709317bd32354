"""Sharding by hand: `num_processes` and `process_index` are a pair that counts data ranks; the main process is one.

And what is told of ranks of one model that read different rows.
"""

import time

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import ProfileKwargs, set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests import models
from tests.distributed import RankFailure, run
from tests.rows import Rows, pad
from tests.training import OwnTrainer, activate, check_alone, trainer_of

SPEC, WORLD, DATA_RANKS = "tp=2,dp_shard=2", 4, 2
GLOBAL_BATCH, STEPS = 6, 3


def loop(spec: str | None, folder: str) -> list[float]:
    """As accelerate's users shard by hand; the loader is not prepared."""
    data_ranks = activate(spec)
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
    assert len(losses) == STEPS
    return losses


@pytest.mark.parametrize("spec", ["tp=2", "pp=2,dp_shard=2"])
def test_same_losses_as_one_process(runs, spec):
    check_alone(loop, spec, runs.initial("llama"), init=False)


def who(out: str) -> dict:
    """What every way to ask says on this rank, and what runs here."""
    activate(SPEC)
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


def by_rank(uneven: bool = False) -> DataLoader:
    """As for DDP without Accelerate: every process reads rows of its own."""
    rows = Rows(24, seed=11, uneven_lengths=uneven)
    mine = DistributedSampler(rows, dist.get_world_size(), dist.get_rank(), shuffle=False)
    return DataLoader(rows, 4, sampler=mine, collate_fn=pad if uneven else None)


class ByRank(OwnTrainer):
    def get_train_dataloader(self):
        return by_rank()

    def get_eval_dataloader(self, eval_dataset=None):
        return by_rank()


def in_plain_loop(out: str) -> None:
    import hf_parallel

    model = hf_parallel.parallelize(models.build("llama").train(), "pp=2")
    for batch in by_rank(uneven=True):
        model(**batch).loss.backward()


def in_accelerate_loop(out: str) -> None:
    accelerator = _accelerator("tp=2")
    model = accelerator.prepare(models.build("llama").train())
    rows = Rows(24, seed=11)
    for batch in accelerator.prepare(DataLoader(rows, 4)):  # right, and for longer than the first steps
        model(**batch).loss.backward()
    model.eval()
    for batch in by_rank():
        model(**batch)


def in_trainer(out: str) -> None:
    """The second loader of a run; its loss does not call what the model is called by."""
    _accelerator("pp=2")
    sets = {name: Rows(24, seed=11) for name in ("train_dataset", "eval_dataset")}
    trainer, _ = trainer_of(models.build("llama"), out, settings={"max_steps": 5}, kind=ByRank, **sets)
    trainer.get_train_dataloader = lambda: Trainer.get_train_dataloader(trainer)
    trainer.train()
    trainer.evaluate()


def _accelerator(spec: str) -> Accelerator:
    activate(spec)
    return Accelerator(cpu=True)


@pytest.mark.parametrize("route", [in_plain_loop, in_accelerate_loop, in_trainer])
def test_ranks_of_one_model_that_read_different_rows(route, tmp_path):
    with pytest.raises(RankFailure) as caught:
        run(route, 2, str(tmp_path), init=route is in_plain_loop)
    assert caught.value.kinds == {0: "SpecError", 1: "SpecError"}
    assert "ranks 0 and 1 " in caught.value.message
    assert "accelerator.prepare(loader) works" in caught.value.message
    assert "num_replicas=1 and rank=0 here" in caught.value.message
