"""A sharded model without a head gives its layers' hidden states, as in one process."""

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
