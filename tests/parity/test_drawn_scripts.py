"""Scripts and layouts drawn at random, as `python -m tests.drawn` draws more of them; and what it has found.

Each of `FOUND` differed from one process, or failed, in silence or with torch's own error, before it was mended.
"""

import pytest

from tests.drawn import Bench, draw_layout, draw_script, read_choices, show_choices
from tests.training import none

FOUND = {
    "the losses of the last steps, which are not logged": ("dp_shard=2", "max_steps=5 ; logging_steps=2"),
    "operations of adapters": ("tp=2", "lora=(('r', 3), ('target_modules', 'all-linear'))"),
    "operations and tokens of repeated rows": (
        "dp_shard=4",
        "model='gpt_oss' ; include_num_input_tokens_seen='all'",
    ),
    "numbers gathered as objects": ("dp_shard=2", "eval_use_gather_object=True ; prediction_loss_only=True"),
    "predictions gathered as objects": (
        "dp_replicate=2",
        "eval_use_gather_object=True ; metrics='share' ; batch_eval_metrics=True ; config=(('output_hidden_states', True),)",
    ),
    "gradients of two dtypes in a unit": ("dp_replicate=2,pp=2", "loss='override' ; dtype='bfloat16'"),
}


@pytest.fixture(scope="module")
def bench():
    bench = Bench()
    yield bench
    bench.close()


@pytest.mark.parametrize("case", FOUND)
def test_found_scripts(bench, case):
    spec, choices = FOUND[case]
    kind, words = bench.try_script(read_choices(choices), spec)
    none(words)
    assert kind == "equal"


@pytest.mark.parametrize("seed", range(24))
def test_drawn_scripts(bench, seed):
    """Each is equal to one process or refused in words."""
    chosen = draw_script(seed)
    spec = draw_layout(seed, chosen)
    kind, words = bench.try_script(chosen, spec)
    assert kind in ("equal", "refused", "no script"), "\n".join([f"{spec}: {show_choices(chosen)}", *words[:20]])
