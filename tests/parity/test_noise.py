"""Noise whose size and numbers follow from a tensor's shape: a rank that holds a part of it draws as one process."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.neftune import activate_neftune

import hf_parallel
from tests.distributed import run
from tests.models import VOCABULARY
from tests.training import Outcome, activate, axes

ROWS, LENGTH = 4, 33  # an odd length: sequence parallelism pads it


def step(spec, out, model):
    """The loss and the gradient norm of a batch with padding, of which NEFTune's noise is drawn under a seed."""
    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(model).train()
    activate_neftune(model, 20.0)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, -5:] = 0
    torch.manual_seed(3)
    loss = model(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
    loss.backward()
    norm = hf_parallel.clip_grad_norm(model, 1e9)
    return Outcome([{"loss": float(loss.detach()), "grad_norm": float(norm)}], [])


@pytest.mark.parametrize(
    "spec",
    [
        *("cp=2", "cp=2,context_parallel=ulysses", "tp=2", "tp=2,sequence_parallel=false", "pp=2"),
        *("cp=2,tp=2", "cp=2,pp=2", "tp=2,pp=2"),
    ],
)
def test_neftune_is_that_of_one_process(spec, runs):
    """With the same random state before the step, all of its numbers are the same."""
    runs.compare(step, spec, runs.initial("llama"))


def states(spec, folder, changes):
    """The random state inside a layer of a forward pass in training, and the one after the step."""
    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder, **changes).train()
    inside = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: inside.append(torch.get_rng_state().tolist()))
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    torch.manual_seed(3)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return inside[0], torch.get_rng_state().tolist()


@pytest.mark.parametrize("spec", ["cp=2,context_parallel=ulysses", "cp=2,tp=2", "tp=2"])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_dropout": 0.3}),
        ("mixtral", {"router_jitter_noise": 0.1}),
    ],
    ids=["nothing", "number", "jitter"],
)
def test_ranks_draw_other_numbers_where_they_hold_other_values(model, changes, spec, runs):
    """Probabilities and noise that modules keep as numbers count, too; afterwards all ranks go on alike."""
    ranks = run(states, axes(spec)["world"], spec, runs.initial(model), changes, init=False)
    assert len({str(inside) for inside, _ in ranks}) == (len(ranks) if changes else 1)
    assert len({str(after) for _, after in ranks}) == 1
