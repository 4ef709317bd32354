"""TRL's own scripts (`trl sft`, `trl dpo`, …) as installed, with their own flags, on a tiny model and tiny data.

`script` runs what `python -m trl.scripts.sft --flag …` runs, in this process; `write_data` makes local folders that
stand for the Hub's: one per kind of data set, with a `train` and a `test` split as JSON lines.
"""

import importlib
import json
import random
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import datasets
import torch
import trl
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast, PrinterCallback, trainer

from hf_parallel import hooks
from tests import models, rollouts
from tests.distributed import run, run_alone
from tests.training import Outcome, Recorder, activate, axes, compared

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<unk>"]
#: 13: a ragged last batch, of which a data rank of two has less than the other; 6: less than one batch.
ROWS = {"train": 64, "test": 13, "validation": 6}
STEPS = 5
#: Imported here, once: each run would spend a second on it.
TRAINERS = (
    *(trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer, trl.RewardTrainer),
    *(trl.GRPOTrainer, trl.RLOOTrainer),
)


def write_tokenizer(folder: str) -> None:
    """A tokenizer of single bytes and some pairs, which the tiny models' vocabulary holds, with a chat template."""
    tokenizer = Tokenizer(tokenizer_models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    kept = [chr(code) for code in range(33, 127)] + ["Ġ"]
    trainer = trainers.BpeTrainer(vocab_size=256, special_tokens=SPECIAL, initial_alphabet=kept, show_progress=False)
    tokenizer.train_from_iterator([topics["assert"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_model(folder: str, kind: str = "llama", classifier: bool = False, **changes: Any) -> None:
    """A tiny model with its tokenizer, in Hub format; with one score per sequence instead of a head if asked."""
    model = models.build(kind, max_position_embeddings=128, eos_token_id=0, pad_token_id=1, **changes)
    if classifier:
        torch.manual_seed(models.SEED)
        config = model.config
        config.num_labels = 1
        model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_data(root: str) -> None:
    """Folders `text`, `completion`, …: what the trainers call language modelling, prompt-completion, … data."""
    words = topics["assert"].split()
    draw = random.Random(3)

    def some(least: int, most: int) -> str:
        start = draw.randrange(len(words) - most)
        return " ".join(words[start : start + draw.randint(least, most)])

    def row(kind: str) -> dict[str, Any]:
        if kind == "text":
            return {"text": some(3, 9)}
        if kind == "prompt":
            return {"prompt": some(2, 5)}
        if kind == "completion":
            return {"prompt": some(2, 5), "completion": " " + some(1, 6)}
        if kind == "chat":
            turns = [("user", some(2, 4)), ("assistant", some(1, 5))]
            return {"messages": [{"role": role, "content": text} for role, text in turns]}
        return {"prompt": some(2, 4), "chosen": " " + some(1, 5), "rejected": " " + some(1, 5)}

    for kind in ("text", "completion", "chat", "preference", "prompt"):
        folder = Path(root, kind)
        folder.mkdir(parents=True)
        for split, count in ROWS.items():
            lines = [json.dumps(row(kind)) for _ in range(count)]
            (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


class AllLogs(Recorder):
    """Keeps every log, metrics of the trainer included."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append({key: value for key, value in compared(logs).items() if isinstance(value, (int, float))})


#: Of `trl`, those that draw tokens.
GENERATING = ("grpo", "rloo")


def script(
    name: str,
    flags: tuple[str, ...],
    root: str,
    out: str,
    spec: str | None = None,
    batch: int = 8,
    real_draws: bool = False,
) -> Outcome:
    """Run `trl NAME FLAGS` in steps of `batch` rows over all data ranks. Draws belong to rows, or to a step."""
    datasets.config.HF_DATASETS_CACHE = Path(root, "cache")
    data_rank = _activate(spec)
    if name in GENERATING and not real_draws:
        rollouts.draw_by_row(data_rank)
    datasets.disable_progress_bars()
    recorder = AllLogs()
    callbacks = [recorder, rollouts.SeedEachStep()] if real_draws else [recorder]
    trainer.DEFAULT_CALLBACKS = [*callbacks, *trainer.DEFAULT_CALLBACKS]  # a script takes no callbacks
    PrinterCallback.on_log = lambda *args, **kwargs: None
    rows = str(batch // axes(spec)["data_ranks"])
    common = {
        **{"output_dir": out, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": "none"},
        **{"use_cpu": "true", "bf16": "false", "disable_tqdm": "true", "optim": "sgd", "learning_rate": 0.1},
        **{"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows},
    }
    arguments = [word for key, value in common.items() for word in (f"--{key}", str(value))]
    module = importlib.import_module(f"trl.scripts.{name}")
    parser = module.make_parser()
    module.main(*parser.parse_args_and_config([*arguments, *flags], fail_with_unknown_args=False))
    return Outcome(recorder.logs, recorder.gradient_keys, out)


def _activate(spec: str | None) -> int:
    """Make the layout active; returns the data rank."""
    activate(spec)
    return hooks.runtime.mesh().data_rank if spec else 0


def generating(kind: str, model: str, out: str, spec: str, settings: dict[str, Any], **more: Any) -> int:
    """A trainer that draws tokens while it trains, made but not run; returns the seed it goes on from."""
    _activate(spec)
    prompts = datasets.Dataset.from_dict({"prompt": ["a", "b"]})
    config, trainer_class = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
    arguments = config(out, report_to="none", bf16=False, use_cpu=True, **settings)
    trainer_class(model, rollouts.reward, arguments, prompts, **more)
    return torch.initial_seed()


class Folder:
    """A folder with models, data and what the scripts write; references run once."""

    def __init__(self, root: Path):
        self.root = root
        self.references: dict[Any, Outcome] = {}
        self.count = 0
        write_data(str(root / "data"))
        run_alone(self._write_models)
        self.environment = {"TQDM_DISABLE": "1"}

    def _write_models(self) -> None:
        write_model(str(self.root / "llama"))
        write_model(str(self.root / "scores"), classifier=True)
        write_model(str(self.root / "wide"), hidden_size=128, intermediate_size=256)

    def flags(self, name: str, data: str, flags: str) -> tuple[str, ...]:
        """The command line behind `trl NAME`."""
        model = "scores" if name == "reward" else "llama"
        model = "wide" if "4bit" in flags else model
        where = ("--model_name_or_path", str(self.root / model), "--dataset_name", str(self.root / "data" / data))
        return (*where, *flags.replace("ROOT", str(self.root)).split())

    def out(self) -> str:
        """A folder for one run."""
        self.count += 1
        return str(self.root / f"run-{self.count}")

    def reference(self, name: str, data: str, flags: str) -> Outcome:
        """What the script does in one plain process."""
        key = name, data, flags
        if key not in self.references:
            call = partial(script, name, self.flags(*key), str(self.root), self.out())
            self.references[key] = run(call, 1, init=False, env=self.environment, timeout=120)[0]
        return self.references[key]

    def parallel(self, name: str, data: str, flags: str, spec: str) -> list[Outcome]:
        """What each rank of the layout does with it."""
        call = partial(script, name, self.flags(name, data, flags), str(self.root), self.out(), spec)
        return run(call, axes(spec)["world"], init=False, env=self.environment, timeout=120)
