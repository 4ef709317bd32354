"""What fine-tuning scripts do beside training, as PEFT's own do: shuffling without a seed, resizing, placing."""

import os
import random
from functools import partial

import numpy
import pytest
import torch
from torch.utils.data import SubsetRandomSampler
from transformers import AutoModelForCausalLM, Trainer

from hf_parallel.ask.config import SpecError
from tests.distributed import run
from tests.rows import Rows, Stream
from tests.training import TRAIN_SEED, activate, fit, trainer_of


def habits(initial):
    """What a rank draws without a seed, and what loading and resizing say."""
    random.seed(int(os.environ["RANK"]))
    numpy.random.seed(int(os.environ["RANK"]))
    activate("tp=2,pp=2")
    drawn = random.random(), numpy.random.random()
    with pytest.raises(SpecError, match='device_map=balanced.* "auto" works'):
        AutoModelForCausalLM.from_pretrained(initial, device_map="balanced")
    model = AutoModelForCausalLM.from_pretrained(initial, device_map="auto")
    rows = model.config.vocab_size
    kept = model.resize_token_embeddings(rows - 3, pad_to_multiple_of=8)
    return drawn, model._hf_parallel.notes, kept is model.get_input_embeddings()


def test_habits_of_scripts(runs):
    """Every rank shuffles as rank 0 does; device_map="auto" is told of; a vocabulary that fits is kept."""
    ranks = run(partial(habits, runs.initial("llama")), 4, init=False)
    assert len({drawn for drawn, *_ in ranks}) == 1
    assert all(any("device_map=auto" in note for note in notes) and kept for _, notes, kept in ranks)


def test_experts_that_data_ranks_balance_apart_are_told():
    """Their auxiliary loss is not linear in the rows."""
    from types import SimpleNamespace

    from hf_parallel.hooks.report import _list_inexact_numbers

    model = SimpleNamespace(config=SimpleNamespace(output_router_logits=True))
    loaders = SimpleNamespace(gradient_state=SimpleNamespace(active_dataloader=None))
    trainer = SimpleNamespace(model=model, can_return_loss=True, accelerator=loaders)
    balance, contrast = _list_inexact_numbers(trainer, data_ranks=2)
    assert "balances experts" in balance
    assert "compares only its own" in contrast
    assert not _list_inexact_numbers(trainer, data_ranks=1)
    trainer.neftune_noise_alpha = 5.0
    assert "NEFTune" in _list_inexact_numbers(trainer, data_ranks=2)[-1]


class Chosen(Trainer):
    """Trains on 19 of the rows, whatever there are."""

    def _get_train_sampler(self, *args, **kwargs):
        return SubsetRandomSampler(range(18, -1, -1), torch.Generator().manual_seed(5))


def read_some(spec, out, folder, kind):
    """Train where the last batch is not as full as the length of the data set tells."""
    ranks, model = activate(spec), AutoModelForCausalLM.from_pretrained(folder)
    if kind is Stream:
        settings = {"max_steps": 3, "accelerator_config": {"dispatch_batches": False}}
        return fit(*trainer_of(model, out, ranks, settings, train_dataset=Stream(21, TRAIN_SEED)))
    return fit(*trainer_of(model, out, ranks, kind=kind, train_dataset=Rows(22, TRAIN_SEED)))


@pytest.mark.parametrize("kind", [Chosen, Stream])
def test_a_last_batch_that_the_length_does_not_tell(runs, kind):
    runs.compare(read_some, "dp_shard=2", runs.initial("llama"), kind)
