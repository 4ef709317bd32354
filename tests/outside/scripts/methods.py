"""Train one small language model by a method of a library, as its documentation tells: Trainer, and what it adds."""

import argparse
import sys

import torch
from borrowed_trainers import Rows, collate, tokens
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


def badam(model, args, sources):
    """BAdam's optimizer trains one block of layers at a time, with copies of its weights in fp32."""
    sys.path.insert(0, f"{sources}/BAdam/src")
    from badam import BlockOptimizer

    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    optimizer = BlockOptimizer(
        inner,
        named_parameters_list=list(model.named_parameters()),
        switch_block_every=2,
        switch_mode="descending",
        verbose=0,
    )
    return Trainer, {"optimizers": (optimizer, None)}


def minlora(model, args, sources):
    """minLoRA puts adapters on weights as torch's parametrizations; the optimizer gets them alone."""
    sys.path.insert(0, f"{sources}/minLoRA")
    from minlora import add_lora, get_lora_params

    add_lora(model)
    for part in model.modules():  # a B of zeros would leave no gradient to an A
        if hasattr(part, "lora_B"):
            torch.nn.init.normal_(part.lora_B, std=0.02)
    optimizer = torch.optim.AdamW([{"params": list(get_lora_params(model))}], lr=1e-2, eps=1e-3)
    return Trainer, {"optimizers": (optimizer, None)}


def reft(model, args, sources):
    """pyreft trains what it does to hidden states at the last word of a question; the model stays as it is."""
    import pyreft
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path, model_max_length=64)
    intervention = pyreft.LoreftIntervention(
        embed_dim=model.config.hidden_size, low_rank_dimension=4, dtype=torch.float32
    )
    where = {"layer": 2, "component": "block_output", "low_rank_dimension": 4, "intervention": intervention}
    changed = pyreft.get_reft_model(model, pyreft.ReftConfig(representations=where))
    changed.set_device("cpu")
    words = ["assert", "with", "while", "the", "is", "None", "value", "expression", "target"]
    asked = [" ".join(words[i % 5 : i % 5 + 1 + i % 4]) for i in range(30)]
    answers = [" ".join(words[-2 - i % 6 : -1]) for i in range(30)]
    data = pyreft.make_last_position_supervised_data_module(tokenizer, model, asked, answers)
    return pyreft.ReftTrainerForCausalLM, {"model": changed, "processing_class": tokenizer, **data}


def load(given):
    """Return the model; by hand from its file if a method changes it before it becomes parallel."""
    if not given.early:
        return AutoModelForCausalLM.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(given.model))
    model.load_state_dict(load_file(f"{given.model}/model.safetensors"))
    return model


METHODS = {"badam": badam, "minlora": minlora, "reft": reft}


def main():
    options = argparse.ArgumentParser()
    for name in ("method", "model", "output_dir", "sources"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--accumulation", type=int, default=1)
    options.add_argument("--early", action="store_true", help="the method comes before the layout")
    given = options.parse_args()
    set_seed(1)
    model = load(given)
    args = TrainingArguments(
        given.output_dir,
        max_steps=6,
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
    )
    kind, more = METHODS[given.method](model, args, given.sources)
    sets = {"train_dataset": Rows(tokens(30, 1)), "eval_dataset": Rows(tokens(11, 4)), "data_collator": collate}
    trainer = kind(**{"model": model, "args": args, **sets, **more})
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    trainer.save_model(given.output_dir)


if __name__ == "__main__":
    main()
