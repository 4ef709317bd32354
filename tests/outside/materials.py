"""Local stand-ins for what the scripts would fetch: tokenizers of 515 entries, tiny models, data sets of odd sizes."""

import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, pre_tokenizers, processors, trainers
from tokenizers import decoders as tokenizer_decoders
from tokenizers import models as tokenizer_models
from transformers import AutoModelForSequenceClassification, BertForMaskedLM, PreTrainedTokenizerFast

from tests import models

VOCABULARY = 515  # no number of ranks divides it
SPECIAL = ["<pad>", "<unk>", "<cls>", "</s>", "<mask>", "<|im_start|>", "<|im_end|>"]
#: What stands around a row: as in BERT, at the end only as in T5, nothing.
FRAMES = {
    "pairs": {"single": "<cls> $A </s>", "pair": "<cls> $A </s> $B:1 </s>:1"},
    "ended": {"single": "$A </s>", "pair": "$A </s> $B:1 </s>:1"},
    "started": {"single": "<cls> $A", "pair": "<cls> $A <cls> $B:1"},
    "plain": None,
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCABULARY}
TOKENS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
#: Folder -> the model in it and its tokenizer. `wide` has room for a tokenizer that is padded to a multiple of 8;
#: rows of `blocks` hold whole blocks of 64 quantised weights.
MODELS = {
    "gpt2": ("gpt2", "plain", {"vocab_size": VOCABULARY, "n_embd": 32, "n_inner": 48, "n_layer": 5}),
    "llama": ("llama", "ended", {**SMALL, "num_hidden_layers": 5, "tie_word_embeddings": False}),
    "wide": ("llama", "ended", {**SMALL, "num_hidden_layers": 3, "vocab_size": 520}),
    "blocks": (
        "llama",
        "ended",
        {**SMALL, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 520},
    ),
    "started": ("llama", "started", {**SMALL, "num_hidden_layers": 5, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", "plain", {**SMALL, "num_hidden_layers": 5, "tie_word_embeddings": False}),
    "bert": ("bert", "pairs", {**SMALL, "num_hidden_layers": 3}),
    "t5": (
        "t5",
        "ended",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 3},
    ),
}
#: Rows per file. 22 and 11 leave ragged last batches of 8; loops of their own train on full ones, or drop the rest.
ROWS = {"train": 22, "full": 32, "odd": 33, "validation": 11}


def write_all(root: str) -> None:
    """Every model and data set below a folder."""
    words = " ".join(topics[name] for name in ("assert", "while", "if", "with")).split()
    tokenizers = {frame: tokenizer(frame) for frame in FRAMES}
    for name, (kind, frame, changes) in MODELS.items():
        model(kind, changes).save_pretrained(f"{root}/{name}")
        tokenizers[frame].save_pretrained(f"{root}/{name}")
    AutoModelForSequenceClassification.from_pretrained(f"{root}/llama").save_pretrained(f"{root}/scores")
    tokenizers["ended"].save_pretrained(f"{root}/scores")
    draw = random.Random(5)
    for kind in ("texts", "pairs", "questions", "summaries", "chats", "retrieval"):
        for split, count in ROWS.items():
            rows = [ROW[kind](words, draw, index) for index in range(count)]
            write(Path(root, kind, f"{split}.jsonl"), rows)
        write(Path(root, kind, "test.jsonl"), rows)
    for kind, draw_row in LISTS.items():
        for split in ("train", "validation"):
            path = Path(root, kind, f"{split}.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([draw_row(words, draw) for _ in range(ROWS[split])]))
    write_for_tuning(Path(root), tokenizers["started"])


def write_for_tuning(root: Path, chatty: PreTrainedTokenizerFast) -> None:
    """Write what the lists are under other names, plain text, and a model with a template for chats."""
    for kind in ("talks", "instructions", "dialogues"):
        rows = json.loads((root / kind / "train.json").read_text())
        write(root / kind / "train.jsonl", rows)
    turns = [{"messages": [{"role": t["from"], "content": t["value"]} for t in r["conversations"]]} for r in rows]
    (root / "dialogues" / "messages.json").write_text(json.dumps(turns))
    write(root / "dialogues" / "talks.json", [{"conversations": row["messages"]} for row in turns])
    training = {"output_dir": "OUTPUT", "max_steps": 3, "learning_rate": 1e-2, "adam_epsilon": 1e-3, "seed": 1}
    training |= {"per_device_train_batch_size": 0.5, "per_device_eval_batch_size": 0.5, "logging_steps": 1}
    training |= {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "do_eval": True}
    training |= {"predict_with_generate": True, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    training |= {"generation_config": {"max_new_tokens": 7}, "remove_unused_columns": False}
    files = dict.fromkeys(("train_file", "val_file", "test_file"), "talks.json")
    settings = {"data_config": files, "max_input_length": 33, "max_output_length": 9, "training_args": training}
    (root / "dialogues" / "glm.json").write_text(json.dumps(settings))
    adapters = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_dropout": 0.0}
    settings["peft_config"] = {**adapters, "target_modules": ["q_proj", "down_proj"]}
    (root / "dialogues" / "glm-lora.json").write_text(json.dumps(settings))
    texts = [json.loads(line) for line in (root / "texts" / "full.jsonl").read_text().splitlines()]
    (root / "typed").mkdir(exist_ok=True)
    (root / "typed" / "train.json").write_text(json.dumps({"type": "text_only", "instances": texts}))
    for name in ("with", "while"):
        (root / "plain").mkdir(exist_ok=True)
        (root / "plain" / f"{name}.txt").write_text(topics[name])
    chatty.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    )
    chatty.bos_token = "<cls>"
    chatty.save_pretrained(root / "chatty")
    model("llama", {**SMALL, "num_hidden_layers": 3}).save_pretrained(root / "chatty")


def tokenizer(frame: str) -> PreTrainedTokenizerFast:
    """Byte pairs learned from Python's own help texts."""
    bare = Tokenizer(tokenizer_models.BPE(unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = tokenizer_decoders.ByteLevel()
    learning = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    bare.train_from_iterator([topics["assert"], topics["while"], topics["exprlists"]], learning)
    if FRAMES[frame]:
        known = [(name, bare.token_to_id(name)) for name in ("<cls>", "</s>")]
        bare.post_processor = processors.TemplateProcessing(**FRAMES[frame], special_tokens=known)
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<cls>", "eos_token": "</s>"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if frame == "pairs" else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, **names, mask_token="<mask>", sep_token="</s>", model_input_names=inputs
    )


def model(kind: str, changes: dict):
    """A model for the scripts; BERT as it is published, without a head for classes."""
    special = {} if kind in ("bert", "t5") else TOKENS
    config = models.CONFIGS[kind](
        **{**special, "pad_token_id": 0, "eos_token_id": 3, "max_position_embeddings": 64, **changes}
    )
    if kind != "bert":
        torch.manual_seed(models.SEED)
        return models.auto_class(config).from_config(config)
    torch.manual_seed(models.SEED)
    config.num_labels = 2
    return BertForMaskedLM(config)


def some(words: list[str], draw: random.Random, least: int, most: int) -> str:
    """A piece of text."""
    start = draw.randrange(len(words) - most)
    return " ".join(words[start : start + draw.randint(least, most)])


def question(words: list[str], draw: random.Random, index: int) -> dict:
    """An answer somewhere in a text; some texts are longer than a window."""
    context = some(words, draw, 12, 30)
    parts = context.split()
    at = draw.randrange(len(parts) - 2)
    answer = " ".join(parts[at : at + 2])
    start = len(" ".join(parts[:at])) + (at > 0)
    return {
        "id": str(index),
        "question": some(words, draw, 2, 3),
        "context": context,
        "answer": answer,
        "answer_start": start,
    }


def retrieval(words: list[str], draw: random.Random, index: int) -> dict:
    """A question with one passage that answers it and two that do not, under the names of two projects."""
    right, *wrong = [some(words, draw, 3, 8) for _ in range(3)]
    return {
        "query": some(words, draw, 2, 4),
        "positive_passages": [{"text": right}],
        "negative_passages": [{"text": text} for text in wrong],
        "pos": [right],
        "neg": wrong,
    }


ROW = {
    "retrieval": retrieval,
    "texts": lambda words, draw, index: {"text": some(words, draw, 12, 30)},
    "pairs": lambda words, draw, index: {
        "sentence1": some(words, draw, 2, 6),
        "sentence2": some(words, draw, 2, 6),
        "label": index * 7 // 3 % 2,
        "idx": index,
    },
    "questions": question,
    "summaries": lambda words, draw, index: {
        "document": some(words, draw, 6, 12),
        "summary": some(words, draw, 1, 4),
    },
    "chats": lambda words, draw, index: {
        "messages": [
            {"role": "user", "content": some(words, draw, 2, 5)},
            {"role": "assistant", "content": some(words, draw, 1, 6)},
        ]
    },
}
#: Files that are one list, as scripts of instructions and conversations read them.
LISTS = {
    "instructions": lambda words, draw: {
        "instruction": some(words, draw, 2, 4),
        "input": draw.choice(["", some(words, draw, 1, 3)]),
        "output": some(words, draw, 2, 6),
    },
    "talks": lambda words, draw: talk(words, draw, "human", "gpt"),
    "dialogues": lambda words, draw: talk(words, draw, "user", "assistant"),
}


def talk(words: list[str], draw: random.Random, *sides: str) -> dict:
    """One or two turns of each side."""
    turns = [{"from": side, "value": some(words, draw, 1, 5)} for _ in range(draw.randint(1, 2)) for side in sides]
    return {"id": str(draw.randrange(1000)), "conversations": turns}


def write(path: Path, rows: list[dict]) -> None:
    """One row per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
