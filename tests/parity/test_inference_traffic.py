"""What travels without a backward pass: weights once in `generate`, and no logits for an evaluation's loss."""

from functools import partial
from unittest import mock

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_parallel.axes.data import gathered_once
from tests import models
from tests.counting import CountCollectives
from tests.distributed import run, run_alone
from tests.rows import Rows
from tests.training import activate, axes, data, trainer_of

TOKENS = 6


def generated(spec, tmp_path, name="llama", room=True, **settings):
    """Tokens that a trained model generates, then trains on and generates again, with gathers of each time."""
    data_ranks = activate(spec)
    model = models.build(name, vocab_size=515)
    trainer, recorder = trainer_of(model, tmp_path, data_ranks, settings, train_dataset=data(name, 11, 3))
    found, gathers = [], []
    prompts = torch.randint(3, 515, (3, 9), generator=torch.Generator().manual_seed(4))
    lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
    with mock.patch.object(gathered_once, "measure_free_memory", return_value=1e12 if room else 0.0):
        for _ in range(2):
            trainer.train()
            with CountCollectives() as counted:
                found.append(trainer.model.generate(prompts, do_sample=False, **lengths))
            gathers.append(counted.counts["gather"])
            assert all(getattr(parameter, "placements", True) for parameter in model.parameters())
    return torch.cat(found), [log["loss"] for log in recorder.logs], gathers


@pytest.mark.parametrize(
    ("spec", "gathers"),
    [
        ("dp_shard=2", 7),  # of four layers, embedding, head, and the last norm
        ("dp_shard=2,zero_stage=1", 7),
        ("dp_replicate=2,dp_shard=2", 7),
        ("cp=2", 7 + TOKENS),  # and the logits of each token, as there is no key/value cache
        ("pp=2,dp_shard=2", 3),  # two layers; the rest of the stage
    ],
)
def test_gathered_once(tmp_path, spec, gathers):
    """The tokens, and the losses before and after, are those of one process."""
    expected = run_alone(generated, None, str(tmp_path))
    for tokens, losses, found in run(generated, axes(spec)["world"], spec, str(tmp_path), init=False):
        assert torch.equal(tokens, expected[0])
        assert losses == pytest.approx(expected[1], rel=1e-5)
        assert found == [gathers, gathers]


def test_seq2seq(tmp_path):
    """T5 calls its encoder by itself, before the first token."""
    expected = run_alone(partial(generated, None, str(tmp_path), "t5"))
    for tokens, losses, found in run(partial(generated, "dp_shard=2", str(tmp_path), "t5"), 2, init=False):
        assert torch.equal(tokens, expected[0])
        assert losses == pytest.approx(expected[1], rel=1e-5)
        assert found == [5, 5]


@pytest.mark.parametrize(("spec", "gathers"), [("dp_shard=2", 7 * TOKENS), ("dp_shard=2,zero_stage=2", 7)])
def test_gathered_for_each_token_where_there_is_no_room(tmp_path, spec, gathers):
    """With zero_stage=2 training holds whole weights, so there is."""
    expected = run_alone(generated, None, str(tmp_path))
    for tokens, losses, found in run(partial(generated, spec, str(tmp_path), room=False), 2, init=False):
        assert torch.equal(tokens, expected[0])
        assert losses == pytest.approx(expected[1], rel=1e-5)
        assert found == [gathers, gathers]


# ---- an evaluation gathers weights once, if training holds whole ones -------------------------------------------


class Halves(TrainerCallback):
    """Halves a weight after the first batch of an evaluation."""

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 1:
            model.model.norm.weight.data.mul_(0.5)


def evaluated_twice(spec, tmp_path, halves=False):
    """Losses of two evaluations with a training between them, and how often units were gathered in each."""
    data_ranks = activate(spec)
    model = models.build("llama", vocab_size=515)
    sets = {"train_dataset": Rows(11, 3, length=33), "eval_dataset": Rows(29, 4, length=33)}
    trainer, _ = trainer_of(model, tmp_path, data_ranks, **sets)
    trainer.add_callback(Halves() if halves else TrainerCallback())
    found, gathers = [], []
    for _ in range(2):
        trainer.train()
        with CountCollectives() as counted:
            found.append(trainer.evaluate()["eval_loss"])
        gathers.append(counted.counts["gather"])
    return found, gathers


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_evaluation_gathers_weights_once(tmp_path, stage, halves):
    """With zero_stage=3, and where a script's callback may change weights, for each batch."""
    expected, _ = run_alone(evaluated_twice, None, str(tmp_path), halves)
    few, many = sorted(
        run(evaluated_twice, 2, f"dp_shard=2,zero_stage={one}", str(tmp_path), init=False)[0][1][0] for one in (1, 3)
    )
    assert many - few == 7 * 3  # units and batches but the first
    for found, gathers in run(evaluated_twice, 2, f"dp_shard=2,zero_stage={stage}", str(tmp_path), halves, init=False):
        assert found == pytest.approx(expected, rel=1e-5)
        assert gathers == [few if stage < 3 and not halves else many] * 2


# ---- an evaluation that takes the loss alone reads no logits ----------------------------------------------------


class Own(Trainer):
    """A step of a script's own, which reads logits also where it gives only the loss."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        self.seen = tuple(outputs["logits"].shape)
        return loss.detach(), None, None


def evaluated(spec, tmp_path, kind=Trainer):
    """The loss, the largest tensor that any rank gathers, and the shape of the logits that a script's step reads."""
    data_ranks = activate(spec)
    model = models.build("llama", vocab_size=515)
    sets = {"train_dataset": Rows(8, 3, length=33), "eval_dataset": Rows(11, 4, length=33)}
    trainer, _ = trainer_of(model, tmp_path, data_ranks, kind=kind, **sets)
    trainer.train()
    with CountCollectives() as counted:
        loss = trainer.evaluate()["eval_loss"]
    return loss, counted.largest, getattr(trainer, "seen", None)


@pytest.mark.parametrize("spec", ["tp=2", "cp=2", "tp=2,dp_shard=2"])
def test_evaluation_of_the_loss_gathers_no_logits(tmp_path, spec):
    expected, _, _ = run_alone(evaluated, None, str(tmp_path))
    for loss, largest, _ in run(evaluated, axes(spec)["world"], spec, str(tmp_path), init=False):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert largest < 3 * 33 * 515 * 4, largest  # of three rows, the smaller batch


def test_a_step_of_its_own_reads_whole_logits(tmp_path):
    expected, _, seen = run_alone(evaluated, None, str(tmp_path), Own)
    for loss, _, shape in run(evaluated, 2, "tp=2", str(tmp_path), Own, init=False):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert shape == seen == (3, 33, 515)
