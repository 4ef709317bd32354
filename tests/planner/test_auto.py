"""`--parallel auto`: chosen at the script's first model, the same on all ranks, then as if it had been asked for."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_parallel.ask.config import SpecError
from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.rows import VOCABULARY, data
from tests.training import Script, arguments_of, load_model, trainer_of


@pytest.fixture
def folder(runs):
    """Of a model that knows the rows' tokens, unlike others here."""
    return runs.initial("llama", vocab_size=VOCABULARY)


def chosen():
    """The active layout, who asked for it, and whether the patches are in place."""
    from hf_parallel.hooks import activation, auto, runtime

    current = runtime.current()
    assert auto.who_waits() is None
    return current.config.to_spec(), current.source, activation.is_active()


def trained(folder, out, route):
    from hf_parallel.hooks import activation
    from hf_parallel.hooks.auto import read_script_batch

    if route == "flag":
        import hf_parallel  # noqa: F401 - gives TrainingArguments its field

        args = arguments_of(out, 2, parallel="auto")
        assert read_script_batch(models.llama(), ["train.py"]).rows == 4  # not the default of 8
    else:
        activation.activate("auto", source="the test")
        args = arguments_of(out, 2)
    model = load_model(Script(route="from_pretrained" if route == "flag" else route), folder, 0)
    trainer, _ = trainer_of(model, out, settings=args, train_dataset=data("llama", 16, 1))
    trainer.train()
    return *chosen(), trainer.state.global_step, trainer.model._hf_parallel.config.to_spec()


@pytest.mark.parametrize("route", ["from_pretrained", "from_config", "flag"])
def test_trainer(folder, tmp_path, route):
    results = run(trained, 2, folder, str(tmp_path), route)
    assert results[0] == results[1]
    spec, source, active, steps, of_model = results[0]
    assert source.endswith("(auto)")
    assert (active, steps, of_model) == (True, 2, spec)


def test_one_sentence_says_what_was_chosen():
    """The layout, memory, speed and the batch of a step."""
    from hf_parallel.hooks.auto import format_choice
    from hf_parallel.planner import make_cluster
    from hf_parallel.planner.search import search

    cluster = make_cluster("l40s-48gb", 4)
    found = search(model=models.llama(), cluster=cluster, seq=33, global_batch=None, rows=3, accumulation=2)
    said, first = format_choice(found), found.choices[0]
    assert "\n" not in said
    assert f"auto chooses {first.config.to_spec()}, " in said
    assert f"{first.needed_gib:.3g} of 44" in said
    assert f"{4 * first.prediction.tokens_per_s_per_gpu:,.0f} tokens/s" in said
    data_ranks = first.config.data_parallel_size
    assert f"global batch {6 * data_ranks} sequences of 33 tokens (3 x {data_ranks} data ranks x 2 acc" in said


def prepared(folder):
    from accelerate import Accelerator

    from hf_parallel.hooks import activation

    activation.activate("auto", source="the test")
    accelerator = Accelerator(cpu=True)
    model = load_model(Script(route="from_config"), folder, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.arange(16).view(2, 8)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    return chosen()


def test_accelerate_loop(folder):
    results = run(prepared, 2, folder)
    assert results[0] == results[1]


def chosen_for_narrow_pair():
    from hf_parallel.hooks import auto
    from tests.planner.test_plan_cli import make_narrow_pair

    auto.wait("the test", lambda config, source: None, cluster=make_narrow_pair(1))
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "num_attention_heads": 16}
    auto.choose_layout_here(auto.Shown(models.llama(**wide, dtype="bfloat16", max_position_embeddings=33)))


def test_a_folder_is_for_the_user_to_name():
    """`auto` starts at once and knows no folder: it refuses, with the layout that would fit."""
    with pytest.raises(RankFailure) as caught:
        run(chosen_for_narrow_pair, 2)
    assert "offload=nvme:/scratch" in str(caught.value)


def no_model_shown():
    from hf_parallel.hooks import activation, auto

    activation.activate("auto", source="the runner")
    auto.check_chosen()


def two_wishes():
    from hf_parallel.hooks import activation

    activation.activate("auto", source="the first")
    activation.activate("tp=2", source="the second")


def too_late(folder, out):
    from hf_parallel.hooks import activation

    activation.activate("auto", source="the test")
    trainer_of(None, out, model_init=lambda: AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize(
    ("script", "words"),
    [(no_model_shown, ["the runner", "auto", "no Transformers model"]), (two_wishes, ["the first", "the second"])],
)
def test_refused(script, words):
    with pytest.raises(RankFailure) as caught:
        run(script, 2)
    assert caught.value.kind == "SpecError"
    assert [word for word in words if word not in caught.value.message] == []


def test_model_init_is_refused(folder, tmp_path):
    with pytest.raises(RankFailure, match="model_init"):
        run(too_late, 2, folder, str(tmp_path))


def alone(folder):
    from hf_parallel.hooks import activation

    activation.activate("auto", source="the test")
    AutoModelForCausalLM.from_pretrained(folder)
    return activation.is_active(), activation.is_expected()


def test_one_process_stays_as_it_is(folder):
    assert run_alone(alone, folder) == (False, False)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {"rows": 8, "accumulation": 1, "seq": 64, "precision": "fp32"}),
        (["--per_device_train_batch_size", "3", "--block-size=16"], {"rows": 3, "seq": 16}),
        (["--bf16", "--gradient_accumulation_steps=4"], {"precision": "mixed", "accumulation": 4}),
        (["--fp16", "--optim", "paged_adamw_8bit"], {"precision": "fp16", "optimizer": "adamw_8bit"}),
        (["--bf16", "false", "--max_length", "4096"], {"precision": "fp32", "seq": 64}),
        (["--packing", "true"], {"documents": True}),
        (["--packing", "--packing_strategy", "wrapped"], {"documents": False}),
    ],
)
def test_batch_from_the_command_line(argv, expected):
    from hf_parallel.hooks.auto import read_script_batch

    found = read_script_batch(models.llama(), ["train.py", *argv])
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("dtype", "argv", "precision"),
    [
        (torch.bfloat16, ["--bf16"], "bf16"),
        ("bfloat16", [], "bf16"),
        (torch.float32, ["--bf16"], "mixed"),
        (torch.float32, [], "fp32"),
    ],
)
def test_precision_is_that_of_weights_and_of_autocast(dtype, argv, precision):
    from hf_parallel.hooks.auto import read_script_batch

    assert read_script_batch(models.llama(dtype=dtype), ["train.py", *argv]).precision == precision
    assert read_script_batch(models.llama(), ["train.py", *argv], dtype).precision == precision


def test_launcher_and_library_do_not_mix():
    from hf_parallel.ask.config import ParallelConfig

    with pytest.raises(SpecError, match="hf-parallel plan"):
        ParallelConfig.parse("auto")
