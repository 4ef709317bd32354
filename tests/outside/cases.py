"""Which scripts run on which layouts, with which arguments; what is refused there, and what waits for a mend."""

from dataclasses import dataclass, field

from tests.outside.watching import Tolerance
from tests.training import axes

SPECS = ("dp_shard=2", "tp=2", "pp=2", "tp=2,pp=2")
PIPELINE = ("pp=2", "tp=2,pp=2")
BATCH = 8

TRAINER = (
    "--output_dir OUT --per_device_train_batch_size ROWS --per_device_eval_batch_size ROWS --logging_steps 1 "
    "--report_to none --use_cpu --disable_tqdm true --save_strategy no --learning_rate 1e-2 --adam_epsilon 1e-3"
)
LOOP = "--lr 1e-2 --adam_epsilon 1e-3 --output_dir OUT"
#: These scripts count warm-up in steps of one process, and accelerate steps once per process.
PAIRS = (
    f"--batch_size ROWS --eval_batch_size ROWS --max_batch_size ROWS --num_epochs 2 --num_warmup_steps 0 {LOOP} --cpu"
)


def files(kind: str, train: str = "train") -> str:
    """A script's data files."""
    return f"--train_file ROOT/{kind}/{train}.jsonl --validation_file ROOT/{kind}/validation.jsonl"


@dataclass(frozen=True)
class Case:
    """A script, its arguments, and how near to one process its numbers are."""

    script: str
    arguments: str
    specs: tuple[str, ...] = SPECS
    refused: dict[str, str] = field(default_factory=dict)  # spec -> words of the refusal
    needs: tuple[str, ...] = ()
    tolerance: Tolerance = Tolerance()
    again: str = ""  # more arguments of a second launch, which is the one that is compared
    edits: tuple[
        tuple[str, str], ...
    ] = ()  # of a script with numbers and names of its own: text, and what replaces it
    modules: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()  # edits of files that it imports, by path's end

    def words(self, arguments: str, root: str, out: str, spec: str | None) -> list[str]:
        """The command line: rows per process are the batch of all over the data ranks."""
        rows = BATCH // (axes(spec)["data_ranks"] if spec else 1)
        replaced = {"ROOT": root, "OUT": out, "ROWS": str(rows), "TWICE": str(2 * rows)}
        for name, value in replaced.items():
            arguments = arguments.replace(name, value)
        return arguments.split()


NO_STAGES = dict.fromkeys(PIPELINE, "pp")
CASES = {
    "run_clm": Case(
        "run_clm.py",
        f"--model_name_or_path ROOT/gpt2 {files('texts')} --block_size 33 {TRAINER} --num_train_epochs 1 "
        "--max_eval_samples 11 --eval_strategy epoch",
    ),
    "run_clm from scratch": Case(
        "run_clm.py",
        f"--model_name_or_path ROOT/llama --from_scratch {files('texts')} --block_size 17 {TRAINER} "
        "--gradient_accumulation_steps 2 --max_steps 3 --max_eval_samples 11",
    ),
    "run_clm --streaming": Case(
        "run_clm.py",
        f"--model_name_or_path ROOT/llama --streaming {files('texts')} --block_size 33 {TRAINER} --max_steps 3 "
        "--max_eval_samples 11",
    ),
    "run_clm_no_trainer": Case(
        "run_clm_no_trainer.py",
        f"--model_name_or_path ROOT/llama {files('texts', 'full')} --block_size 33 --output_dir OUT --seed 1 "
        "--per_device_train_batch_size ROWS --per_device_eval_batch_size ROWS --learning_rate 1e-2 "
        "--adam_epsilon 1e-3 --weight_decay 0.1 --num_warmup_steps 1 --gradient_accumulation_steps 2 "
        "--lr_scheduler_type constant --max_train_steps 2 --checkpointing_steps 2",
    ),
    "run_mlm": Case(
        "run_mlm.py",
        f"--model_name_or_path ROOT/bert {files('texts')} --line_by_line --max_seq_length 33 {TRAINER} "
        "--num_train_epochs 1",
        refused=NO_STAGES,
    ),
    "run_glue": Case(
        "run_glue.py",
        f"--model_name_or_path ROOT/bert {files('pairs')} {TRAINER} --num_train_epochs 1",
        refused=NO_STAGES,
    ),
    "run_glue, decoder": Case(
        "run_glue.py",
        f"--model_name_or_path ROOT/llama {files('pairs')} {TRAINER} --num_train_epochs 1",
    ),
    "run_qa": Case(
        "run_qa.py",
        f"--model_name_or_path ROOT/bert {files('questions')} {TRAINER} --num_train_epochs 1",
        refused=NO_STAGES,
    ),
    "run_summarization": Case(
        "run_summarization.py",
        f"--model_name_or_path ROOT/t5 {files('summaries')} {TRAINER} --num_train_epochs 1 --predict_with_generate "
        "--num_beams 2",
        refused=NO_STAGES,
    ),
    "nlp_example": Case(
        "nlp_example.py", f"--model ROOT/bert {files('pairs', 'odd')} {PAIRS} --batch_size TWICE", refused=NO_STAGES
    ),
    "nlp_example, decoder": Case("nlp_example.py", f"--model ROOT/llama {files('pairs', 'odd')} {PAIRS}"),
    "complete_nlp_example": Case(
        "complete_nlp_example.py",
        f"--model ROOT/llama {files('pairs', 'full')} {PAIRS} --with_tracking --checkpointing_steps 3",
    ),
    "complete_nlp_example, resumed": Case(
        "complete_nlp_example.py",
        f"--model ROOT/llama {files('pairs', 'full')} {PAIRS} --checkpointing_steps epoch",
        again="--resume_from_checkpoint OUT/epoch_0",
    ),
    "gradient_accumulation": Case(
        "by_feature.py",
        f"--model ROOT/llama {files('pairs', 'full')} {PAIRS} --feature accumulation --gradient_accumulation_steps 2",
    ),
    "gradient_accumulation_for_autoregressive_models": Case(
        "accumulate_tokens.py",
        f"--model ROOT/llama {files('texts', 'full')} --batch_size ROWS {LOOP} --gradient_accumulation_steps 3",
    ),
    "early_stopping": Case("by_feature.py", f"--model ROOT/llama {files('pairs', 'full')} {PAIRS} --feature stopping"),
    "multi_process_metrics": Case(
        "by_feature.py", f"--model ROOT/llama {files('pairs', 'full')} {PAIRS} --feature metrics --num_epochs 1"
    ),
    "cross_validation": Case("by_feature.py", f"--model ROOT/scores {files('pairs', 'full')} {PAIRS} --feature folds"),
    "peft sft": Case(
        "peft_sft.py",
        f"--model_name_or_path ROOT/wide --dataset_name ROOT/chats {TRAINER} --max_length 33 --max_steps 3 "
        "--eval_strategy epoch --bf16 false",
        needs=("trl", "peft"),
    ),
    "peft_lora_clm_accelerate": Case(
        "peft_lora_clm.py",
        f"--model ROOT/llama --train_file ROOT/summaries/full.jsonl --batch_size ROWS --num_epochs 2 {LOOP}",
        needs=("peft",),
    ),
    "dora_finetuning": Case(
        "dora_finetuning.py",
        "--base_model ROOT/llama --data_path ROOT/texts --batch_size ROWS --output_dir OUT --learning_rate 1e-2 "
        "--use_dora",
        needs=("peft",),
    ),
    "sentence-transformers": Case(
        "sentence_pairs.py",
        f"--model_name_or_path ROOT/bert {files('pairs')} {TRAINER} --num_train_epochs 1 "
        "--dataloader_drop_last true",  # it sets this itself where there are several processes
        specs=(*SPECS, "tp=2,dp_shard=2"),  # where a batch of odd length meets one of even length
        refused=NO_STAGES,
        needs=("sentence_transformers",),
    ),
}
