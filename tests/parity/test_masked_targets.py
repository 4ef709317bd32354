"""Labels predicted at tokens that the attention mask leaves out: one process's numbers, or an error that says so."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_parallel
from tests.distributed import RankFailure, run
from tests.models import VOCABULARY
from tests.training import Outcome, activate, axes

SPECS = ("cp=2", "tp=2,attention=torch_flash")


def step(spec, out, folder, masked, ignored, kernel=None):
    """The loss and the gradient norm of a batch whose second row has these tokens masked, and these labels ignored."""
    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=kernel).train()
    tokens = torch.randint(1, VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[1, slice(*masked)], labels[1, slice(*ignored)] = 0, -100
    loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    loss.backward()
    norm = hf_parallel.clip_grad_norm(model, 1e9)
    return Outcome([{"loss": float(loss.detach()), "grad_norm": float(norm)}], [])


#: Masked tokens, ignored labels, the script's kernel: left padding, right padding, a hole.
EQUAL = [((0, 5), (0, 5), "sdpa"), ((0, 5), (0, 6), "eager"), ((28, 33), (28, 33), "sdpa"), ((9, 12), (9, 13), "sdpa")]
REFUSED = [((0, 5), (0, 5), "eager"), ((28, 33), (0, 0), "sdpa"), ((9, 12), (9, 12), "sdpa")]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("masked", "ignored", "kernel"), EQUAL)
def test_same_numbers(masked, ignored, kernel, spec, runs):
    runs.compare(step, spec, runs.initial("llama"), masked, ignored, kernel)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("masked", "ignored", "kernel"), REFUSED)
def test_refused(masked, ignored, kernel, spec, runs):
    """By eager attention a token that sees none takes the mean of all; a masked token sees those before it."""
    with pytest.raises(RankFailure) as caught:
        run(step, axes(spec)["world"], spec, "", runs.initial("llama"), masked, ignored, kernel, init=False)
    blamed, works = {"cp": ("cp_size=2", "cp_size=1"), "tp": ("torch_flash", f"attention={kernel}")}[spec[:2]]
    assert caught.value.kind == "ValueError"
    assert blamed in caught.value.message
    assert works in caught.value.message
    assert "-100" in caught.value.message


@pytest.mark.parametrize("spec", ["cp=2", "cp=2,pp=2"])
def test_gemma_with_left_padding(spec, runs):
    """Its own kernel is eager, and the window leaves tokens out besides."""
    folder = runs.initial("gemma2")
    runs.compare(step, spec, folder, (0, 5), (0, 6))
    with pytest.raises(RankFailure, match="cp_size=1, works"):
        run(step, axes(spec)["world"], spec, "", folder, (0, 5), (0, 5), init=False)
