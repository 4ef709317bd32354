"""Every process walks the parts of a model in one order, because a set of names has another order in each process."""

import itertools

import pytest
import torch
from torch import nn

from hf_parallel.ask.config import SpecError
from hf_parallel.axes.data import zero
from hf_parallel.axes.tensor.axis import SplitFacts, resolve_styles
from hf_parallel.axes.tensor.infer import find_latent_attention
from hf_parallel.model.experts import ExpertFacts
from tests import models
from tests.refusals import pattern_of_refusal


def test_latent_attentions_are_cut_in_the_order_of_the_model():
    with torch.device("meta"):
        model = models.auto_class(models.deepseek_v3()).from_config(models.deepseek_v3())
    found = list(find_latent_attention(model))
    assert len(found) == 12
    assert found == [name for name, _ in model.named_modules() if name in found]


def test_the_first_experts_that_cannot_be_cut_are_refused():
    layers = [f"model.layers.{number}.mlp.experts" for number in range(7)]
    experts = {name: ExpertFacts("Experts", 4, 33, {}, frozenset(), False) for name in layers}
    facts = SplitFacts("Model", (4, 4), styles=dict.fromkeys(layers, ("experts", "known")), experts=experts)
    with pytest.raises(SpecError, match=pattern_of_refusal("tp_size=2", 33, layers[0], works="tp_size=1 works")):
        resolve_styles(facts, 2)


def test_units_of_two_dtypes_are_grouped_alike(monkeypatch):
    """Where as many modules have one dtype as another, the same one prevails on all ranks."""
    grouped = []
    monkeypatch.setattr(zero, "fully_shard", lambda module, **settings: grouped.append(module))
    pairs = list(itertools.permutations([torch.bfloat16, torch.float16, torch.float32, torch.float64], 2))
    for first, second in pairs:
        unit = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=one))]) for one in (first, second))
        unit.append(nn.ParameterList([unit[0][0], unit[1][0]]))
        unit = nn.ModuleList([unit[2], unit[0], unit[1]])  # what has both comes first
        zero._shard_other_dtypes(unit, True, {})
    assert [module[0].dtype for module in grouped] == [max(pair, key=str) for pair in pairs]
