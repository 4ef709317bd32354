"""Loops around a model of the script's own, which Accelerator prepares: rewards with a gain, policies with a value."""

from tests.outside.cases import Case

MOCK = "__import__('tests.outside.stand_ins').outside.stand_ins.stand_for(%s)\n"
#: A board that is not here, names that torch has no more, texts and answers of ours.
REWARDS = (
    ("    _dispatch_sqrt,\n", ""),
    ("import functools\n", "import functools\nfrom math import sqrt as _dispatch_sqrt\n"),
    ("import tyro\n", f"{MOCK % repr('torch.utils.tensorboard')}import tyro\n"),
    (
        'load_dataset("bookcorpus", split="train")',
        'load_dataset("json", data_files="ROOT/texts/full.jsonl", split="train")',
    ),
    (
        '        "vwxyzjn/lm-human-preferences",\n        data_files=[args.label_dataset],',
        '        "json", data_files="ROOT/judged/train.jsonl",',
    ),
    (
        "        accelerator.save_model(reward_model, args.save_path)",
        "        accelerator.save_model(reward_model, args.save_path)\n"
        "    model = accelerator.unwrap_model(reward_model)\n"
        "    accelerator.log({'gain': float(model.reward_gain), 'bias': float(model.reward_bias)})",
    ),
    ("adaptive_kl: Optional[AdaptiveKLParams]", "adaptive_kl: tyro.conf.Suppress[AdaptiveKLParams]"),
)
#: Data ranks read other questions where each shuffles them by its own seed, and draw other answers to them.
ONE_SEED = (
    ("local_seed = args.seed + accelerator.process_index * 100003", "local_seed = args.seed"),
    ("do_sample=True", "do_sample=False"),
)
REWARD_RUN = (
    "--base_model ROOT/gpt2 --save_path OUT/end --labels.num_train 24 --local_batch_size ROWS "
    "--local_rollout_batch_size ROWS --local_normalize_samples TWICE --task.query_length 12 --task.response_length 5 "
    "--lr 1e-2 --eps 1e-3 --print_sample_output_freq 2"
)
POLICY_RUN = (
    "--base_model ROOT/gpt2 --save_path OUT/end --rewards.trained_model ROOT/judged/rewards.pt "
    "--ppo.total_episodes 24 --ppo.local_batch_size ROWS --ppo.no-whiten-rewards --ppo.lr 1e-2 --ppo.eps 1e-3 "
    "--ppo.noptepochs 2 --task.query_length 12 --task.response_length 5 --task.truncate_after 2"
)
LOOPS = {
    f"lm-human-preference train_{kind}{more}": Case(
        f"lm-human-preference-details/lm_human_preference_details/train_{kind}_accelerate.py",
        f"{given} {words}",
        edits=(*REWARDS, *edits),
    )
    for kind, given in (("reward", REWARD_RUN), ("policy", POLICY_RUN))
    for more, words, edits in (
        ("", "", ()),
        (", one seed", "", ONE_SEED),
        (
            ", one seed, accumulated",
            f"--{'ppo.' * (kind == 'policy')}gradient_accumulation_steps 2",
            ONE_SEED,
        ),
    )
}
