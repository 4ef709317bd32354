"""Loaders that nobody has prepared, of a trainer's `get_train_dataloader` and of loops: who reads which batches?"""

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, default_data_collator

from hf_parallel.hooks import report
from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.loops import losses
from tests.rows import Rows
from tests.training import activate, check_numbers, fit, trainer_of


class Unshared(Trainer):
    """Forgets `prepare`."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=default_data_collator)


class Shared(Unshared):
    def get_train_dataloader(self):
        return self.accelerator.prepare(super().get_train_dataloader())


class ByProcess(Unshared):
    """Gives each data rank its own examples, as ms-swift does."""

    def get_train_dataloader(self):
        rows = [self.train_dataset[at] for at in range(len(self.train_dataset))]
        self.train_dataset = rows[self.accelerator.process_index :: self.accelerator.num_processes]
        return super().get_train_dataloader()


def train(spec: str | None, out: str, kind: type[Trainer]):
    data_ranks = activate(spec)
    return fit(*trainer_of(models.build("llama"), out, data_ranks, kind=kind, train_dataset=Rows(16, 11, even=True)))


@pytest.mark.parametrize("kind", [Shared, Unshared])
@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_numbers_of_one_process(runs, kind, spec):
    """Where there is one data rank, nobody need share anything out."""
    if (spec, kind) != ("dp_shard=2", Unshared):
        runs.compare(train, spec, kind)


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "tp=2,dp_shard=2"])
def test_the_same_batches_on_all_data_ranks_are_refused(tmp_path, spec):
    axis = "dp_replicate" if "replicate" in spec else "dp_shard"
    with pytest.raises(RankFailure, match=rf"{axis}_size=2: .*Unshared .* 2 data ranks .*prepare.* {axis}_size=1"):
        run(train, 4 if "," in spec else 2, spec, str(tmp_path), Unshared, init=False)


def test_other_batches_on_each_data_rank_are_trained_on(tmp_path):
    outcomes = run(train, 2, "dp_shard=2", str(tmp_path), ByProcess, init=False)
    assert [len(outcome.logs) for outcome in outcomes] == [2, 2]


def loop(spec: str | None, folder: str, prepares: bool):
    """The losses of a loop with torch alone, or with a loader of Accelerate, and what is said of its batches."""
    activate(spec)
    lines = []
    report.say = lines.append
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    loader = DataLoader(Rows(16, 11, even=True), 4)
    batches = [batch["input_ids"] for batch in (Accelerator(cpu=True).prepare(loader) if prepares else loader)]
    return losses(model, batches), [line for line in lines if "same batch" in line]


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "tp=2"])
def test_a_loop_whose_loader_is_as_it_is(runs, spec):
    """It does what one process does, on each data rank: a line says how often, and what shares batches out."""
    expected, _ = run_alone(loop, None, runs.initial("llama"), False)
    for found, lines in run(loop, 2, spec, runs.initial("llama"), False, init=False):
        check_numbers([found], expected)
        assert len(lines) == (spec != "tp=2")
        assert all("accelerator.prepare(loader)" in line for line in lines)


def test_a_loop_whose_loader_is_prepared(runs):
    for found, lines in run(loop, 2, "dp_shard=2", runs.initial("llama"), True, init=False):
        assert len(found) == 2
        assert not lines
