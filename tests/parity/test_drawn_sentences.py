"""sentence-transformers scripts and layouts drawn at random, as `python -m tests.drawn embed` draws more of them.

Each of `FOUND` differed from one process, or failed, in silence or with another library's own error, before it was
mended.
"""

import pytest

pytest.importorskip("sentence_transformers")
pytest.importorskip("peft")

from tests.drawn.bench import Bench
from tests.drawn.embed import KIND

FOUND = {
    "batches of one table each": ("dp_shard=2", "tables=2"),
    "an order by a seed and the epoch": ("dp_shard=2", "num_train_epochs=2 ; data_seed=3"),
    "batches without texts that are alike": ("dp_replicate=2", "alike=True ; batch_sampler='no_duplicates'"),
    "a sum over pairs": ("dp_shard=2", "loss='contrastive_sum'"),
    "a mean over documents": ("dp_shard=2", "loss='cross_adr'"),
    "a mean over pairs of documents": ("dp_replicate=2", "loss='cross_lambda' ; tables=2"),
    "unlike numbers of calls of the model": ("dp_shard=2", "loss='cross_list_net'"),
    "latents that no example has used": ("dp_shard=2", "loss='csr'"),
    "a save of a module that is no transformers model, and its weights again": (
        *("dp_shard=2", "base='static' ; resumes=True ; max_steps=5 ; save_strategy='steps'"),
    ),
    "a moved model with a bias that is tied": ("dp_shard=2", "loss='splade'"),
    "parts of a loss of a ragged batch": (
        *(
            "dp_shard=2",
            "loss='splade_margins' ; rows=13 ; eval_rows=13 ; eval_strategy='steps' ; dataloader_drop_last=False",
        ),
    ),
    "a ragged batch that is compared": (
        *("dp_replicate=2", "loss='ranking' ; rows=13 ; batch=4 ; max_steps=5 ; dataloader_drop_last=False"),
    ),
    "a ragged batch of a stream": (
        *("dp_shard=2", "stream=True ; rows=13 ; batch=4 ; max_steps=4 ; dataloader_drop_last=False"),
    ),
    "less than a batch to evaluate": (
        *("dp_shard=2", "eval_rows=3 ; batch=4 ; eval_strategy='steps' ; dataloader_drop_last=False"),
    ),
}


@pytest.fixture(scope="module")
def bench():
    made = Bench(KIND)
    yield made
    made.close()


@pytest.mark.parametrize("case", FOUND)
def test_found_scripts(bench, case):
    spec, choices = FOUND[case]
    bench.check(KIND.read(choices), spec)


def test_a_stream_of_text(bench):
    ended, words = bench.try_script(KIND.read("stream=True ; max_steps=4 ; dispatches=True"), "tp=2")
    assert ended == "refused"
    assert 'accelerator_config={"dispatch_batches": False} works' in words[0]


@pytest.mark.parametrize("seed", range(3))
def test_drawn_scripts(bench, seed):
    """Each is equal to one process or refused in words."""
    bench.check_drawn(seed)
