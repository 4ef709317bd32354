"""A module around a model that `from_pretrained` has made parallel: a pooled encoder with a layer of its own."""

import pytest
import torch
from torch import nn
from transformers import AutoModel

from hf_parallel.apply.methods import find_models_inside
from hf_parallel.ask.config import ParallelConfig, SpecError
from tests import training
from tests.refusals import pattern_of_refusal
from tests.rows import CLASSES
from tests.training import Outcome, Script, activate


class Pooled(nn.Module):
    """The mean of the hidden states, a layer behind it, and a number of its own."""

    def __init__(self, folder: str):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder)
        torch.manual_seed(5)
        self.head = nn.Linear(64, CLASSES)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(-1)
        logits = self.scale * self.head((hidden * kept).sum(1) / kept.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(spec: str | None, out: str, folder: str) -> Outcome:
    """The Trainer script with that model."""
    data_ranks = activate(spec)
    return training.train(Script(model="bert"), folder, out, data_ranks, model=Pooled(folder))


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "tp=2,dp_shard=2"])
def test_as_in_one_process(spec, runs):
    """Loss, norm, gradients of all weights, evaluation, and the saved weights of both."""
    runs.compare(train, spec, runs.initial("bert"))


def test_a_pipeline_is_refused():
    around = nn.Sequential(nn.Linear(1, 1))
    around[0]._hf_parallel = "pipelined"
    with pytest.raises(SpecError, match=pattern_of_refusal("pp_size=2", "Sequential", works="pp_size=1 works")):
        find_models_inside(around, ParallelConfig.parse("pp=2"))
