"""Ways to save and to generate outside Trainer, on every kind of layout."""

import os
from functools import partial
from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from transformers.utils import hub

from tests import models
from tests.distributed import run, run_alone
from tests.training import activate, axes, none, weight_differences
from tests.trl_scripts import make_tokenizer

SPECS = ("dp_shard=2", "tp=2", "pp=2", "tp=2,pp=2")


def save_gathered(spec: str | None, folder: str) -> None:
    """The idiom of Accelerate's examples: gather the state dict on all ranks, write it on the main process."""
    activate(spec)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(models.build("qwen3"))
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )


@pytest.mark.parametrize("spec", SPECS)
def test_a_gathered_state_dict_saves(spec, tmp_path):
    run_alone(save_gathered, None, str(tmp_path / "one"))
    run(save_gathered, axes(spec)["world"], spec, str(tmp_path / "many"), init=False)
    none(weight_differences(str(tmp_path / "many"), str(tmp_path / "one"), 0.0))


def save_variant(spec: str | None, folder: str) -> list[str]:
    """Save twice, first in more files, under the name of a variant."""
    activate(spec)
    model = Accelerator(cpu=True).prepare(models.build("llama"))
    for size in ("50KB", "200KB"):
        model.save_pretrained(folder, variant="half", max_shard_size=size)
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2"])
def test_a_variant_in_several_files_loads(spec, tmp_path):
    expected = run_alone(save_variant, None, str(tmp_path / "one"))
    assert run(save_variant, 2, spec, str(tmp_path / "many"), init=False)[0] == expected
    load = partial(AutoModelForCausalLM.from_pretrained, variant="half", dtype="auto")
    saved, plain = (load(str(tmp_path / name)).state_dict() for name in ("many", "one"))
    torch.testing.assert_close(saved, plain, rtol=0, atol=0)


def upload(spec: str | None) -> list[tuple]:
    """What this process uploads of a model in one file, in several, of its adapters and of a tokenizer."""
    activate(spec)
    calls: list[tuple] = []

    class Hub:
        def create_repo(self, name, **kwargs):
            calls.append((name,))
            return SimpleNamespace(repo_id=name)

        def create_commit(self, repo_id, operations, **kwargs):
            calls.append((repo_id, sorted(one.path_in_repo for one in operations)))

    hub.hf_api, hub.create_and_tag_model_card = Hub, lambda *args, **kwargs: SimpleNamespace(save=lambda path: None)
    model = Accelerator(cpu=True).prepare(models.build("llama"))
    model.push_to_hub("one")
    model.push_to_hub("several", max_shard_size="50KB")
    make_tokenizer().push_to_hub("tokenizer")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).push_to_hub("adapters")
    return calls


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2"])
def test_uploads_are_those_of_one_process(spec):
    expected = run_alone(upload, None)
    assert len(expected) == 8
    assert run(upload, 2, spec, init=False) == [expected, []]


def generate(spec: str | None) -> list[list[int]]:
    """Greedy tokens of T5, whose encoder generate() calls past the model's own forward."""
    from transformers import AutoModelForSeq2SeqLM, T5Config

    torch.manual_seed(models.SEED)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "initializer_factor": 2.0}
    model = AutoModelForSeq2SeqLM.from_config(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))
    if spec:
        from hf_parallel import parallelize

        parallelize(model, spec)
    return model.eval().generate(torch.arange(1, 6).view(1, 5), max_new_tokens=6, do_sample=False).tolist()


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2"])
def test_generation_of_a_sharded_encoder_decoder(spec):
    assert run(generate, 2, spec) == [run_alone(generate, None)] * 2


def evaluate(spec: str | None) -> tuple[float, list[float]]:
    """A loop without Trainer: the config still asks for a key/value cache."""
    model = models.build("llama", use_cache=True)
    if spec:
        from hf_parallel import parallelize

        parallelize(model, spec)
    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        output = model.eval()(input_ids=ids, labels=ids)
    return output.loss.item(), output.logits.sum(dim=(1, 2)).tolist()


@pytest.mark.parametrize("spec", ["tp=2", "pp=2", "tp=2,pp=2"])
def test_evaluation_outside_trainer(spec):
    """Rows of an odd length, and `use_cache` as configs have it."""
    loss, sums = run_alone(evaluate, None)
    for found, logits in run(evaluate, axes(spec)["world"], spec):
        assert found == pytest.approx(loss, rel=1e-5)
        assert logits == pytest.approx(sums, abs=1e-3)  # sums of 15 x 256 logits
