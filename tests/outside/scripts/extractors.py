"""GLiNER2's trainer, which loops by itself, on spans of words: `--folder` has the encoder's tokenizer."""

import argparse
import json
import tempfile

import torch
from gliner2.configuration import ExtractorConfig
from gliner2.model import Extractor
from gliner2.training.trainer import GLiNER2Trainer, TrainingConfig
from transformers import AutoTokenizer, BertConfig


def main() -> None:
    options = argparse.ArgumentParser()
    for name in ("folder", "data_file", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--lora", action="store_true")
    args = options.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    with open(args.data_file) as file:
        rows = [json.loads(line) for line in file]
    data = [
        {
            "input": " ".join(row["tokenized_text"]),
            "output": {"entities": {k: [" ".join(row["tokenized_text"][a : b + 1])] for a, b, k in row["ner"]}},
        }
        for row in rows[:32]
    ]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    encoder = BertConfig(**sizes, vocab_size=len(tokenizer), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(1)
    model = Extractor(
        ExtractorConfig(model_name=args.folder, max_width=4), encoder_config=encoder, tokenizer=tokenizer
    )
    start = tempfile.mkdtemp()
    model.save_pretrained(start)
    model.processor.tokenizer.save_pretrained(start)
    model = Extractor.from_pretrained(start)
    settings = TrainingConfig(
        **{"output_dir": args.output_dir, "max_steps": 4, "batch_size": args.batch_size, "seed": 1},
        **{"encoder_lr": 1e-3, "task_lr": 1e-3, "warmup_steps": 0, "eval_strategy": "no", "num_workers": 0},
        **{"fp16": False, "use_lora": args.lora},
    )
    trainer = GLiNER2Trainer(model, settings, train_data=data)
    history = trainer.train()["train_metrics_history"]
    with open(f"{args.output_dir}/all_results.json", "w") as file:
        json.dump({f"loss_{at}": step["loss"] for at, step in enumerate(history)}, file)


main()
