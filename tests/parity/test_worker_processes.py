"""Worker processes of a loader: what those that are not forked get is pickled (all, from Python 3.14 on)."""

import pickle
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset

from hf_parallel.hooks.accelerate.shares import list_notes_on_workers
from tests import models
from tests.distributed import run
from tests.rows import Rows, Stream, pad
from tests.training import activate, axes, trainer_of

EACH = {"accelerator_config": {"dispatch_batches": False}}
ONE = {"dataloader_num_workers": 1}


def send_to_worker(spec: str, kind: type, arguments: dict, out: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return a batch of the loader's data set and collator, that of both as a worker gets them, and what is told."""
    sets = {"train_dataset": kind(22, 3), "data_collator": pad}
    spawned = {"dataloader_multiprocessing_context": "spawn", "dataloader_in_order": False}
    changes = {"max_steps": 3, "dataloader_num_workers": 2, **spawned, **arguments}
    loader = trainer_of(models.build("llama"), out, activate(spec), changes, **sets)[0].get_train_dataloader()
    assert loader.base_dataloader.multiprocessing_context.get_start_method() == "spawn"
    assert not loader.base_dataloader.in_order
    parts = (loader.base_dataloader.dataset, loader.base_dataloader.collate_fn)
    batches = []
    for dataset, collate in (parts, pickle.loads(ForkingPickler.dumps(parts))):
        rows = list(islice(dataset, 4)) if isinstance(dataset, IterableDataset) else [dataset[i] for i in range(4)]
        batch = collate(rows)
        batches.append(getattr(batch, "batch", batch)["input_ids"])
    return (*batches, list_notes_on_workers(loader))


@pytest.mark.parametrize(
    ("spec", "kind", "arguments", "told"),
    [
        ("dp_shard=2", Stream, {}, True),
        ("dp_shard=2", Stream, ONE, False),
        ("dp_shard=2", Stream, EACH, False),
        ("dp_shard=2", Rows, {}, False),
        ("dp_shard=2,pack_tokens=70", Rows, {}, False),
        ("dp_shard=2,padding_free=true", Rows, {}, False),
    ],
    ids=str,
)
def test_data_set_and_collator_reach_a_worker(spec, kind, arguments, told, tmp_path):
    """A stream that rank 0 reads by several workers makes other batches than one process does, and is told."""
    rank = partial(send_to_worker, spec, kind, arguments, str(tmp_path))
    for ours, of_worker, notes in run(rank, axes(spec)["world"], init=False):
        assert torch.equal(ours, of_worker)
        assert any("dataloader_num_workers=1 works" in note for note in notes) == told


def pickle_accelerator(spec: str) -> tuple[list, list]:
    """Return batches of a prepared loader, and those of its copy out of a pickled `Accelerator`."""
    activate(spec)
    accelerator = Accelerator()
    accelerator.prepare(DataLoader(list(range(11)), batch_size=2))
    copied = pickle.loads(pickle.dumps(accelerator))
    return tuple([batch.tolist() for batch in one._dataloaders[0]] for one in (accelerator, copied))


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_accelerator_with_loaders_is_pickled(spec):
    for rank, (ours, of_copy) in enumerate(run(partial(pickle_accelerator, spec), 2, init=False)):
        assert ours == of_copy != []
        assert ours[0] == ([2, 3] if rank and spec == "dp_shard=2" else [0, 1])
