"""Every method of PEFT but LoRA is refused by name before it changes a model, however it would come in."""

import pytest
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")

import hf_parallel
from hf_parallel.ask.config import SpecError
from tests import models
from tests.distributed import run
from tests.training import activate

#: What a method's config cannot be made without.
NEEDED = {
    "ADALORA": {"total_step": 3},
    "ADAPTION_PROMPT": {"adapter_layers": 2, "adapter_len": 4},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]},
}


def build():
    return AutoModelForCausalLM.from_config(models.llama())


def configs():
    """One of each method that this PEFT has."""
    from peft import mapping

    made = {kind.value: config for kind, config in mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return {
        name: config(task_type="CAUSAL_LM", **NEEDED.get(name, {})) for name, config in made.items() if name != "LORA"
    }


def said_of(call):
    with pytest.raises(SpecError) as caught:
        call()
    return str(caught.value)


def on_a_layout():
    """What each method, and LoRA among several, is answered with."""
    from peft import LoraConfig, get_peft_model

    activate("dp_shard=2")
    model = build()
    found = {name: said_of(lambda config=config: get_peft_model(model, config)) for name, config in configs().items()}
    mixed = said_of(lambda: get_peft_model(model, LoraConfig(target_modules=["q_proj"]), mixed=True))
    return found, mixed


def before_a_layout():
    """Methods that are no layers of their own, on a model that becomes parallel later."""
    from peft import get_peft_model

    adapted = {name: get_peft_model(build(), configs()[name]) for name in ("ADAPTION_PROMPT", "IA3")}
    return {
        name: said_of(lambda model=model: hf_parallel.parallelize(model, "dp_shard=2"))
        for name, model in adapted.items()
    }


def test_every_other_method_is_refused():
    found, mixed = run(on_a_layout, 2, init=False)[0]
    assert len(found) > 20
    assert [name for name, text in found.items() if f"peft_type={name}: " not in text] == []
    assert "MixedModel" in mixed


def test_methods_from_before_the_layout_are_refused():
    found = run(before_a_layout, 2)[0]
    assert len(found) == 2
    assert [name for name, text in found.items() if f"peft_type={name}: " not in text] == []
