"""Samplers and data sets of a script's own that are told each epoch by `set_epoch`: they draw as in one process."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from tests.distributed import run, run_alone
from tests.rows import Rows
from tests.training import activate, axes, check_numbers, fit, trainer_of

ROWS, BATCH, EPOCHS = 11, 4, 3


class Turning(BatchSampler):
    """Begins each epoch at another example."""

    epoch = 0

    def __iter__(self):
        order = [(place + 3 * self.epoch) % ROWS for place in range(ROWS)]
        return iter([order[start : start + self.batch_size] for start in range(0, ROWS, self.batch_size)])

    def set_epoch(self, epoch):
        self.epoch = epoch


class Changing(Dataset):
    """Other numbers in each epoch, as a data set that draws a mask or a crop anew has them."""

    epoch = 0

    def __init__(self):
        self.rows = Rows(ROWS, 11, length=33)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        row = dict(self.rows[index])
        row["labels"] = torch.where(torch.arange(33) % (self.epoch + 2) == 0, -100, row["labels"])
        return {"index": torch.tensor(index + 100 * self.epoch), **row}

    def set_epoch(self, epoch):
        self.epoch = epoch


def read(spec, own_sampler, shuffle):
    """The examples of a prepared loader, epoch after epoch, and the first ones of an epoch that is set by hand."""
    activate(spec)
    accelerator, data = Accelerator(cpu=True), Changing()
    size = BATCH // accelerator.num_processes
    order = {"batch_sampler": Turning(SequentialSampler(data), size, False)} if own_sampler else {"batch_size": size}
    torch.manual_seed(3)
    loader = accelerator.prepare(DataLoader(data, **order, **({"shuffle": True} if shuffle else {})))
    found = [accelerator.gather_for_metrics(batch["index"]).tolist() for _ in range(EPOCHS) for batch in loader]
    loader.set_epoch(7)
    return [*sum(found, []), *accelerator.gather_for_metrics(next(iter(loader))["index"]).tolist()]


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2,tp=2", "tp=2"])
@pytest.mark.parametrize(("own_sampler", "shuffle"), [(True, False), (False, True), (False, False)])
def test_loaders_tell_the_epoch(spec, own_sampler, shuffle):
    alone = run_alone(read, None, own_sampler, shuffle)
    assert {number // 100 for number in alone} == {*range(EPOCHS), 7}
    for found in run(read, axes(spec)["world"], spec, own_sampler, shuffle, init=False):
        assert found == alone


class Told(Changing):
    def __getitem__(self, index):
        return {key: value for key, value in super().__getitem__(index).items() if key != "index"}


def train(spec, out, folder):
    from transformers import AutoModelForCausalLM

    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    settings = {"num_train_epochs": EPOCHS, "max_steps": -1}
    trainer, recorder = trainer_of(model, out, data_ranks, settings, train_dataset=Told())
    return [log["loss"] for log in fit(trainer, recorder).logs]


def test_trainers_tell_the_epoch(runs, tmp_path):
    """A Trainer shuffles, so that accelerate has a sampler with an epoch of its own inside."""
    folder = runs.initial("llama")
    losses = run_alone(train, None, str(tmp_path / "one"), folder)
    check_numbers(run(train, 2, "dp_shard=2", str(tmp_path / "two"), folder, init=False), losses)
