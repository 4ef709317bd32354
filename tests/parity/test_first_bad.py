"""A number that is not finite: the module, the rank and the micro-batch that gave it first, and what becomes of the step."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import RankFailure, run
from tests.resuming import train
from tests.training import axes

SHORT = {"max_steps": 3, "save_strategy": "no", "gradient_accumulation_steps": 2}
BAD_STEP = 2


class Spoilt(torch.autograd.Function):
    """The identity, whose gradient is not a number."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


class Fault:
    """In the second step one rank's module gives what is no number, in one of its micro-batches."""

    def __init__(self, module, rank, micro_batch, how, trainer):
        self.trainer, self.here, self.how, self.calls = trainer, dist.get_rank() == rank, how, 0
        self.wanted = micro_batch
        step = trainer.training_step
        found = dict(trainer.model.named_modules())[module]
        found.register_forward_hook(self.spoil)
        trainer.compute_loss = partial(self.counted, trainer.compute_loss)
        del step

    def counted(self, compute_loss, *args, **kwargs):
        """Batches of a step are numbered as they come."""
        if self.trainer.state.global_step != getattr(self, "step", None):
            self.step, self.calls = self.trainer.state.global_step, 0
        self.calls += 1
        return compute_loss(*args, **kwargs)

    def spoil(self, module, args, output):
        second = (self.calls - 1) % 2 + 1 == self.wanted  # computed once more, they come once more
        if self.here and second and self.trainer.state.global_step == BAD_STEP - 1:
            return Spoilt.apply(output) if self.how == "backward" else output * math.nan
        return output


def training(spec, folder, out, change):
    from hf_parallel import hooks

    hooks.activate(spec, source="test")
    ended, trainer = train(folder, out, axes(spec)["data_ranks"], change=change, **SHORT)
    finite = all(bool(torch.isfinite(p.to_local() if hasattr(p, "to_local") else p).all()) for p in trainer.model.parameters())
    return ended.logs, finite, sum(len(module._forward_hooks) for module in trainer.model.modules())


MLP = "model.layers.3.mlp.down_proj"
CASES = [
    ("dp_shard=2", "model.layers.2.mlp.act_fn", 1, 2, "forward", "the forward of model.layers.2.mlp.act_fn on rank 1, "),
    ("tp=2", "model.layers.1.mlp.act_fn", 1, 1, "forward", "the forward of model.layers.1.mlp.act_fn on rank 1, "),
    ("pp=2", "model.layers.1.mlp.act_fn", 0, 2, "forward", "the forward of model.layers.1.mlp.act_fn on rank 0, "),
    ("pp=2", "model.layers.3.mlp.act_fn", 1, 2, "backward", "the backward of "),
    ("tp=2,pp=2", "model.layers.3.mlp.act_fn", 3, 2, "forward", "the forward of model.layers.3.mlp.act_fn on rank 3, "),
    ("dp_shard=2", "model.layers.2.mlp.act_fn", 0, 1, "backward", "the backward of "),
]


@pytest.mark.parametrize(("spec", "module", "rank", "micro_batch", "how", "where"), CASES)
def test_where_it_comes_from(runs, capfd, tmp_path, spec, module, rank, micro_batch, how, where):
    change = partial(Fault, module, rank, micro_batch, how)
    ended = run(training, axes(spec)["world"], spec, runs.initial("llama"), str(tmp_path), change, init=False)
    err = capfd.readouterr().err
    lines = [line for line in err.splitlines() if "first appears" in line]
    assert len(lines) == 1, err
    assert f"step {BAD_STEP}: the gradient norm is nan: it first appears in {where}" in lines[0], lines
    assert f"rank {rank}, micro-batch {micro_batch} of 2" in lines[0], lines
    assert module in lines[0], lines
    assert not ended[0][1]  # as in Trainer: the step is taken
