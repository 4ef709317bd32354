"""Forward passes that a script's hook stops at a layer, as nethook and baukit do to read an activation.

Sizes are odd: 515 rows of vocabulary, 3 layers, one key/value head, rows of 33 tokens.
"""

import contextlib

import pytest
import torch

import hf_parallel
from tests.parity.test_assigned_weights import as_in_one_process, batch, initial, start  # noqa: F401 - a fixture
from tests.training import layouts

SPECS = ("dp_shard=2", "dp_replicate=2,zero_stage=0", "dp_shard=2,zero_stage=1", "dp_shard=2,zero_stage=2")


class Stop(Exception):
    """Ends a forward pass."""


def stop_at(model, rows, part):
    """Return what this part of the model gives, and run nothing behind it."""
    kept = []

    def stop(module, args, output):
        kept.append(output[0] if isinstance(output, tuple) else output)
        raise Stop

    handle = part.register_forward_hook(stop)
    with contextlib.suppress(Stop):
        model(**rows)
    handle.remove()
    return kept[0]


def looking(folder, spec=None, followed=False):
    """Stops before the optimizer is made, between backward pass and clipping, and between the steps."""
    model, rows, seen = start(spec, folder), batch(), []
    layers = model.model.layers
    with torch.no_grad():
        stop_at(model, rows, layers[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for turn in range(4):
        loss = model(**rows).loss
        loss.backward()
        with torch.set_grad_enabled(followed):
            stop_at(model, rows, (layers[1], layers[0].mlp, model.model.embed_tokens)[turn % 3])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if turn == 1:
            with torch.no_grad():
                stop_at(model, rows, layers[2].self_attn)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), float(norm)]
    return seen, hf_parallel.full_state_dict(model)


def followed(folder, spec=None):
    return looking(folder, spec, followed=True)


def training(folder, spec=None):
    """A loss of an activation behind which nothing ran, alone and beside the model's own."""
    model, rows, seen = start(spec, folder), batch(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for turn in range(4):
        layers = model.model.layers
        part = (layers[1], layers[0].self_attn, layers[2], layers[0])[turn]
        loss = (stop_at(model, rows, part) - 0.1).pow(2).mean()
        if turn == 2:
            loss = loss + model(**rows).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), float(norm)]
    seen.append(model(**rows).loss.item())
    return seen, hf_parallel.full_state_dict(model)


@pytest.mark.parametrize("loop", [looking, followed, training])
@pytest.mark.parametrize("spec", layouts("library", *SPECS))
def test_passes_that_are_stopped(spec, loop, initial):  # noqa: F811
    """What they gathered is neither clipped nor what the next pass computes with; a loss of theirs trains."""
    as_in_one_process(loop, initial["qwen3"], spec)
