"""A sharded model without a head gives its layers' hidden states, as in one process."""

import pytest
import torch
from transformers import AutoModel

import hf_parallel
from tests import models
from tests.distributed import run
from tests.training import activate


def states():
    """Those of one process and of the same weights over data ranks."""
    torch.manual_seed(models.SEED)
    activate("dp_shard=2")
    model = AutoModel.from_config(models.bert()).eval()
    batch = {"input_ids": torch.arange(4, 37).view(1, -1), "output_hidden_states": True}
    alone = model(**batch).hidden_states
    hf_parallel.parallelize(model, "dp_shard=2")
    return alone, model(**batch).get("hidden_states")


def test_hidden_states_over_data_ranks():
    alone, sharded = run(states, 2, init=False)[0]
    torch.testing.assert_close(sharded, alone, rtol=1e-5, atol=1e-6)  # the same operations


def asked_by_config():
    """What a model's config asks for is refused as an argument is: its ranks have parts of the scores."""
    activate("cp=2")
    config = models.bert()
    config._attn_implementation, config.output_attentions = "eager", True
    model = AutoModel.from_config(config).eval()
    hf_parallel.parallelize(model, "cp=2")
    batch = {"input_ids": torch.arange(4, 37).view(1, -1)}
    with pytest.raises(ValueError, match="output_attentions=True .* cp_size=1"):
        model(**batch)
    return model(**batch, output_attentions=False).last_hidden_state.shape[1]


def test_attention_that_a_config_asks_for():
    assert run(asked_by_config, 2, init=False) == [33, 33]
