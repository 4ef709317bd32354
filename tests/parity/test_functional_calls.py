"""`torch.func.functional_call` of a parallel model: the numbers of one process, or refused at once."""

import copy

import pytest
import torch
from torch.func import functional_call, stack_module_state

from hf_parallel import SpecError
from tests.distributed import run
from tests.loops import prepare_loop, rows, take_step
from tests.refusals import pattern_of_refusal
from tests.training import axes, check_alone


def learn_fast_weights(spec: str | None, folder: str) -> list[float]:
    """First-order meta-learning: the loss of weights one step further on, and its gradients for the slow ones."""
    accelerator, model, optimizer = prepare_loop(spec, folder, 0.2)
    batch, found = rows(4, 33).to(accelerator.device), []
    for _ in range(3):
        loss = model(input_ids=batch, labels=batch).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        named = zip(model.named_parameters(), gradients, strict=True)
        fast = {name: p - 0.1 * gradient for (name, p), gradient in named}
        later = functional_call(model, fast, (), {"input_ids": batch, "labels": batch}).loss
        found += [loss.item(), *take_step(accelerator, model, optimizer, later)]
    return found


def read_other_weights(spec: str | None, folder: str) -> list[float]:
    """The losses of halved weights and of the model's own, in turns, without gradients."""
    accelerator, model, _ = prepare_loop(spec, folder, 0.2)
    batch, found = rows(4, 33).to(accelerator.device), []
    with torch.no_grad():
        for _ in range(2):
            half = {name: p * 0.5 for name, p in model.named_parameters()}
            found.append(functional_call(model, half, (), {"input_ids": batch, "labels": batch}).loss.item())
            found.append(model(input_ids=batch, labels=batch).loss.item())
    return found


def train_halves(spec: str | None, folder: str) -> float:
    accelerator, model, _ = prepare_loop(spec, folder, 0.2)
    batch = rows(4, 33).to(accelerator.device)
    half = {name: p * 0.5 for name, p in model.named_parameters()}
    return functional_call(model, half, (), {"input_ids": batch, "labels": batch}).loss.item()


def run_ensemble(spec: str | None, folder: str) -> object:
    accelerator, model, _ = prepare_loop(spec, folder, 0.2)
    states = stack_module_state([copy.deepcopy(model) for _ in range(2)])
    batch = rows(4, 33).to(accelerator.device)
    return torch.vmap(lambda *state: functional_call(model, state, (), {"input_ids": batch}).logits)(*states)


@pytest.fixture(scope="module")
def initial(runs):
    """The folder of an untrained model of odd sizes."""
    return runs.initial("llama", num_hidden_layers=3, vocab_size=515)


def test_fast_weights(initial):
    check_alone(learn_fast_weights, "tp=2", initial, init=False)


@pytest.mark.parametrize("spec", ["tp=2", "pp=2"])
def test_other_weights_without_gradients(spec, initial):
    check_alone(read_other_weights, spec, initial, init=False)


def refuses(spec: str, folder: str, script, pattern: str) -> None:
    with pytest.raises(SpecError, match=pattern):
        script(spec, folder)


@pytest.mark.parametrize(
    ("script", "spec", "what", "works"),
    [
        (train_halves, "dp_shard=2", "functional_call with data and context ranks=2", "tp_size"),
        (read_other_weights, "dp_shard=2", "functional_call with data and context ranks=2", "copy.deepcopy(model)"),
        (train_halves, "pp=2", "functional_call with pp_size=2 and weights that need gradients", "tp_size"),
        (run_ensemble, "tp=2", "torch.func on a parallel model", "call one model at a time"),
    ],
)
def test_refuses_at_once(script, spec, what, works, initial):
    run(refuses, axes(spec)["world"], spec, initial, script, pattern_of_refusal(what, works=works), init=False)
