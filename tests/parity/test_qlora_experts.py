"""QLoRA on mixtures: linears in 4 bits beside experts that are none, and experts that are linears of their own."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests import models, sweep
from tests.distributed import run_alone
from tests.parity import test_expert_models as mixtures
from tests.rows import data
from tests.training import Outcome, Tolerance, activate, fit, trainer_of

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
#: Hidden sizes and widths of whole blocks of 64; PhiMoE's router is a subclass of Linear, which stays as it is.
TARGETS: dict[str, dict[str, Any]] = {
    "mixtral": {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
    "phimoe": {"target_modules": ["q_proj", "v_proj"]},
    "gpt_oss": {"target_modules": ["k_proj", "o_proj"]},
    "lists": {"target_modules": ["q_proj", "up", "down"]},
}


class Listed(nn.Module):
    """Experts as a model from before transformers kept them side by side has them: linears in a list."""

    def __init__(self, hidden: int, width: int, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate, self.top_k = nn.Linear(hidden, experts, bias=False), top_k
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(hidden, width), "down": nn.Linear(width, hidden)}) for _ in range(experts)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(hidden_states).softmax(-1).topk(self.top_k, -1)
        output = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self.experts):
            own: Any = expert
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            output = output + share * own["down"](own["up"](hidden_states).relu())
        return output


class ListedForCausalLM(LlamaForCausalLM):
    """A Llama with such layers, as a script or a model's own code defines it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Listed(config.hidden_size, config.intermediate_size)
        self.post_init()


def write(name: str, folder: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    if name == "lists":
        torch.manual_seed(models.SEED)
        model = ListedForCausalLM(models.llama(**sizes))
    elif name == "mixtral":
        model = models.build(name, **sizes)
    else:
        cls, config = mixtures.tiny(name)
        changes = {"hidden_size": 128, "head_dim": 32, "vocab_size": models.VOCABULARY, "pad_token_id": 0}
        for key, value in changes.items():
            setattr(config, key, value)
        model = sweep.build_random(cls, config)
    model.save_pretrained(folder)


def train(spec: str | None, out: str, name: str, folder: str) -> Outcome:
    """Three steps."""
    data_ranks = activate(spec)
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    cls = ListedForCausalLM if name == "lists" else AutoModelForCausalLM
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = cls.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(models.SEED)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **TARGETS[name]))
    made = trainer_of(model, out, data_ranks, train_dataset=data("llama", 22, 11))
    return fit(*made, f"{out}/saved")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where a model is, by name."""
    root = tmp_path_factory.mktemp("experts")

    def folder(name):
        if not (root / name).exists():
            run_alone(write, name, str(root / name))
        return str(root / name)

    return folder


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("tp=2,ep=2", "mixtral"),
        ("dp_shard=2,ep=2", "mixtral"),
        ("tp=2,pp=2", "mixtral"),
        ("dp_shard=2", "phimoe"),
        ("tp=2", "gpt_oss"),
        ("dp_shard=2,ep=2", "gpt_oss"),
        ("dp_shard=2", "lists"),
        ("tp=2", "lists"),
    ],
)
def test_same_numbers_as_one_process(runs, folders, spec, name):
    """The codes are equal, and so are products but for their order of sums."""
    runs.compare(train, spec, name, folders(name), tolerance=Tolerance(weights=2e-6))
