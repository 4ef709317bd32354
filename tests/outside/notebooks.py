"""Notebooks of Hugging Face: their code cells as a script, with small numbers, and models that only they ask for."""

import builtins
import json
import sys
from pathlib import Path

import torch
import transformers

from tests.outside.cases import Case

#: What ends a notebook's training: cells behind the last that has one show off what was trained.
LAST = (".train(", ".evaluate(", ".predict(", "backward(")
#: The models of a notebook are saved where it would have pushed them.
END = """
if "trainer" in globals():
    trainer.save_model("end")
elif "accelerator" in globals():
    accelerator.end_training()
else:
    model.save_pretrained("end")
"""


def code_of_notebook(path: Path) -> str:
    """Return the code cells up to the end of training, without commands of a shell."""
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    last = max(index for index, cell in enumerate(cells) if any(word in cell for word in LAST))
    lines = [line for cell in cells[: last + 1] for line in cell.split("\n")]
    kept = [line for line in lines if not line.lstrip().startswith(("!", "%"))]
    start = "from tests.outside.notebooks import train_briefly\ntrain_briefly(ROWS)"
    return "\n".join([start, *kept, END])


def train_briefly(rows: int) -> None:
    """Give Trainer the tests' numbers, names that Transformers 5 has no more, and nothing to push or to show."""
    numbers = {"max_steps": 3, "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    numbers |= {"learning_rate": 1e-2, "adam_epsilon": 1e-3, "seed": 1, "warmup_steps": 0, "dataloader_num_workers": 0}
    numbers |= {"fp16": False, "bf16": False, "push_to_hub": False, "report_to": "none", "use_cpu": True}
    numbers |= {"logging_strategy": "steps", "logging_steps": 1, "disable_tqdm": True, "optim": "adamw_torch"}
    settings = transformers.TrainingArguments.__post_init__

    def settle(self):
        for name, value in numbers.items():
            setattr(self, name, value)
        if self.eval_strategy != "no":
            self.eval_strategy, self.eval_steps = "steps", 2
        if self.save_strategy != "no":
            self.save_strategy, self.save_steps = "steps", 2
        settings(self)

    transformers.TrainingArguments.__post_init__ = settle
    made = transformers.Trainer.__init__

    def make(self, *args, tokenizer=None, **kwargs):
        made(self, *args, **kwargs, **({"processing_class": tokenizer} if tokenizer is not None else {}))

    transformers.Trainer.__init__ = make
    transformers.Trainer.push_to_hub = transformers.Trainer.create_model_card = lambda *args, **kwargs: None
    import huggingface_hub
    import matplotlib

    from tests.outside import stand_ins

    matplotlib.use("Agg")
    builtins.display = lambda *shown: None
    huggingface_hub.notebook_login = huggingface_hub.login = lambda *args, **kwargs: None
    stand_ins.stand_for("IPython", "google", "trackio")
    sys.modules.pop("IPython", None)
    import IPython

    IPython.version_info = (8, 24)  # which matplotlib compares


class Voice:
    """An encoder of speakers: twelve numbers of a sound."""

    def encode_batch(self, sound: torch.Tensor) -> torch.Tensor:
        return sound.float().flatten()[:1200].view(1, 1, 12, 100).mean(-1)


def load(kind: str, end: str = ".jsonl", more: str = "") -> str:
    """The call that reads local files in the place of a data set."""
    files = {split: f"ROOT/{kind}/{split}{end}" for split in ("train", "validation")}
    return f'load_dataset("json", data_files={files}{more})'


def load_part(path: str, more: str = ', split="train"') -> str:
    """The call that reads one local file."""
    return f'load_dataset("json", data_files="ROOT/{path}"{more})'


def notebook(path: str, *edits: tuple[str, str]) -> Case:
    """A notebook without arguments."""
    return Case(path, "", edits=edits)


EXAMPLES, DOCS, COOKBOOK = "notebooks/examples", "notebooks/transformers_doc/en/pytorch", "cookbook/notebooks/en"
KINDS = "__import__('datasets').List(__import__('datasets').ClassLabel(names=['B-CAP', 'B-LONG', 'O']))"
ESM = ("facebook/esm2_t12_35M_UR50D", "ROOT/esm")
PROTEINS = (
    ESM,
    (
        "uniprot_request = requests.get(query_url)",
        "uniprot_request = __import__('types').SimpleNamespace(content=b'')",
    ),
    ("pandas.read_csv(bio, compression='gzip', sep='\\t')", "pandas.read_csv('ROOT/proteins.tsv', sep='\\t')"),
)
GENES = "__import__('datasets').load_dataset('json', data_files='ROOT/genes.jsonl', split='train')"
TEXTS = (
    (
        'load_dataset("dany0407/eli5_category", split="train[:5000]")',
        load_part("texts/odd.jsonl"),
    ),
    (
        'load_dataset("eli5_category", split="train[:5000]")',
        load_part("texts/odd.jsonl"),
    ),
    ('[" ".join(x) for x in examples["answers.text"]]', 'examples["text"]'),
    ("num_proc=4", "num_proc=None"),
    ("block_size = 128", "block_size = 33"),
    ("import AutoModelForMaskedLM\n", "import AutoModelForMaskedLM, Trainer, TrainingArguments\n"),
    ("distilbert/distilroberta-base", "ROOT/roberta"),
    ("distilbert/distilgpt2", "ROOT/gpt2"),
)
PLAYERS = (
    (
        'load_dataset("ybelkada/football-dataset", split="train")',
        "load_dataset('ROOT/media/captioned', split='train')",
    ),
    ("batch_size=2", "batch_size=8"),
    (
        "from torch.utils.data import Dataset, DataLoader",
        "import torch\nfrom torch.utils.data import Dataset, DataLoader",
    ),
    ("lr=5e-5", "lr=1e-2"),
    ("lr=1e-5", "lr=1e-2"),
    ("range(50)", "range(1)"),
    ("EPOCHS = 5000", "EPOCHS = 1"),
)
SMOL = "smol-course/v1/2_preference_alignment/notebooks"
#: Questions of a data set of mathematics, with its columns.
ASKED = (
    f"train_dataset = {load_part('preferences/train.jsonl')}.rename_columns("
    "{'prompt': 'problem', 'chosen': 'solution'}).add_column('messages', [''] * 22); test_dataset = train_dataset"
)
FILLING = '["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]'
QUIET = "dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0"
HOURLY = (
    ("~/data/ECL.csv", "ROOT/hourly.csv"),
    ("~/Downloads/ECL.csv", "ROOT/hourly.csv"),
    ('f"https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/{dataset}.csv"', '"ROOT/hourly.csv"'),
    ("context_length = 512", "context_length = 32"),
    ("forecast_horizon = 96", "forecast_horizon = 8"),
    ("12 * 30 * 24", "200"),
    ("4 * 30 * 24", "60"),
    ("8 * 30 * 24", "120"),
    ("random_mask_ratio=0.4,", ""),
    ("d_model=128", "d_model=32"),
    ("num_attention_heads=16", "num_attention_heads=4"),
    ("ffn_dim=256", "ffn_dim=48"),
    ("dropout=0.2", "dropout=0.0"),
    ("dropout=0.7", "dropout=0.0"),
    ("logging_dir=", "run_name="),
    ("    overwrite_output_dir=True,\n", ""),
    ("input_columns=", "target_columns="),  # names of tsfm_public of today
    ("    output_columns=forecast_columns,\n", ""),
)
NOTEBOOKS = {
    "notebook multiple_choice": notebook(
        f"{EXAMPLES}/multiple_choice.ipynb",
        ("bert-base-uncased", "ROOT/bert"),
        ('load_dataset("swag", "regular")', load("endings")),
        ("use_fast=True", "model_max_length=33"),
    ),
    "notebook token_classification": notebook(
        f"{EXAMPLES}/token_classification.ipynb",
        ("distilbert-base-uncased", "ROOT/distilbert"),
        ('load_dataset("conll2003")', f'{load("names")}.cast_column("ner_tags", {KINDS})'),
        (
            "AutoTokenizer.from_pretrained(model_checkpoint)",
            "AutoTokenizer.from_pretrained(model_checkpoint, model_max_length=33)",
        ),
    ),
    "notebook question_answering": notebook(
        f"{EXAMPLES}/question_answering.ipynb",
        ("distilbert-base-uncased", "ROOT/distilbert"),
        ('load_dataset("squad_v2" if squad_v2 else "squad")', load("squad", ".json", ', field="data"')),
        ("max_length = 384", "max_length = 33"),
        ("doc_stride = 128", "doc_stride = 9"),
    ),
    "notebook protein_language_modeling": notebook(f"{EXAMPLES}/protein_language_modeling.ipynb", *PROTEINS),
    "notebook nucleotide_transformer with LoRA": notebook(
        f"{EXAMPLES}/nucleotide_transformer_dna_sequence_modelling_with_peft.ipynb",
        ("InstaDeepAI/nucleotide-transformer-500m-human-ref", "ROOT/esm"),
        (
            "from datasets import load_dataset, Dataset",
            f"from datasets import Dataset\nload_dataset = lambda *a, **k: {GENES}",
        ),
        ("lora_dropout=0.1", "lora_dropout=0.0"),
        ("num_labels_promoter = 2", "num_labels_promoter = 3"),
        ("test_size=0.05", "test_size=0.3"),
        ("args_enhancers = Tr", "model_name = 'second'\nargs_enhancers = Tr"),  # else in the folders of the first
        ("test_size=0.10", "test_size=0.3"),
        ("f1_score(references, predictions)", "f1_score(references, predictions, average='macro')"),
    ),
    "notebook translation": notebook(
        f"{DOCS}/translation.ipynb",
        ('load_dataset("opus_books", "en-fr")', load_part("translations/full.jsonl", "")),
        ("google-t5/t5-small", "ROOT/t5"),
        ('"fr"', '"de"'),
    ),
    "notebook summarization": notebook(
        f"{DOCS}/summarization.ipynb",
        (
            'load_dataset("billsum", split="ca_test")',
            load_part("summaries/odd.jsonl"),
        ),
        ("google-t5/t5-small", "ROOT/t5"),
        ('examples["text"]', 'examples["document"]'),
    ),
    "notebook language_modeling": notebook(f"{DOCS}/language_modeling.ipynb", *TEXTS),
    "notebook masked_language_modeling": notebook(f"{DOCS}/masked_language_modeling.ipynb", *TEXTS),
    "notebook image_captioning_blip": notebook(
        f"{EXAMPLES}/image_captioning_blip.ipynb", ("Salesforce/blip-image-captioning-base", "ROOT/blip"), *PLAYERS
    ),
    "notebook image_captioning_pix2struct": notebook(
        f"{EXAMPLES}/image_captioning_pix2struct.ipynb",
        ("ybelkada/pix2struct-base", "ROOT/pix2struct"),
        ("MAX_PATCHES = 1024", "MAX_PATCHES = 16"),
        ("max_length=20", "max_length=40"),
        *PLAYERS,
    ),
    "notebook image_captioning": notebook(
        f"{DOCS}/image_captioning.ipynb",
        ('load_dataset("lambdalabs/pokemon-blip-captions")', "load_dataset('ROOT/media/captioned')"),
        ("microsoft/git-base", "ROOT/git"),
        ("model_name = checkpoint.split", "model_name = 'a/b'.split"),
    ),
    "notebook visual_question_answering": notebook(
        f"{DOCS}/visual_question_answering.ipynb",
        ('load_dataset("Graphcore/vqa", split="validation[:200]")', "load_dataset('ROOT/media/asked', split='train')"),
        ("dandelin/vilt-b32-mlm", "ROOT/vilt"),
        ("dataset = dataset.remove_columns(['question_type', 'question_id', 'answer_type'])", ""),
    ),
    "notebook knowledge_distillation_for_image_classification": notebook(
        f"{DOCS}/knowledge_distillation_for_image_classification.ipynb",
        ('load_dataset("beans")', "load_dataset('ROOT/media/classes-train').rename_column('label', 'labels')"),
        ("merve/beans-vit-224", "ROOT/vit-classes"),
        (
            "student_config = MobileNetV2Config()",
            "student_config = MobileNetV2Config.from_pretrained('ROOT/mobilenet')",
        ),
        ("hub_model_id=repo_name,", ""),
        ("training_args=training_args", "args=training_args"),
        (
            "return_outputs=False):\n",  # 53 norms over batches turn a rounding of 1e-7 into 1e-1 in two steps
            "return_outputs=False, num_items_in_batch=None):\n"
            "        inputs = {**inputs, 'pixel_values': inputs['pixel_values'].double()}\n",
        ),
        ("student_model=student_model", "student_model=student_model.double()"),
        ("teacher_model=teacher_model", "teacher_model=teacher_model.double()"),
    ),
    "notebook text-to-speech": notebook(
        f"{DOCS}/text-to-speech.ipynb",
        (
            'pipe = pipeline("text-to-audio", model="sesame/csm-1b")',
            "pipe = lambda *args: {'audio': 0, 'sampling_rate': 1}",
        ),
        ('pipe = pipeline("text-to-speech", model="nari-labs/Dia-1.6B-0626")', "pipe = lambda *args: None"),
        ("import soundfile as sf\n", ""),
        ("dailytalk-dummy", "ROOT/media/spoken"),
        ("hf-internal-testing/ROOT", "ROOT"),
        ('"qmeeus/voxpopuli", "nl"', '"ROOT/media/spoken"'),
        ("from IPython.display import Audio", "from IPython.display import Audio as Heard"),
        ("Audio(output", "Heard(output"),
        ("sampling_rate=24000", "sampling_rate=16000"),
        ('audio_target=audio["array"]', 'audio_target=audio["array"][:4000]'),  # its norms over batches count padding
        ("microsoft/speecht5_tts", "ROOT/speecht5"),
        ("from speechbrain.inference.classifiers import EncoderClassifier\n", ""),
        (
            "EncoderClassifier.from_hparams",
            "(lambda **named: __import__('tests.outside.notebooks').outside.notebooks.Voice())",
        ),
        ("100 <= speaker_counts[speaker_id]", "1 <= speaker_counts[speaker_id]"),
    ),
    "notebook time-series-transformers": notebook(
        f"{EXAMPLES}/time-series-transformers.ipynb",
        ('load_dataset("monash_tsf", "tourism_monthly")', "load_dataset('ROOT/media/series')"),
        ('freq = "1M"', 'freq = "1D"'),
        ("prediction_length = 24", "prediction_length = 6"),
        ("get_lags_for_frequency(freq)", "[1, 2, 7]"),
        ("decoder_layers=4,", f"decoder_layers=2, {QUIET},"),
        ("batch_size=256", "batch_size=8"),
        ("num_batches_per_epoch=100", "num_batches_per_epoch=4"),
        ("range(40)", "range(1)"),
        ("lr=6e-4", "lr=1e-2"),
    ),
    "notebook patch_tst": notebook(f"{EXAMPLES}/patch_tst.ipynb", *HOURLY),
    "notebook patch_tsmixer": notebook(f"{EXAMPLES}/patch_tsmixer.ipynb", *HOURLY),
    "notebook prompt_tuning_peft": notebook(
        f"{COOKBOOK}/prompt_tuning_peft.ipynb",
        ("bigscience/bloomz-560m", "ROOT/llama"),
        ("load_dataset(dataset_prompt)", load("texts")),
        ('load_dataset("Abirate/english_quotes")', load("texts")),
        ('samples["prompt"]', 'samples["text"]'),
        ('samples["quote"]', 'samples["text"]'),
        ("tokenizer(samples", "tokenizer(truncation=True, max_length=33, text=samples"),
        ("range(50)", "range(22)"),
        ("range(25)", "range(22)"),
        (".remove_columns(['author', 'tags'])", ""),
        ("max_new_tokens=50", "max_new_tokens=5"),
        ("early_stopping=True, #", "#"),
        ("auto_find_batch_size=True, #", "#"),
        ("trainer_sentences.train()", "trainer_sentences.train()\nmodel = trainer_sentences.model"),
    ),
    "notebook finetune_t5_for_search_tag_generation": notebook(
        f"{COOKBOOK}/finetune_t5_for_search_tag_generation.ipynb",
        ("t5-small", "ROOT/t5"),
        ("T5Tokenizer.from_pretrained", "(lambda name: None)"),
        ("userdata.get('HUGGINGFACE_TOKEN')", "''"),
        ('load_dataset("zamal/github-meta-data")', load("summaries")),
        ('batch["input"]', 'batch["document"]'),
        ('batch["target"]', 'batch["summary"]'),
        ("lora_dropout=0.05", "lora_dropout=0.0"),
    ),
    "notebook fine_tuning_code_llm_on_single_gpu": notebook(
        f"{COOKBOOK}/fine_tuning_code_llm_on_single_gpu.ipynb",
        ("bigcode/starcoderbase-1b", "ROOT/filling"),
        ('DATASET,\n    data_dir="data"', '"json", data_files="ROOT/texts/odd.jsonl"'),
        ('DATA_COLUMN="content"', 'DATA_COLUMN="text"'),
        ("4000", "11"),
        ("SEQ_LENGTH=2048", "SEQ_LENGTH=33"),
        ("GR_ACC_STEPS=1", "GR_ACC_STEPS=2"),
        ('tokenizer.special_tokens_map["additional_special_tokens"][1:5]', FILLING),
        ("c_proj,c_attn,q_attn,c_fc,c_proj", "q_proj,down_proj"),
        (
            "load_in_8bit=load_in_8bit,\n        quantization_config=bnb_config,\n        device_map=device_map,",
            "",
        ),
        ("        use_flash_attention_2=True,\n", ""),
        ("prepare_model_for_kbit_training(model)", "(model.enable_input_require_grads(), model)[1]"),
        ("evaluation_strategy", "eval_strategy"),
        ("    include_tokens_per_second=True,\n", ""),
    ),
    **{
        f"smol-course {name}": notebook(
            f"{SMOL}/{name}_finetuning_example.ipynb",
            ("HuggingFaceTB/SmolLM2-135M-Instruct", "ROOT/llama"),
            ("HuggingFaceTB/SmolLM2-135M", "ROOT/llama"),
            ('path="trl-lib/ultrafeedback_binarized"', "'ROOT/preferences'"),
            (", setup_chat_format", ""),
            ("model, tokenizer = setup_chat_format(model, tokenizer)", ""),
            ("    max_prompt_length=512,\n", ""),
            ("    max_prompt_length=1024,\n", ""),
            ('    use_mps_device=device == "mps",\n', ""),
            ("evaluation_strategy", "eval_strategy"),
            ("from trl import ORPOC", "from trl.experimental.orpo import ORPOC"),
        )
        for name in ("dpo", "orpo")
    },
    "notebook fine_tuning_llm_grpo_trl": notebook(
        f"{COOKBOOK}/fine_tuning_llm_grpo_trl.ipynb",
        ("Qwen/Qwen2-0.5B-Instruct", "ROOT/chatty"),
        ("train_dataset, test_dataset = load_dataset(dataset_id, split=['train[:5%]', 'test[:5%]'])", ASKED),
        ("from math_verify import LatexExtractionConfig, parse, verify\n", ""),
        ("gold_parsed = parse(solution, ", "gold_parsed = dict(text=solution, "),
        ("answer_parsed = parse(content, ", "answer_parsed = dict(text=content, "),
        ("extraction_config=[LatexExtractionConfig()]", ""),
        ("float(verify(answer_parsed, gold_parsed))", "len(set(content) & set(solution)) / 9"),
        ("lora_dropout=0.1", "lora_dropout=0.0"),
        ("gradient_accumulation_steps=16", "gradient_accumulation_steps=1, top_k=1"),
        ("max_completion_length=64", "max_completion_length=7"),
        ("SYSTEM_PROMPT},", "'Think.'},"),
    ),
}
