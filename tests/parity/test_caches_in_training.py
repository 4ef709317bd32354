"""Losses that go through a key/value cache: a prefix is read in a call of its own, and its keys and values train."""

import pytest
import torch

from tests.distributed import RankFailure, run, run_alone_once
from tests.loops import prepare_loop, take_step
from tests.training import axes, check_numbers


def train(spec: str | None, folder: str, prefix: int, gradients: bool) -> list[float]:
    """Losses and gradient norms of three steps; the prefix has no output that the loss reads, only its cache."""
    accelerator, model, optimizer = prepare_loop(spec, folder)
    ids, found = (torch.arange(66) * 7 % 515).view(2, 33), []
    for _ in range(3):
        with torch.set_grad_enabled(gradients):
            first = model(input_ids=ids[:, :prefix], use_cache=True)
        loss = model(input_ids=ids[:, prefix:], cache=first.past_key_values, labels=ids[:, prefix:]).loss
        found += take_step(accelerator, model, optimizer, loss)
    return found


SPECS = ("dp_shard=2", "dp_shard=2,zero_stage=2", "dp_replicate=2", "tp=2", "dp_shard=2,tp=2")


@pytest.mark.parametrize(("prefix", "gradients"), [(12, True), (11, True), (11, False)])  # tp pads odd lengths
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("spec", SPECS)
def test_numbers_of_one_process(runs, spec, kind, prefix, gradients):
    folder = runs.initial(kind)
    ranks = run(train, axes(spec)["world"], spec, folder, prefix, gradients, init=False)
    check_numbers(ranks, run_alone_once(train, None, folder, prefix, gradients))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(("spec", "works"), [("cp=2", "cp_size=1"), ("pp=2", "use_cache=False")])
def test_a_cache_that_would_be_lost_is_refused(runs, spec, works, gradients):
    """A sequence that ranks share, and a pipeline, keep no cache: the second call would not see the prefix."""
    with pytest.raises(RankFailure, match=f"key/value cache.*{works}"):
        run(train, 2, spec, runs.initial("llama"), 12, gradients, init=False)
