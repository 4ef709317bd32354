"""How long steps of this rank take, and what they do meanwhile.

    meter.begin("trainer")                # a step begins
    with meter.phase(DATA): ...           # its batches are read
    with meter.phase(COMPUTE): ...        # forward and backward of a micro-batch
    meter.end("trainer")                  # the optimizer's step is done
    window = meter.take()                 # the steps since the last call, in seconds

Waits for other ranks are taken out of the phase they fall in. What is in no phase (clipping, the optimizer, callbacks)
is the rest of the step.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hf_parallel.monitor.clock import Mark, clock_of
from hf_parallel.monitor.waits import Waits

STEP, DATA, COMPUTE, REST = "step", "data", "compute", "rest"
#: Of how many steps one is looked into by `basic`: marks of each collective cost the host some time.
EVERY = 4

_Spans = list[tuple[tuple[str, str], Mark, Mark]]  # phase and axis ("" for the phase itself), begin, end


@dataclass
class Window:
    """Steps between two readings. `seconds` by (phase, axis) of the `looked` steps that were looked into, which took
    `looked_seconds`; `tokens`, `rows` and `calls` of this rank's batches."""

    steps: int = 0
    step_seconds: float = 0.0
    looked: int = 0
    looked_seconds: float = 0.0
    tokens: int = 0
    rows: int = 0
    calls: int = 0
    seconds: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def waits(self) -> dict[str, float]:
        """Seconds of waiting by axis."""
        found: defaultdict[str, float] = defaultdict(float)
        for (_, axis), seconds in self.seconds.items():
            if axis:
                found[axis] += seconds
        return dict(found)

    def own(self, phase: str) -> float:
        """Seconds of a phase without its waits."""
        waits = sum(s for (where, axis), s in self.seconds.items() if where == phase and axis)
        if phase == REST:
            return self.looked_seconds - waits - self.seconds[DATA, ""] - self.seconds[COMPUTE, ""]
        return self.seconds[phase, ""] - waits


@dataclass
class _Step:
    begin: Mark
    looks: bool
    spans: _Spans = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    calls: int = 0


class Meter:
    """Of this process. One step is open at a time, by whoever has begun it."""

    def __init__(self, axes: Mapping[str, str], device: torch.device, full: bool) -> None:
        self.clock = clock_of(device)
        self.waits = Waits(axes, self.clock, self._note)
        self.owner: str | None = None
        self._every = 1 if full else EVERY
        self._phase = REST
        self._step: _Step | None = None
        self._ended: deque[tuple[_Step, Mark]] = deque()  # not read yet, with the mark of their end
        self._window = Window()
        self._count = 0
        self.waits.start(device)

    def begin(self, owner: str) -> None:
        """A step begins; one that nobody has ended never was."""
        self.clock.begin()
        looks = self._count % self._every == 0
        self.owner, self._phase = owner, REST
        self._step = _Step(self.clock.mark(), looks)
        self.waits.open = looks

    def end(self, owner: str) -> None:
        """The step is done, if it is this one's."""
        step = self._step
        if step is None or self.owner != owner:
            return
        self._step, self.owner, self.waits.open = None, None, False
        self._count += 1
        self._ended.append((step, self.clock.mark()))
        self._read()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs in here is of this phase; inside of another one it is of that."""
        step = self._step
        if step is None or not step.looks or self._phase != REST:
            yield
            return
        begin, self._phase = self.clock.mark(), name
        try:
            yield
        finally:
            self._phase = REST
            step.spans.append(((name, ""), begin, self.clock.mark()))

    def count(self, tokens: int, rows: int) -> None:
        """The open step trains on these too, in one more call of the model."""
        if self._step is not None:
            self._step.tokens += tokens
            self._step.rows += rows
            self._step.calls += 1

    def _note(self, axis: str, begin: Mark, end: Mark) -> None:
        step = self._step
        if step is not None:
            step.spans.append(((self._phase, axis), begin, end))

    def _read(self) -> None:
        """The ended steps that the device is past."""
        while self._ended and self.clock.is_past(self._ended[0][1]):
            step, end = self._ended.popleft()
            window, seconds = self._window, self.clock.seconds(step.begin, end)
            window.steps += 1
            window.step_seconds += seconds
            window.tokens, window.rows = window.tokens + step.tokens, window.rows + step.rows
            window.calls += step.calls
            if step.looks:
                window.looked += 1
                window.looked_seconds += seconds
            for key, begin, until in step.spans:
                window.seconds[key] += self.clock.seconds(begin, until)
                self.clock.release(begin, until)
            self.clock.release(step.begin, end)

    def take(self) -> Window:
        """The steps since the last call."""
        self._read()
        taken, self._window = self._window, Window()
        self._count = 0
        return taken

    def give_back(self, window: Window) -> None:
        """What was just taken is taken later: another rank's device is not past a step yet."""
        self._window = window

    def stop(self) -> None:
        """Measure no more."""
        self.waits.stop()
