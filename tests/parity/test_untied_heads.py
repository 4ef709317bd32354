"""A head that a script, or PEFT's merging, gives a weight of its own, though the config ties it to the embedding.

`odd` is tied: 515 rows of vocabulary, rows of unlike lengths. Folders must have both weights.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hf_parallel
from tests import models
from tests.distributed import RankFailure, run
from tests.rows import data
from tests.training import activate, axes, fit, trainer_of


def by_assignment(model):
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())


def by_module(model):
    model.config.tie_word_embeddings = False
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    head.weight.data.copy_(hf_parallel.full_tensor(model.lm_head.weight))
    model.lm_head = head


def train(spec, out, folder, untie, loaded):
    """A script that unties the model it has loaded, or the one that it makes before Trainer sees it."""
    data_ranks = activate(spec)
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(folder)
    else:
        torch.manual_seed(models.SEED)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    untie(model)
    return fit(*trainer_of(model, out, data_ranks, train_dataset=data("odd", 22, 11)), f"{out}/saved")


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "tp=2,dp_shard=2"])
@pytest.mark.parametrize("untie", [by_assignment, by_module])
def test_untied_before_the_layout(runs, untie, spec):
    runs.compare(train, spec, runs.initial("odd"), untie, False)


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_another_head_after_loading(runs, spec):
    runs.compare(train, spec, runs.initial("odd"), by_module, True)


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "pp=2,dp_shard=2"])
def test_another_weight_after_loading_is_refused(runs, tmp_path, spec):
    """Ranks hold one parameter for both names, and would train it as one."""
    call = partial(train, spec, str(tmp_path), runs.initial("odd"), by_assignment, True)
    with pytest.raises(RankFailure, match=r"lm_head.weight = nn.Parameter\(x\).*model.embed_tokens.weight.*untie and"):
        run(call, axes(spec)["world"], init=False)


def merge(spec, out, folder):
    """A head trained beside adapters, merged into the model."""
    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]))
    outcome = fit(*trainer_of(model, out, data_ranks, train_dataset=data("odd", 22, 11)))
    merged = model.merge_and_unload()
    merged.save_pretrained(f"{out}/saved")
    outcome.folder, outcome.more = f"{out}/saved", merged.config.tie_word_embeddings
    return outcome


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_merged_head(runs, spec):
    for rank in runs.compare(merge, spec, runs.initial("odd")):
        assert rank.more is False
        assert json.loads(Path(rank.folder, "config.json").read_text())["tie_word_embeddings"] is False
