"""What enters a region of tensor parallelism: known inputs, and no others that train."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.axis import SequenceParallelFlag
from hf_parallel.axes.tensor.region import Region
from hf_parallel.axes.tensor.sequence_parallel import _pad_mask
from tests.distributed import RankFailure, run


class Attention(nn.Module):
    """An attention that reads `rel_embeddings` and `other` besides its hidden states."""

    def forward(self, hidden_states, other=None, rel_embeddings=None, residual=None):
        return hidden_states


def enter(*args: torch.Tensor, **kwargs: torch.Tensor) -> tuple[tuple, dict]:
    owner = Attention()
    return Region(owner, dist.group.WORLD, SequenceParallelFlag(False), at_owner=True).enter_owner(owner, args, kwargs)


@pytest.mark.parametrize("by_name", [True, False])
def test_an_unknown_input_with_a_gradient_is_refused(by_name):
    hidden, other = torch.ones(1, 2, 4), torch.ones(4, requires_grad=True)
    with pytest.raises(RankFailure) as caught:
        run(lambda: enter(hidden, other=other) if by_name else enter(hidden, other), 2)
    assert caught.value.kind == "NotImplementedError"
    assert [word for word in ("Attention", "other", "tp_size=1") if word not in caught.value.message] == []


def test_known_inputs_and_those_without_a_gradient_enter():
    hidden, trained = torch.ones(1, 2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    for args, kwargs in run(lambda: enter(hidden, torch.ones(4), rel_embeddings=trained, residual=trained), 2):
        assert [tensor.tolist() for tensor in args] == [hidden.tolist(), [1.0] * 4]
        assert {name: tensor.tolist() for name, tensor in kwargs.items()} == {
            name: [1.0] * 4 for name in ("rel_embeddings", "residual")
        }


def test_the_gradient_of_what_heads_read_besides_is_summed():
    def gradients():
        owner, hidden = Attention(), torch.ones(1, 2, 4)
        shared, added = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        region = Region(owner, dist.group.WORLD, SequenceParallelFlag(False), at_owner=True)
        _, given = region.enter_owner(owner, (hidden,), {"rel_embeddings": shared, "residual": added})
        (given["rel_embeddings"] * (dist.get_rank() + 1) + given["residual"]).sum().backward()
        return shared.grad, added.grad

    for shared, added in run(gradients, 2):
        assert shared.tolist() == [3.0] * 4
        assert added.tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_masks_of_queries_and_keys_are_padded(dtype):
    """No token looks at the padding; the padding looks at something, or its softmax would be no number."""
    looks = torch.ones(3, 3).tril().bool()[None, None]
    mask = torch.where(looks, 0.0, torch.finfo(dtype).min) if dtype.is_floating_point else looks.to(dtype)
    padded = _pad_mask(mask, 3, 1)
    open = padded == 0 if dtype.is_floating_point else padded.bool()
    assert padded.shape == (1, 1, 4, 4)
    assert padded.dtype == dtype
    assert torch.equal(open[..., :3, :3], looks)
    assert not open[..., :3, 3].any()
    assert open[..., 3, :].all()


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="sequence_parallel=false"):
        _pad_mask(torch.ones(1, 1, 3, 5), 3, 1)
