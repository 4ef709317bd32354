"""Loops that other projects write by hand around a small model: preferences, distillation, editing, averages, rounds.

Functions and classes are read from each project's checkout; tokens are drawn. What a loop computes is saved as tensors
beside the weights, because nothing of Trainer or Accelerate reports it.
"""

import argparse
import sys
import types
import unittest.mock
from pathlib import Path

import numpy
import torch
from borrowed_trainers import Rows, read_module, tokens
from latent import causal
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from unlike import even

BATCH = 8


def preferences(given):
    """DPO in torch's own loop: a policy, a reference, batches that are cut by hand, a state dict that is written."""
    folder = Path(given.sources, "direct-preference-optimization")

    def batches(split, batch_size, n_examples, **kwargs):
        generator = torch.Generator().manual_seed(5)
        for _ in range(n_examples // batch_size):
            batch = {}
            for kind, length in (("chosen", 33), ("rejected", 27)):
                ids = torch.randint(5, 500, (batch_size, length), generator=generator)
                labels = ids.clone()
                labels[:, :7] = -100
                batch |= {f"{kind}_input_ids": ids, f"{kind}_labels": labels}
                batch[f"{kind}_attention_mask"] = torch.ones_like(ids)
            yield batch

    for name in ("omegaconf", "tensor_parallel", "wandb"):
        sys.modules[name] = unittest.mock.MagicMock()
    sys.modules["preference_datasets"] = types.SimpleNamespace(get_batch_iterator=batches)
    read_module("utils", folder / "utils.py", (("v.to(device)", "v"),))
    trainers = read_module("trainers", folder / "trainers.py", ())
    config = types.SimpleNamespace(
        model=types.SimpleNamespace(tokenizer_name_or_path=given.model, name_or_path=given.model),
        loss=types.SimpleNamespace(name="dpo", beta=0.1, reference_free=False, label_smoothing=0.1),
        local_dirs=[given.output_dir], datasets=[], max_length=40, max_prompt_length=10, n_epochs=1, n_examples=24,
        batch_size=8, n_eval_examples=8, eval_batch_size=8, optimizer="RMSprop", lr=1e-3, warmup_steps=2,
        eval_every=8, do_first_eval=True, sample_during_eval=False, debug=False, trainer="BasicTrainer",
        gradient_accumulation_steps=2, max_grad_norm=1.0, minimum_log_interval_secs=-1,
        wandb=types.SimpleNamespace(enabled=False),
    )  # fmt: skip
    policy, reference, seen = causal(given), causal(given), []
    trainer = trainers.BasicTrainer(policy, config, 1, given.output_dir, reference_model=reference)
    measure = trainer.get_batch_metrics

    def measured(*args, **kwargs):
        loss, metrics = measure(*args, **kwargs)
        seen.append(loss.detach().reshape(1))
        seen.extend(torch.tensor(values) / 100 for name, values in metrics.items() if "logps" in name)
        return loss, metrics

    trainer.get_batch_metrics = measured
    trainer.train()
    trainer.save()
    written = torch.load(Path(given.output_dir, "LATEST", "policy.pt"))["state"]
    return policy, {"seen": torch.cat(seen), "norm": written["model.norm.weight"]}


def distilled(given):
    """TextBrewer distils hidden states and maps of attention of a frozen teacher in its own loop."""
    sys.path.insert(0, f"{given.sources}/TextBrewer/src")
    sys.modules["tensorboardX"] = unittest.mock.MagicMock()
    from textbrewer import DistillationConfig, GeneralDistiller, TrainingConfig

    def load(seed):
        set_seed(seed)
        kinds = {"output_hidden_states": True, "output_attentions": True, "num_labels": 3}
        return AutoModelForSequenceClassification.from_pretrained(given.model, attn_implementation="eager", **kinds)

    def adapt(batch, outputs):
        return {
            "logits": outputs.logits, "hidden": outputs.hidden_states, "attention": outputs.attentions,
            "losses": outputs.loss, "inputs_mask": batch["attention_mask"],
        }  # fmt: skip

    teacher, student = load(2), load(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.3)
    rounds = [("hidden", "hidden_mse"), ("hidden", "cos"), ("hidden", "nst"), ("hidden", "gram")]
    rounds += [("attention", "attention_mse"), ("attention", "attention_ce")]
    matches = [
        {"layer_T": [1, 1] if loss in ("nst", "gram") else 1, "layer_S": [1, 1] if loss in ("nst", "gram") else 1,
         "feature": feature, "loss": loss, "weight": 0.3}
        for feature, loss in rounds
    ]  # fmt: skip
    settings = DistillationConfig(temperature=4, hard_label_weight=0.5, intermediate_matches=matches)
    training = TrainingConfig(log_dir=None, output_dir=given.output_dir, device="cpu", gradient_accumulation_steps=2)
    training.ckpt_steps = 100
    distiller, seen = GeneralDistiller(training, settings, teacher, student, adapt, adapt), []

    def classes(features):
        batch = even(features)
        return {**batch, "labels": batch["input_ids"][:, 3] % 3}

    measure = distiller.train_on_batch

    def measured(batch, args):
        loss, parts = measure(batch, args)
        seen.append(torch.stack([loss.detach(), *(part.detach() for part in parts.values())]))
        return loss, parts

    distiller.train_on_batch = measured
    loader = DataLoader(Rows(tokens(32, 1)), batch_size=BATCH, collate_fn=classes)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
    with distiller:
        distiller.train(optimizer, loader, num_epochs=2, max_grad_norm=1.0, callback=None)
    return student, {"seen": torch.stack(seen)}


def edited(given):
    """ROME optimizes what one layer gives at one word, and adds a product of two vectors to a weight."""
    folder, names = Path(given.sources, "EasyEdit", "easyeditor"), {}
    nethook = read_module("nethook", folder / "util" / "nethook.py", ())
    device = {"normalize_device": lambda device: torch.device("cpu"), "get_module_device": lambda *args: "cpu"}
    for name in ("repr_tools", "compute_u", "compute_v", "rome_main"):
        text = (folder / "models" / "rome" / f"{name}.py").read_text()
        for line in [line for line in text.splitlines() if line.startswith("from .")]:
            text = text.replace(line, "")
        names |= {"nethook": nethook, "ROMEHyperParams": object, **device}
        names["repr_tools"] = types.SimpleNamespace(**names)
        exec(compile("from __future__ import annotations\n" + text, name, "exec"), names)  # its own text
    names["CONTEXT_TEMPLATES_CACHE"] = ["{}", "value {}", "the expression is {}"]
    model, tokenizer = causal(given), AutoTokenizer.from_pretrained(given.model, pad_token="<pad>")
    tokenizer.padding_side = "right"
    settings = types.SimpleNamespace(
        layers=[2], rewrite_module_tmp="model.layers.{}.mlp.down_proj", layer_module_tmp="model.layers.{}",
        mlp_module_tmp="model.layers.{}.mlp", fact_token="last", mom2_adjustment=False, v_loss_layer=4, v_lr=0.3,
        v_num_grad_steps=5, v_weight_decay=1e-3, clamp_norm_factor=4, kl_factor=0.1, device=0,
        context_template_length_params=[],
    )  # fmt: skip
    request = {"prompt": "assert {} is", "subject": "condition", "target_new": "true"}
    changed, _ = names["apply_rome_to_model"](model, tokenizer, [request], settings)
    return changed, {}


def averaged(given, alone=False):
    """ema_pytorch averages a model that Accelerate prepares later, as F5-TTS does, on all ranks or on the first."""
    sys.path.insert(0, given.packages)
    from accelerate import Accelerator
    from ema_pytorch import EMA

    accelerator, model = Accelerator(cpu=True), causal(given)
    mean = None
    if accelerator.is_main_process or not alone:
        mean = EMA(model, include_online_model=False, beta=0.8, update_after_step=0, update_every=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    loader = DataLoader(Rows(tokens(32, 1)), batch_size=given.batch_size, collate_fn=even)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mean is not None:
            mean.update()
    own = accelerator.unwrap_model(model)
    if mean is None:
        return own, {}
    return own, {n: t.detach().clone() for n, t in mean.ema_model.state_dict().items() if "layers.2" in n}


def federated(given):
    """Flower's clients give their weights as arrays after a round, and take averages before the next."""
    model, seen = causal(given), []

    def train(rows):
        loader = DataLoader(Rows(rows), batch_size=BATCH, shuffle=True, collate_fn=even)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        model.train()
        for batch in loader:
            batch = {key: value.to("cpu") for key, value in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return [value.cpu().numpy().copy() for value in model.state_dict().values()]  # as if sent

    def load(arrays):
        names = model.state_dict().keys()
        model.load_state_dict({n: torch.tensor(a) for n, a in zip(names, arrays, strict=True)}, strict=True)

    start = [value.cpu().numpy().copy() for value in model.state_dict().values()]
    for turn in range(2):
        clients = []
        for number in range(2):
            load(start)
            clients.append(train(tokens(16, 10 * turn + number)))
        start = [numpy.mean(arrays, axis=0) for arrays in zip(*clients, strict=True)]
    load(start)
    return model, {"seen": torch.stack(seen)}


LOOPS = {
    "preferences": preferences,
    "distilled": distilled,
    "edited": edited,
    "averaged": averaged,
    "averaged by one": lambda given: averaged(given, alone=True),
    "federated": federated,
}


def main():
    options = argparse.ArgumentParser()
    for name in ("loop", "model", "output_dir", "sources", "packages"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    given = options.parse_args()
    set_seed(1)
    model, numbers = LOOPS[given.loop.replace("_", " ")](given)
    model.save_pretrained(given.output_dir)
    if numbers and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
        folder = Path(given.output_dir, "numbers")
        folder.mkdir()
        save_file({name: value.contiguous() for name, value in numbers.items()}, folder / "model.safetensors")


if __name__ == "__main__":
    main()
