"""A script's own loss that fails on the last stage, which alone runs it: no stage waits for the others' time-out."""

import time

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer

from tests.distributed import RankFailure, run
from tests.rows import Rows
from tests.training import activate, arguments_of, axes


class Failing(Trainer):
    """Reads a column that is not there: in the first step, or in a later one."""

    fails_at = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        if self.state.global_step >= self.fails_at:
            inputs["rewards"]
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("spec", ["pp=2", "pp=2,tp=2"])
def test_all_stages_stop(spec, fails_at, runs, tmp_path):
    """With the error of the script, and where it was raised."""
    folder = runs.initial("llama", num_hidden_layers=3, vocab_size=515, num_key_value_heads=1)

    def train():
        activate(spec)
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = Failing(model, arguments_of(str(tmp_path), 1), train_dataset=Rows(16, 11, length=33))
        trainer.fails_at = fails_at
        with pytest.raises(KeyError, match="rewards") as failed:
            trainer.train()
        return str(failed.value.__cause__)

    causes = run(train, axes(spec)["world"], init=False, timeout=60)
    assert "compute_loss" in causes[0]
    assert "on rank" in causes[0]


class Embedding(Trainer):
    """Embeds by itself; on the last stage, where it runs, the embedding is a stand-in that would give zeros."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        return model(**inputs).loss + embedded.square().mean()


def test_a_loss_that_embeds_by_itself_is_refused(runs, tmp_path):
    """It names the stage that holds the embedding, and does not train without the term."""
    folder = runs.initial("llama", num_hidden_layers=3, vocab_size=515, num_key_value_heads=1)

    def train():
        activate("pp=2")
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = Embedding(model, arguments_of(str(tmp_path), 1), train_dataset=Rows(16, 11, length=33))
        with pytest.raises(RuntimeError, match=r"model\.embed_tokens .*\b0\b.*pp_size=1 works"):
            trainer.train()

    run(train, 2, init=False, timeout=60)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_error_inside_a_schedule_is_the_models_own(way, stage, runs, tmp_path):
    """Not torch's `[Stage 1] failed to run forward`; the other stage ends too, and hears of it."""
    folder = runs.initial("llama", num_hidden_layers=3, vocab_size=515, num_key_value_heads=1)

    def fail(*_):
        raise LookupError("no such expert")

    def train():
        activate("pp=2")
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = Trainer(model, arguments_of(str(tmp_path), 1), train_dataset=Rows(16, 11, length=33))
        if dist.get_rank() == stage:
            layer = model.model.layers[2 * stage]
            layer.register_forward_pre_hook(fail) if way == "forward" else layer.register_full_backward_hook(fail)
        trainer.train()

    start = time.monotonic()
    with pytest.raises(RankFailure, match="no such expert") as failed:
        run(train, 2, init=False, timeout=60)
    assert failed.value.rank == stage
    assert failed.value.kind == "LookupError"
    assert set(failed.value.kinds) == {0, 1}
    assert time.monotonic() - start < 30  # a deadlock is seen after 15 s and more, the limit of this test is 60


@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_in_a_micro_batch_that_is_not_scheduled(stage, runs):
    """In a loop, where no watchdog of a Trainer tells the others: the last stage does not wait to be heard."""
    folder = runs.initial("llama", num_hidden_layers=3, vocab_size=515, num_key_value_heads=1)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise LookupError("no such expert")

    def evaluate():
        activate("pp=2")
        model = AutoModelForCausalLM.from_pretrained(folder)
        if dist.get_rank() == stage:
            model.model.layers[2 * stage].register_forward_pre_hook(fail)
        with torch.no_grad():
            model(input_ids=torch.arange(132).view(4, 33))

    with pytest.raises(RankFailure) as failed:
        run(evaluate, 2, init=False, timeout=12)  # a deadlock is ended after 15 s and more
    assert failed.value.kinds[stage] == "LookupError"
