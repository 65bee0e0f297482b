"""The report as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.cli.doctor.report import BUSY, Report
from mrl.system.units import size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def render(report: Report, console: Console | None = None) -> None:
    """Print the report; `console` defaults to stdout."""
    from rich.console import Console
    from rich.markup import escape

    console = console or Console()
    machine = report.machine
    console.print(f"[bold]Python[/] {escape(machine.python)} on {escape(machine.os)}")
    console.print(
        f"{machine.cores} cores, {_size(machine.memory)} memory, {_size(machine.disk_free)} free disk here, "
        + (escape("; ".join(report.gpus)) if report.gpus else "no GPU")
    )
    console.print(_packages(report))
    console.print(_checks(report))
    for problem in report.problems:
        console.print(f"[red]problem:[/] {escape(problem)}", soft_wrap=True)
    defaults = ", ".join(check.name for check in report.checks if check.default)
    failed = [check for check in report.checks if check.default and not check.ok and not check.slow]
    slow = [check.name for check in report.checks if check.default and check.slow]
    if report.ok:
        console.print(f"[green]mrl works here[/] with its defaults ({escape(defaults)}).")
    elif slow and not failed:
        console.print(
            f"[yellow]Whether mrl works here is not known:[/] {escape(', '.join(slow))} took too long to try. {BUSY}.",
            soft_wrap=True,
        )
    else:
        console.print(f"[red]mrl does not work here[/] with its defaults ({escape(defaults)}): see what failed above.")


def _packages(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("package", "version", "for", title="Installed", title_justify="left")
    for package in report.packages:
        version = Text(package.version) if package.version else Text("not installed", style="dim")
        table.add_row(package.name, version, package.purpose or "mrl itself")
    return table


def _checks(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", "works", "what happened", "s", title="Tried", title_justify="left")
    for check in report.checks:
        works = Text("yes", style="green") if check.ok else Text("no", style="red" if check.default else "yellow")
        works = Text("too slow", style="yellow") if check.slow else works
        happened = Text(check.detail + (f"\n→ {check.fix}" if check.fix else ""))
        name = check.name + (" (default)" if check.default else "")
        table.add_row(check.kind, Text(name), works, happened, f"{check.seconds:.1f}")
    return table


def _size(count: int | None) -> str:
    return "unknown" if count is None else size(count)
