"""What Accelerate is told beside a layout: engines of its own are refused by name, what means nothing is let be."""

import os
from datetime import timedelta

import pytest
import torch
from accelerate import Accelerator, utils
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from hf_parallel.ask.config import SpecError
from hf_parallel.ranks.groups import time_out
from tests import models
from tests.distributed import run, run_alone
from tests.refusals import pattern_of_refusal
from tests.rows import Rows
from tests.training import activate


def powers():
    """A hook that compresses what DDP sends."""
    return [utils.DistributedDataParallelKwargs(comm_hook=utils.DDPCommunicationHookType.POWER_SGD)]


#: What is asked for -> what the refusal names.
REFUSED = {
    "fsdp_plugin": lambda: {"fsdp_plugin": utils.FullyShardedDataParallelPlugin(fsdp_version=2)},
    "deepspeed_plugin": lambda: {"deepspeed_plugin": utils.DeepSpeedPlugin(zero_stage=2)},
    "parallelism_config": lambda: {"parallelism_config": utils.ParallelismConfig(dp_shard_size=2)},
    "mixed_precision=fp8": lambda: {"mixed_precision": "fp8"},
    "comm_hook=power_sgd": lambda: {"kwargs_handlers": powers()},
}


def said_of(call):
    with pytest.raises(SpecError) as caught:
        call()
    AcceleratorState._reset_state()
    return str(caught.value)


def average(accelerator):
    """Weights that data ranks keep for two steps, as the class is used."""
    model = torch.nn.Linear(3, 3)
    return LocalSGD(accelerator, model, local_sgd_steps=2)


def on_data_ranks():
    activate("dp_shard=2")
    found = {name: said_of(lambda make=make: Accelerator(cpu=True, **make())) for name, make in REFUSED.items()}
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    launched = said_of(lambda: Accelerator(cpu=True))
    del os.environ["ACCELERATE_USE_FSDP"]
    later = utils.InitProcessGroupKwargs(timeout=timedelta(seconds=77))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[later])
    return found, launched, said_of(lambda: average(accelerator)), time_out()


def on_one():
    """One data rank: as in one process neither of the two does anything, and objects are what they were."""
    activate("tp=2")
    accelerator = Accelerator(cpu=True, kwargs_handlers=powers())
    with average(accelerator) as averaging:
        averaging.step()
    batch = {"rows": torch.arange(5), "texts": ["a", "b"]}
    gathered = accelerator.gather_for_metrics(batch, use_gather_object=True), utils.gather_object(batch)
    return averaging.enabled, all(found is batch for found in gathered)


def test_settings_on_data_ranks():
    found, launched, averaged, limit = run(on_data_ranks, 2, init=False)[0]
    assert {name: name in text and "works" in text for name, text in found.items()} == dict.fromkeys(found, True)
    assert "ACCELERATE_USE_FSDP" in launched
    assert "hf-parallel migrate" in launched
    assert "LocalSGD" in averaged
    assert limit == timedelta(seconds=77)


def test_settings_on_one_data_rank():
    assert run(on_one, 2, init=False) == [(False, True)] * 2


def train_without_autocast(spec):
    """Losses of a loop that asks for 16 bits, and switches autocast off; its parts are prepared one by one."""
    data_ranks = activate(spec)
    switched_off = utils.AutocastKwargs(enabled=False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[switched_off])
    model = models.build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare_model(model)
    optimizer, losses = accelerator.prepare_optimizer(optimizer), []
    for batch in accelerator.prepare_data_loader(DataLoader(Rows(24, 3, even=True), 8 // data_ranks)):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


@pytest.mark.parametrize("spec", ["dp_shard=2", "cp=2", "pp=2", "tp=2"])
def test_autocast_that_is_switched_off(spec):
    expected = run_alone(train_without_autocast, None)
    for losses in run(train_without_autocast, 2, spec, init=False):
        assert losses == pytest.approx(expected, rel=1e-5)  # fp32; in bf16 the first one was 2e-4 off


def compare_shapes(spec):
    """What is found of unlike shapes, and of a last batch of which data ranks have unlike parts."""
    activate(spec)
    accelerator = Accelerator()
    mine = torch.ones(2, 3 + accelerator.process_index)
    found = []
    for collective in (accelerator.gather, accelerator.reduce, utils.reduce, utils.gather):
        with pytest.raises(utils.operations.DistributedOperationException) as caught:
            collective(mine)
        found.append(str(caught.value))
    loader = accelerator.prepare(DataLoader(torch.arange(7.0)[:, None], 2))
    rows = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    return found, accelerator.gather(mine[:, :3]).shape, accelerator.reduce(mine[:, :3]).shape, rows.flatten().tolist()


def test_debug_mode_compares_shapes():
    """`ACCELERATE_DEBUG_MODE` names the shapes of all data ranks; the start of a last batch is none."""
    for found, gathered, reduced, rows in run(
        compare_shapes, 2, "dp_shard=2", init=False, env={"ACCELERATE_DEBUG_MODE": "1"}
    ):
        assert all("[2, 3]" in words and "[2, 4]" in words for words in found)
        assert (gathered, reduced) == ((4, 3), (2, 3))
        assert rows == list(range(7))


class Batches(Dataset):
    """A data set whose examples are batches."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == len(self):
            raise IndexError(index)
        return torch.arange(4) + 4 * index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Batches())


def read_batches_without_size(kind):
    activate("dp_shard=2")
    with pytest.raises(SpecError, match=pattern_of_refusal("batch_size=None", 2, works="dispatch_batches=True works")):
        Accelerator(dataloader_config=utils.DataLoaderConfiguration(dispatch_batches=False)).prepare(
            DataLoader(kind(), batch_size=None)
        )
    accelerator = Accelerator(dataloader_config=utils.DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(kind(), batch_size=None))
    by_sampler = DataLoader(torch.arange(20), sampler=BatchSampler(range(20), 4, False), batch_size=None)
    by_sampler = Accelerator().prepare(by_sampler)
    read = [torch.cat([accelerator.gather(batch) for batch in some]) for some in (loader, by_sampler)]
    return [sorted(set(rows.tolist())) for rows in read]


@pytest.mark.parametrize("kind", [Batches, Stream])
def test_batches_without_a_size_are_dispatched_or_refused(kind):
    for read in run(read_batches_without_size, 2, kind, init=False):
        assert read == [list(range(20))] * 2
