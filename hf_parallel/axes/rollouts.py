"""Where TRL's trainers have what they compare with: completions drawn ahead of time, a reference on other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.axes.axis import Axis, Keys, key
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.config import ParallelConfig

IN_TURN, ONE_STEP_BEHIND = "in_turn", "one_step_behind"
_PATIENCE_S = 600


@dataclass(frozen=True)
class RolloutKeys(Keys):
    rollouts: str = key(
        IN_TURN,
        "GRPO with a rollout server: draw `in_turn` with training, or for the next step while this one trains, "
        "`one_step_behind`",
        choices=(IN_TURN, ONE_STEP_BEHIND),
    )
    reference: str | None = key(
        None,
        "`http://host:port` of `python -m hf_parallel.rollouts --reference MODEL`: TRL's reference model is asked "
        "there, and held by no rank",
    )
    reference_timeout_s: int = key(_PATIENCE_S, "seconds in which that server must answer, else the run ends")


class Rollouts(Axis[None, None]):
    """Read by the hooks of TRL; see docs/rl.md."""

    name = "rollouts"
    alone = True

    def check(self, config: ParallelConfig) -> None:
        """An address, and whole rows to ask about."""
        address, seconds = config.reference, f"reference_timeout_s={config.reference_timeout_s}"
        if config.reference_timeout_s < 1:
            refuse(seconds, "is one at least", f"reference_timeout_s={_PATIENCE_S}")
        if address is None and config.reference_timeout_s != _PATIENCE_S:
            refuse(seconds, "without reference=http://… no server is asked", f"reference_timeout_s={_PATIENCE_S}")
        if address is None:
            return
        if not address.startswith(("http://", "https://")):
            refuse(f"reference={address}", "is no address", "reference=http://127.0.0.1:8001")
        if config.cp_size != 1:
            refuse(
                f"reference={address}", f"is asked about whole rows, of which cp={config.cp_size} has parts", "cp=1"
            )


ROLLOUTS = RolloutKeys.axis = Rollouts()
