"""GRPO and RLOO whose completions come from a server: rewards, losses and weights of one process that draws them.

The server draws by row, as the one process does (`rollouts.py`), so that both draw the same tokens.
"""

import pytest

from tests.parity.test_trl import LORA, check

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("requests")

from tests import rollout_servers, trl_scripts
from tests.training import pairs

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trl_scripts.Folder(tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize(
    ("case", "spec"),
    [
        pytest.param(case, spec, marks=pytest.mark.support("trl rloo" if case == "rloo" else "trl grpo"))
        for case, spec in pairs(dict.fromkeys(("grpo", "dapo", "adapters", "rloo"), "tp=2 dp_shard=2,pp=2"))
    ],
)
def test_as_one_process_that_generates(folder, case, spec):
    with rollout_servers.running(str(folder.root / "llama"), by_row=True) as port:
        where = f"--vllm_server_base_url http://127.0.0.1:{port} --vllm_group_port {rollout_servers.free_port()}"
        if case == "dapo":  # TRL's correction weighs by what top_k has left out, which one process does not know
            where += " --vllm_importance_sampling_correction false"
        name = "rloo" if case == "rloo" else "grpo"
        check(folder, name, "prompt", BASE + CASES[case], spec, also=f"--use_vllm true --vllm_mode server {where}")
