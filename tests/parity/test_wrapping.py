"""A module around a model that `from_pretrained` has made parallel: a pooled encoder with a layer of its own."""

import os
from abc import ABC

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel, Trainer

from hf_parallel.apply.methods import find_models_inside
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.session import of_process
from hf_parallel.ranks import desync
from tests import training
from tests.distributed import run
from tests.refusals import pattern_of_refusal
from tests.rows import CLASSES, data
from tests.training import Outcome, Script, activate, fit, trainer_of


class Pooled(nn.Module):
    """The mean of the hidden states, a layer behind it, and a number of its own."""

    def __init__(self, folder: str):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder)
        torch.manual_seed(5)
        self.head = nn.Linear(64, CLASSES)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(-1)
        logits = self.scale * self.head((hidden * kept).sum(1) / kept.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(spec: str | None, out: str, folder: str) -> Outcome:
    """The Trainer script with that model."""
    data_ranks = activate(spec)
    return training.train(Script(model="bert"), folder, out, data_ranks, model=Pooled(folder))


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "tp=2,dp_shard=2"])
def test_as_in_one_process(spec, runs):
    """Loss, norm, gradients of all weights, evaluation, and the saved weights of both."""
    runs.compare(train, spec, runs.initial("bert"))


class PooledConfig(PretrainedConfig):
    model_type = "pooled"


class PooledModel(PreTrainedModel):
    """A model of transformers' own kind that loads its encoder in `__init__`, as TRL's details of summarizing do."""

    config_class, base_model_prefix = PooledConfig, "encoder"

    def __init__(self, folder: str):
        super().__init__(PooledConfig())
        self.encoder = AutoModel.from_pretrained(folder)
        torch.manual_seed(5)
        self.head = nn.Linear(64, CLASSES)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    forward = Pooled.forward


def train_model(spec: str | None, out: str, folder: str, resized: bool) -> Outcome:
    """The Trainer script with that model, maybe with a vocabulary that has grown, as SpanMarker's."""
    data_ranks, model = activate(spec), PooledModel(folder)
    if resized:
        embedding = model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 3, 8)
        assert embedding.weight.shape[0] % 8 == 0
    return training.train(Script(model="bert"), folder, out, data_ranks, model=model)


@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_a_model_of_transformers_around_another(spec, resized, runs):
    runs.compare(train_model, spec, runs.initial("bert"), resized)


class Embedder(ABC, Pooled):
    """The same with a base before nn.Module, whose objects torch's FSDP cannot give another class by itself."""

    def save(self, folder: str) -> None:
        own = self.encoder.state_dict()
        self.encoder.save_pretrained(folder, state_dict={name: x.clone().cpu() for name, x in own.items()})


class SavesItsEncoder(Trainer):
    """As FlagEmbedding's: what is saved is a part of the model, asked for where only rank 0 is."""

    def _save(self, output_dir=None, state_dict=None):
        self.model.save(output_dir)


def train_embedder(spec: str | None, out: str, folder: str) -> Outcome:
    data_ranks = activate(spec)
    rows = {"train_dataset": data("bert", 22, 11), "eval_dataset": data("bert", 5, 12)}
    made = trainer_of(Embedder(folder), out, data_ranks, kind=SavesItsEncoder, **rows)
    return fit(*made, f"{out}/saved")


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_a_trainer_saves_a_part_of_a_model_with_two_bases(spec, runs):
    runs.compare(train_embedder, spec, runs.initial("bert"))


class Writing(Pooled):
    """Writes its own folder, as GLiNER does."""

    def save_pretrained(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        state = {name: tensor.clone().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, f"{folder}/model.safetensors")


class SavesOnRank0(Trainer):
    def save_model(self, output_dir=None, _internal_call=False):
        if self.args.should_save:
            self.model.save_pretrained(output_dir or self.args.output_dir)


def train_writing(spec: str | None, out: str, folder: str, saved: str) -> Outcome:
    data_ranks = activate(spec)
    rows = {"train_dataset": data("bert", 22, 11), "eval_dataset": data("bert", 5, 12)}
    settings = {"save_strategy": "steps", "save_steps": 2}
    outcome = fit(*trainer_of(Writing(folder), out, data_ranks, settings, SavesOnRank0, **rows), f"{out}/saved")
    outcome.folder = f"{out}/{saved}"
    if spec:
        of_process(desync.Answering).detector.end()  # as at the end of a script
    return outcome


@pytest.mark.parametrize("saved", ["saved", "checkpoint-2"])
@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_a_trainer_that_lets_rank_0_save_alone(spec, saved, runs):
    runs.compare(train_writing, spec, runs.initial("bert"), saved)


class Valued(Pooled):
    """Its state names the tensors of the model as the model itself does, as TRL's value heads do."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name.removeprefix("encoder."): tensor for name, tensor in state.items()}


def train_valued(spec: str | None, out: str, folder: str) -> Outcome:
    data_ranks = activate(spec)
    rows = {"train_dataset": data("bert", 22, 11), "eval_dataset": data("bert", 5, 12)}
    return fit(*trainer_of(Valued(folder), out, data_ranks, **rows), f"{out}/saved")


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_a_state_with_the_names_of_the_model(spec, runs):
    """Under tp queries, keys and values of one matrix lie in another order on the ranks."""
    runs.compare(train_valued, spec, runs.initial("phi3"))


def adapt(folder: str) -> None:
    from peft import IA3Config, LoraConfig, get_peft_model

    activate("dp_shard=2")
    split, whole = Pooled(folder), Pooled(folder)
    split.encoder = get_peft_model(split.encoder, LoraConfig(target_modules=["key"]))
    whole.encoder = get_peft_model(whole.encoder, IA3Config(target_modules=["key"], feedforward_modules=[]))
    accelerator = Accelerator(cpu=True)
    assert [type(part).__name__ for part in accelerator.prepare(split)._hf_parallel.parts] == ["BertModel"]
    with pytest.raises(SpecError, match="adapters in a model inside Pooled: .* whole.*; LoRA"):
        accelerator.prepare(whole)


def test_adapters_that_could_not_be_saved_are_refused(runs):
    run(adapt, 2, runs.initial("bert"), init=False)


def test_a_pipeline_is_refused():
    around = nn.Sequential(nn.Linear(1, 1))
    around[0]._hf_parallel = "pipelined"
    with pytest.raises(SpecError, match=pattern_of_refusal("pp_size=2", "Sequential", works="pp_size=1 works")):
        find_models_inside(around, ParallelConfig.parse("pp=2"))
