"""A number that is not finite: which module, rank and micro-batch gave it first, and what becomes of the step."""

import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_parallel.axes.pipeline.schedules import count_micro_batches
from hf_parallel.ranks.mesh import get_stored
from tests.distributed import RankFailure, run, run_alone
from tests.resuming import train
from tests.training import activate, axes, close

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
        self.wanted, self.step = micro_batch, 0
        config = trainer.model._hf_parallel.config
        rows = trainer.args.per_device_train_batch_size
        self.each = 1 if config.pp_size == 1 else count_micro_batches(rows, config)  # calls for each batch
        found = dict(trainer.model.named_modules())[module]
        found.register_forward_hook(self.spoil)

    def spoil(self, module, args, output):
        if self.trainer.state.global_step != self.step:
            self.step, self.calls = self.trainer.state.global_step, 0
        self.calls += 1
        batch = (self.calls - 1) // self.each % 2 + 1  # computed once more, they come once more
        if self.here and batch == self.wanted and self.step == BAD_STEP - 1:
            return Spoilt.apply(output) if self.how == "backward" else output * math.nan
        return output


def training(spec, folder, out, change, **more):
    activate(spec)
    ended, trainer = train(folder, out, axes(spec)["data_ranks"], change=change, **SHORT, **more)
    finite = all(bool(torch.isfinite(get_stored(parameter)).all()) for parameter in trainer.model.parameters())
    return ended.logs, finite, hook_count(trainer.model, "act_fn")


def test_a_loss_scaler_has_bad_steps_by_plan(monkeypatch):
    from hf_parallel.hooks.trainer import bad_numbers

    said = []
    config = SimpleNamespace(nan_action="skip")
    mesh = SimpleNamespace(config=config, device=torch.device("cuda"))
    monkeypatch.setattr(bad_numbers.runtime, "mesh", lambda: mesh)
    monkeypatch.setattr(bad_numbers.report, "say", said.append)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(scaler=object()))
    trainer.args = SimpleNamespace(logging_nan_inf_filter=False)
    bad_numbers.Looking(trainer)
    assert re.search("nan_action=skip: .*fp16", said.pop())
    config.nan_action = "report"
    looking = bad_numbers.Looking(trainer)
    looking.logged({"loss": math.nan})
    assert not looking.wanted
    assert not said
    trainer.accelerator.scaler = None
    looking = bad_numbers.Looking(trainer)
    looking.logged({"loss": math.nan})
    assert looking.wanted


def hook_count(model, kind):
    """Of modules that FSDP2 has no hooks on, without those of the layout's axes."""
    hooks = [
        hook for name, one in model.named_modules() if name.endswith(kind) for hook in one._forward_hooks.values()
    ]
    return sum(not hook.__module__.startswith("hf_parallel.axes.") for hook in hooks)


CASES = [
    (
        "dp_shard=2",
        "model.layers.2.mlp.act_fn",
        1,
        2,
        "forward",
        "the forward of model.layers.2.mlp.act_fn on rank 1, ",
    ),
    ("tp=2", "model.layers.1.mlp.act_fn", 1, 1, "forward", "the forward of model.layers.1.mlp.act_fn on rank 1, "),
    ("pp=2", "model.layers.1.mlp.act_fn", 0, 2, "forward", "the forward of model.layers.1.mlp.act_fn on rank 0, "),
    ("pp=2", "model.layers.3.mlp.act_fn", 1, 2, "backward", "the backward of "),
    (
        "tp=2,pp=2",
        "model.layers.3.mlp.act_fn",
        3,
        2,
        "forward",
        "the forward of model.layers.3.mlp.act_fn on rank 3, ",
    ),
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


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2"])
def test_layers_that_run_again(runs, capfd, tmp_path, spec):
    """A checkpointed layer compares what it saved for its backward pass with what it saves when it runs again."""
    change = partial(Fault, "model.layers.1.mlp.act_fn", 0, 1, "forward")
    call = partial(training, spec, runs.initial("llama"), str(tmp_path), change, gradient_checkpointing=True)
    run(call, 2, init=False)
    assert "it first appears in the forward of model.layers.1.mlp.act_fn on rank 0, " in capfd.readouterr().err


class LeftOut(TrainerCallback):
    """Plain Trainer's second step without its gradients."""

    def __init__(self, trainer):
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == BAD_STEP - 1:
            model.zero_grad(set_to_none=True)


def alone(folder, out):
    return train(folder, out, change=LeftOut, **SHORT)[0].logs


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2", "pp=2"])
def test_a_step_that_is_left_out(runs, capfd, tmp_path, spec):
    """Afterwards all ranks are where one process is that never took the step."""
    change = partial(Fault, "model.layers.1.mlp.act_fn", 0, 1, "forward")
    call = partial(training, f"{spec},nan_action=skip", runs.initial("llama"), str(tmp_path / "ours"), change)
    logs, finite, hooks_left = run(call, 2, init=False)[0]
    expected = run_alone(alone, runs.initial("llama"), str(tmp_path / "plain"))
    assert finite
    assert math.isnan(logs[BAD_STEP]["grad_norm"])
    for key in ("loss", "grad_norm"):
        assert not close(key, logs[3][key], expected[3][key], 1e-5), (logs, expected)
    assert hooks_left == 1  # the fault's own
    told = [line for line in capfd.readouterr().err.splitlines() if "gradient norm is nan" in line]
    assert len(told) == 1, told
    assert "on rank 0, micro-batch 1 of 2" in told[0]
    assert told[0].endswith("the step is left out (nan_action=skip)")


class CountsSteps(torch.optim.SGD):
    """SGD that counts its steps in its groups, as schedule-free optimizers do, also where there is no gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def counts(folder, out):
    """How many steps of three the optimizer has counted, of which the second is left out."""

    def change(trainer):
        trainer.optimizer = CountsSteps(trainer.model.parameters(), lr=0.01)
        Fault("model.layers.1.mlp.act_fn", 0, 1, "forward", trainer)

    activate("dp_shard=2,nan_action=skip")
    trainer = train(folder, out, 2, change=change, **SHORT)[1]
    return [group["count"] for group in trainer.optimizer.param_groups]


def test_an_optimizer_does_not_count_a_step_that_is_left_out(runs, tmp_path):
    assert run(counts, 2, runs.initial("llama"), str(tmp_path), init=False) == [[2], [2]]


def test_a_run_that_stops(runs, tmp_path):
    spec, change = "dp_shard=2,nan_action=stop", partial(Fault, "model.layers.1.mlp.act_fn", 1, 2, "forward")
    with pytest.raises(RankFailure) as caught:
        run(training, 2, spec, runs.initial("llama"), str(tmp_path), change, init=False)
    assert caught.value.kinds == {0: "BadNumberError", 1: "BadNumberError"}
    assert "the forward of model.layers.1.mlp.act_fn on rank 1, micro-batch 2 of 2" in caught.value.message


def spoils_a_weight(trainer):
    """What an optimizer may do; the norm of its step was finite."""
    trainer.add_callback(Spoiler())


class Spoiler(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == BAD_STEP - 1 and dist.get_rank() == 1:
            name, weight = next((n, p) for n, p in model.named_parameters() if "layers.3.mlp.up_proj" in n)
            with torch.no_grad():
                get_stored(weight).view(-1)[3] = math.inf


def test_a_weight(runs, capfd, tmp_path):
    run(training, 2, "tp=2", runs.initial("llama"), str(tmp_path), spoils_a_weight, init=False)
    told = [line for line in capfd.readouterr().err.splitlines() if "first appears" in line]
    assert len(told) == 1
    assert "weight model.layers.3.mlp.up_proj.weight, after the optimizer's step 1 on rank 1;" in told[0], told
