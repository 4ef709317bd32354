"""Scripts evaluate under `torch.inference_mode()`, before they train and between steps, on batches made inside it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import loops
from tests.distributed import run, run_alone_once
from tests.training import activate, axes


def evaluated_and_trained(spec: str | None, folder: str) -> list[float]:
    """Losses of evaluations in inference mode, whose mask changes in place, and of two steps."""
    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens, found = loops.rows(3, 33), []
    for _ in range(2):
        model.eval()
        with torch.inference_mode():
            mask = torch.ones_like(tokens)
            for length in (33, 20):
                mask[1, length:] = 0
                labels = tokens.masked_fill(mask == 0, -100)
                found.append(model(input_ids=tokens.clone(), attention_mask=mask, labels=labels).loss.item())
        model.train()
        found += loops.losses(model, [tokens])
    return found


@pytest.mark.parametrize("spec", ["cp=2", "pp=2,dp_shard=2", "pp=2,dp_replicate=2", "tp=2", "dp_shard=2"])
def test_losses_of_one_process(spec, runs):
    """Memory that inference mode makes is none that a step trains with, and counts no versions."""
    folder = runs.initial("llama", num_hidden_layers=3, vocab_size=515)
    expected = run_alone_once(evaluated_and_trained, None, folder)
    for ours in run(evaluated_and_trained, axes(spec)["world"], spec, folder, init=False, timeout=120):
        assert ours == pytest.approx(expected, rel=1e-5)  # sums in another order


def loaded_and_evaluated(spec: str | None, folder: str) -> float:
    activate(spec)
    with torch.inference_mode():
        model, tokens = AutoModelForCausalLM.from_pretrained(folder), loops.rows(3, 33)
        return model(input_ids=tokens, labels=tokens).loss.item()


def test_weights_that_count_no_versions(runs):
    """Whole evaluation scripts run under inference mode."""
    folder = runs.initial("llama", num_hidden_layers=3, vocab_size=515)
    expected = run_alone_once(loaded_and_evaluated, None, folder)
    for ours in run(loaded_and_evaluated, 2, "dp_shard=2", folder, init=False):
        assert ours == pytest.approx(expected, rel=1e-5)  # sums in another order
