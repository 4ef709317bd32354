"""What cannot work is refused at start: on every rank, in one line that names the key, the number and what works."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

from tests import models, resuming
from tests.distributed import RankFailure, run
from tests.refusals import pattern_of_refusal
from tests.reliability.launching import hf_parallel_launch, launch, torchrun
from tests.rows import data
from tests.training import Script, activate, load_model, trainer_of


class NotReached(TrainerCallback):
    """Turns a step into a failure: the refusal must come first."""

    def on_step_begin(self, args, state, control, **kwargs):
        raise AssertionError("training began")


def train(spec: str, folder: str, out: str, batch_size: int = 8) -> None:
    """An ordinary start of training under a spec."""
    activate(spec)
    model = load_model(Script(), folder, 0)
    rows = data("bert" if model.config.model_type == "bert" else "llama", 16, seed=1)
    settings = {"per_device_train_batch_size": batch_size}
    trainer, _ = trainer_of(model, out, settings=settings, callbacks=[NotReached()], train_dataset=rows)
    trainer.train()


def refusal(world: int, fn, *args, env=None) -> str:
    """The message of the `SpecError` that every rank raised."""
    with pytest.raises(RankFailure) as caught:
        run(fn, world, *args, init=False, env=env)
    assert caught.value.kinds == dict.fromkeys(range(world), "SpecError"), str(caught.value)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("spec", "world", "model", "words"),
    [
        pytest.param("tp=2,pp_sise=2", 2, "llama", ["pp_sise", "pp_size"], id="unknown key"),
        pytest.param("tp=2,pp=2", 2, "llama", ["4", "2"], id="sizes above the world"),
        pytest.param("tp=1,dp_shard=1", 2, "llama", ["one process", "2", "dp_shard=2"], id="sizes below the world"),
        pytest.param("tp=3", 3, "llama", ["tp_size=3", "4 attention heads", "tp_size=2"], id="heads"),
        pytest.param("pp=5", 5, "llama", ["pp_size=5", "4 layers", "pp_size=4"], id="more stages than layers"),
        pytest.param("pp=2,pipeline_microbatches=3", 2, "llama", ["pipeline_microbatches=3", "8"], id="micro-batches"),
        pytest.param("pp=2,pipeline_split=[3,2]", 2, "llama", ["pipeline_split", "[3,2]", "4"], id="split"),
        pytest.param("tp=2", 2, "mamba", ["tp_size=2", "Mamba", "tp_size=1"], id="no attention"),
        pytest.param("tp=4", 4, "olmo2", ["tp_size=4", "norm over all key heads", "tp_size=2"], id="norm of keys"),
        pytest.param("tp=2", 2, "stablelm_12b", ["tp_size=2", "for each head", "tp_size=1"], id="norms of heads"),
        pytest.param("tp=2", 2, "doge", ["tp_size=2", "DogeAttention", "tp_size=1"], id="mask of all heads"),
        pytest.param("pp=2", 2, "bert", ["pp_size=2", "Bert", "pp_size=1"], id="no pipeline plan"),
        pytest.param("cp=2", 2, "mamba", ["cp_size=2", "Mamba", "cp_size=1"], id="no attention to share"),
        pytest.param("cp=2", 2, "t5", ["cp_size=2", "T5", "cp_size=1"], id="two stacks"),
        pytest.param("cp=2", 2, "roberta", ["cp_size=2", "positions", "cp_size=1"], id="positions of its own"),
        pytest.param(
            "cp=3,context_parallel=ulysses",
            3,
            "llama",
            ["ulysses", "4 heads", "context_parallel=ring"],
            id="few heads",
        ),
        pytest.param("cp=2,attention=eager", 2, "llama", ["attention=eager", "attention=auto"], id="kernels"),
        pytest.param("ep=2", 2, "llama", ["ep_size=2", "ep_size=1"], id="expert parallelism"),
        pytest.param("tp=2,offload=cpu", 2, "llama", ["offload=cpu", "offload=optimizer"], id="offload"),
        pytest.param("offload=nvme:/proc/x", 2, "llama", ["nvme:/proc/x", "offload=optimizer"], id="no folder"),
        pytest.param("quantize_weights=true", 2, "llama", ["quantize_weights=true", "int8"], id="ZeRO++"),
        pytest.param("tp=2,quantize_weights=int8", 2, "llama", ["quantize_weights=int8", "dp_shard_size"], id="qwZ"),
        pytest.param("dp_shard=2,hierarchical_shard=2", 2, "llama", ["hierarchical_shard=none"], id="hpZ"),
    ],
)
def test_refused_on_every_rank_before_any_step(runs, tmp_path, spec, world, model, words):
    message = refusal(world, train, spec, runs.initial(model), str(tmp_path))
    assert [word for word in words if word not in message] == [], message


def test_yaml_that_is_no_mapping(runs, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text("- tp_size: 2\n")
    message = refusal(2, train, str(file), runs.initial("llama"), str(tmp_path))
    assert "spec.yaml" in message
    assert "mapping" in message


def test_batch_smaller_than_the_stages(runs, tmp_path):
    message = refusal(2, train, "pp=2", runs.initial("llama"), str(tmp_path), 1)
    assert "pp_size=2" in message


def test_a_second_spec_names_both_sources():
    def twice():
        from hf_parallel.hooks import activation

        activation.activate("tp=2", source="the first")
        activation.activate("tp_size=2", source="the same again")
        activation.activate("pp=2", source="the second")

    message = refusal(2, twice)
    assert [word for word in ("the first", "the second", "tp=2", "pp=2") if word not in message] == []


def test_a_flag_against_the_environment_names_both(tmp_path):
    def conflict():
        import hf_parallel  # noqa: F401 - gives TrainingArguments its field

        TrainingArguments(str(tmp_path), use_cpu=True, parallel="pp=2")

    message = refusal(2, conflict, env={"HF_PARALLEL": "tp=2"})
    assert [word for word in ("HF_PARALLEL", "TrainingArguments", "tp=2", "pp=2") if word not in message] == []


FUSED = {"fused_linear_cross_entropy": True}
UNFUSED = {"cross_entropy": True, "fused_linear_cross_entropy": False}
LIGER = {
    "loss": ("tp=2", {"liger_kernel_config": FUSED}, 'fused_linear_cross_entropy": False'),
    "sequence": ("cp=2", {"liger_kernel_config": FUSED}, "cp_size=2"),
    "cross-entropy": ("tp=2", {"liger_kernel_config": UNFUSED}, "split logits"),
    "selective": ("dp_shard=2,activation_checkpointing=selective", {}, "activation_checkpointing=full"),
}


@pytest.mark.parametrize("what", LIGER)
def test_what_liger_cannot_do(runs, tmp_path, what):
    """What it would compute of parts, and what it would write into."""
    spec, settings, said = LIGER[what]

    def ask(folder: str):
        import hf_parallel

        hf_parallel.activate(spec)
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer_of(model, str(tmp_path), settings={"use_liger_kernel": True, **settings})

    message = refusal(2, ask, runs.initial("llama"))
    assert said in message
    assert "works" in message


@pytest.mark.parametrize("spec", ["tp=2", "pp=2"])
def test_forwards_that_were_replaced_before_the_split(spec):
    """As Liger changes modules, and `AutoLigerKernelForCausalLM` classes."""

    def change():
        import hf_parallel

        own, changed = models.build("llama"), models.build("llama")
        own.model.norm.forward = own.model.norm.forward
        forward = type("Liger", (), {"forward": lambda self, input_ids=None: None}).forward
        forward.__module__ = "liger_kernel.transformers.model.llama"
        changed.__class__ = type("LlamaForCausalLM", (type(changed),), {"forward": forward})
        said = []
        for model in (own, changed):
            with pytest.raises(hf_parallel.SpecError) as error:
                hf_parallel.parallelize(model, spec)
            said.append(str(error.value))
        return said

    for first, second in run(change, 2):
        assert "model.norm has a forward of its own" in first
        assert "LlamaForCausalLM has a forward of its own" in second


class Odd(torch.optim.SGD):
    """Keeps a number per row, as row-wise optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["row"] = torch.zeros(parameter.shape[0])


def save_odd(folder: str, out: str) -> None:
    """Train with it up to the first checkpoint."""

    def change(trainer):
        trainer.optimizer = Odd(trainer.model.parameters(), lr=0.1)

    activate("tp=2")
    resuming.train(folder, out, change=change)


def test_an_optimizer_with_another_kind_of_state_is_refused_by_name(runs, tmp_path):
    with pytest.raises(RankFailure, match=r"Odd .*\brow\b.*save_only_model=True") as caught:
        run(save_odd, 2, runs.initial("llama"), str(tmp_path), init=False)
    assert caught.value.kinds == dict.fromkeys(range(2), "NotImplementedError")


def resume_as_sgd(folder: str, out: str, saved: str) -> None:
    """Resume what AdamW has saved."""
    activate("tp=2")
    resuming.train(folder, out, resume=saved, optim="sgd")


def test_the_state_of_another_optimizer_is_refused_by_name(runs, tmp_path):
    job = {"folder": runs.initial("llama"), "out": str(tmp_path), "max_steps": 1}
    resuming.trained("dp_shard=2", job)
    saved = str(tmp_path / "checkpoint-1")
    line = pattern_of_refusal(f"resume_from_checkpoint={saved}", "AdamW", "SGD", works="optimizer it was written with")
    with pytest.raises(RankFailure, match=line) as caught:
        run(resume_as_sgd, 2, job["folder"], job["out"], saved, init=False)
    assert caught.value.kinds == dict.fromkeys(range(2), "SpecError")


SCRIPT = """
import sys

from transformers import AutoModelForCausalLM

AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("still here")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "processes", "spec", "words"),
    [
        pytest.param(torchrun, 2, "tq=2", ["tq", "tp"], id="torchrun, unknown key"),
        pytest.param(torchrun, 3, "tp=3", ["tp_size=3", "4 attention heads", "tp_size=2"], id="torchrun, heads"),
        pytest.param(hf_parallel_launch, 2, "tp=3", ["tp=3", "2 processes"], id="hf-parallel launch, sizes"),
    ],
)
def test_a_launched_script_ends_with_one_line(runs, tmp_path, launcher, processes, spec, words):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = launch(launcher(processes, spec), str(script), runs.initial("llama"))
    assert ended.code != 0
    assert "still here" not in ended.out
    assert len(ended.refusals) == 1, ended.err[-3000:]
    assert [word for word in words if word not in ended.refusals[0]] == [], ended.refusals[0]


def test_torch_is_not_initialised_in_the_parent():
    """The fork harness depends on it; a test module that trains at import would break every later test."""
    assert not torch.distributed.is_initialized()
    assert "RANK" not in os.environ
