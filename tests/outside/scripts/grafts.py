"""Train a small model whose layers a project has replaced by its own: merged and drawn anew, masked, decorated."""

import ast
import sys
import types
import unittest.mock
from functools import partial
from pathlib import Path

import numpy
import torch
from borrowed_trainers import collate
from latent import causal, main
from transformers import AutoConfig, Trainer, TrainerCallback


def functions_of(path: Path, *names: str, **known) -> types.SimpleNamespace:
    """Some functions and classes of a file of that project, without the rest of its text."""
    text = path.read_text()
    parts = [node for node in ast.parse(text).body if getattr(node, "name", None) in names]
    module = {"torch": torch, "nn": torch.nn, "np": numpy, "partial": partial, "__name__": path.stem, **known}
    exec(compile(ast.Module(parts, []), str(path), "exec"), module)  # the own text of that project
    return types.SimpleNamespace(**{name: module[name] for name in names})


def merged(given, args, **settings):
    """ReLoRA merges its adapters every two steps, draws them anew, and prunes the moments of the optimizer."""
    folder = Path(given.sources, "relora/peft_pretraining")
    import math
    from dataclasses import dataclass

    logger = types.SimpleNamespace(info=lambda text: None, warning=lambda text: None)
    names = ("ReLoRaConfig", "ReLoRaModel", "ReLoRaLinear")
    typed = {**vars(__import__("typing")), "F": torch.nn.functional, "dataclass": dataclass, "math": math}
    relora = functions_of(folder / "relora.py", *names, **typed, bnb=None, logger=logger)
    names = ("random_pruning_", "magnitude_pruning_", "optimizer_reset")
    reset = functions_of(
        folder / "training_utils.py", *names, dist=torch.distributed, logger=logger, ZeroRedundancyOptimizer=tuple
    )
    model = relora.ReLoRaModel(causal(given), target_modules=["attn", "mlp"], r=4, lora_alpha=4, lora_dropout=0.0)

    class Merges(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if state.global_step % 2 == 0:
                model.merge_and_reinit()
                reset.optimizer_reset(
                    optimizer,
                    reset_params=[p for name, p in model.named_parameters() if "lora_" in name],
                    optimizer_state_keys=["exp_avg", "exp_avg_sq"],
                    **{"reset_optimizer_on_relora": False, "optimizer_random_pruning": 0.0, **settings},
                )

    return Trainer, model, {"callbacks": [Merges()]}


def delta(given, args, kind, **settings):
    """OpenDelta decorates the forward of modules, in front, behind or beside them."""
    sys.path.insert(0, f"{given.sources}/OpenDelta")
    import transformers

    for name, known in (("file_utils", "utils"), ("deepspeed", "integrations.deepspeed")):
        sys.modules[f"transformers.{name}"] = __import__(f"transformers.{known}", fromlist=["*"])
    sys.modules["transformers.deepspeed"].deepspeed_config = lambda: None
    for name in ("DeltaCenter", "bigmodelvis", "web"):
        sys.modules[name] = unittest.mock.MagicMock()
    transformers.file_utils = sys.modules["transformers.file_utils"]
    import opendelta

    model = causal(given)
    torch.manual_seed(2)
    change = getattr(opendelta, kind)(backbone_model=model, **settings)
    change.freeze_module(exclude=["deltas"], set_state_dict=False)
    for name, parameter in model.named_parameters():  # what begins at 0 leaves no gradient to what is before it
        if "lora_B" in name or "up_proj.weight" in name and "adapter" in name:
            torch.nn.init.normal_(parameter.data, std=0.02)
    return Trainer, model, {}


def masked(given, args, pruning="topK"):
    """Movement pruning trains a score for each weight, and keeps those of the largest scores."""
    folder = Path(given.sources, "transformers-research-projects/movement-pruning")
    sys.path.insert(0, str(folder))
    import transformers

    names = transformers.utils
    sys.modules["transformers.file_utils"] = file_utils = types.ModuleType("transformers.file_utils")
    file_utils.add_start_docstrings = names.add_start_docstrings
    file_utils.add_start_docstrings_to_model_forward = names.add_start_docstrings_to_model_forward
    from transformers.models.bert import modeling_bert

    modeling_bert.load_tf_weights_in_bert = None
    transformers.modeling_utils.prune_linear_layer = None
    from emmental import MaskedBertConfig, MaskedBertForSequenceClassification

    schedule = functions_of(folder / "masked_run_glue.py", "schedule_threshold", "regularization")
    known = AutoConfig.from_pretrained(given.model).to_dict()
    known = {key: known[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    known |= {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    known |= {"is_decoder": False, "num_labels": 3}
    config = MaskedBertConfig(**known, pruning_method=pruning, mask_init="kaiming", mask_scale=0.0)
    model = MaskedBertForSequenceClassification(config)

    class Prunes(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            threshold, weight = schedule.schedule_threshold(self.state.global_step, 4, 1, 1.0, 0.3, 0, 1, 1.0)
            outputs = model(**inputs, threshold=threshold if pruning == "topK" else 0.1)
            loss = outputs[0]
            if pruning != "topK":
                loss = loss + weight * schedule.regularization(model, "l1")
            return (loss, outputs) if return_outputs else loss

    def rows(features):
        batch = collate(features, 33)
        return {**batch, "labels": batch["input_ids"][:, 3] % 3}

    return Prunes, model, {"data_collator": rows}


METHODS = {
    "merged": partial(merged, reset_optimizer_on_relora=False, optimizer_magnitude_pruning=0.5),
    "merged at random": partial(merged, optimizer_random_pruning=0.5, optimizer_magnitude_pruning=0.0),
    "lora": partial(delta, kind="LoraModel", modified_modules=["q_proj", "v_proj"], lora_r=4, lora_alpha=4),
    "adapter": partial(delta, kind="AdapterModel", modified_modules=["self_attn", "mlp"], bottleneck_dim=6),
    "bitfit": partial(delta, kind="BitFitModel", modified_modules=["q_proj", "mlp.down_proj"]),
    "masked": masked,
    "thresholds": partial(masked, pruning="sigmoied_threshold"),
}

if __name__ == "__main__":
    main(METHODS)
