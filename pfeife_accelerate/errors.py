"""The one error type people see: what happened, where, why, and what to try.

Models: a refusal with a stable id (`PF204`) that a test and a search engine can match.
Ignores: how errors reach the other ranks; that is the runtime's work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

__all__ = ["InternalError", "PfeifeError", "assert_never", "did_you_mean"]


class PfeifeError(ValueError):
    """A configuration, model or script that cannot be pipelined as asked.

    `where` is one line (a source line, a rank, a file) or a ready picture of several lines;
    `hints` are things to try, the likeliest first.
    """

    def __init__(
        self,
        *,
        id: str,
        what: str,
        where: str | None = None,
        why: str | None = None,
        hints: Iterable[str] = (),
    ) -> None:
        """Build the error; its text is what `str()` gives."""
        self.id = id
        self.what = what
        self.where = where
        self.why = why
        self.hints = tuple(hints)
        super().__init__(self._render())

    def _render(self) -> str:
        lines = [f"{self.id} {self.what}"]
        if self.where is not None:
            # A picture speaks for itself; a single line needs the label.
            picture = self.where.splitlines()
            lines += _block("where", picture) if len(picture) == 1 else [f"  {row}" for row in picture]
        if self.why is not None:
            lines += _block("why", self.why.splitlines())
        for position, hint in enumerate(self.hints):
            lines += _block("try" if position == 0 else "or", hint.splitlines())
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by field: the default would call the class with the text alone."""
        return _rebuild, (type(self), self.id, self.what, self.where, self.why, self.hints)


class InternalError(PfeifeError):
    """Something that can only be our own mistake."""


def _rebuild(
    cls: type[PfeifeError], id: str, what: str, where: str | None, why: str | None, hints: tuple[str, ...]
) -> PfeifeError:
    return cls(id=id, what=what, where=where, why=why, hints=hints)


def _block(label: str, lines: list[str]) -> list[str]:
    return [f"  {label if row == 0 else '':<7}{line}" for row, line in enumerate(lines)]


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is most likely a misspelling of, or None when none is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[near[0]] if near else None


def assert_never(value: NoReturn) -> NoReturn:
    """End an exhaustive `match`: the type checker proves that no member of the set arrives here."""
    raise InternalError(id="PF001", what=f"unhandled case {value!r}", why="a reader of a closed set forgot a member")
