"""Arguments that scripts give by position are read as those that they name: losses, counts, labels, refusals."""

import functools
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer

import hf_parallel
from hf_parallel.hooks import auto
from tests.distributed import run, run_alone
from tests.refusals import pattern_of_refusal
from tests.rows import Rows
from tests.training import (
    GLOBAL_BATCH,
    TRAIN_SEED,
    activate,
    arguments_of,
    axes,
    close,
    layouts,
    none,
    own_loss,
    tensor_differences,
)

ODD = {"num_hidden_layers": 3, "vocab_size": 515, "num_key_value_heads": 1}


class Positional(Trainer):
    """A training step by hand, as in many papers' code."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, False, num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class Recorded(Positional):
    """Also names the arguments of `compute_loss` in its own way."""

    def compute_loss(self, model, inputs, outputs_too=False, tokens=None):
        return own_loss(model(**inputs), inputs["labels"], tokens)


def trained(kind, folder, out, spec=None):
    """Two steps on rows with unequal numbers of labels; the losses and the weights."""
    ranks, losses = activate(spec), []
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = Rows(2 * GLOBAL_BATCH, TRAIN_SEED, length=33)
    trainer = kind(model, arguments_of(out, ranks), None, rows)
    trainer.remove_callback(PrinterCallback)
    trainer.log = lambda logs, *rest: losses.append(logs["loss"]) if "loss" in logs else None
    trainer.train(None, None)
    state = hf_parallel.full_state_dict(model)
    if not spec or torch.distributed.get_rank() == 0:
        model.save_pretrained(f"{out}/gathered", True, state)  # by rank 0 alone, as a gathered one is
    return losses, state


def loop(folder, out, spec=None):
    """Two steps of an accelerate loop that gives everything to the model by position."""
    from accelerate import Accelerator

    ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    accelerator = Accelerator(cpu=True)
    rows = Rows(2 * GLOBAL_BATCH, TRAIN_SEED, length=33)
    loader = torch.utils.data.DataLoader(rows, batch_size=GLOBAL_BATCH // ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    names = list(inspect.signature(model.forward).parameters)
    for batch in loader:
        given = [batch.get(name) for name in names[: names.index("labels") + 1]]
        loss = model(*given).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return losses, hf_parallel.full_state_dict(model)


SCRIPTS = {
    "trainer": functools.partial(trained, Positional),
    "own names": functools.partial(trained, Recorded),
    "loop": loop,
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("spec", layouts("library", "dp_shard=2", "pp=2", "tp=2"))
def test_same_numbers_by_position(script, spec, runs, tmp_path):
    """Counts of tokens, labels and gathered weights by position."""
    initial = runs.initial("llama", **ODD)
    losses, weights = run_alone(SCRIPTS[script], initial, str(tmp_path / "alone"))
    ranks = run(SCRIPTS[script], axes(spec)["world"], initial, str(tmp_path / "ranks"), spec, init=False, timeout=60)
    for step, (ours, theirs) in enumerate(zip(ranks[0][0], losses, strict=True)):
        none(close(f"loss {step}", ours, theirs, 1e-5))  # relative; sums in another order
    none(tensor_differences("weight", ranks[0][1], weights, 1e-6))  # absolute; steps move them by 1e-3 and more


def test_auto_sees_a_loss_function_by_position(monkeypatch, tmp_path):
    """Whole logits are then read, for which a layout needs room."""
    found = []

    def choose(shown):
        found.append(shown.reader)
        raise StopIteration

    monkeypatch.setattr(auto, "choose_layout_here", choose)

    def ask():
        arguments = arguments_of(str(tmp_path), 1)
        for given in ((), (None, None, None, None, None, own_loss)):
            with pytest.raises(StopIteration):
                auto._choose_at_trainer(
                    Trainer.__init__, object.__new__(Trainer), torch.nn.Linear(3, 5), arguments, *given
                )
        return found

    assert run_alone(ask) == [None, "compute_loss_func computes the loss"]


def test_what_is_refused_by_position():
    """Batches that data ranks would run out of apart."""

    def ask():
        activate("dp_shard=2")
        from accelerate import accelerator

        loader = torch.utils.data.DataLoader(Rows(11, TRAIN_SEED), batch_size=2)
        names = list(inspect.signature(accelerator.prepare_data_loader).parameters)
        given = {"put_on_device": False, "even_batches": False}
        defaults = inspect.signature(accelerator.prepare_data_loader).parameters
        listed = [given.get(name, defaults[name].default) for name in names[1 : names.index("even_batches") + 1]]
        with pytest.raises(
            hf_parallel.SpecError, match=pattern_of_refusal("even_batches=False", 2, works="True works")
        ):
            accelerator.prepare_data_loader(loader, *listed)

    run(ask, 2, init=False)
