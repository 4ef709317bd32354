"""A trainer's own `get_train_dataloader` that returns a loader as it is: who reads which batches?"""

import pytest
from torch.utils.data import DataLoader
from transformers import Trainer, default_data_collator

from tests import models
from tests.distributed import RankFailure, run
from tests.rows import Rows
from tests.training import activate, fit, trainer_of


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
