"""Adapters of a model whose vocabulary was resized: peft saves its embedding and head beside them."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import models
from tests.distributed import run, run_alone
from tests.rows import data
from tests.training import activate, fit, over, trainer_of

pytest.importorskip("peft")

ROWS = 518
KINDS = {
    "adapters": {"target_modules": ["q_proj", "down_proj"]},
    "trained": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


def script(spec, out, folder, lora, rows, embeddings="auto"):
    """Add tokens, train adapters for two steps, save."""
    from peft import LoraConfig, get_peft_model

    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    model.resize_token_embeddings(rows)
    model = get_peft_model(model, LoraConfig(r=3, task_type="CAUSAL_LM", **KINDS[lora]))
    trainer, recorder = trainer_of(model, out, data_ranks, train_dataset=data("llama", 11, 11))
    outcome = fit(trainer, recorder)
    outcome.folder = f"{out}/saved"
    model.save_pretrained(outcome.folder, save_embedding_layers=embeddings)
    return outcome


@over("LoRA, tokens added", "dp_shard=2", "tp=2,pp=2", lora=KINDS)
def test_as_in_one_process(runs, lora, spec):
    runs.compare(script, spec, runs.initial("llama"), lora, ROWS)


@over("LoRA, tokens added", "pp=2")
def test_embeddings_that_are_asked_for(runs, spec):
    """`save_embedding_layers=True` of a vocabulary as it was; of a tied one under both names."""
    runs.compare(script, spec, runs.initial("odd"), "adapters", 515, True)


def save_in_a_loop(folder, out, spec=None):
    """The names and values in the file of `accelerator.save_model`."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    activate(spec)
    accelerator, model = Accelerator(cpu=True), AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    model = accelerator.prepare(get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "lm_head"])))
    accelerator.save_model(model, out)
    accelerator.wait_for_everyone()
    return load_file(f"{out}/model.safetensors")


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2"])
def test_a_tied_head_is_saved_once(runs, tmp_path, spec):
    expected = run_alone(partial(save_in_a_loop, runs.initial("odd"), f"{tmp_path}/one"))
    found = run(partial(save_in_a_loop, runs.initial("odd"), f"{tmp_path}/all", spec), 2, init=False)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)


def save_two(folder, out, spec=None):
    """What is in the folders of two models of one base, whose embeddings have the adapters."""
    from peft import LoraConfig, get_peft_model

    activate(spec)
    torch.manual_seed(models.SEED)
    config = LoraConfig(r=3, target_modules=["embed_tokens"], init_lora_weights=False)
    bases = [AutoModelForCausalLM.from_pretrained(folder) for _ in range(2)]
    for number, base in enumerate(bases):
        get_peft_model(base, config).save_pretrained(f"{out}/{number}")
    return [load_file(f"{out}/{number}/adapter_model.safetensors") for number in range(2)]


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2"])
def test_two_models_with_one_embedding(runs, tmp_path, spec):
    expected = run_alone(save_two, runs.initial("odd"), f"{tmp_path}/one")
    assert all(any("base_layer" in name for name in one) for one in expected)
    found = run(save_two, 2, runs.initial("odd"), f"{tmp_path}/all", spec, init=False)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)
