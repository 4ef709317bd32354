"""What many ranks add up in 16 bits: gradients are summed in fp32 and rounded once, and so is their norm."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import models
from tests.distributed import run

RANKS = 4


def gradients(rank: int) -> torch.Tensor:
    """This rank's part of a gradient, of all magnitudes: each addition in bf16 rounds."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5, 33, generator=generator).bfloat16()


def summed() -> torch.Tensor:
    """The sum over all ranks, rounded once."""
    return torch.stack([gradients(rank) for rank in range(RANKS)]).float().sum(0).bfloat16()


def test_data_ranks():
    """Also over two micro-batches without a reduction between them."""

    def step(count: int):
        import hf_parallel

        torch.manual_seed(0)
        model = hf_parallel.parallelize(nn.Linear(33, 5).bfloat16(), f"dp_shard={RANKS}")
        for micro_batch in range(count):
            model.set_requires_gradient_sync(micro_batch == count - 1)
            output = model(torch.eye(33, dtype=torch.bfloat16))  # the gradient of the weight is that of the output
            output.backward(gradients(dist.get_rank()).t().to(output.device) * RANKS)
        return model.weight.grad.full_tensor()

    for count in (1, 2):
        for found in run(step, RANKS, count):
            assert torch.equal(found, summed() * count)


class Two(nn.Module):
    """Two layers of one unit; a batch may leave out the second, as a batch without pictures does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(33, 5), nn.Linear(33, 5)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        return self.first(inputs) + (self.second(inputs) if both else 0)


@pytest.mark.parametrize("spec", [f"dp_shard={RANKS}", f"dp_replicate={RANKS}"])
def test_a_layer_that_the_last_micro_batch_alone_runs(spec):
    def step():
        import hf_parallel

        torch.manual_seed(0)
        model = hf_parallel.parallelize(Two().bfloat16(), spec)
        for both in (False, True):
            model.set_requires_gradient_sync(both)
            output = model(torch.eye(33, dtype=torch.bfloat16), both)
            output.backward(gradients(dist.get_rank()).t().to(output.device) * RANKS)
        return [layer.weight.grad.full_tensor() for layer in (model.first, model.second)]

    for first, second in run(step, RANKS):
        assert torch.equal(first, summed() * 2)
        assert torch.equal(second, summed())


def test_weights_that_tensor_parallel_ranks_share():
    def step():
        from hf_parallel.ranks import copy_weight_to_group

        weight = torch.zeros(5, 33, dtype=torch.bfloat16, requires_grad=True)
        copy_weight_to_group(weight, dist.group.WORLD).backward(gradients(dist.get_rank()))
        return weight.grad

    for found in run(step, RANKS):
        assert torch.equal(found, summed())


def test_norm():
    def step(spec: str):
        import hf_parallel

        model = models.build("llama", num_hidden_layers=1, vocab_size=515).bfloat16()
        hf_parallel.parallelize(model, spec)
        tokens = torch.randint(0, 515, (2, 33), generator=torch.Generator().manual_seed(5))
        model(input_ids=tokens, labels=tokens).loss.backward()
        norm = hf_parallel.clip_grad_norm(model, math.inf)
        whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().double() for p in model.parameters()]
        return norm.item(), math.sqrt(sum(gradient.square().sum().item() for gradient in whole))

    for spec in ("tp=2", "dp_shard=2"):
        for norm, expected in run(step, 2, spec):
            assert abs(norm - expected) <= 1e-5 * expected  # sums in another order; bf16 would keep 4e-3
