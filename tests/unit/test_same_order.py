"""Every process walks the parts of a model in one order, because a set of names has another order in each process."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_parallel.ask.config import SpecError
from hf_parallel.axes.data import units
from hf_parallel.axes.tensor.axis import SplitFacts, resolve_styles
from hf_parallel.axes.tensor.infer import find_latent_attention
from hf_parallel.model.experts import ExpertFacts
from tests import models
from tests.refusals import pattern_of_refusal


class Held:
    """Stands for FSDP2's record of a parameter."""

    def __init__(self, place):
        self._module_info = place


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


def test_weights_of_two_dtypes_are_grouped_alike(monkeypatch):
    """Where as many weights have one dtype as another, the same one prevails on all ranks."""
    moved, group = [], SimpleNamespace(fsdp_params=[], _reset_sharded_params=False)
    monkeypatch.setattr(units, "iterate_sharded_modules", lambda root: [root])
    monkeypatch.setattr(units, "get_groups_of", lambda unit: [group])
    monkeypatch.setattr(units, "_move_to_own_group", lambda held, *rest: moved.append(held) or [])
    pairs = list(itertools.permutations([torch.bfloat16, torch.float16, torch.float32, torch.float64], 2))
    for pair in pairs:
        module = nn.ParameterList(nn.Parameter(torch.zeros(1, dtype=one)) for one in (*pair, *pair))
        places = [SimpleNamespace(module=module, param_name=str(number)) for number in range(4)]
        group.fsdp_params = [Held(place) for place in places]
        units.separate_dtypes(module)
    dtypes = [[getattr(one._module_info.module, one._module_info.param_name).dtype for one in held] for held in moved]
    assert dtypes == [2 * [max(pair, key=lambda dtype: (-dtype.itemsize, str(dtype)))] for pair in pairs]
