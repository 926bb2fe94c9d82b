"""What ``compile`` does when something may have changed: plan, build, tell."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

import click

from tkbuild.build import BuildEvent, BuildFailure, BuildResult, build
from tkbuild.cli import emit_json
from tkbuild.cli.selection import selected
from tkbuild.errors import CompileError
from tkbuild.facts import BuildFacts
from tkbuild.plan import BuildPlan, make_plan, make_requests, shard
from tkbuild.render import RENDER_TIMEOUT_S, Renderer
from tkbuild.variants import Variant

__all__ = ["PlainReporter", "build", "planned", "reporter", "selected", "summarise"]

_BAR_WIDTH = 24
# Plain lines tell of lowered kernels no more often than this.
_QUIET_S = 10.0


def planned(variants: Iterable[Variant], facts: BuildFacts, timeout_s: float, part: tuple[int, int] | None) -> BuildPlan:
    """Render ``variants`` and return the plan for them, or for the part (index, count) of it."""
    plan = make_plan(make_requests(variants, Renderer(timeout_s=min(timeout_s, RENDER_TIMEOUT_S))), facts)
    return plan if part is None else shard(plan, *part)


def reporter(as_json: bool) -> Callable[[BuildEvent], None]:
    """JSON lines, a progress bar on a terminal, or plain lines for what was not in the store."""
    if as_json:
        return lambda event: emit_json(event.to_json())
    return _show_bar if sys.stderr.isatty() else PlainReporter()


class PlainReporter:
    """Writes a line when lowering begins, for each variant that is compiled or failed, and while only lowering goes on.

    now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._spoke_at: float | None = None
        self._lowered = 0

    def __call__(self, event: BuildEvent) -> None:
        """Write what the event is worth."""
        if event.kind == "started" and self._spoke_at is None:
            self._say(event, f"{event.total - event.finished} variants are not in the store; lowering begins")
        elif event.kind == "lowered":
            self._lowered += len(event.variants)
            if self._spoke_at is not None and self._now() - self._spoke_at >= _QUIET_S:
                self._say(event, f"lowered {self._lowered} variants")
        elif event.kind in ("compiled", "failed"):
            self._say(event, f"{event.kind} {' '.join(event.variants)} ({event.elapsed_s:.1f} s)")

    def _say(self, event: BuildEvent, text: str) -> None:
        self._spoke_at = self._now()
        click.echo(f"[{event.finished}/{event.total}] {text}", err=True)


def _show_bar(event: BuildEvent) -> None:
    if event.kind == "failed":
        click.echo(f"\r\033[Kfailed {' '.join(event.variants)}", err=True)
    filled = _BAR_WIDTH * event.finished // max(1, event.total)
    what = event.variants[0] if event.variants else ""
    end = "\n" if event.kind == "done" else ""
    click.echo(
        f"\r\033[K[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {event.finished}/{event.total} {event.kind} {what}"[:160] + end,
        err=True,
        nl=False,
    )


def summarise(result: BuildResult, as_json: bool) -> None:
    for failure in result.failures:
        _show_failure(failure, as_json)
    if not as_json:
        click.echo(
            f"{len(result.built)} variants ready, {result.hits} of them from the store; {result.lowered} lowered, "
            f"{result.compiled} compiled, {len(result.failures)} failed in {result.elapsed_s:.1f} s"
        )
    if result.failures:
        kinds = {type(failure.error) for failure in result.failures}
        kind = kinds.pop() if len(kinds) == 1 else CompileError
        raise kind(f"{len(result.failures)} variants were not built; see above", variants=[f.variant for f in result.failures])


def _show_failure(failure: BuildFailure, as_json: bool) -> None:
    if as_json:
        emit_json({"variant": failure.variant, "stage": failure.stage, "elapsed_s": failure.elapsed_s, "error": str(failure.error)})
    else:
        click.echo(f"{failure.variant}: {failure.stage} failed after {failure.elapsed_s:.1f} s: {failure.error}", err=True)
