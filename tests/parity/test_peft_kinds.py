"""PEFT's other methods: ranks keep their adapters whole, with the numbers of one process; tp and pp are refused.

Each is put on a base that is sharded already. Methods that draw numbers per process, or read its whole batch, are
refused, as nothing can be compared.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Trainer

pytest.importorskip("peft")

import hf_parallel
from hf_parallel.ask.config import SpecError
from hf_parallel.axes.data.units import WHOLE
from hf_parallel.hooks.peft.before import _OF_WHOLE_SEQUENCES, _WHOLE_KINDS, is_kept_whole
from tests import models
from tests.counting import CountCollectives
from tests.distributed import run
from tests.resuming import STEPS, STOP, log_differences, trained
from tests.rows import data, pad
from tests.training import Tolerance, activate, check_alone, fit, none, trainer_of, weight_differences

TARGETS = {"target_modules": ["q_proj", "o_proj", "down_proj"]}
#: Methods that put prompts before the tokens or adapt whole attention modules: PEFT merges none of them.
_UNMERGED = {"ADAPTION_PROMPT", "CARTRIDGE", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"}
#: The token that calls an activated LoRA.
CALL = 7
PROMPTS = {"num_virtual_tokens": 3}
#: What the config of a method is made with; the others have `TARGETS`.
SETTINGS = {
    "ADALORA": {**TARGETS, "total_step": 30, "init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1},
    "ADAPTION_PROMPT": {"adapter_layers": 2, "adapter_len": 3},
    "BOFT": {**TARGETS, "boft_block_size": 4},
    "C3A": {**TARGETS, "block_size": 8},
    "CARTRIDGE": PROMPTS,
    "HIRA": {"target_modules": [*TARGETS["target_modules"], "embed_tokens"]},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "MULTITASK_PROMPT_TUNING": {**PROMPTS, "num_tasks": 2},
    "OFT": {**TARGETS, "oft_block_size": 4},
    "PREFIX_TUNING": PROMPTS,
    "PROMPT_TUNING": PROMPTS,
    "P_TUNING": {**PROMPTS, "encoder_hidden_size": 15},
    "RANDLORA": {**TARGETS, "r": 5},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": list(range(40))},
    "VBLORA": {**TARGETS, "vector_length": 4, "num_vectors": 15},
}
BLOCKS = {"target_modules_bd_a": ["q_proj", "down_proj"], "target_modules_bd_b": ["o_proj"]}
#: Settings of LoRA that data ranks alone keep.
LORA = {
    "activated": {"alora_invocation_tokens": [CALL]},
    "block diagonal": {"use_bdlora": {"nblocks": 2, **BLOCKS}},
    "kasa": {"kasa_config": {"beta": 0.1, "gamma": 0.1}},
    "mica": {"init_lora_weights": "mica"},
    "pissa by iterations": {"init_lora_weights": "pissa_niter_4"},
    "tokens": {"trainable_token_indices": list(range(40))},
    "tokens of the head": {"trainable_token_indices": {"lm_head": list(range(40))}},
}
#: Weights of a method that is steep at its start, as its norms of 7,000 and 25 are: 3 steps at a rate of 1e-3.
STEEP = {"DELORA", "RANDLORA", "WAVEFT"}


def config_of(kind):
    from peft import BdLoraConfig, KasaConfig, LoraConfig, mapping

    if kind in LORA:
        classes = {"use_bdlora": BdLoraConfig, "kasa_config": KasaConfig}
        made = {name: classes[name](**value) if name in classes else value for name, value in LORA[kind].items()}
        return LoraConfig(task_type="CAUSAL_LM", r=6, **TARGETS, **made)
    made = {known.value: config for known, config in mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}[kind]
    return made(task_type="CAUSAL_LM", **SETTINGS.get(kind, TARGETS))


class Regularised(Trainer):
    """PEFT's own example of KaSA: a loss of the adapters beside the model's."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        if return_outputs:
            return result[0] + model._get_kasa_loss(), result[1]
        return result + model._get_kasa_loss()


def with_tasks(rows):
    """A batch whose examples are of two tasks."""
    return {**pad(rows), "task_ids": torch.tensor([int(row["input_ids"][0]) % 2 for row in rows])}


def with_calls(rows):
    """A batch of which three in four examples call an activated LoRA somewhere."""
    for row in rows:
        first = int(row["input_ids"][0])
        if first % 4:
            row["input_ids"][1 + first % 5] = CALL
    return pad(rows)


COLLATORS = {"MULTITASK_PROMPT_TUNING": with_tasks, "activated": with_calls}


def adapted(spec, out, kind, folder, before=False, second=False, **changes):
    """Train an adapter of a kind: two batches a step, of unlike lengths, the last one ragged."""
    from peft import get_peft_model

    data_ranks = 1 if before else activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    model = get_peft_model(model, config_of(kind))
    if second:
        model.add_adapter("second", config_of(kind))
        model.set_adapter("second")
    data_ranks = activate(spec) if before else data_ranks
    settings = {"gradient_accumulation_steps": 2, "learning_rate": 1e-3 if kind in STEEP else 1e-2, **changes}
    rows, held_out = (data("llama", count, seed, uneven_lengths=True) for count, seed in ((44, 11), (13, 12)))
    trainer, recorder = trainer_of(
        model,
        out,
        data_ranks,
        {"optim": "adamw_torch", "adam_epsilon": 1e-3, "label_names": ["labels"], **settings},
        kind=Regularised if kind == "kasa" else Trainer,
        train_dataset=rows,
        eval_dataset=held_out,
        data_collator=COLLATORS.get(kind, pad),
    )
    outcome = fit(trainer, recorder, f"{out}/saved")
    assert all(logs["grad_norm"] > 0 for logs in outcome.logs)
    return outcome


@pytest.mark.parametrize("kind", sorted([*_WHOLE_KINDS, *LORA]))
@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "dp_replicate=2,dp_shard=2"])
def test_as_in_one_process(runs, kind, spec):
    runs.compare(adapted, spec, kind, runs.initial("llama", num_hidden_layers=3))


@pytest.mark.parametrize("kind", sorted({*_WHOLE_KINDS, *LORA} - {*_OF_WHOLE_SEQUENCES, "activated"}))
@pytest.mark.parametrize("spec", ["cp=2", "cp=2,dp_shard=2"])
def test_parts_of_sequences(runs, kind, spec):
    # A spectrum is drawn from a normal distribution: fp32 keeps its largest numbers, of size 3, to 2.4e-7. Iterated
    # factors, of size 0.4, start 6e-6 apart where a weight lies elsewhere in memory, in one process too.
    tolerance = Tolerance(weights={"FOURIERFT": 3e-6, "pissa by iterations": 1e-5}.get(kind, Tolerance().weights))
    runs.compare(adapted, spec, kind, runs.initial("llama", num_hidden_layers=3), tolerance=tolerance)


@pytest.mark.parametrize("kind", ["IA3", "VERA", "kasa", "PROMPT_TUNING"])
def test_from_before_the_layout(runs, kind):
    """As by a script that names the layout in its arguments."""
    runs.compare(partial(adapted, before=True), "dp_shard=2", kind, runs.initial("llama", num_hidden_layers=3))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["OFT", "VERA", "mica", "PROMPT_TUNING"])
def test_a_second_adapter(runs, kind, before):
    folder = runs.initial("llama", num_hidden_layers=3)
    ranks = runs.compare(partial(adapted, second=True, before=before), "dp_shard=2", kind, folder)
    assert all("second" in key for key in ranks[0].gradient_keys[0])


@pytest.mark.parametrize("kind", ["OFT", "P_TUNING", "TRAINABLE_TOKENS"])
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"max_grad_norm": 0.05, "gradient_accumulation_steps": 1},
    ],
    ids=["checkpointed", "reentrant", "clipped"],
)
def test_settings_of_trainer(runs, kind, changes):
    runs.compare(partial(adapted, **changes), "dp_shard=2", kind, runs.initial("llama", num_hidden_layers=3))


def with_head(spec, out, folder):
    """Train prompts, which lie beside the model, and a copy of its head, which lies in it."""
    from peft import PromptTuningConfig, get_peft_model

    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, modules_to_save=["lm_head"])
    rows = data("llama", 44, 11, uneven_lengths=True)
    options = {"train_dataset": rows, "data_collator": pad}
    return fit(*trainer_of(get_peft_model(model, config), out, data_ranks, **options), f"{out}/saved")


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2"])
def test_prompts_beside_a_copied_head(runs, spec):
    runs.compare(with_head, spec, runs.initial("llama", num_hidden_layers=3))


def with_decoder(spec, out, folder):
    """Train prompts of two tasks for an encoder and a decoder; the last batch leaves a rank without an example."""
    from peft import MultitaskPromptTuningConfig, get_peft_model

    data_ranks = activate(spec)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    config = MultitaskPromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, num_tasks=2)
    options = {"train_dataset": data("t5", 20, 11), "eval_dataset": data("t5", 9, 12), "data_collator": with_tasks}
    settings = {"label_names": ["labels"]}
    return fit(*trainer_of(get_peft_model(model, config), out, data_ranks, settings, **options), f"{out}/saved")


def test_prompts_of_tasks_for_a_decoder(runs):
    runs.compare(with_decoder, "dp_shard=2", runs.initial("t5"))


KEYS = (
    *("dp_shard=2,zero_stage=2", "dp_shard=2,zero_stage=1,dp_replicate=2", "dp_shard=2,offload=cpu"),
    *("dp_shard=2,offload=optimizer", "dp_shard=2,activation_checkpointing=full", "dp_shard=2,batch_shares=3:1"),
)


@pytest.mark.parametrize("spec", KEYS)
def test_keys(runs, spec):
    runs.compare(adapted, spec, "HRA", runs.initial("llama", num_hidden_layers=3))


def adapt(kind, model):
    from peft import get_peft_model

    torch.manual_seed(models.SEED)
    return get_peft_model(model, config_of(kind))


@pytest.mark.parametrize("kind", ["VERA", "PROMPT_TUNING"])
def test_stopped_run_goes_on(runs, tmp_path, kind):
    """From the checkpoint of one process and from its own."""
    job = {"folder": runs.initial("llama"), "adapt": partial(adapt, kind)}
    (one,) = trained("", {**job, "out": f"{tmp_path}/one"})
    own = {**job, "out": f"{tmp_path}/own"}
    jobs = [
        {**job, "out": f"{tmp_path}/on-{name}", "resume": f"{tmp_path}/{name}/checkpoint-{STOP}"}
        for name in ("one", "own")
    ]
    through, *resumed = trained("dp_shard=2", own, *jobs)
    found = log_differences(through, one, range(1, STEPS + 1), 1e-4)
    for ended in resumed:
        found += log_differences(ended, one, range(STOP + 1, STEPS + 1), 1e-4)
    none(found)


def loaded(spec, out, folder, adapter, trains):
    """Load a saved adapter, answer a few tokens with it, without and with it again; save it again."""
    from peft import PeftModel

    activate(spec)
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(base, adapter, is_trainable=trains).eval()
    tokens = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        on = model(input_ids=tokens).logits
        with model.disable_adapter():
            off = model(input_ids=tokens).logits
        again = model(input_ids=tokens).logits
    model.save_pretrained(out)
    return on, off, again


def deleted(spec, out, kind, folder):
    """Train the first adapter once the second one, which was active, is deleted, and then a third one."""
    from peft import get_peft_model

    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    model = get_peft_model(model, config_of(kind))
    model.add_adapter("second", config_of(kind))
    model.set_adapter("second")
    model(**pad([data("llama", 1, 11)[0]])).loss.backward()
    held = list(model.parameters())  # as an optimizer of before does
    model.delete_adapter("second")
    model.add_adapter("third", config_of(kind))
    model.set_adapter("third")
    model.zero_grad()
    rows = data("llama", 44, 11, uneven_lengths=True)
    settings = {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "label_names": ["labels"]}
    trainer, recorder = trainer_of(model, out, data_ranks, settings, train_dataset=rows, data_collator=pad)
    outcome = fit(trainer, recorder, f"{out}/saved")
    kept = vars(model.get_base_model()._hf_parallel.root)[WHOLE] if spec else ()
    there = set(map(id, model.parameters()))
    outcome.more = len([p for p in kept if id(p) in set(map(id, held)) - there])
    return outcome


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "tokens"])
def test_a_deleted_adapter(runs, kind):
    ranks = runs.compare(deleted, "dp_shard=2", kind, runs.initial("llama", num_hidden_layers=3))
    assert [rank.more for rank in ranks] == [0, 0]


def mixed(spec, folder):
    """Logits of examples with an adapter each, or none."""
    from peft import get_peft_model

    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    model = get_peft_model(model, config_of("tokens"))
    model.add_adapter("second", config_of("tokens"))
    for name, parameter in model.named_parameters():
        if "default" in name or "second" in name:
            parameter.data.add_(0.1 if "second" in name else 0.3)
    model.eval()
    with torch.no_grad():
        tokens = torch.arange(45).view(3, 15)
        logits = model(input_ids=tokens, adapter_names=["default", "second", "__base__"]).logits
    return logits.double().norm(dim=-1).flatten().tolist()


def test_an_adapter_for_each_example(runs):
    check_alone(mixed, "dp_shard=2", runs.initial("llama", num_hidden_layers=3), init=False)


@pytest.mark.parametrize("kind", ["LOHA", "OSF", "PREFIX_TUNING", "TRAINABLE_TOKENS"])
def test_saved_adapters_are_those_of_peft(runs, tmp_path, kind):
    """Plain PEFT reads what ranks have saved, ranks read what plain PEFT has saved, and both write the same."""
    base = runs.initial("llama", num_hidden_layers=3)
    trains = kind != "PREFIX_TUNING"  # PEFT loads no prompts to train
    folder = runs.alone(adapted, kind, base).folder
    (one,) = run(partial(loaded, None, f"{tmp_path}/one", base, folder, trains), 1, init=False)
    for rank in run(partial(loaded, "dp_shard=2", f"{tmp_path}/ranks", base, folder, trains), 2, init=False):
        for found, wanted in zip(rank, one, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(one[0], one[1])
    none(weight_differences(f"{tmp_path}/ranks", f"{tmp_path}/one", 0.0))


class Branched(torch.nn.Module):
    """Parameters of which the ranks use others."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))


def averaged():
    """Gradients of parameters that both ranks, one rank and no rank have used, and what was sent for them."""
    from hf_parallel.axes.data.whole import keep_whole

    mesh = hf_parallel.parallelize(models.build("llama", num_hidden_layers=1), "dp_shard=2")._hf_parallel.mesh
    model = Branched()
    keep_whole(model, mesh, model.parameters())
    rank = torch.distributed.get_rank()
    with CountCollectives() as counted:
        (model.a.sum() * (rank + 1) + (model.b.sum() if rank else 0)).backward()
    first = [None if parameter.grad is None else parameter.grad.tolist() for parameter in model.parameters()]
    (model.a.sum() * (rank + 1)).backward()  # a second pass adds the mean of its own
    return first, model.a.grad.tolist(), counted.counts["reduce"]


def test_gradients_that_some_ranks_have():
    for first, again, reductions in run(averaged, 2):
        assert first == [[1.5] * 3, [0.5] * 3, None]
        assert again == [3.0] * 3
        assert reductions == 1


def refusal_of(call):
    with pytest.raises(SpecError) as caught:
        call()
    return str(caught.value)


def refused(spec):
    """What each method, and LoRA among several, is answered with; None for what is not refused."""
    from peft import LoraConfig, get_peft_model, mapping

    activate(spec)
    found = {}
    model = AutoModelForCausalLM.from_config(models.llama())
    names = [kind.value for kind in mapping.PEFT_TYPE_TO_CONFIG_MAPPING if kind.value not in ("LORA", "CPT", "XLORA")]
    kept = {"dp_shard": {*_WHOLE_KINDS, *LORA}, "cp": {*_WHOLE_KINDS, *LORA} - {*_OF_WHOLE_SEQUENCES, "activated"}}
    for name in (name for name in (*names, *LORA) if name not in kept.get(spec.partition("=")[0], ())):
        config = mapping.PEFT_TYPE_TO_CONFIG_MAPPING.get(name)
        made = config_of(name) if name in LORA else config(task_type="CAUSAL_LM", **SETTINGS.get(name, {}))
        found[name] = refusal_of(lambda made=made: get_peft_model(model, made))
    mixed = refusal_of(lambda: get_peft_model(model, LoraConfig(target_modules=["q_proj"]), mixed=True))
    return found, mixed


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "cp=2"])
def test_what_is_refused_by_name(spec):
    found, mixed = run(partial(refused, spec), 2, init=False)[0]
    axis = spec.partition("=")[0]
    assert len(found) > (40 if axis in ("tp", "pp") else 2)
    if axis == "cp":
        assert {"CARTRIDGE", "PREFIX_TUNING", "activated"} <= found.keys()
    for name, text in found.items():
        wanted = "LoraConfig(" if name in LORA else f"peft_type={name}"
        assert wanted in text
        assert (f"{axis}_size=1, works" in text) == (name in _WHOLE_KINDS or name in LORA)
    assert "MixedModel" in mixed


@pytest.mark.parametrize("kind", ["IA3", "PROMPT_TUNING", "mica"])
def test_bases_of_four_bits_are_refused(kind):
    base = SimpleNamespace(is_loaded_in_4bit=True)
    mesh = SimpleNamespace(size=lambda axis: 1)
    with pytest.raises(SpecError, match="on a base of 4 bits"):
        is_kept_whole(config_of(kind), base, mesh)


def test_settings_beside_known_ones_are_refused():
    """One known setting vouches for no other: these compress what a rank's own batch gives."""
    from peft import LoraConfig, VeloraConfig

    config = LoraConfig(trainable_token_indices=[1], velora_config=VeloraConfig())
    mesh = SimpleNamespace(size=lambda axis: 1)
    with pytest.raises(SpecError, match=r"LoraConfig\(velora_config=.*its default works"):
        is_kept_whole(config, SimpleNamespace(), mesh)


def merged(spec, kind, folder):
    """Logits with trained adapters, merged, taken out again, and merged for good; None where PEFT cannot."""
    from peft import get_peft_model

    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    model = get_peft_model(model, config_of(kind)).eval()
    tokens, found = torch.arange(14).reshape(2, 7), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for call in (lambda: None, model.merge_adapter, model.unmerge_adapter, model.merge_and_unload):
        try:
            model = call() or model
        except (NotImplementedError, ValueError):  # PEFT's own
            found.append(None)
            continue
        with torch.no_grad():
            found.append(model(input_ids=tokens).logits)
    return found


@pytest.mark.parametrize("kind", sorted([*_WHOLE_KINDS - _UNMERGED, *LORA]))
def test_merging(runs, kind):
    folder = runs.initial("llama", num_hidden_layers=3)
    (one,) = run(partial(merged, None, kind, folder), 1, init=False)
    for rank in run(partial(merged, "dp_shard=2", kind, folder), 2, init=False):
        assert [found is None for found in rank] == [found is None for found in one]
        for found, wanted in zip(rank, one, strict=True):
            if wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
