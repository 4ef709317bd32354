"""Keys of a run: what it says of itself, how it is watched, how it saves, where TRL's rollouts come from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_parallel.ask.keys.layers import CompileKeys
from hf_parallel.ask.keys.sizes import Keys, Sizes, key
from hf_parallel.ask.spec import refuse, spell

HANG_AUTO, HANG_OFF = "auto", "off"
IN_TURN, ONE_STEP_BEHIND = "in_turn", "one_step_behind"
_PATIENCE_S = 600
_MONITORS, _TRACE = ("off", "basic", "full"), re.compile(r"trace:(\d+)")


@dataclass(frozen=True)
class WatchKeys(Keys):
    """Keys for watching a training: hangs, and numbers that are not finite."""

    holds_alone = True

    hang_timeout_s: str = key(
        HANG_AUTO,
        "seconds in which nothing ends, after which all ranks say where they are; `off`",
        shown="0.8 of the process group's time-out",
    )
    hang_action: str = key("stop", "then end the run, or only `report`", choices=("stop", "report"))
    nan_action: str = key(
        "report",
        "a gradient norm that is not finite: say where it comes from; `stop` ends the run, `skip` leaves the step out",
        choices=("report", "stop", "skip"),
    )

    def check_keys(self) -> None:
        """Require a number of seconds, or a word."""
        value = self.hang_timeout_s
        if value in (HANG_AUTO, HANG_OFF):
            return
        try:
            good = 0 < float(value) < float("inf")
        except ValueError:
            good = False
        if not good:
            refuse(f"hang_timeout_s={value}", "neither seconds, nor off", "hang_timeout_s=600")


@dataclass(frozen=True)
class MonitorKeys(CompileKeys):
    """Keys for measurements of a training beside its loss; see docs/monitoring.md."""

    holds_alone = True

    monitor: str = key(
        "basic",
        "`perf/` keys in every log: speed, waits, memory; `full` parts them by axis; `off`; `trace:N` is `basic` and "
        "records N steps for `hf-parallel bisect`",
    )
    profile_steps: tuple[int, ...] | None = key(
        None,
        "for example `[5,6]`: a trace and a picture of all ranks in these steps of a Trainer, "
        "`OUTPUT_DIR/profile_step_5.json.gz` and `.svg`",
    )

    @property
    def traced_steps(self) -> int:
        """Return how many steps `hf-parallel bisect` can compare; 0 unless asked for."""
        traced = _TRACE.fullmatch(self.monitor)
        return int(traced[1]) if traced else 0

    def check_keys(self) -> None:
        """Reject what is no way to monitor; require steps that exist."""
        if self.monitor not in _MONITORS and self.traced_steps < 1:
            refuse(f"monitor={self.monitor}", f"not one of {', '.join(_MONITORS)}, trace:N", "monitor=trace:4")
        if self.traced_steps and self.compile != "none":
            refuse(
                f"compile={self.compile}", f"monitor={self.monitor} reads the output of each module", "compile=none"
            )
        if self.profile_steps is not None and min(self.profile_steps) < 1:
            refuse(f"profile_steps={spell(self.profile_steps)}", "steps count from 1", "profile_steps=[5,6]")


@dataclass(frozen=True)
class RolloutKeys(Sizes):
    """Where TRL's trainers get completions and reference log-probabilities; see docs/rl.md."""

    holds_alone = True

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

    def check_keys(self) -> None:
        """Require an address, and whole sequences to ask about."""
        address, seconds = self.reference, f"reference_timeout_s={self.reference_timeout_s}"
        if self.reference_timeout_s < 1:
            refuse(seconds, "is one at least", f"reference_timeout_s={_PATIENCE_S}")
        if address is None and self.reference_timeout_s != _PATIENCE_S:
            refuse(seconds, "without reference=http://… no server is asked", f"reference_timeout_s={_PATIENCE_S}")
        if address is None:
            return
        if not address.startswith(("http://", "https://")):
            refuse(f"reference={address}", "is no address", "reference=http://127.0.0.1:8001")
        if self.cp_size != 1:
            refuse(f"reference={address}", f"is asked about whole rows, of which cp={self.cp_size} has parts", "cp=1")


@dataclass(frozen=True)
class SavingKeys(Keys):
    """Keys for writing checkpoints."""

    holds_alone = True

    async_save: bool = key(False, "write checkpoints from a copy in host memory while training goes on")
