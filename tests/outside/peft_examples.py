"""PEFT's own examples, read from a checkout: each method as its authors train it."""

from tests.outside.cases import TRAINER, Case

EXAMPLES = "peft/examples"
#: Numbers that are written into the scripts, for three steps that log and evaluate; no scaled losses on CPUs.
STEPS = (
    ("warmup_steps=100", "warmup_steps=0"),
    ("warmup_steps=int(max_steps * 0.1),", "warmup_steps=0,"),
    ("logging_steps=100", "logging_steps=1"),
    ("gradient_accumulation_steps=16\n        // batch_size", "gradient_accumulation_steps=2"),
    ("gradient_accumulation_steps=16\n", "gradient_accumulation_steps=2  "),
    ("gradient_accumulation_steps=16", "gradient_accumulation_steps=2"),
    ("fp16=True,", ""),
    ('logging_dir="./logs",', ""),
    ("    device_module.empty_cache()\n", ""),
    ("            learning_rate=learning_rate,\n", "            learning_rate=learning_rate, adam_epsilon=1e-3,\n"),
    ("        learning_rate=learning_rate,\n", "        learning_rate=learning_rate, adam_epsilon=1e-3,\n"),
    ("        variant=variant,", "        group_size=8, variant=variant,"),
    ("device_module.is_available() and device_module.is_bf16_supported()", "False"),
    ("bf16_suppotrted else torch.float16", "bf16_suppotrted else torch.float32"),
)
INSTRUCTIONS = (
    "--base_model ROOT/llama --data_path ROOT/instructions --output_dir OUT --batch_size ROWS --learning_rate 1e-2 "
    "--cutoff_len 65 --val_set_size 3 --eval_step 2 --save_step 2 --device_map cpu --dtype float32 --seed 1"
)
TEXTS = (
    "--base_model ROOT/llama --data_path ROOT/texts --output_dir OUT --batch_size ROWS --learning_rate 1e-2 "
    "--cutoff_len 33 --eval_step 1 --save_step 100 --device cpu"
)
SFT = (
    f"--base_model_name_or_path ROOT/llama --data_path ROOT/texts --dataset_split train {TRAINER} --max_steps 3 "
    "--max_length 33 --bf16 false"
)
FULL = (("dtype=torch.bfloat16", "dtype=torch.float32"),)
FIELDS = "--data_path ROOT/instructions --dataset_split train --dataset_field instruction output --bits fp32"
WRITTEN = {
    "olora": "--lora_dropout 0",
    "waveft": "--waveft_n_frequency 129 --waveft_scaling 1",
    "hira": "--hira_dropout 0",
    "shira": "--shira_r 4",
    "glora": "",
}
OF_TEXTS = {
    "delora": "--module_dropout 0 --delora_lambda 5",
    "gralora": "--gralora_dropout 0",
    "randlora": "--randlora_dropout 0",
    "road": "",
    "deft": "--deft_dropout 0",
    "supertuning": "",
    "peanut": "",
    "lily": "",
}
#: Columns, lengths and a metric that need no download.
SEARCHED = (
    ('dataset = load_dataset(args.dataset_name, revision="main")', "dataset = load_dataset(args.dataset_name)"),
    ('examples["query"]', 'examples["sentence1"]'),
    ('examples["product_title"]', 'examples["sentence2"]'),
    ('examples["relevance_label"]', 'examples["label"]'),
    ("max_length=70", "max_length=33"),
    ("(step + 1) % 100 == 0", "True"),
    ('metric = evaluate.load("roc_auc")', "scores = []"),
    ("metric.add_batch(", "(lambda prediction_scores, references: scores.append(float(prediction_scores.sum())))("),
    ("metric.compute()", "{'scores': sum(scores)}"),
    ("lr=args.learning_rate)", "lr=args.learning_rate, eps=1e-3)"),
)
SEARCH = (
    f"{EXAMPLES}/feature_extraction/peft_lora_embedding_semantic_search.py",
    "--dataset_name ROOT/pairs --model_name_or_path ROOT/bert --output_dir OUT --per_device_train_batch_size ROWS "
    "--per_device_eval_batch_size ROWS --learning_rate 1e-3 --num_train_epochs 2 --seed 1 --with_tracking "
    "--lr_scheduler_type constant",
)
PEFT = {
    **{
        f"peft {name}": Case(
            f"{EXAMPLES}/{name}_finetuning/{name}_finetuning.py", f"{INSTRUCTIONS} {more}", edits=STEPS
        )
        for name, more in WRITTEN.items()
    },
    **{
        f"peft {name}": Case(f"{EXAMPLES}/{name}_finetuning/{name}_finetuning.py", f"{TEXTS} {more}", edits=STEPS)
        for name, more in OF_TEXTS.items()
    },
    "peft dora": Case(
        f"{EXAMPLES}/dora_finetuning/dora_finetuning.py", f"{TEXTS} --lora_dropout 0 --use_dora", edits=STEPS
    ),
    "peft lorafa": Case(
        f"{EXAMPLES}/lorafa_finetune/lorafa_finetuning.py",
        "--base_model_name_or_path ROOT/llama --dataset_name_or_path ROOT/instructions --output_dir OUT "
        "--batch_size ROWS --lr 1e-2 --cutoff_len 33 --eval_step 1 --save_step 100 --lora_dropout 0 --lorafa",
        edits=(
            *STEPS,
            (
                "compute_dtype = torch.bfloat16 if is_bf16_supported else torch.float16",
                "compute_dtype = torch.float32",
            ),
            ('examples["query"]', 'examples["instruction"]'),
            ('examples["response"]', 'examples["output"]'),
        ),
    ),
    "peft lora_ga": Case(
        f"{EXAMPLES}/lora_ga_finetuning/lora_ga_finetuning.py",
        "--base_model ROOT/gpt2 --dataset_name ROOT/texts --dataset_config default --output_dir OUT --batch_size ROWS "
        "--learning_rate 1e-2 --max_length 33 --warmup_steps 0 --logging_steps 1 --num_epochs 1 --lora_dropout 0 "
        "--grad_estimate_iters 2",
    ),
    "peft kasa": Case(
        f"{EXAMPLES}/kasa_finetuning/kasa_finetuning.py", f"{SFT} --kasa_gamma 0.1 --lora_r 4", edits=FULL
    ),
    "peft mica": Case(f"{EXAMPLES}/mica_finetuning/mica_finetuning.py", f"{SFT} --lora_r 4", edits=FULL),
    **{
        f"peft {name}": Case(
            f"{EXAMPLES}/{name}_finetuning/{name}_finetuning.py",
            f"--base_model_name_or_path ROOT/llama {FIELDS} {TRAINER} --max_steps 3 --max_length 33 --bf16 false "
            f"{more}",
        )
        for name, more in {
            "pissa": "--merge_and_save true",
            "miss": "--merge_and_save true --miss_r 8",
            "psoft": "--r 8 --psoft_alpha 8",
            "unilora": "--merge_and_save true",
        }.items()
    },
    "peft alora": Case(
        f"{EXAMPLES}/alora_finetuning/alora_finetuning.py",
        "--base_model ROOT/chatty --data_path ROOT/instructions --output_dir OUT --batch_size ROWS --lora_dropout 0 "
        "--learning_rate 1e-2 --cutoff_len 65 --eval_step 1 --save_step 100 --device cpu "
        "--invocation_string assistant",
        edits=(
            *STEPS,
            ('["test"]', '["train"]'),
            (
                "        weight_decay=0.01,",
                "        weight_decay=0.01, use_cpu=True, disable_tqdm=True, report_to='none',",
            ),
        ),
    ),
    "peft semantic_search": Case(SEARCH[0], f"{SEARCH[1]} --use_peft", edits=SEARCHED),
    "peft semantic_search, whole model": Case(
        *SEARCH,
        edits=(
            *SEARCHED,
            (", state_dict=accelerator.get_state_dict(accelerator.unwrap_model(model))", ""),
            (
                "accelerator.unwrap_model(model).save_pretrained(",
                "accelerator.unwrap_model(model).model.save_pretrained(",
            ),
        ),
    ),
    "peft frod": Case(
        f"{EXAMPLES}/frod_finetuning/frod_text_classification.py",
        "--model_name_or_path ROOT/bert --dataset_name ROOT/pairs --output_dir OUT --per_device_train_batch_size ROWS "
        "--per_device_eval_batch_size ROWS --logging_steps 1 --use_cpu --disable_tqdm true",
        edits=(
            ("load_dataset(frod_args.dataset_name, frod_args.task_name)", "load_dataset(frod_args.dataset_name)"),
            ('batch["sentence"]', 'batch["sentence1"]'),
        ),
    ),
}
