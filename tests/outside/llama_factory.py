"""LLaMA-Factory, read from a checkout, on its own demonstration data."""

from tests.outside.cases import TRAINER, Case

TRAIN = "LLaMA-Factory/src/train.py"
BASE = (
    "--dataset_dir SOURCES/LLaMA-Factory/data --template alpaca --cutoff_len 65 --max_samples 22 --overwrite_cache "
    f"--do_train {TRAINER} --max_steps 3 --seed 1"
)
ROWS = "--model_name_or_path ROOT/llama --dataset alpaca_en_demo"
EVALUATED = "--val_size 0.4 --eval_strategy steps --eval_steps 2 --compute_accuracy"
LORA = "--finetuning_type lora --lora_rank 4 --lora_target all --lora_dropout 0"
SFT = {
    "full": f"--finetuning_type full {EVALUATED}",
    "freeze": f"--finetuning_type freeze --freeze_trainable_layers 2 {EVALUATED}",
    "lora": f"{LORA} {EVALUATED}",
    "lora, loraplus": f"{LORA} --loraplus_lr_ratio 8",
    "lora, dora": f"{LORA} --use_dora",
    "lora, pissa": f"{LORA} --pissa_init --pissa_iter -1",
    "oft": "--finetuning_type oft --oft_block_size 8 --oft_rank 0 --oft_target all",
    "packing": "--finetuning_type full --packing true",
    "neat packing": "--finetuning_type full --neat_packing",
    "dft": "--finetuning_type full --use_dft_loss",
    "eaft": "--finetuning_type full --use_eaft_loss",
    "asft": "--finetuning_type full --use_asft_loss",
    "muon": "--finetuning_type full --use_muon",
    "neftune": "--finetuning_type full --neftune_noise_alpha 5",
    "accumulated": f"{LORA} --gradient_accumulation_steps 2",
    "sequential": "--finetuning_type full --disable_shuffling --mask_history",
}
FULL = "--finetuning_type full"
#: A reference model, which LoRA has in itself, and losses without one.
PREFERENCES = {
    "full": FULL,
    "full, ftx and bco": f"{FULL} --pref_ftx 0.3 --pref_bco_weight 0.2",
    "lora": f"{LORA} {EVALUATED.replace(' --compute_accuracy', '')}",
    "lora, orpo": f"{LORA} --pref_loss orpo",
    "lora, simpo": f"{LORA} --pref_loss simpo",
    "lora, ipo": f"{LORA} --pref_loss ipo",
}
FACTORY = {
    **{f"LLaMA-Factory sft, {name}": Case(TRAIN, f"--stage sft {ROWS} {BASE} {more}") for name, more in SFT.items()},
    **{
        f"LLaMA-Factory dpo, {name}": Case(
            TRAIN, f"--stage dpo --model_name_or_path ROOT/llama --dataset dpo_en_demo {BASE} {more}"
        )
        for name, more in PREFERENCES.items()
    },
    **{
        f"LLaMA-Factory kto, {name}": Case(
            TRAIN, f"--stage kto --model_name_or_path ROOT/llama --dataset kto_en_demo {BASE} {more}"
        )
        for name, more in {"full": FULL, "lora": LORA}.items()
    },
    **{
        f"LLaMA-Factory rm, {name}": Case(
            TRAIN, f"--stage rm --model_name_or_path ROOT/llama --dataset dpo_en_demo {BASE} {more} {EVALUATED}"
        )
        for name, more in {"full": FULL, "lora": LORA}.items()
    },
    "LLaMA-Factory sft, generated": Case(
        TRAIN,
        f"--stage sft {ROWS} {BASE} {LORA} --predict_with_generate --do_eval --eval_dataset identity "
        "--max_new_tokens 7 --do_sample false",
    ),
    "LLaMA-Factory pt": Case(
        TRAIN,
        f"--stage pt --model_name_or_path ROOT/llama --dataset c4_demo {BASE} --finetuning_type full {EVALUATED}",
    ),
}
