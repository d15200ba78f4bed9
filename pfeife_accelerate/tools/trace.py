"""`pfeife trace`: a recorded training step beside its plan, as a picture, as tables, and for ui.perfetto.dev.

`pfeife trace trace.json` shows what the option `trace` has written; `pfeife trace train.py` runs the script with that
option first. Models: one pipeline. Ignores: what the script does between its steps.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.trace import Trace, trace_from_json
from pfeife_accelerate.planner.comparison import Comparison, compare
from pfeife_accelerate.tools.chrome_trace import chrome_trace
from pfeife_accelerate.tools.plan_report import timeline_text
from pfeife_accelerate.tools.tables import number_table

__all__ = ["print_comparison", "read_trace", "show", "trace_script"]

_UNKNOWN = "-"


def show(file: Path, *, perfetto: Path | None = None, console: Console | None = None) -> int:
    """Print a recorded trace; gives the exit code."""
    _report(console or Console(), read_trace(file), perfetto)
    return 0


def trace_script(
    script: Path,
    arguments: Sequence[str],
    *,
    out: Path,
    config: Path | None = None,
    num_processes: int | None = None,
    perfetto: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run the script, all of it, recording some steps into `out`, and print them; gives the exit code.

    Raises: PfeifeError PF234 for files that are not there, PF235 if no step was recorded.
    """
    # Imported here: a file is shown without torch.
    from pfeife_accelerate.config import PfeifePlugin
    from pfeife_accelerate.tools.launch_command import check_paths, run_script

    check_paths(script, config, out, where="pfeife trace")
    with tempfile.TemporaryDirectory(prefix="pfeife-trace-") as folder:
        made = Path(folder) / "trace.json"
        code = run_script(script, arguments, PfeifePlugin(trace=str(made)), config, num_processes, Path(folder))
        if code != 0:
            return code
        if not made.exists():
            raise PfeifeError(
                id="PF235",
                what=f"{script} ended before any step was recorded",
                where="pfeife trace",
                why="only training steps that run the planned schedule are recorded, and the first ones are left out",
                hints=("let the script train for more steps", "PFEIFE_TRACE_AFTER=0 records from the first one on"),
            )
        out.write_bytes(made.read_bytes())
    console = console or Console()
    _report(console, read_trace(out), perfetto)
    console.print(Text(f"written to {out}"), soft_wrap=True)
    return 0


def read_trace(file: Path) -> Trace:
    """The trace in a file.

    Raises: PfeifeError PF236 where there is none, PF168 where there is something else.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PfeifeError(id="PF236", what=f"the trace {file} cannot be read", why=str(error)) from error
    return trace_from_json(text, str(file))


def _report(console: Console, trace: Trace, perfetto: Path | None) -> None:
    print_comparison(console, trace)
    if perfetto is None:
        return
    try:
        perfetto.write_text(json.dumps(chrome_trace(trace)), encoding="utf-8")
    except OSError as error:
        raise PfeifeError(id="PF236", what=f"{perfetto} cannot be written", why=str(error)) from error
    console.print(Text(f"for ui.perfetto.dev: {perfetto}"), soft_wrap=True)


def print_comparison(console: Console, trace: Trace) -> None:
    """The picture and the tables."""
    found = compare(trace)
    scale_s = max(found.planned.makespan_s, found.recorded.makespan_s)
    spec, num_ranks = trace.plan.spec, trace.plan.num_ranks
    numbers = ", ".join(str(step.number) for step in trace.steps)
    console.print(Text(f"{num_ranks} ranks, {spec.family.value}; recorded training steps {numbers}"), soft_wrap=True)
    for title, timeline in (("planned", found.planned), (f"recorded, step {found.number}", found.recorded)):
        console.print(Text(title))
        console.print(timeline_text(timeline, num_ranks, console.width, scale_s=scale_s), soft_wrap=True)
    console.print(_step_table(found))
    console.print(_stage_table(found))
    if found.links:
        console.print(_link_table(found))
    error_s = max(step.clock_error_s for step in trace.steps)
    console.print(Text(f"clocks of the ranks agree within {error_s * 1e6:.0f} us"), soft_wrap=True)
    if trace.plan.machine is None:
        text = "the plan does not say which links it was made for: they are taken to cost nothing"
        console.print(Text(text), soft_wrap=True)


def _step_table(found: Comparison) -> Table:
    table = number_table("", "planned", "recorded", "error", title="Step, and idle share of each rank")
    table.add_row("ms", _ms(found.step.planned_s), _ms(found.step.recorded_s), _error(found.step.error))
    table.add_row("idle", f"{found.planned_idle:.1%}", f"{found.recorded_idle:.1%}", "")
    for rank in found.ranks:
        table.add_row(f"rank {rank.rank}", f"{rank.planned_idle:.1%}", f"{rank.recorded_idle:.1%}", "")
    return table


def _stage_table(found: Comparison) -> Table:
    table = number_table("stage", "rank", "", "planned ms", "recorded ms", "error", title="Stages, one micro-batch")
    for row in found.stages:
        planned, recorded = _ms(row.planned_s), _ms(row.recorded_s)
        table.add_row(str(row.stage), str(row.rank), row.kind.value, planned, recorded, _error(row.error))
    return table


def _link_table(found: Comparison) -> Table:
    table = number_table("link", "messages", "planned ms", "recorded ms", "error", title="Links, one message")
    for row in found.links:
        link = f"{row.sender} to {row.receiver}"
        table.add_row(link, str(row.num_messages), _ms(row.planned_s), _ms(row.recorded_s), _error(row.error))
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    return f"{seconds * 1e3:.3f}" if seconds < 0.01 else f"{seconds * 1e3:.1f}"


def _error(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:+.1%}"
