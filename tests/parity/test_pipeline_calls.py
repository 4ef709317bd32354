"""More than one call of a pipelined model with a gradient before a backward pass, each against one process."""

import pytest
import torch

from hf_parallel import parallelize
from tests import models
from tests.distributed import run, run_alone


def gradients(spec: str | None, dropped: bool) -> dict[str, torch.Tensor]:
    """Gradients of a loss of two calls, or of the second one alone: what the first gave is thrown away then."""
    model = models.build("qwen3").train()  # tied: both ends add to one weight
    if spec:
        parallelize(model, spec)
    tokens = torch.randint(0, models.VOCABULARY, (6, 11), generator=torch.Generator().manual_seed(3))
    first = model(input_ids=tokens[:, :7]).logits.pow(2).mean()
    second = model(input_ids=tokens).logits.pow(2).mean()
    loss = 0.3 * second if dropped else 0.7 * first + 0.3 * second
    del first
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


@pytest.mark.parametrize("spec", ["pp=2,dp_shard=2", "pp=2,dp_shard=2,zero_stage=2"])
@pytest.mark.parametrize("dropped", [True, False], ids=["dropped", "both"])
def test_two_calls_before_a_backward(spec, dropped):
    """The first leaves weights gathered: gradients of the second are those of the stored ones all the same."""
    expected = run_alone(gradients, None, dropped)
    found = {name: gradient for part in run(gradients, 4, spec, dropped) for name, gradient in part.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # Sums over other micro-batches; relative to the largest entry.
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name)
