"""A script's hooks on layers: what they see of the tokens, and the line that says so."""

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from hf_parallel.hooks import report
from tests.distributed import run
from tests.training import activate, axes


def hook(folder: str, spec: str) -> tuple[list[str], list[int]]:
    """What is said of hooks on a layer, twice; how many tokens of 33 each call of a layer sees."""
    activate(spec)
    model, lines, seen = AutoModelForCausalLM.from_pretrained(folder), [], []
    report.say = lines.append
    for layer in model.model.layers[:2]:
        layer.mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    model(input_ids=model.dummy_inputs["input_ids"][:1, :1].repeat(2, 33))
    return lines, seen


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tp=2", "1/2 of the tokens under tp_size=2"),
        ("tp=2,sequence_parallel=false", None),
        ("cp=2", "1/2 of the tokens under cp_size=2"),
    ],
)
def test_a_hook_that_sees_a_part_is_told_of_once(runs, spec, said):
    for lines, seen in run(hook, axes(spec)["world"], runs.initial("llama", vocab_size=515), spec, init=False):
        assert [said is not None and said in line for line in lines] == [True] * (said is not None)
        assert all(count == 33 for count in seen) == (said is None)


def hook_before(folder: str, spec: str, kind: str) -> list[str]:
    """What is said of a hook that is there before the model is parallel."""
    activate(spec)
    model, lines = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), []
    report.say = lines.append
    handle = None
    if kind == "all":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    elif kind == "features":
        model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    elif kind == "head":
        model.lm_head.register_full_backward_hook(lambda *_: None)
    else:
        model.model.layers[1].self_attn.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    Accelerator().prepare(model)
    if handle is not None:
        handle.remove()
    return [line for line in lines if "hook" in line]


@pytest.mark.parametrize(
    ("kind", "spec", "said"),
    [
        ("input", "tp=2", "LlamaAttention sees 1/2 of the tokens under tp_size=2"),
        ("all", "tp=2", "all modules sees 1/2 of the tokens under tp_size=2"),
        ("features", "tp=2,sequence_parallel=false", "Linear sees 1/2 of the features"),
        ("head", "pp=2", "a micro-batch at a time, on the ranks that hold it, under pp_size=2"),
        ("head", "tp=2", None),
        ("input", "dp_shard=2", None),
    ],
)
def test_earlier_hooks_are_told_of(runs, kind, spec, said):
    for lines in run(hook_before, 2, runs.initial("llama", vocab_size=515), spec, kind, init=False):
        assert [said is not None and said in line for line in lines] == [True] * (said is not None)
