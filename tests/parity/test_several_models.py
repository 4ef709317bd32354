"""Losses that call several models, or one several times: preferences against a reference, as in TRL."""

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer

from hf_parallel.ask.spec import SpecError
from tests.distributed import run
from tests.rows import VOCABULARY
from tests.training import Outcome, Tolerance, activate, fit, none, over, trainer_of, weight_differences


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


def prefer(spec: str | None, out: str, folder: str, kind: str, rows: int = 22) -> Outcome:
    """Three steps, the last one ragged, then an evaluation."""
    data_ranks = activate(spec)
    model, reference = AutoModelForCausalLM.from_pretrained(folder), None
    if kind == "adapters":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    else:
        reference = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False).eval()
    settings = {"learning_rate": 0.5, "remove_unused_columns": False, "label_names": ["margin"]}
    sets = {"train_dataset": Preferences(rows), "eval_dataset": Preferences(9), "data_collator": collate}
    trainer, recorder = trainer_of(model, out, data_ranks, settings, PreferenceTrainer, **sets)
    trainer.reference, trainer.gaps = reference, []
    outcome = fit(trainer, recorder)
    if spec and "dp_shard" in spec:  # nobody may find gathered weights after an evaluation
        every = [*model.parameters(), *(reference.parameters() if reference is not None else ())]
        assert all(isinstance(parameter, DTensor) for parameter in every)
    return outcome


#: Differences of sums over a row's tokens, in exponentials: ten times what single losses are off.
OF_PAIRS = Tolerance(loss=1e-4, grad_norm=1e-4, eval_loss=1e-4)


@pytest.mark.parametrize("kind", ["reference", "adapters"])
@over("two models", "dp_shard=2", "tp=2", "pp=2", "pp=2,dp_shard=2", "tp=2,pp=2")
def test_preferences(runs, kind, spec, capfd):
    ranks = runs.compare(prefer, spec, runs.initial("llama"), kind, tolerance=OF_PAIRS)
    assert all(len(rank.logs) == 3 for rank in ranks)
    if "pp=" in spec:
        assert "1f1b from now on" in capfd.readouterr().err


def save_apart(spec: str, folder: str, out: str) -> None:
    """Save a student on rank 0 alone, then its teacher, of the same sizes, on all ranks: rank 1 is at the teacher."""
    activate(spec)
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(2)
    if torch.distributed.get_rank() == 0:
        student.save_pretrained(f"{out}/student")
    teacher.save_pretrained(f"{out}/teacher")


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2"])
def test_saves_of_unlike_models_do_not_meet(runs, spec, tmp_path):
    """Rank 1 gives its part of the student while it waits at the teacher: no folder mixes both."""
    initial = runs.initial("llama")
    run(save_apart, 2, spec, initial, str(tmp_path), init=False)
    none(weight_differences(f"{tmp_path}/student", initial, 0.0))
    saved, former = (load_file(f"{folder}/model.safetensors") for folder in (f"{tmp_path}/teacher", initial))
    assert saved.keys() == former.keys()
    assert all(torch.equal(saved[name], 2 * former[name]) for name in saved)


def share_layers(spec: str, folder: str) -> None:
    """Give a frozen teacher the student's layers, as scripts of distillation do where both have one encoder."""
    activate(spec)
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    with pytest.raises(SpecError, match="layers, put into a parallel model: another model's weights, which 2 .*works"):
        teacher.model.layers = student.model.layers


def test_layers_of_another_model_are_refused(runs):
    run(share_layers, 2, "dp_shard=2", runs.initial("llama"), init=False)
