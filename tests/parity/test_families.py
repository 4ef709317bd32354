"""Tensor and sequence parallelism for the families people use, whatever their layers look like (`tests/models.py`)."""

import pytest
import torch
import transformers

from tests import models
from tests.distributed import run, run_alone
from tests.rows import LENGTH
from tests.training import Script, activate, axes, check_plainly_loaded, none, over, weight_differences

#: Newer than the others.
GRANITE_SWA = pytest.param(
    "granite_swa",
    marks=pytest.mark.skipif(not hasattr(transformers, "GraniteSWAConfig"), reason="no Granite SWA in transformers"),
)
DECODERS = (
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "opt_350m",
    "falcon",
    "falcon_7b",
    "falcon_rw",
    "bloom",
    "gemma3",
    "deepseek_v3",
    GRANITE_SWA,
)
FAMILIES = (*DECODERS, "bert", "roberta", "t5", "t5_gated", "vit", "llava")
#: Families with one case each; what the sweep finds for all others is in docs/reference/models.md.
MORE_DECODERS = (
    "gpt_bigcode",
    "gpt_bigcode_heads",
    "gptj",
    "mpt",
    "olmo2",
    "command_r",
    "persimmon",
    "stablelm",
    "xglm",
)
MORE = ("deberta", "deberta_v3", "deberta_xlarge", "bart", "clip")
SPECS = ("tp=2", "tp=2,dp_shard=2")
PACKED = ("phi3", "gpt2", "gpt_neox", "falcon", "falcon_7b", "falcon_rw", "bloom")


@over("{model}", *SPECS, model=FAMILIES)
def test_same_numbers_as_one_process(runs, model, spec):
    """Alone, and with data ranks over micro-batches that hold unequal numbers of targets."""
    runs.check(Script(model=model).with_accumulation(1 if spec == "tp=2" else 2), spec)


@over("{model}", "tp=2,pp=2", model=DECODERS)
def test_in_a_pipeline(runs, model, spec):
    runs.check(Script(model=model).with_accumulation(2), spec)


@pytest.mark.parametrize("model", [*MORE_DECODERS, *MORE])
def test_more_families(runs, model):
    runs.check(Script(model=model), "tp=2")


@pytest.mark.parametrize("model", [*MORE_DECODERS, "mamba"])
def test_more_families_in_a_pipeline(runs, model):
    """Mamba too, which has no heads to split but stages like any other."""
    runs.check(Script(model=model), "pp=2" if model == "mamba" else "tp=2,pp=2")


@over("{model}", "dp_shard=2", model=("t5", "vit", "llava", "falcon_rw", GRANITE_SWA))
def test_on_data_ranks_alone(runs, model, spec):
    """Batches of other kinds: targets that are not shifted, images without tokens, weights without a gradient."""
    runs.check(Script(model=model).with_accumulation(2), spec)


@over("{model}", "tp=4", model=("gpt2", "t5"))
def test_one_head_per_rank(runs, model, spec):
    runs.check(Script(model=model).with_accumulation(2), spec)


@over(
    "{model}", "tp=2", model=("gpt2", "phi3", "falcon", "bloom", "opt_350m", "deepseek_v3", GRANITE_SWA, "t5", "bert")
)
def test_without_sequence_parallelism(runs, model, spec):
    """Regions are entered and left with sums: shared latents, residuals and encoder states count once."""
    runs.check(Script(model=model), f"{spec},sequence_parallel=false")


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
@over("{model}", "tp=2", model=("gpt2", "opt", "falcon_rw", "bloom", "bert", "roberta", "t5", "llava"))
def test_length_that_tp_does_not_divide(runs, model, spec, masked):
    """Without a mask too, where what fills the last part must stay out of attention, means and positions.

    T5's decoder has an odd length of its own.
    """
    runs.check(Script(model=model, length=LENGTH - 1, masked=masked), spec)


@over("{model}", "tp=4", model=("gpt2", "t5"))
def test_length_that_leaves_a_rank_without_tokens(runs, model, spec):
    """13 tokens, and 9 for T5's decoder: of the last part one token is real, or none."""
    runs.check(Script(model=model, length=LENGTH - 3), spec)


@over("{model}", "tp=2", model=("gpt2", "bloom", "t5"))
def test_gradient_checkpointing(runs, model, spec):
    """Regions are entered twice; T5's first layer hands a bias to the others."""
    runs.check(Script(model=model, arguments=(("gradient_checkpointing", True),)), spec)


@pytest.mark.parametrize("route", ["from_config", "unequal"])
@over("{model}", "tp=2", model=("gpt2", "phi3"))
def test_packed_weights_from_config(runs, model, spec, route):
    """Weights are cut in memory, not on reading; saved, they are in the model's own order again."""
    runs.check(Script(model=model, route=route), spec)


@over("{model}", "tp=2", "tp=2,dp_shard=2", model=("gpt2", "phi3"))
def test_packed_weights_of_the_best_checkpoint(runs, model, spec):
    """The folder of an earlier step is read back into the cut model. The worst step counts as best: it is not last."""
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    runs.check(Script(model=model, arguments=tuple({**steps, **best}.items())), spec)


@over("{model}", *SPECS, model=("gpt2", "phi3", "falcon"))
def test_plain_transformers_loads_the_saved_folder(runs, model, spec):
    """An ordinary Hub folder after training: no key missing, none too many, the same weights again."""
    folder = runs.parallel(Script(model=model), spec)[0].folder
    check_plainly_loaded(folder)


def load_and_save(spec: str, folder: str, out: str, gathered: bool) -> None:
    """Read a folder in slices and write it again, as the model does it or from one state dict as Accelerate does."""
    from accelerate import Accelerator
    from transformers import AutoConfig

    activate(spec)
    model = models.auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    if not gathered:
        model.save_pretrained(out)
        return
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    state = accelerator.get_state_dict(model)
    main = accelerator.is_main_process
    accelerator.unwrap_model(model).save_pretrained(out, is_main_process=main, state_dict=state)


@pytest.mark.parametrize("gathered", [False, True], ids=["streamed", "gathered"])
@pytest.mark.parametrize("spec", ["tp=2", "tp=2,dp_shard=2"])
@pytest.mark.parametrize("model", PACKED)
def test_a_folder_read_and_written_is_the_same(runs, tmp_path, model, spec, gathered):
    """To the last bit, biases included, which differ from row to row."""
    folder, out = runs.initial(model), str(tmp_path / "again")
    run(load_and_save, axes(spec)["world"], spec, folder, out, gathered, init=False)
    none(weight_differences(out, folder, 0.0))


def whole_matrices(name: str) -> list[str]:
    """The weights with two or more dimensions of which a rank keeps all."""
    from hf_parallel import parallelize

    model = parallelize(models.build(name), "tp=2")
    state = model.state_dict()
    return [key for key, tensor in state.items() if tensor.dim() > 1 and not hasattr(tensor, "placements")]


# What may stay whole: small, or not part of the language model. Falcon 7B's one key and value serve all ranks.
SMALL = (
    "position",
    "wpe",
    "token_type",
    "pooler",
    "classifier",
    "project_in",
    "project_out",
    "relative_attention_bias",
)
WHOLE = {
    "deepseek_v3": ("q_a_proj", "kv_a_proj_with_mqa"),
    "falcon_7b": ("query_key_value",),
    "vit": ("cls_token", "patch_embeddings"),
    "llava": ("vision_tower", "multi_modal_projector"),
}


@over("{model}", "tp=2", model=FAMILIES)
def test_every_large_weight_is_split(model, spec):
    """Same numbers would also come of whole weights that all ranks multiply with."""
    allowed = SMALL + WHOLE.get(model, ())
    for names in run(whole_matrices, 2, model):
        assert [name for name in names if not any(word in name for word in allowed)] == []


def generate(name: str, spec: str | None) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens after two prompts of an odd length, one of them padded on the left, and their logits.

    Tied models so small repeat their last token for ever: no token may come twice.
    """
    model = models.build(name, use_cache=True)
    if spec:
        from hf_parallel import parallelize

        parallelize(model, spec)
    prompts = torch.arange(3, 13).view(2, 5)
    mask = torch.ones_like(prompts)
    mask[1, :2] = 0
    settings = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    settings["no_repeat_ngram_size"] = 1
    kept = {"output_logits": True, "return_dict_in_generate": True}
    outputs = model.eval().generate(prompts, attention_mask=mask, **settings, **kept)
    return outputs.sequences.tolist(), torch.stack(outputs.logits)


@over(
    "{model}", "tp=2", model=("gpt2", "phi3", "falcon", "falcon_7b", "falcon_rw", "bloom", "opt", "deepseek_v3", "t5")
)
def test_generation_with_a_cache(model, spec):
    """One token at a time, with the keys and values of each rank's own heads."""
    tokens, logits = run_alone(generate, model, None)
    for found, parts in run(generate, 2, model, spec):
        assert found == tokens
        assert (parts - logits).abs().max() < 1e-4  # logits of size ~5


def test_generation_sees_every_step():
    """The comparison itself: logits differ from step to step, so a wrong cache would show."""
    for name in ("gpt2", "falcon", "t5"):
        _, logits = run_alone(generate, name, None)
        assert ((logits[1:] - logits[:-1]).abs().amax((1, 2)) > 1e-2).all()
