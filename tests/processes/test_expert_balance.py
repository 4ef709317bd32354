"""The auxiliary loss of routers over data ranks, of outputs with and without the routers' logits."""

import pytest
import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.axes.experts.balance import balance_over_data_ranks
from hf_parallel.ranks.mesh import ParallelMesh
from tests import distributed

CONFIG = {
    "vocab_size": 515,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "output_router_logits": True,
}


def without_logits(module, args, output):
    """As a fused head gives its output: with the field, and nothing in it."""
    output.router_logits = None
    return output


def gaps(hidden: bool) -> float:
    """Between the auxiliary loss of two data ranks' own rows and that of all of them in one process."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**CONFIG)).eval()
    rows = torch.randint(0, 515, (6, 33))
    alone = model(rows).aux_loss
    if hidden:
        model.register_forward_hook(without_logits)
    balance_over_data_ranks(model, ParallelMesh.create(ParallelConfig(dp_shard_size=2), torch.device("cpu")))
    own = rows[dist.get_rank() :: 2]
    return abs(float(model(own).aux_loss.detach() - alone))


@pytest.mark.parametrize("hidden", [False, True])
def test_auxiliary_loss_is_that_of_all_rows(hidden):
    assert max(distributed.run(gaps, 2, hidden)) < 1e-6  # fp32: sums in another order
