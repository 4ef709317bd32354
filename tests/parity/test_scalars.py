"""Parameters of no dim: a temperature of the logits and a scale of each layer's output, in the model of a script."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, LlamaForCausalLM

from tests import models, training
from tests.distributed import run_alone
from tests.rows import data
from tests.training import EVAL_SEED, TRAIN_SEED, over


class Scaled(LlamaForCausalLM):
    """Its logits are divided by a temperature that is learned."""

    def __init__(self, config):
        super().__init__(config)
        self.temperature = torch.nn.Parameter(torch.tensor(1.5))
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(hidden) / self.temperature
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs) if labels is not None else None
        return {"loss": loss, "logits": logits}


def made(folder):
    torch.manual_seed(models.SEED)
    return Scaled(AutoConfig.from_pretrained(folder))


def script(spec, out, folder, accumulation, loaded):
    data_ranks = training.activate(spec)
    if loaded:
        model = Scaled.from_pretrained(folder)
    else:
        model = made(folder)
    settings = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0.5}
    sets = {
        "train_dataset": data("llama", 22 * accumulation, TRAIN_SEED),
        "eval_dataset": data("llama", 13, EVAL_SEED),
    }
    trained = training.trainer_of(model, out, data_ranks, settings, **sets)
    outcome = training.fit(*trained, f"{out}/saved")
    with safe_open(f"{out}/saved/model.safetensors", "pt") as file:
        outcome.more = file.get_tensor("temperature").item()
    return outcome


SPECS = (
    "dp_shard=2",
    "dp_replicate=2",
    "dp_shard=2,zero_stage=1",
    "cp=2",
    "tp=2,dp_shard=2",
    "dp_replicate=2,tp=2",
    "tp=2",
    "dp_replicate=2,dp_shard=2",
)


@pytest.fixture(scope="module")
def folder(runs, tmp_path_factory):
    """Of the untrained model, with its temperature."""
    out = str(tmp_path_factory.mktemp("scaled"))
    run_alone(lambda: made(runs.initial("llama")).save_pretrained(out))
    return out


@over("scalars", *SPECS)
@pytest.mark.parametrize("loaded", [True, False])
def test_a_temperature(runs, folder, spec, loaded):
    """Gradients, and so the temperature, are those of one process; the checkpoint has it without a dim."""
    ranks = runs.compare(script, spec, folder, 2, loaded)
    alone = runs.alone(script, folder, 2, loaded).more
    assert abs(alone - 1.5) > 0.01
    assert ranks[0].more == pytest.approx(alone, abs=1e-6)
