"""TRL scripts and layouts drawn at random, as `python -m tests.drawn sft` draws more of them; and what it has found.

Each of `FOUND` differed from one process, or failed, in silence or with torch's own error, before it was mended.
"""

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from tests.drawn import online, trl_scripts
from tests.drawn.bench import Bench

KINDS = {**trl_scripts.KINDS, **online.KINDS}

FOUND = {
    "label smoothing in an evaluation": ("sft", "dp_shard=2", "label_smoothing_factor=0.1 ; eval_rows=17"),
    "a loss function in an evaluation": ("sft", "dp_shard=2", "loss='function' ; eval_rows=17 ; data='completion'"),
    "a trial of how a loss is cut, of targets without tokens": ("dpo", "cp=2,pp=2", ""),
    "a trial of how a loss is cut, of prompts without their last token": ("grpo", "cp=2,pp=2", ""),
    "figures of the reference, of a data set in memory": ("dpo", "tp=2", "precompute_ref_log_probs=True"),
    "figures of the reference in a ragged batch": ("kto", "dp_shard=2", "precompute_ref_log_probs=True"),
    "figures of the reference in a ragged batch of pairs": ("dpo", "dp_shard=2", "precompute_ref_log_probs=True"),
    "pairs in a ragged batch of an evaluation": ("dpo", "dp_replicate=2", ""),
    "a last batch of which the length of a data set says less": ("grpo", "tp=2", "eval_rows=13"),
    "a last batch that is left out": ("grpo", "dp_shard=2", "eval_rows=13 ; dataloader_drop_last=True"),
    "prompts that only fill the last batch of an evaluation": (
        *("grpo", "dp_shard=2"),
        "model='gpt2' ; eval_rows=5 ; max_steps=4 ; min_p=0.02",
    ),
    "activations of another dtype than expected": ("dpo", "dp_replicate=2,pp=2", "bf16=True"),
}


@pytest.fixture(scope="module")
def benches():
    made = {trainer: Bench(kind) for trainer, kind in KINDS.items()}
    yield made
    for bench in made.values():
        bench.close()


@pytest.mark.parametrize("case", FOUND)
def test_found_scripts(benches, case):
    trainer, spec, choices = FOUND[case]
    benches[trainer].check(KINDS[trainer].read(choices), spec)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("trainer", KINDS)
def test_drawn_scripts(benches, trainer, seed):
    """Each is equal to one process or refused in words."""
    benches[trainer].check_drawn(seed)
