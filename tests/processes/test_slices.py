"""A rank knows which slices it stores."""

import itertools

import pytest
import torch
from torch import nn

from hf_parallel.checkpoint.slices import find_local_part, read_part
from hf_parallel.model.anatomy import StoredOrder
from tests.distributed import run


def stored_parts(dp: int, tp: int) -> list[str]:
    """Cut parameters of many sizes by tp and FSDP2, and compare what is stored with what `find_local_part` says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    wrong = []
    for size, dim in itertools.product(range(1, 12), (0, 1, None)):
        own = torch.arange(size * 7.0).view(size, 7)
        order = StoredOrder(0, torch.arange(size).flip(0)) if size % 2 else None
        stored = order.to_stored(own) if order else own
        module = nn.Module()
        cut = stored if dim is None else distribute_tensor(stored, mesh["tp"], [Shard(dim)], src_data_rank=None)
        module.weight = nn.Parameter(cut)
        fully_shard(module, mesh=mesh["dp"])
        if not torch.equal(module.weight.to_local(), read_part(own, find_local_part(module.weight, order))):
            wrong.append(f"{size} rows, tp cuts dim {dim}: {module.weight.placements}")
    return wrong


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3), (1, 4), (4, 1)])
def test_a_rank_knows_what_it_stores(dp, tp):
    assert run(stored_parts, dp * tp, dp, tp) == [[]] * (dp * tp)
