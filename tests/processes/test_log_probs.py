"""Scores of tokens over a vocabulary that is cut, against softmax over the whole of it."""

import pytest
import torch
import torch.distributed as dist

from hf_parallel.axes.tensor import vocab_parallel
from hf_parallel.axes.tensor.vocab_parallel import Scaling
from tests.distributed import run

TOKENS, HIDDEN, VOCABULARY = 11, 8, 13


def whole(hidden, weight, bias, targets, scaling):
    logits = scaling.logits(hidden @ weight.t() + bias)
    logs = logits.log_softmax(-1)
    probabilities = logs.exp()
    at_target = logs.gather(1, targets[:, None])[:, 0]
    entropy = -(probabilities * logs).sum(-1)
    top = logits.argmax(-1) == targets
    return at_target, entropy, probabilities.square().sum(-1).log(), logits.mean(-1), top


def scores(scaling):
    """Scores and gradients on this rank, and those of the whole vocabulary."""
    vocab_parallel.CHUNK = 4
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(TOKENS, HIDDEN), torch.randn(VOCABULARY, HIDDEN), torch.randn(VOCABULARY)
    targets, weights = torch.randint(VOCABULARY, (TOKENS,)), torch.randn(2, TOKENS)
    group = dist.group.WORLD
    size = -(-VOCABULARY // group.size())
    rows = slice(size * group.rank(), size * (group.rank() + 1))
    pairs = []
    for part in (rows, slice(None)):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight[part], bias[part])]
        if part is rows:
            found = vocab_parallel.compute_log_probs(*leaves, targets, group, rows.start, VOCABULARY, scaling)
            found = [*vars(found).values()]
        else:
            found = whole(*leaves, targets, scaling)
        ((found[0] * weights[0]).sum() + (found[1] * weights[1]).sum()).backward()
        gradients = [leaf.grad for leaf in leaves]
        pairs.append([*found, gradients[0], *(g if part is rows else g[rows] for g in gradients[1:])])
    return pairs


@pytest.mark.parametrize("scaling", [Scaling(), Scaling(0.7, 3.0, 1.5)], ids=["plain", "capped"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_as_over_the_whole_vocabulary(ranks, scaling):
    for ours, theirs in run(scores, ranks, scaling):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
