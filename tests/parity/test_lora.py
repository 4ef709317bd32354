"""LoRA scripts, unchanged: adapters put on a base that is sharded already train and are saved as in one process.

The runs are those of test_trainer.py: loss, gradient norm, set of gradients, evaluation, prediction, adapter folder.
"""

import json
import os
import runpy
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, trainer

from hf_parallel.ask.config import SpecError
from tests import models, training
from tests.adapters import ATTENTION, ENDS, MLP, logits_while_merging, lora
from tests.counting import CountCollectives
from tests.distributed import RankFailure, run, run_alone
from tests.resuming import STEPS, STOP, log_differences, trained
from tests.training import (
    BF16,
    Recorder,
    Script,
    Tolerance,
    activate,
    axes,
    differences,
    load_model,
    none,
    over,
    weight_differences,
    with_adapters,
)

pytest.importorskip("peft")
from peft import LoraConfig, get_peft_model

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("one", "own")
CHECKPOINTED = (("gradient_checkpointing", True),)


@pytest.mark.parametrize("model", ["llama", "gpt2", "opt", "phi3", "deepseek_v3", "gemma3"])
def test_other_layers(runs, model):
    """Conv1D and packed projections, biases, layers that enter by themselves, narrow layers, scaled embeddings."""
    targets = "all-linear" if model != "gemma3" else (*ATTENTION, "embed_tokens")
    runs.check(
        Script(model=model, lora=lora(targets, use_rslora=True, lora_alpha=2, rank_pattern=(("o_proj", 2),))), "tp=2"
    )


@over("LoRA", "tp=4")
def test_key_value_heads_that_ranks_share(runs, spec):
    runs.check(Script(lora=lora(ATTENTION)), spec)


@pytest.mark.parametrize("key", ["sequence_parallel=false", "tp_overlap=true"])
def test_keys_of_tensor_parallelism(runs, key):
    runs.check(Script(lora=lora(ATTENTION + MLP + ENDS)), f"tp=2,{key}")


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"])
def test_adapters_on_one_stage_only(runs, layer, schedule):
    """The other stages have nothing to train; gradients still pass through them, or need not."""
    script = Script(lora=lora(ATTENTION, layers_to_transform=(layer,)))
    runs.check(script.with_accumulation(2), f"pp=2,pipeline_schedule={schedule}")


@pytest.mark.parametrize(("layers", "spec"), [((2, 3), "pp=2,dp_shard=2"), ((0, 1), "pp=2")])
def test_loss_that_keeps_all_activations(runs, layers, spec):
    """With a first stage that has nothing to train, or a last one, which alone computes the loss."""
    runs.check(Script(overrides=True, own_loss=True, lora=lora(MLP, layers_to_transform=layers)), spec)


def test_second_adapter_and_zero_start(runs):
    """peft's own start (B = 0), and a second adapter that is put in, made active and trained."""
    settings = lora(ATTENTION + MLP, init_lora_weights=True)
    runs.check(Script(lora=settings, second_adapter=True), "tp=2,dp_shard=2")
    runs.check(Script(lora=settings, second_adapter=True), "tp=2,pp=2")


def test_second_adapter_with_magnitudes(runs):
    """DoRA's norms of a second adapter: of the layers of other stages there are none."""
    runs.check(Script(lora=lora(("q_proj", "down_proj"), use_dora=True), second_adapter=True), "pp=2")


def train_in_turn(spec, initial, out):
    """Two adapters of other sizes in one model: the second is trained, then the first."""
    from peft import LoraConfig

    data_ranks = activate(spec)
    script, outcomes = Script(lora=lora(ATTENTION + MLP)), []
    model = load_model(script, initial, 0)
    second = LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights="gaussian", target_modules=["o_proj", "lm_head"])
    model.add_adapter("second", second)
    for name in ("second", "default"):
        model.set_adapter(name)
        outcomes.append(training.train(script, initial, f"{out}/{name}", data_ranks, model=model))
    return outcomes


@pytest.mark.parametrize("spec", ["dp_shard=2,tp=2", "pp=2,dp_shard=2"])
def test_adapters_trained_in_turn(runs, tmp_path, spec):
    """What trains changes after the weights have been gathered: other gradients, and of the first adapter no more."""
    initial = runs.initial("llama")
    one = run_alone(train_in_turn, None, initial, f"{tmp_path}/one")
    many = run(partial(train_in_turn, spec, initial, f"{tmp_path}/many"), 4, init=False)
    for i, expected in enumerate(one):
        none(differences([ranks[i] for ranks in many], expected, Tolerance()))


@over("LoRA", "tp=2,dp_shard=2", "tp=2,pp=2")
def test_bf16(runs, spec):
    runs.check(Script(lora=lora("all-linear"), arguments=(("bf16", True),)), spec, BF16)


@pytest.mark.parametrize("spec", ["tp=2,dp_shard=2", "tp=2,pp=2"])
def test_best_checkpoint_is_read_back(runs, spec):
    """After training the best step's adapters are in place: evaluation and prediction see them."""
    best = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    arguments = (*best.items(), ("load_best_model_at_end", True), ("learning_rate", 3.0))
    runs.check(Script(lora=lora(ATTENTION + ENDS), arguments=arguments), spec, Tolerance(1e-4, 1e-4, 1e-4, 1e-2, 1e-3))


def test_dropout_is_the_same_when_recomputed(runs):
    """Masks differ from those of one process, but a recomputed layer must find its own again."""
    plain = Script(lora=lora(ATTENTION + MLP, lora_dropout=0.3))
    checkpointed = Script(lora=plain.lora, arguments=CHECKPOINTED)
    for spec in ("tp=2", "tp=2,sequence_parallel=false"):
        ours, theirs = runs.parallel(checkpointed, spec), runs.parallel(plain, spec)[0]
        none(differences(ours, theirs, Tolerance()))


@pytest.mark.parametrize("spec", ["tp=2,pp=2", "tp=2,dp_shard=2"])
def test_folder_loads_in_plain_peft(runs, spec):
    """The folder gives the same logits and config as that of one process, and training can go on from it."""
    script = Script(model="qwen3", lora=lora(ATTENTION + MLP + ENDS))
    folder, reference = runs.parallel(script, spec)[0].folder, runs.reference(script)
    base = runs.initial("qwen3")
    ours, theirs = (run_alone(logits_of, base, where) for where in (folder, reference.folder))
    assert (ours - theirs).abs().max() < 1e-4
    assert config_of(folder) == config_of(reference.folder)
    again = Script(model="qwen3", lora=(("folder", reference.folder),))
    runs.check(again, spec)


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2,tp=2", "tp=2,pp=2"])
def test_modules_trained_whole(runs, spec):
    """Copies of embedding and head beside adapters; the originals stay as they are."""
    runs.check(Script(lora=lora(ATTENTION, modules_to_save=ENDS)), spec)


@pytest.mark.support("DoRA")
@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("llama", "dp_shard=2"),
        ("llama", "tp=2,dp_shard=2"),
        ("qwen3", "tp=2,pp=2"),
        ("gpt2", "tp=2"),
        ("phi3", "tp=2"),
    ],
)
def test_dora(runs, model, spec):
    """Magnitudes, which start as the norms of whole rows, and rows whose norms run over ranks."""
    runs.check(Script(model=model, lora=lora("all-linear", use_dora=True)), spec)


def train_adapted(spec, script, initial, out):
    """The script, whose layout becomes active when its model has adapters already, equal on no two ranks."""
    model = load_model(script, initial, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += int(os.environ["RANK"])
    return training.train(script, initial, out, activate(spec), model=model)


@pytest.mark.parametrize("spec", ["dp_shard=2,tp=2", "tp=2,pp=2"])
def test_adapters_from_before_the_layout(runs, tmp_path, spec):
    script = Script(lora=lora((*ATTENTION, *ENDS)), second_adapter=True)
    call = partial(train_adapted, spec, script, runs.initial("llama"), str(tmp_path))
    none(differences(run(call, 4, init=False), runs.reference(script), Tolerance()))


@pytest.mark.parametrize(("start", "spec"), [("pissa", "tp=2"), ("olora", "dp_shard=2")])
def test_adapters_from_before_the_layout_that_started_from_the_base(runs, tmp_path, start, spec):
    """Their base is a rest already, which is not to be factorised again."""
    script = Script(lora=lora("all-linear", init_lora_weights=start))
    call = partial(train_adapted, spec, script, runs.initial("llama"), str(tmp_path))
    none(differences(run(call, 2, init=False), runs.reference(script), Tolerance()))


@pytest.mark.parametrize(
    ("model", "start", "spec"),
    [("phi3", "pissa", "tp=2,dp_shard=2"), ("gpt2", "pissa", "tp=2"), ("llama", "olora", "tp=2,pp=2")],
)
def test_starts_from_the_base(runs, model, start, spec):
    """Adapters are factors of whole weights; each rank keeps its part of the rest."""
    runs.check(Script(model=model, lora=lora("all-linear", init_lora_weights=start)), spec)


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_shard=2,pp=2"])
def test_dora_of_an_embedding(runs, spec):
    """Its norms are read after the lookup, when the weights are parts again."""
    runs.check(Script(lora=lora(("q_proj", "embed_tokens"), use_dora=True)), spec)


def test_dora_of_shared_heads(runs):
    runs.check(Script(lora=lora(ATTENTION, use_dora=True)), "tp=4")


@pytest.mark.parametrize(("bias", "spec"), [("all", "tp=2,dp_shard=2"), ("lora_only", "tp=2,pp=2")])
def test_biases(runs, bias, spec):
    runs.check(Script(model="gpt2", lora=lora("all-linear", bias=bias)), spec)


def merged(spec, model, initial, out, **settings):
    """Logits before merging, merged in place, taken out again, and merged for good; the merged model is saved."""
    activate(spec)
    targets = "all-linear" if model != "llama" or settings else (*ATTENTION, *MLP, *ENDS)
    adapted = load_model(Script(model=model, lora=lora(targets, **settings)), initial, 0).eval()
    with torch.no_grad():  # magnitudes that are not the norms they start as
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter *= 1.1
    return logits_while_merging(adapted, out)


@pytest.mark.parametrize(
    ("model", "spec", "dora"),
    [
        ("llama", "tp=2,pp=2", False),
        ("phi3", "dp_shard=2,tp=2", True),
        ("gpt2", "tp=2", False),
        ("llama", "dp_shard=2,pp=2", True),
        ("phi3", "dp_shard=2,tp=2", False),
        ("gpt2", "dp_shard=2,tp=2", True),
        ("llama", "tp=4", True),
    ],
)
def test_merging(runs, tmp_path, model, spec, dora):
    """Into each rank's part of the base: the same logits, and a folder of whole weights for plain transformers."""
    initial, one, many = runs.initial(model), str(tmp_path / "one"), str(tmp_path / "many")
    settings = {"use_dora": True} if dora else {}
    (reference, *_) = run_alone(merged, None, model, initial, one, **settings)
    call = partial(merged, spec, model, initial, many, **settings)
    for results in run(call, axes(spec)["world"], init=False):
        assert all((logits - reference).abs().max() < 1e-4 for logits in results)
    none(weight_differences(many, one, 1e-6))


def state_dict(spec, initial):
    """What `accelerator.get_state_dict` gives of a model with adapters."""
    from accelerate import Accelerator

    activate(spec)
    model = load_model(Script(lora=lora((*ATTENTION, *ENDS), modules_to_save=["model.norm"])), initial, 0)
    return Accelerator(cpu=True).get_state_dict(model)


def test_state_dict_is_whole(runs):
    """On rank 0, by PEFT's own names; the other ranks get nothing."""
    initial = runs.initial("llama")
    (one,) = run(partial(state_dict, None, initial), 1, init=False)
    first, *others = run(partial(state_dict, "dp_shard=2,pp=2", initial), 4, init=False)
    assert others == [{}] * 3
    assert first.keys() == one.keys()
    assert all(torch.equal(first[name], one[name]) for name in one)


def reduced(initial, spec):
    """Bytes that one step reduces over data ranks, and those of the adapters' gradients."""
    activate(spec)
    script = Script(lora=lora("all-linear"))
    model = load_model(script, initial, 0).train()
    ids = torch.arange(16).reshape(2, 8)
    loss = model(input_ids=ids, labels=ids).loss
    with CountCollectives() as counted:
        loss.backward()
    adapters = sum(4 * p.numel() for name, p in model.named_parameters() if "lora_" in name)
    return counted.whole["scatter"] + counted.whole["reduce"], adapters


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2"])
def test_only_adapters_are_reduced(runs, spec):
    """Gradients of the adapters, once; of the frozen base nothing."""
    for found, adapters in run(partial(reduced, runs.initial("llama"), spec), 2, init=False):
        assert found == adapters


def gathered(initial: str, spec: str, use_dora: bool) -> Counter[str]:
    """How often a step of adapters in fp32 on a base in bf16 gathers and reduces."""
    activate(spec)
    base = AutoModelForCausalLM.from_pretrained(initial, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=3, target_modules="all-linear", use_dora=use_dora)).train()
    ids = torch.arange(16).reshape(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()  # the first call compares the batches of data ranks
    with CountCollectives() as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    return counted.counts


@pytest.mark.parametrize("use_dora", [False, True])
def test_layers_gather_once_for_adapters_of_another_dtype(runs, use_dora):
    """Adapters in fp32 are most of what trains: a layer gathers them with its frozen base, forward and backward."""
    counts = run(partial(gathered, runs.initial("llama"), "dp_shard=2", use_dora), 2, init=False)[0]
    layers = AutoConfig.from_pretrained(runs.initial("llama")).num_hidden_layers
    assert counts["gather"] <= 2 * layers + 3
    assert counts["scatter"] == layers


def copied_head(initial: str, spec: str | None) -> tuple[list[float], float]:
    """Losses with a trained copy of the head and without adapters; bytes gathered for the first, by the head's."""
    activate(spec)
    script = Script(lora=lora(("q_proj",), modules_to_save=["lm_head"]))
    model = load_model(script, initial, 0).train()
    with torch.no_grad():
        model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    ids = torch.arange(22).reshape(2, 11)
    with CountCollectives() as counted:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    with torch.no_grad(), model.disable_adapter():
        reference = model(input_ids=ids, labels=ids).loss
    with model.disable_adapter():
        frozen = model(input_ids=ids, labels=ids).loss
    ends = counted.whole["gather"] / model.lm_head.original_module.weight.nbytes
    return [loss.item(), reference.item(), frozen.item()], ends


def test_a_head_is_not_gathered_beside_its_trained_copy(runs):
    """Embedding and copy are gathered once, the layers twice."""
    expected, _ = run_alone(copied_head, runs.initial("llama"), None)
    layers = 2 * sum(p.nbytes for p in models.build("llama").model.layers.parameters())
    for losses, ends in run(copied_head, 2, runs.initial("llama"), "dp_shard=2", init=False):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert ends - layers / (515 * 64 * 4) == pytest.approx(2, abs=0.3)


def example(spec, arguments):
    """examples/finetune_lora.py, unchanged; the losses it logged."""
    activate(spec)
    recorder = Recorder()
    trainer.DEFAULT_CALLBACKS = [recorder, *trainer.DEFAULT_CALLBACKS]  # a script takes no callbacks
    PrinterCallback.on_log = lambda *args, **kwargs: None
    sys.argv, sys.path = ["finetune_lora.py", *arguments], [str(EXAMPLES), *sys.path]
    runpy.run_path(str(EXAMPLES / "finetune_lora.py"), run_name="__main__")
    return recorder.logs


@pytest.mark.parametrize("spec", ["dp_shard=2,tp=2"])
def test_script_as_peft_shows_it(tmp_path, spec):
    """get_peft_model, all linear layers, the best checkpoint kept and loaded, adapters loaded again by plain calls."""
    found = []
    for name, layout, rows in (("one", None, 8), ("many", spec, 4)):
        flags = {"base": tmp_path / "base", "output_dir": tmp_path / name, "max_steps": 2, "vocab_size": 2000}
        flags |= {"logging_steps": 1, "eval_steps": 1, "save_steps": 1, "learning_rate": 1e-3, "report_to": "none"}
        flags |= {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True, "use_cpu": True}
        flags |= {"per_device_train_batch_size": rows, "per_device_eval_batch_size": 8 * rows, "disable_tqdm": True}
        arguments = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        found.append(run(partial(example, layout, arguments), 4 if layout else 1, init=False)[0])
    one, many = found
    assert len(many) == len(one) == 2
    assert [log["loss"] for log in many] == pytest.approx([log["loss"] for log in one], rel=1e-5)


def masks(initial, sequence_parallel):
    """Where two rows of inputs survive the dropout of a column's and a row's adapter, for two layers."""
    activate(f"tp=2,sequence_parallel={sequence_parallel}")
    script = Script(lora=lora(("q_proj", "o_proj"), lora_dropout=0.5))
    model, found = load_model(script, initial, 0).train(), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p == 0.5:
            module.register_forward_hook(lambda m, args, y, name=name: found.__setitem__(name, y != 0))
    model(input_ids=torch.arange(16).reshape(2, 8))
    return [mask for name, mask in found.items() if "layers.0" in name or "layers.1" in name]


@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
def test_dropout_masks(runs, sequence_parallel):
    """What ranks hold alike they drop alike, of what they hold parts they drop different things; layers differ."""
    first, second = run(partial(masks, runs.initial("llama"), sequence_parallel), 2, init=False)
    alike = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert alike == [True, False, True, False]
    assert not torch.equal(first[0], first[2])


@pytest.mark.parametrize("spec", ["tp=2,dp_shard=2", "tp=2,pp=2"])
def test_stopped_run_goes_on(runs, tmp_path, spec):
    """From the checkpoint of one process and from its own: adapters, moments and schedule."""
    adapt = partial(with_adapters, Script(lora=lora(ATTENTION + MLP)))
    job = {"folder": runs.initial("llama"), "adapt": adapt}
    (one,) = trained("", {**job, "out": f"{tmp_path}/one"})
    own = {**job, "out": f"{tmp_path}/own"}
    jobs = [
        {**job, "out": f"{tmp_path}/on-{name}", "resume": f"{tmp_path}/{name}/checkpoint-{STOP}"} for name in NAMES
    ]
    through, *resumed = trained(spec, own, *jobs)
    found = log_differences(through, one, range(1, STEPS + 1), 1e-4)
    for ended in resumed:
        found += log_differences(ended, one, range(STOP + 1, STEPS + 1), 1e-4)
    none(found)


def logits_of(base, folder):
    """Of a few tokens, by plain transformers and peft."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    return model(input_ids=torch.arange(16).reshape(2, 8)).logits.detach()


def config_of(folder):
    """What peft wrote beside the weights."""
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()}


REFUSED = [
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"layer_replication": ((0, 2), (1, 4))}, "layer_replication"),
    ({"trainable_token_indices": (1, 2)}, "trainable_token_indices"),
]


@pytest.mark.parametrize(("settings", "named"), REFUSED)
def test_refused_by_name(runs, settings, named):
    with pytest.raises(RankFailure, match=rf"LoraConfig\({named}=.* works"):
        runs.parallel(Script(lora=lora(ATTENTION, **settings)), "tp=2")


def other_ways(initial):
    """Adapters by other ways than LoRA's get_peft_model, and what changes the base; each must raise."""
    from accelerate import Accelerator
    from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model, inject_adapter_in_model
    from peft.optimizers import create_lorafa_optimizer

    activate("tp=2")
    said = []

    def refused(error, call):
        with pytest.raises(error) as caught:
            call()
        said.append(str(caught.value))

    def load():
        return AutoModelForCausalLM.from_pretrained(initial)

    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    refused(SpecError, lambda: get_peft_model(load(), IA3Config(task_type="CAUSAL_LM")))
    refused(SpecError, lambda: get_peft_model(load(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))
    layers = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["mlp.up_proj"])
    refused(SpecError, lambda: get_peft_model(load(), layers))
    refused(SpecError, lambda: inject_adapter_in_model(IA3Config(target_modules=["k_proj"]), load()))
    model = get_peft_model(load(), config)
    refused(NotImplementedError, lambda: model.merge_and_unload(safe_merge=True))
    optimizer = create_lorafa_optimizer(model, r=8, lora_alpha=8, lr=0.1)
    refused(SpecError, lambda: Accelerator(cpu=True).prepare(model, optimizer))
    return said


def test_other_ways_are_refused(runs):
    said = run(partial(other_ways, runs.initial("llama")), 2, init=False)[0]
    assert len(said) == 6
    assert all("works" in text or "not part of this version" in text for text in said)
