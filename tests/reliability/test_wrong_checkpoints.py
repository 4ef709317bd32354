"""What is resumed from is no checkpoint, or that of another model: one line, before anything is trained."""

import re

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel import checkpoint
from hf_parallel.ask.config import SpecError
from hf_parallel.hooks.trainer import resuming
from tests.distributed import run
from tests.refusals import pattern_of_refusal
from tests.resuming import train
from tests.training import activate


def refusals(initial: str, other: str, out: str) -> list[str]:
    """What each wrong answer to resume_from_checkpoint is told."""
    activate("dp_shard=2")
    _, trainer = train(initial, out, 2, max_steps=2, save_steps=1)
    told = []
    for asked in (f"{out}/checkpoint-7", out, "nowhere"):
        with pytest.raises(SpecError) as caught:
            trainer.train(resume_from_checkpoint=asked)
        told.append(str(caught.value))
    for asked in (f"{out}/checkpoint-2", True):
        with pytest.raises(SpecError) as caught:
            train(other, f"{out}/empty", 2, max_steps=3, resume=asked)
        told.append(str(caught.value))
    with pytest.raises(SpecError) as caught:
        train(initial, f"{out}/empty", 2, max_steps=3, resume=f"{out}/checkpoint-2", optim="sgd")
    told.append(str(caught.value))
    for folder, error in ((f"{out}/config.json", SpecError), (f"{out}/locked", checkpoint.CheckpointError)):
        with pytest.raises(error) as caught:
            train(initial, folder, 2, max_steps=3)
        told.append(str(caught.value))
    return told


def test_refused_in_one_line(runs, tmp_path):
    out = str(tmp_path)
    (tmp_path / "locked" / "_hf_parallel.lock").mkdir(parents=True)  # root may write everywhere else
    (tmp_path / "config.json").write_text("a file, not a folder")
    first, second = run(refusals, 2, runs.initial("llama"), runs.initial("qwen3"), out, init=False)
    assert first == second
    resume, as_written = "resume_from_checkpoint=", "give the model and optimizer it was written with"
    expected = [
        pattern_of_refusal(f"{resume}{out}/checkpoint-7", works=f"{out}/checkpoint-2 works"),
        pattern_of_refusal(f"{resume}{out}", works=f"{out}/checkpoint-2 works"),
        pattern_of_refusal(f"{resume}nowhere", works="start without it"),
        pattern_of_refusal(f"{resume}{out}/checkpoint-2", works=as_written),
        pattern_of_refusal(f"{resume}True", f"({out}/empty)", works="start without it"),
        pattern_of_refusal(f"{resume}{out}/checkpoint-2", "AdamW", "SGD", works=as_written),
        pattern_of_refusal(f"output_dir={out}/config.json", "File exists", works="give another"),
        pattern_of_refusal(f"output_dir={out}/locked", "Is a directory", works="give another"),
    ]
    assert [line for line, pattern in zip(first, expected, strict=True) if not re.search(pattern, line)] == []


def test_weights_that_the_model_does_not_have(tmp_path, monkeypatch):
    """A checkpoint of two layers for a model of one: what no stage has a use for is named."""
    config = LlamaConfig(vocab_size=35, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    config.num_hidden_layers = 1
    useless = checkpoint.load_weights(LlamaForCausalLM(config), str(tmp_path))
    assert len(useless) == 9
    assert all(name.startswith("model.layers.1.") for name in useless)
    said = []
    monkeypatch.setattr(resuming.report, "say", said.append)
    resuming._say_useless("checkpoint-2", [useless, useless | {"lm_head.weight"}])
    resuming._say_useless("checkpoint-2", [useless, {"lm_head.weight"}])
    first = "model.layers.1.input_layernorm.weight"
    assert said == [f"checkpoint-2 holds 9 weights that this model does not have, {first} first: left out"]
