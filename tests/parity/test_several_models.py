"""Losses that call several models, or one several times: preferences against a reference, as in TRL."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer

from tests import models
from tests.distributed import run, run_alone
from tests.rows import VOCABULARY
from tests.training import Recorder, arguments_of, axes, close, layouts, none


class Preferences(Dataset):
    """Pairs of a chosen and a rejected continuation, of unequal lengths."""

    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(21)
        self.tokens = torch.randint(1, VOCABULARY, (size, 2, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"pair": self.tokens[index], "length": 12 - index % 4, "margin": 0.1 * (index % 3)}


def collate(examples):
    """[chosen 0, chosen 1, …, rejected 0, rejected 1, …], and one margin for each pair."""
    tokens = torch.cat([torch.stack([e["pair"][i] for e in examples]) for i in (0, 1)])
    lengths = torch.tensor([e["length"] - i for i in (0, 1) for e in examples])
    mask = (torch.arange(12) < lengths[:, None]).long()
    margins = torch.tensor([e["margin"] for e in examples])
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "completion_mask": mask * (torch.arange(12) > 3),
        "margin": margins,
    }


class PreferenceTrainer(Trainer):
    """Direct preference optimisation (Rafailov et al., 2023) with a reference model, or the adapters off."""

    reference = None

    def log_probabilities(self, model, inputs):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = outputs.logits[:, :-1].float().log_softmax(-1)
        each = logits.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0] * inputs["completion_mask"][:, 1:]
        return each.sum(-1).chunk(2)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chosen, rejected = self.log_probabilities(model, inputs)
        with torch.no_grad():
            if self.reference is None:
                with self.accelerator.unwrap_model(model).disable_adapter():
                    before = self.log_probabilities(model, inputs)
            else:
                before = self.log_probabilities(self.reference, inputs)
        gap = chosen - before[0] - (rejected - before[1])
        self.gaps.append(gap.detach().mean().item())
        loss = -torch.nn.functional.logsigmoid(0.5 * gap - inputs["margin"]).mean()
        return (loss, {"gap": gap}) if return_outputs else loss


def prefer(spec, folder, out, kind, rows=22):
    """Three steps, the last one ragged, then an evaluation."""
    if spec:
        from hf_parallel import hooks

        hooks.activate(spec, source="test")
    ranks = axes(spec)["data_ranks"] if spec else 1
    arguments = arguments_of(out, ranks, learning_rate=0.5, remove_unused_columns=False, label_names=["margin"])
    model, reference = AutoModelForCausalLM.from_pretrained(folder), None
    if kind == "adapters":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    else:
        reference = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False).eval()
    recorder = Recorder()
    trainer = PreferenceTrainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=Preferences(rows),
        eval_dataset=Preferences(9),
        callbacks=[recorder],
    )
    trainer.reference, trainer.gaps = reference, []
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    recorder.logs.append({"loss": evaluated, "grad_norm": evaluated})
    if spec and "dp_shard" in spec:  # nobody may find gathered weights after an evaluation
        every = [*model.parameters(), *(reference.parameters() if reference is not None else ())]
        assert all(isinstance(parameter, DTensor) for parameter in every)
    return recorder.logs, recorder.gradient_keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = str(tmp_path_factory.mktemp("models") / "llama")
    run_alone(lambda: models.build("llama").save_pretrained(where))
    return where


@pytest.mark.parametrize("kind", ["reference", "adapters"])
@pytest.mark.parametrize("spec", layouts("two models", "dp_shard=2", "tp=2", "pp=2", "pp=2,dp_shard=2", "tp=2,pp=2"))
def test_preferences(kind, spec, folder, tmp_path, capfd):
    expected, keys = run_alone(prefer, None, folder, str(tmp_path / "one"), kind)
    outcomes = run(prefer, axes(spec)["world"], spec, folder, str(tmp_path / "many"), kind, init=False)
    for logs, _ in outcomes:
        assert len(logs) == len(expected) == 4  # the last one is an evaluation
        for ours, theirs in zip(logs, expected, strict=True):
            # differences of sums over a row's tokens, in exponentials: ten times what single losses are off
            none([line for key in ("loss", "grad_norm") for line in close(key, ours[key], theirs[key], 1e-4)])
    for step, names in enumerate(keys):
        assert set().union(*(of_rank[step] for _, of_rank in outcomes)) == set(names)
    if "pp=" in spec:
        assert "the script's loss is a mean over micro-batches: 1f1b from now on" in capfd.readouterr().err
