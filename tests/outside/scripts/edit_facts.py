"""EasyEdit's tuning of single weights, read from its checkout: clamped in place, and put back as differences."""

import argparse
import types
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed


def read_method(sources: Path) -> dict:
    """Return what the file of the method defines, without its imports from its own package."""
    folder, found = sources / "EasyEdit" / "easyeditor", {"normalize_device": lambda device: torch.device("cpu")}
    nethook = types.ModuleType("nethook")
    exec(compile((folder / "util" / "nethook.py").read_text(), "nethook", "exec"), vars(nethook))  # its own text
    text = (folder / "models" / "ft" / "ft_main.py").read_text()
    for line in [line for line in text.splitlines() if line.startswith("from .")]:
        text = text.replace(line, "")
    found |= {"nethook": nethook, "FTHyperParams": object}
    exec(compile("from __future__ import annotations\n" + text, "ft_main", "exec"), found)  # its own text
    return found


def main():
    options = argparse.ArgumentParser()
    for name in ("sources", "model", "output_dir", "objective"):
        options.add_argument(f"--{name}")
    options.add_argument("--copy", action="store_true")
    args = options.parse_args()
    set_seed(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    requests = [
        {"prompt": prompt, "target_new": target}
        for prompt, target in (("assert", "not"), ("while the loop", "runs"), ("if a condition is", "true"))
    ]
    settings = types.SimpleNamespace(
        layers=[1, 3], rewrite_module_tmp="model.layers.{}.mlp.down_proj.weight", lr=5e-3, weight_decay=0.1,
        num_steps=4, batch_size=2, norm_constraint=4e-3, objective_optimization=args.objective, model_name="llama",
        device=0,
    )  # fmt: skip
    method = read_method(Path(args.sources))
    edited, before = method["apply_ft_to_model"](
        model, tokenizer, requests, settings, copy=args.copy, return_orig_weights=True
    )
    edited.save_pretrained(f"{args.output_dir}/edited")
    with torch.no_grad():
        for name, weight in before.items():
            method["nethook"].get_parameter(edited, name)[...] = weight
    edited.save_pretrained(f"{args.output_dir}/restored")


main()
