"""What is cast before it is communicated under autocast: inputs of which a forward only multiplies."""

import pytest
import torch
from torch import nn

from hf_parallel.axes.tensor.region import is_only_multiplied
from tests import models


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(6, 10), nn.LayerNorm(10)
        self.down = nn.Linear(10, 6)

    def forward(self, x):
        rows, tokens, _ = x.shape
        return self.down(nn.functional.dropout(self.norm(self.up(x)), 0.5).view(rows, tokens, -1))


class AsksForTheDtype(Mlp):
    def forward(self, x):
        return super().forward(x).to(x.dtype)


class AddsIt(Mlp):
    def forward(self, x):
        return x + super().forward(x)


class GivesItBack(Mlp):
    def forward(self, x):
        return super().forward(x), x


class ReadsItUnderAMask(Mlp):
    def forward(self, x, attention_mask=None):
        return super().forward(x if attention_mask is None else x * 2)


class NeedsMore(Mlp):
    def forward(self, x, scales):
        return super().forward(x) * scales.mean()


@pytest.mark.parametrize(
    ("kind", "safe"),
    [(Mlp, True), (AsksForTheDtype, False), (AddsIt, False), (GivesItBack, False)]
    + [(ReadsItUnderAMask, False), (NeedsMore, False)],
)
def test_is_an_input_only_multiplied(kind, safe):
    """What is not seen to its end counts as one that reads it; nothing of the module changes, no number is drawn."""
    owner = kind()
    before, random = dict(owner._modules), torch.random.get_rng_state()
    assert is_only_multiplied(owner, "x") is safe
    assert owner._modules == before
    assert torch.equal(random, torch.random.get_rng_state())


@pytest.mark.parametrize(("name", "module"), [("llama", "self_attn"), ("llama", "mlp"), ("qwen3", "self_attn")])
def test_decoders_gather_what_they_multiply(name, module):
    config = models.CONFIGS[name]()
    with torch.device("meta"):
        owner = models.auto_class(config).from_config(config).model.layers[0].get_submodule(module)
    assert is_only_multiplied(owner, "x" if module == "mlp" else "hidden_states")
    assert getattr(owner, "config", None) is None or owner.config._attn_implementation == "sdpa"
