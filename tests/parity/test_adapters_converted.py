"""Adapters that started from factors of the base are saved as LoRA of the base as it was."""

import pytest
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")

from tests import models
from tests.adapters import ATTENTION, MLP
from tests.distributed import run, run_alone
from tests.training import activate, axes, none, weight_differences


def converted(spec, initial, out):
    """What PEFT's PiSSA scripts do around a training, which here makes each number half as large again."""
    from peft import LoraConfig, get_peft_model

    activate(spec)
    config = LoraConfig(r=3, target_modules=[*ATTENTION, *MLP], init_lora_weights="pissa", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(initial), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(f"{out}/start")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1.5)
    model.save_pretrained(f"{out}/lora", path_initial_model_for_weight_conversion=f"{out}/start")


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2,pp=2"])
def test_saved_as_lora(tmp_path, spec):
    initial = f"{tmp_path}/model"
    run_alone(lambda: models.build("llama").save_pretrained(initial))
    run_alone(converted, None, initial, f"{tmp_path}/one")
    run(converted, axes(spec)["world"], spec, initial, f"{tmp_path}/many", init=False)
    none(weight_differences(f"{tmp_path}/many/lora", f"{tmp_path}/one/lora", 1e-5))
