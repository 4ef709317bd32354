"""QLoRA on mixtures: linears in 4 bits beside experts that are none, and experts that are linears of their own."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer

from tests import models, sweep
from tests.distributed import run, run_alone
from tests.parity import test_expert_models as mixtures
from tests.rows import data
from tests.training import Recorder, arguments_of, axes, none, spec_id, weight_differences

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
        model = sweep.build(cls, config)
    model.save_pretrained(folder)


def train(spec: str | None, name: str, folder: str, out: str) -> Any:
    """Three steps; also which gradients there are and where the adapters were saved."""
    if spec:
        from hf_parallel import hooks

        hooks.activate(spec, source="test")
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    cls = ListedForCausalLM if name == "lists" else AutoModelForCausalLM
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = cls.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(models.SEED)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **TARGETS[name]))
    arguments = arguments_of(out, axes(spec)["data_ranks"] if spec else 1)
    recorder = Recorder()
    trainer = Trainer(model, arguments, train_dataset=data("llama", 22, 11), callbacks=[recorder])
    trainer.train()
    trainer.save_model(f"{out}/saved")
    return recorder.logs, recorder.gradient_keys, f"{out}/saved"


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Folder, and what one plain process computes with bitsandbytes' own layers, by model."""
    root, made = tmp_path_factory.mktemp("experts"), {}

    def reference(name):
        if name not in made:
            folder = str(root / name)
            run_alone(write, name, folder)
            made[name] = folder, run_alone(train, None, name, folder, f"{folder}-one")
        return made[name]

    return reference


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(spec, name, id=f"{spec_id(spec)}-{name}")
        for spec, name in (
            ("tp=2,ep=2", "mixtral"),
            ("dp_shard=2,ep=2", "mixtral"),
            ("tp=2,pp=2", "mixtral"),
            ("dp_shard=2", "phimoe"),
            ("tp=2", "gpt_oss"),
            ("dp_shard=2,ep=2", "gpt_oss"),
            ("dp_shard=2", "lists"),
            ("tp=2", "lists"),
        )
    ],
)
def test_same_numbers_as_one_process(references, tmp_path, spec, name):
    folder, (logs, keys, saved) = references(name)
    ranks = run(partial(train, spec, name, folder, str(tmp_path)), axes(spec)["world"], init=False, timeout=90)
    found = []
    for own, *_ in ranks:
        for step, (ours, theirs) in enumerate(zip(own, logs, strict=True), 1):
            for key in ("loss", "grad_norm"):  # the codes are equal, and so are products but for their order of sums
                if not abs(ours[key] - theirs[key]) <= 1e-5 * theirs[key]:
                    found.append(f"{key} in step {step}: {ours[key]}, one process {theirs[key]}")
    for step, expected in enumerate(keys):
        if set().union(*(rank[1][step] for rank in ranks)) != set(expected):
            found.append(f"other gradients in step {step + 1}")
    none(found + weight_differences(ranks[0][2], saved, 2e-6))
