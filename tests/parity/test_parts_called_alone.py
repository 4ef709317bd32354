"""Loops that call parts of a model by themselves: its backbone, its embedding, its head, also before the model."""

import pytest
import torch

from tests.distributed import run, run_alone_once
from tests.loops import prepare_loop, take_step
from tests.training import axes, check_numbers


def loss_of(model: torch.nn.Module, ids: torch.Tensor, how: str) -> torch.Tensor:
    """What a script makes of a batch."""
    if how == "embedding":
        return model(inputs_embeds=model.get_input_embeddings()(ids), labels=ids).loss
    if how == "look first":
        with torch.no_grad():
            scale = model.base_model(input_ids=ids).last_hidden_state.abs().mean()
        return model(input_ids=ids, labels=ids).loss * scale
    hidden = model.base_model(input_ids=ids).last_hidden_state
    if how == "backbone":
        return hidden.pow(2).mean()
    if how == "backbone and model":
        return model(input_ids=ids, labels=ids).loss + 0.01 * hidden.pow(2).mean()
    logits = model.lm_head(hidden)[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def train(spec: str | None, folder: str, how: str) -> list[float]:
    """Losses and gradient norms of three steps; all data ranks have the same rows."""
    accelerator, model, optimizer = prepare_loop(spec, folder)
    ids, found = torch.arange(66).view(2, 33), []
    for _ in range(3):
        found += take_step(accelerator, model, optimizer, loss_of(model, ids, how))
    return found


HOW = ("embedding", "look first", "backbone", "backbone and model")


@pytest.mark.parametrize(
    ("how", "spec"),
    [
        *((how, spec) for how in HOW for spec in ("dp_shard=2", "dp_shard=2,zero_stage=2", "dp_replicate=2")),
        *((how, "tp=2,dp_shard=2") for how in HOW),
        ("backbone and head", "dp_shard=2"),  # under tp a head gives parts: docs/idioms.md
    ],
)
def test_numbers_of_one_process(runs, spec, how):
    folder = runs.initial("llama")
    ranks = run(train, axes(spec)["world"], spec, folder, how, init=False)
    check_numbers(ranks, run_alone_once(train, None, folder, how))
