"""A script's hooks on layers: what they see of the tokens, and the line that says so."""

import pytest
from transformers import AutoModelForCausalLM

from hf_parallel.hooks import report
from tests.distributed import run
from tests.training import activate, axes


def hook(folder: str, spec: str) -> tuple[list[str], list[int]]:
    """What is said of hooks on a layer, twice, and on the head; how many tokens of 33 each call of a layer sees."""
    activate(spec)
    model, lines, seen = AutoModelForCausalLM.from_pretrained(folder), [], []
    report.say = lines.append
    model.lm_head.register_forward_hook(lambda *_: None)
    assert not lines
    for layer in model.model.layers[:2]:
        layer.mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    model(input_ids=model.dummy_inputs["input_ids"][:1, :1].repeat(2, 33))
    return lines, seen


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tp=2", "1/2 of the tokens under tp_size=2"),
        ("tp=2,sequence_parallel=false", None),
    ],
)
def test_a_hook_that_sees_a_part_is_told_of_once(runs, spec, said):
    for lines, seen in run(hook, axes(spec)["world"], runs.initial("llama", vocab_size=515), spec, init=False):
        assert [said is not None and said in line for line in lines] == [True] * (said is not None)
        assert all(count == 33 for count in seen) == (said is None)
