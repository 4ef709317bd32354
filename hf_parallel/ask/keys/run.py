"""Keys of a run: what it says of itself, how it is watched, how it saves, where TRL's rollouts come from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_parallel.ask.keys.data import CompressionKeys
from hf_parallel.ask.keys.layers import CompileKeys
from hf_parallel.ask.keys.sizes import Keys, Sizes, key
from hf_parallel.ask.spec import refuse, spell

HANG_AUTO, HANG_OFF = "auto", "off"
IN_TURN, ONE_STEP_BEHIND = "in_turn", "one_step_behind"
_PATIENCE_S = 600
_MONITORS, _TRACE, _NOISE = ("off", "basic", "full"), re.compile(r"trace:([1-9]\d*)"), "noise"


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
class MonitorKeys(CompileKeys, CompressionKeys):
    """Keys for measurements of a training beside its loss; see docs/monitoring.md."""

    holds_alone = True

    monitor: str = key(
        "basic",
        "`perf/` keys in every log: speed, waits, memory; `full` parts them by axis; `off`; `trace:N` is `basic` and "
        "records N steps for `hf-parallel bisect`; `noise` is `basic` and measures the gradient noise scale; "
        "`full+noise` is both",
    )
    profile_steps: tuple[int, ...] | None = key(
        None,
        "for example `[5,6]`: a trace and a picture of all ranks in these steps of a Trainer, "
        "`OUTPUT_DIR/profile_step_5.json.gz` and `.svg`",
    )

    @property
    def traced_steps(self) -> int:
        """Return how many steps `hf-parallel bisect` can compare; 0 unless asked for."""
        traced = next(filter(None, map(_TRACE.fullmatch, self.monitor.split("+"))), None)
        return int(traced[1]) if traced else 0

    @property
    def parts_waits(self) -> bool:
        """Return whether waits are told apart by axis, and all facts printed at the start."""
        return "full" in self.monitor.split("+")

    @property
    def measures_noise(self) -> bool:
        """Return whether the gradient noise scale is measured."""
        return _NOISE in self.monitor.split("+")

    def check_keys(self) -> None:
        """Reject what is no way to monitor; require steps that exist."""
        words, what = self.monitor.split("+"), f"monitor={self.monitor}"
        known = [word for word in words if word in (*_MONITORS, _NOISE) or _TRACE.fullmatch(word)]
        levels = [word for word in words if word in _MONITORS]
        if known != words or len(levels) > 1 or (len(words) > 1 and "off" in words) or len(set(words)) < len(words):
            kinds = f"{', '.join(_MONITORS)}, trace:N, noise, nor one of them +noise"
            refuse(what, f"not one of {kinds}", "monitor=trace:4")
        cp, schedule = self.cp_size, f"pipeline_schedule={self.pipeline_schedule}"
        if self.measures_noise:  # needs a rank that sees the gradient of one data rank's small batch
            if self.ep_size != 1:
                why = "experts get tokens of several data ranks at once"
                refuse(f"{what} with ep_size={self.ep_size}", why, "ep_size=1")
            if self.delays_updates:
                why = "its gradients are those of weights that are a step old"
                refuse(f"{what} with {schedule}", why, "pipeline_schedule=1f1b")
            if self.mirrors_stages:
                why = "each rank has gradients of two stages until they meet their owner's"
                refuse(f"{what} with {schedule}", why, "pipeline_schedule=1f1b")
            for axis in ("tp", "pp") if cp != 1 else ():
                if (size := getattr(self, f"{axis}_size")) != 1:
                    why = f"ranks of cp meet in a reduction that does not know what {axis} holds alike"
                    refuse(f"{what} with cp_size={cp},{axis}_size={size}", why, f"{axis}_size=1")
            if cp != 1 and self.quantize_gradients != "none":
                why = f"cp_size={cp} reduces gradients in two hops, to see each data rank's"
                refuse(f"{what} with quantize_gradients={self.quantize_gradients}", why, "quantize_gradients=none")
        if self.traced_steps and self.compile != "none":
            refuse(f"compile={self.compile}", f"{what} reads the output of each module", "compile=none")
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
            works = "reference=http://127.0.0.1:8001" if self.cp_size == 1 else "reference=none"
            refuse(f"reference={address}", "is no address", works)
        if self.cp_size != 1:
            refuse(f"reference={address}", f"is asked about whole rows, of which cp={self.cp_size} has parts", "cp=1")


@dataclass(frozen=True)
class SavingKeys(Keys):
    """Keys for writing checkpoints."""

    holds_alone = True

    async_save: bool = key(False, "write checkpoints from a copy in host memory while training goes on")
