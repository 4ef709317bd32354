"""Train one small model by methods that call it in their own ways: several passes, heads, memories, masks, merges.

The classes and functions of each project are read from its checkout; tokens are drawn, and Trainer or a loop of
Accelerator's runs them, as the project's own script does.
"""

import argparse
import logging
import types
from functools import partial
from pathlib import Path

import torch
from borrowed_trainers import TODAY, Rows, collate, read_module, tokens
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

LATENT, ANSWER = 7, 3


def causal(given, **changes):
    """The small language model."""
    config = AutoConfig.from_pretrained(given.model, pad_token_id=0, **changes)
    return AutoModelForCausalLM.from_pretrained(given.model, config=config)


def medusa(given, args):
    """Medusa trains heads on hidden states of a frozen model, and multiplies them by its head."""
    module = read_module("medusa", Path(given.sources, "Medusa/medusa/model/medusa_model_legacy.py"), MEDUSA)
    trainer = read_module("medusa_trainer", Path(given.sources, "Medusa/medusa/train/train_legacy.py"), MEDUSA)
    model = causal(given)
    for param in model.base_model.parameters():
        param.requires_grad = False
    return trainer.CustomizedTrainer, module.MedusaModel(model, 3, 1, given.model), {}


MEDUSA = (
    *TODAY,
    *((f"from {name}\n", "") for name in (".modeling_llama_kv import LlamaForCausalLM as KVLlamaForCausalLM",)),
    *((f"from .{name}\n", "") for name in ("utils import *", "kv_cache import initialize_past_key_values")),
    ("from .medusa_choices import mc_sim_7b_63\n", "mc_sim_7b_63 = None\n"),
    ("from fastchat.conversation import SeparatorStyle\n", ""),
    ("from fastchat.model.model_adapter import get_conversation_template\n", ""),
    (
        "from medusa.model.medusa_model_legacy import MedusaModel, MedusaConfig\n",
        "MedusaModel = MedusaConfig = None\n",
    ),
)


def coconut(given, args):
    """Coconut feeds hidden states back as embeddings, one pass per latent token, with the keys of earlier passes."""
    module = read_module("coconut", Path(given.sources, "coconut/coconut.py"), THOUGHTS)
    model = module.Coconut(causal(given), LATENT, 5, 6, ANSWER)
    model.train = partial(torch.nn.Module.train, model)  # torch's own takes a mode

    def with_thoughts(features):
        batch = collate(features)
        for row, ids in enumerate(batch["input_ids"]):
            batch["input_ids"][row] = ids.masked_fill(ids == LATENT, 8)
            batch["input_ids"][row, 9:11] = LATENT  # as many in each row: a process runs the model once for each
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]).contiguous()
        return batch

    return Trainer, model, {"data_collator": with_thoughts}


#: Keys and values that a model takes and hands on are an object today, which Trainer asks for no longer.
THOUGHTS = (
    ("import torch\n", "import torch\nfrom transformers import DynamicCache\n"),
    ("output_hidden_states=True,", "output_hidden_states=True, use_cache=True,"),
    ("for k, v in kv_cache", "for k, v in ((layer.keys, layer.values) for layer in kv_cache.layers)"),
    ("past_key_values=past_key_values,", "past_key_values=DynamicCache(past_key_values),"),
    ("past_key_values=(\n                [", "past_key_values=(\n                DynamicCache(["),
    ("                ]\n                if kv_cache\n", "                ])\n                if kv_cache\n"),
)


def memory(given, args):
    """The recurrent memory transformer hands hidden states of memory tokens from segment to segment."""
    name = "recurrent-memory-transformer/modeling_rmt/language_modeling.py"
    module = read_module("rmt", Path(given.sources, name))
    cell = module.MemoryCell(causal(given), 4)
    return Trainer, module.RecurrentWrapper(cell, segment_size=11, max_n_segments=3, k2=-1), {}


def compressors(given, args):
    """AutoCompressors' trainer calls backward once per part of the text, and hands on vectors without a gradient."""
    folder = Path(given.sources, "AutoCompressors")
    edits = (
        ("from modeling_flash_llama import", "from transformers import"),
        ("self.config.use_return_dict", "True"),
        ("past_key_values = outputs.past_key_values", "past_key_values = None"),
    )
    module = read_module("auto_compressor", folder / "auto_compressor.py", edits)
    trainer = read_module("substep_trainer", folder / "substep_trainer.py", COMPRESSED)
    vars(args).update(training_substeps=2, segments_per_substep=2, randomize_substeps=False, segment_lengths=[8, 8])
    config = AutoConfig.from_pretrained(given.model, pad_token_id=0)
    config.summary_length, config.accumulate_summary = 3, True
    model = module.LlamaAutoCompressorModel.from_pretrained(given.model, config=config)
    rows = [{name: list(field[0]) for name, field in collate([row], 32).items()} for row in tokens(41, 1, 32)]
    sets = {"train_dataset": Rows(rows[:30]), "eval_dataset": Rows(rows[30:])}
    return (
        trainer.SubstepTrainer,
        model,
        {"tokenizer": AutoTokenizer.from_pretrained(given.model, bos_token="<pad>"), **sets},
    )


COMPRESSED = (
    *TODAY,
    ("from base_trainer import BaseTrainer\n", "from transformers import Trainer as BaseTrainer\n"),
    ("return_output_and_metrics=False\n        ):", "return_output_and_metrics=False, num_items_in_batch=None):"),
    ("                         tokenizer,\n", "                         None,\n"),
    (
        "                         model_init,\n",
        "                         model_init,\n                         None,\n",
    ),
    ("and not self.deepspeed", ""),
    ("elif self.deepspeed:", "elif False:"),
    ("self._nested_gather(", "self.accelerator.gather("),
    ("Union[torch.Tensor, Any]]) -> torch.Tensor:", "Union[torch.Tensor, Any]], num_items_in_batch=None):"),
)


def representations(given, args):
    """Representation engineering trains adapters towards hidden states of the model without them."""
    path = Path(given.sources, "representation-engineering/lorra_finetune/src/llama2_lorra.py")
    lines = path.read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("def compute_loss"))
    end = next(i for i, line in enumerate(lines) if line.startswith("def maybe_zero_3"))
    module = {"torch": torch, "gc": __import__("gc")}
    exec("\n".join(lines[start:end]), module)  # the own text of that project

    class LorraTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            settings = {"target_layers": [1, 3], "alpha": 5, "beta": 0, "max_res_len": 9}
            return module["compute_loss"](self, model, inputs, **settings, return_outputs=return_outputs)

    def triples(features):
        ids = collate(features, 33)["input_ids"]
        ids = torch.where(ids == 0, torch.arange(100, 133), ids)  # a norm has no gradient where differences are 0
        ids = torch.stack([ids.roll(shift, dims=1) for shift in (0, 1, 2)], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return LorraTrainer, adapted(causal(given)), {"data_collator": triples, "eval_dataset": None}


def adapted(model, name="default"):
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian", task_type="CAUSAL_LM")
    return get_peft_model(model, config, adapter_name=name)


def orthogonal(given, args):
    """O-LoRA adds how far new adapters are from orthogonal to old ones, in a `training_step` of its own."""
    lines = Path(given.sources, "O-LoRA/src/uie_trainer_lora.py").read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("class UIETrainer"))
    end = next(i for i, line in enumerate(lines) if line.startswith("    def evaluation_loop"))
    text = "\n".join(lines[start:end])
    for old, new in ORTHOGONAL:
        assert old in text, old
        text = text.replace(old, new)
    names = {**vars(__import__("typing")), "Seq2SeqTrainer": Trainer, "torch": torch, "nn": torch.nn}
    names |= {"is_sagemaker_mp_enabled": lambda: False, "logger": logging.getLogger("olora")}
    exec(text, names)  # the own text of that project
    model = adapted(causal(given), "old")
    config = LoraConfig(r=5, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights="gaussian")
    model.add_adapter("new", config)
    model.base_model.set_adapter(["old", "new"])
    for name, param in model.named_parameters():
        param.requires_grad = ".new." in name
    vars(args).update(lamda_1=0.5, lamda_2=0.1)
    return names["UIETrainer"], model, {}


ORTHOGONAL = (
    ('"lora_A" in name:', '"lora_A.old" in name:'),
    ('"loranew_A" in name_', '"lora_A.new" in name_'),
    ('name_.split("loranew_A")', 'name_.split("lora_A")'),
    ('"loranew_" in name', '".new." in name'),
    ("and not self.deepspeed", ""),
    ("self.do_grad_scaling", "False"),
    ("self.use_apex", "False"),
    ("elif self.deepspeed:", "elif False:"),
    ("Union[torch.Tensor, Any]]) -> torch.Tensor:", "Union[torch.Tensor, Any]], num_items_in_batch=None):"),
)


def sentences(given, args):
    """SimCSE's model makes pairs of a batch, and gathers vectors over all processes."""
    module = read_module("simcse", Path(given.sources, "SimCSE/simcse/models.py"), SIMILAR)
    asked = types.SimpleNamespace(pooler_type="cls", temp=0.5, do_mlm=False, hard_negative_weight=0.1)
    config = AutoConfig.from_pretrained(given.model)
    model = module.BertForCL.from_pretrained(given.model, config=config, model_args=asked)

    def triples(features):
        batch = collate(features, 33)
        return {
            "input_ids": torch.stack([batch["input_ids"].roll(shift, dims=1) for shift in (0, 2, 5)], dim=1),
            "attention_mask": torch.ones(len(features), 3, 33, dtype=torch.long),
        }

    return Trainer, model, {"data_collator": triples}


SIMILAR = (
    ("from transformers.file_utils import (", "from transformers.utils import ("),
    ("    add_code_sample_docstrings,\n", ""),
    ("    add_start_docstrings,\n    add_start_docstrings_to_model_forward,\n", ""),
    ("    replace_return_docstrings,\n", "    logging,\n"),
    ("cls.config.use_return_dict", "True"),
    ("        head_mask=head_mask,\n", ""),
    ("cls.init_weights()", "cls.post_init()"),
)

METHODS = {
    "medusa": medusa,
    "coconut": coconut,
    "memory": memory,
    "compressors": compressors,
    "representations": representations,
    "orthogonal": orthogonal,
    "sentences": sentences,
}


def main(methods):
    options = argparse.ArgumentParser()
    for name in ("method", "model", "output_dir", "sources"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--accumulation", type=int, default=1)
    options.add_argument("--full", action="store_true", help="no ragged batches")
    given = options.parse_args()
    set_seed(1)
    args = TrainingArguments(
        given.output_dir,
        max_steps=4,
        per_device_train_batch_size=given.batch_size,
        per_device_eval_batch_size=given.batch_size,
        gradient_accumulation_steps=given.accumulation,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        label_names=["labels"],
        prediction_loss_only=True,
        dataloader_drop_last=given.full,
    )
    kind, model, more = methods[given.method.replace("_", " ")](given, args)
    sets = {"train_dataset": Rows(tokens(30, 1)), "eval_dataset": Rows(tokens(11, 4))}
    if "tokenizer" not in more:
        sets["data_collator"] = collate
    trainer = kind(**{"model": model, "args": args, **sets, **more})
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    if given.method == "coconut":  # which has the embedding twice
        model.base_causallm.save_pretrained(given.output_dir)
    else:
        trainer.save_model(given.output_dir)


if __name__ == "__main__":
    main(METHODS)
