"""GRPO and RLOO whose completions come from a server: rewards, losses and weights of one process that draws them.

The server draws by row, as the one process does (`rollouts.py`), so that both draw the same tokens.
"""

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("requests")

from tests import rollout_servers
from tests.training import pairs
from tests.trl_scripts import LORA

BASE = (
    "--reward_funcs tests.rollouts.reward tests.rollouts.second_reward --num_generations 2 --max_completion_length 8 "
    "--max_steps 4 "
)
CASES = {
    "grpo": "--loss_type grpo --beta 0.1",
    "dapo": "--loss_type dapo --temperature 0.7 --top_k 20",
    "adapters": f"{LORA} --beta 0.1",
    "rloo": "--beta 0.1",
}


@pytest.mark.parametrize(
    ("case", "spec"),
    [
        pytest.param(case, spec, marks=pytest.mark.support("trl rloo" if case == "rloo" else "trl grpo"))
        for case, spec in pairs(dict.fromkeys(("grpo", "dapo", "adapters", "rloo"), "tp=2 dp_shard=2,pp=2"))
    ],
)
def test_as_one_process_that_generates(trl_runs, case, spec):
    with rollout_servers.running(trl_runs.model("llama"), by_row=True) as server:
        also = server.flags
        if case == "dapo":  # TRL's correction weighs by what top_k has left out, which one process does not know
            also += " --vllm_importance_sampling_correction false"
        name = "rloo" if case == "rloo" else "grpo"
        trl_runs.check(name, "prompt", BASE + CASES[case], spec, also=also)
