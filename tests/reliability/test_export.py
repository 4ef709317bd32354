"""`hf-parallel export`: what it writes is what transformers and peft would, and it takes the memory of one tensor."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_parallel import cli
from tests import models
from tests.distributed import run_alone
from tests.reliability.test_loading_memory import MB, SLACK, save_big, watched
from tests.resuming import train
from tests.training import spec_id, weights


def checkpoint(folder: str, out: str) -> None:
    train(folder, out, max_steps=1, save_steps=1)


def exported(*arguments: str) -> int:
    return cli.main(["export", *arguments])


def test_a_checkpoint_in_another_dtype(runs, tmp_path):
    """Only what belongs to the model, in files of the size that is asked for."""
    run_alone(checkpoint, runs.initial("llama"), str(tmp_path / "run"))
    source, out = tmp_path / "run" / "checkpoint-1", tmp_path / "model"
    assert run_alone(exported, str(source), str(out), "--dtype", "bfloat16", "--max-shard-size", "100KB") == 0
    assert {name for name in os.listdir(out) if not name.startswith("model-")} == {
        *("config.json", "generation_config.json", "model.safetensors.index.json")
    }
    ours, theirs = weights(str(out)), weights(str(source))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in ours)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = run_alone(lambda: AutoModelForCausalLM.from_pretrained(out).state_dict())
    assert all(torch.equal(loaded[name], ours[name]) for name in ours)


TARGETS = {
    "llama": {"target_modules": ["q_proj", "down_proj"], "alpha_pattern": {"down_proj": 7}, "use_rslora": True},
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "qwen3": {"target_modules": ["v_proj", "embed_tokens"], "rank_pattern": {"v_proj": 3}},
}


def adapter(base: str, folder: str, targets: dict) -> dict:
    """An adapter whose matrices are random, saved; and what peft makes of it and its base."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=9, **targets))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    model.merge_and_unload().save_pretrained(f"{folder}-merged")


@pytest.mark.parametrize("model", TARGETS)
def test_a_merged_adapter_is_what_peft_makes_of_it(runs, tmp_path, model):
    run_alone(adapter, runs.initial(model), str(tmp_path / "adapter"), TARGETS[model])
    assert run_alone(exported, str(tmp_path / "adapter"), str(tmp_path / "out"), "--merge-adapter") == 0
    ours, theirs, base = (
        weights(str(place)) for place in (tmp_path / "out", tmp_path / "adapter-merged", runs.initial(model))
    )
    assert ours.keys() == theirs.keys()
    gaps = {name: (ours[name] - theirs[name]).abs().max().item() for name in ours}
    assert max(gaps.values()) < 1e-6, gaps  # one rounding of a sum of r products in another order
    assert any((ours[name] - base[name]).abs().max() > 0.1 for name in ours)


def test_an_adapter_stays_one(runs, tmp_path):
    run_alone(adapter, runs.initial("llama"), str(tmp_path / "adapter"), TARGETS["llama"])
    assert run_alone(exported, str(tmp_path / "adapter"), str(tmp_path / "out"), "--dtype", "float16") == 0
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "adapter"))
    assert all(torch.equal(ours[name], theirs[name].half()) for name in theirs)
    assert (tmp_path / "out" / "adapter_config.json").exists()


def refused(*arguments: str) -> int:
    return exported(*arguments)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("damage", "is damaged: model.safetensors has"),
        ("merge", "--merge-adapter"),
        ("trainer", "is plain Trainer's already"),
    ],
)
def test_refusals(runs, tmp_path, capfd, what, words):
    """Nothing is written."""
    from hf_parallel.checkpoint.manifest import write_manifest

    source = tmp_path / "source"
    run_alone(lambda: models.build("llama").save_pretrained(source))
    write_manifest(str(source), {})
    if what == "damage":
        os.truncate(source / "model.safetensors", 1000)
    extra = {"merge": ["--merge-adapter"], "trainer": ["--trainer"]}.get(what, [])
    assert run_alone(refused, str(source), str(tmp_path / "out"), *extra) == 2
    assert words in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def pushed(source: str, out: str) -> list:
    """With the Hub's two calls stood in for."""
    import huggingface_hub

    calls = []

    class Hub:
        def create_repo(self, name, exist_ok):
            calls.append((name, exist_ok))
            return type("Url", (), {"repo_id": f"me/{name}"})

        def upload_folder(self, repo_id, folder_path, commit_message):
            calls.append((repo_id, sorted(os.listdir(folder_path))))
            return "https://hub/me/out"

    huggingface_hub.HfApi = Hub
    assert exported(source, out, "--push_to_hub") == 0
    return calls


def test_push_to_hub(runs, tmp_path):
    calls = run_alone(pushed, runs.initial("llama"), str(tmp_path / "out"))
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert calls == [("out", True), ("me/out", files)]


def peak(source: str, out: str, *arguments: str) -> int:
    exported(source + "-tiny", out + "-tiny")  # lazy imports are not the tensors' memory
    return watched(lambda: exported(source, out, *arguments))[1]


@pytest.mark.slow
def test_memory_of_one_tensor(tmp_path):
    """400 MB of weights, of which the largest is 125 MB; a cast needs it once and a half."""
    size = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3}
    for name, config in (("big", size), ("big-tiny", {})):
        run_alone(save_big, str(tmp_path / name), models.llama(**config))
    for arguments, tensors in (((), 1), (("--dtype", "bfloat16"), 1.5)):
        found = run_alone(peak, str(tmp_path / "big"), str(tmp_path / "out"), *arguments)
        print(f"{spec_id(' '.join(arguments))}: {found / MB:.0f} MB")
        assert found < tensors * 125 * MB + SLACK
