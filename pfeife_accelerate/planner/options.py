"""What the user fixes about a plan; everything else is the search's to choose."""

from __future__ import annotations

from dataclasses import dataclass

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import ScheduleFamily, parse_family

__all__ = ["SearchOptions"]

_CLOSED = {"backward": ("whole", "split"), "recompute": ("none", "auto"), "effort": ("full", "quick")}


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What the user fixes about the plan; None and "auto" leave it to the search."""

    num_microbatches: int | None = None  #: read by the session, which cuts the batch before there is a graph to plan
    schedule: str = "auto"  #: "auto" or the name of a `ScheduleFamily`
    num_loops: int | None = None  #: stages per rank
    microbatches_per_loop: int | None = None  #: looped only
    prefetch_forwards: int | None = None  #: extra forwards before the first backward
    split_points: tuple[str, ...] = ()  #: modules or operations where the stages after the first start; see `cuts_at`
    cuts: tuple[int, ...] | None = None  #: positions, where they are decided already
    memory_fraction: float = 0.9  #: share of a device's memory that a plan may use
    backward: str = "whole"  #: "split": input and weight gradients may be planned apart
    recompute: str = "none"  #: "auto": stages may compute their activations again where memory is short
    effort: str = "full"  #: "quick": the families on a few slicings, nothing refined

    def __post_init__(self) -> None:
        """Refuse words that are not among the choices."""
        for name, choices in _CLOSED.items():
            value = getattr(self, name)
            if value not in choices:
                raise PfeifeError(id="PF307", what=f"{name}={value!r}", why=f"{name} is one of {', '.join(choices)}")

    @property
    def family(self) -> ScheduleFamily | None:
        """The family asked for, None for "auto"."""
        return None if self.schedule.lower() == "auto" else parse_family(self.schedule)
