"""Scripts and layouts drawn at random, as `python -m tests.drawn` draws more of them; and what it has found.

Each of `FOUND` differed from one process, or failed, in silence or with another library's own error, before it was
mended.
"""

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from tests.drawn import loops, losses, seq2seq, trainers, trl_scripts
from tests.drawn.bench import Bench

#: Of which some are drawn here; of the others those that have found something run.
DRAWN = {"trainers": trainers.KIND, "loops": loops.KIND, "seq2seq": seq2seq.KIND, "losses": losses.KIND}
KINDS = {**DRAWN, **trl_scripts.KINDS}
#: How many are drawn, where not twelve.
SEEDS = {"seq2seq": 4, "losses": 6}
FOUND = {
    "losses of the last steps, which are not logged": ("trainers", "dp_shard=2", "max_steps=5 ; logging_steps=2"),
    "operations of adapters": ("trainers", "tp=2", "lora=(('r', 3), ('target_modules', 'all-linear'))"),
    "operations and tokens of repeated rows": (
        *("trainers", "dp_shard=4"),
        "model='gpt_oss' ; include_num_input_tokens_seen='all'",
    ),
    "numbers gathered as objects": (
        "trainers",
        "dp_shard=2",
        "eval_use_gather_object=True ; prediction_loss_only=True",
    ),
    "predictions gathered as objects": (
        *("trainers", "dp_replicate=2"),
        "eval_use_gather_object=True ; metrics='share' ; batch_eval_metrics=True ; "
        "config=(('output_hidden_states', True),)",
    ),
    "gradients of two dtypes in a unit": ("trainers", "dp_replicate=2,pp=2", "loss='override' ; dtype='bfloat16'"),
    "adapters in fp32 and a copy of the head in 16 bits in one unit": (
        *("trainers", "dp_replicate=2"),
        "dtype='bfloat16' ; "
        "lora=(('r', 3), ('target_modules', ('q_proj', 'v_proj')), ('modules_to_save', ('lm_head',)))",
    ),
    "adapters in fp32 and norms in 16 bits in one unit": (
        *("trainers", "dp_shard=2"),
        "dtype='bfloat16' ; frozen='all_but_norms_of_adapted' ; lora=(('r', 3), ('target_modules', 'all-linear'))",
    ),
    "weights cast for a last evaluation": (
        *("trainers", "tp=2"),
        "bf16=True ; bf16_full_eval=True ; eval_strategy='epoch'",
    ),
    "a base in 16 bits and a copy of the head in fp32, cast for a last evaluation": (
        *("trainers", "dp_shard=2"),
        "dtype='bfloat16' ; bf16_full_eval=True ; "
        "lora=(('r', 3), ('target_modules', ('q_proj', 'v_proj')), ('modules_to_save', ('lm_head',)))",
    ),
    "a copy of the head in 16 bits, whose weight a loss reads without a call": (
        *("dpo", "dp_replicate=2"),
        "dtype='bfloat16' ; "
        "adapters=('lora', {'r': 3, 'target_modules': ('q_proj', 'v_proj'), 'modules_to_save': ('lm_head',)})",
    ),
    "a stream that has ended when its last batch is computed": (
        *("sft", "dp_shard=2"),
        "rows=19 ; stream=True ; gradient_accumulation_steps=2 ; max_steps=4",
    ),
    "weights moved that have copies in 16 bits": (
        *("seq2seq", "tp=2"),
        "twice='new_trainer' ; bf16=True ; bf16_full_eval=True ; eval_strategy='steps' ; collator='seq2seq'",
    ),
    "figures of a loss that is computed anew": ("losses", "dp_shard=2", "form='items_or_mean' ; logs='figure'"),
    "zeros as gradients of 16-bit weights": (
        *("loops", "dp_shard=2"),
        "rows=24 ; dtype='bfloat16' ; accumulates='no_sync' ; zero_grad='kept'",
    ),
    "evaluation of a last batch in a loop": ("loops", "dp_shard=2", "eval_rows=13"),
    "batches skipped of a map-style data set that rank 0 reads": (
        *("loops", "dp_shard=2"),
        "rows=31 ; epochs=2 ; dispatch_batches=True ; resumes=True",
    ),
    "an order that is drawn after generating": (
        *("seq2seq", "pp=2"),
        "model='llama' ; twice='evaluates_first' ; train_sampling_strategy='group_by_length'",
    ),
    "a smoothed loss of a prediction": ("seq2seq", "dp_shard=2", "smoothing=0.1 ; collator='seq2seq'"),
    "generation told to keep no cache": (
        *("seq2seq", "pp=2"),
        "model='gpt2' ; generation_max_length=24 ; generation_from='call'",
    ),
    "generation that ends at unlike places": (
        *("seq2seq", "dp_shard=2,pp=2"),
        "model='gemma2' ; optimizers='own' ; generation_max_length=24 ; generation={'no_repeat_ngram_size': 2}",
    ),
    "a mean over tokens where data ranks have no example": (
        *("losses", "dp_shard=4"),
        "uneven_lengths=False ; rows=13 ; batch=4",
    ),
    "a mean over tokens where data ranks have no target": ("losses", "dp_shard=4", "empty_rows=True ; rows=31"),
    "a function of SFT that ignores the count": (
        *("losses", "dp_shard=2"),
        "trainer='sft' ; form='indexed' ; given='function' ; names_count=False ; remove_unused_columns=False",
    ),
    "a subclass of SFT that adds a mean over examples": (
        *("losses", "dp_shard=2"),
        "form='super' ; trainer='sft' ; second='first_token' ; remove_unused_columns=False",
    ),
    "logits read beside a loss that nobody reads": ("losses", "dp_replicate=2,lean_loss=true", ""),
    "logits read beside a loss that is read": (
        *("losses", "dp_shard=2,zero_stage=0,lean_loss=true"),
        "gradient_accumulation_steps=2 ; form='super' ; second='examples'",
    ),
    "a subclass of SFT for a model whose first label counts": (
        *("losses", "dp_shard=2"),
        "model='gpt2' ; form='super' ; trainer='sft' ; remove_unused_columns=False",
    ),
    "shares of a map-style data set that rank 0 reads": (
        *("loops", "dp_replicate=2,batch_shares=3:1"),
        "dispatch_batches=True",
    ),
    "a mean over the targets of labels and a mask, as many in both halves of the first trial": (
        *("losses", "dp_replicate=2"),
        "uneven_lengths=False ; over='both' ; more_columns=True ; remove_unused_columns=False ; batch=4",
    ),
    "a mean by weights of tokens": (
        *("losses", "dp_shard=2"),
        "over='token_weights' ; more_columns=True ; remove_unused_columns=False ; second='z'",
    ),
    "a mean by weights of rows, accumulated": (
        *("losses", "dp_replicate=2,pp=2"),
        "over='row_weights' ; more_columns=True ; remove_unused_columns=False ; gradient_accumulation_steps=2",
    ),
}


@pytest.fixture(scope="module")
def benches():
    benches = {name: Bench(kind) for name, kind in KINDS.items()}
    yield benches
    for bench in benches.values():
        bench.close()


@pytest.mark.parametrize("case", FOUND)
def test_found_scripts(benches, case):
    name, spec, choices = FOUND[case]
    benches[name].check(KINDS[name].read(choices), spec)


def test_a_loss_that_reads_the_target_at_the_first_token(benches):
    """A joined row has no target there: it is tried also where the two examples of the trial happen to have none."""
    choices = KINDS["trainers"].read("uneven_lengths=True ; loss='sum_of_parts'")
    ended, words = benches["trainers"].try_script(choices, "dp_shard=2,padding_free=true")
    assert ended == "refused"
    assert "padding_free=false works" in words[0]


@pytest.mark.parametrize(
    "choices",
    [
        "over='loss_mask' ; more_columns=True",  # a mask that holds the first tokens of some examples
        "trainer='sft' ; form='by_example'",
        "trainer='sft' ; form='by_example' ; given='function'",
        "trainer='sft' ; form='super' ; second='first_token'",
    ],
)
def test_a_loss_that_looks_at_examples_is_not_joined(benches, choices):
    chosen = KINDS["losses"].read(choices + " ; remove_unused_columns=False")
    ended, words = benches["losses"].try_script(chosen, "dp_shard=2,padding_free=true")
    assert ended == "refused"
    assert "looks at examples" in words[0]
    assert "padding_free=false works" in words[0]


@pytest.mark.parametrize(
    "choices",
    [
        "second='first_token'",  # the model gets labels, and its own loss is not read
        "form='items' ; second='z'",
        "form='super' ; second='z'",
        "form='super' ; second='z' ; trainer='sft' ; remove_unused_columns=False",
        "over='ids' ; more_columns=True ; remove_unused_columns=False",  # targets that no column tells
        "over='rows_of_a_kind' ; more_columns=True ; remove_unused_columns=False",
    ],
)
def test_a_term_that_knows_no_count_is_told(benches, choices):
    """A mean over the tokens of a data rank beside another term has other numbers than one process."""
    assert benches["losses"].try_script(KINDS["losses"].read(choices), "dp_shard=2")[0] == "told"


@pytest.mark.parametrize("spec", ["pp=2", "dp_shard=2"])
@pytest.mark.parametrize("model", ["gpt_oss", "opt"])
def test_joined_rows_of_models_that_read_the_examples_before(benches, model, spec):
    """Each rank joins other examples, and eager attention of these models does not keep them apart."""
    choices = KINDS["sft"].read(f"model={model!r} ; packing=True")
    outcome, lines = benches["sft"].try_script(choices, spec)
    assert outcome == "refused"
    assert any("packing=False with padding_free=False works" in line for line in lines)


def test_figures_of_a_reference_under_uneven_shares(benches):
    """Rejected answers of a ragged last batch counted as repeated rows, and their figures were zero."""
    choices = KINDS["dpo"].read("precompute_ref_log_probs=True")
    assert benches["dpo"].try_script(choices, "dp_shard=2,batch_shares=3:1") == ("equal", [])


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in DRAWN for seed in range(SEEDS.get(name, 12))])
def test_drawn_scripts(benches, name, seed):
    """Each is equal to one process or refused in words."""
    benches[name].check_drawn(seed)
