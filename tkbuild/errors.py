"""The error tree: one base, one subclass per stage, each with the exit code of the command that meets it; and advice they share."""

from __future__ import annotations

from typing import Any


def pip_install(*wheels: str) -> str:
    """Return the command that puts ``wheels`` of tkbuild or kernels into the place of what is installed, for the end of a message.

    It leaves all other packages as they are: with their dependencies, pip would replace torch as well.
    """
    return f"pip install --no-deps --force-reinstall --find-links FOLDER {' '.join(wheels)} (FOLDER: where the wheels are)"


class TkbuildError(Exception):
    """A failure tkbuild foresaw: its text says what, where, what was expected and what to do next.

    The facts behind the text are attributes: ``NoVariantError("...", kernel="moe.gate").kernel``. A fact that was
    not given is an ``AttributeError``; ``facts`` holds all of them. Errors survive pickling, facts included.
    """

    exit_code: int = 1

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no fact {name!r}; it has: {', '.join(facts) or 'none'}")


class SpecError(TkbuildError):
    """A kernel spec or profile is wrong. ``problems`` lists everything found, each with its position."""

    exit_code = 2


class RenderError(TkbuildError):
    """A template did not render: an undefined or unused name, a value that is no literal, a syntax error."""

    exit_code = 3


class LowerError(TkbuildError):
    """TileLang refused a rendered source, or its result cannot be expressed as a launch plan."""

    exit_code = 4


class CompileError(TkbuildError):
    """The CUDA compiler failed, or its result breaks a limit of the spec (spills, stack)."""

    exit_code = 5


class IntegrityError(TkbuildError):
    """Stored or packaged bytes are not what their record or manifest says."""

    exit_code = 6


class NoVariantError(TkbuildError):
    """No built variant fits a call; the text lists every candidate with the reason it was rejected."""

    exit_code = 7


class LaunchError(TkbuildError):
    """The CUDA driver refused to load or launch a kernel."""

    exit_code = 8


class PackageError(TkbuildError):
    """A kernel wheel cannot be made, or an installed one does not belong to this runtime."""

    exit_code = 9


class VerifyError(TkbuildError):
    """A kernel's result differs from its reference by more than the tolerance."""

    exit_code = 10


class ToolchainError(TkbuildError):
    """A compiler or one of its parts is missing, broken or of the wrong version."""

    exit_code = 11


class ArgumentError(TkbuildError, ValueError):
    """An argument of a function or command is not acceptable."""

    exit_code = 12


class DriverNotFoundError(TkbuildError):
    """The CUDA driver library is not there, or is too old for the runtime."""

    exit_code = 13


class PatternError(TkbuildError):
    """A pattern selects nothing."""

    exit_code = 14


class StoreError(TkbuildError):
    """The artifact store cannot be read or written."""

    exit_code = 15


class StepTimeoutError(TkbuildError):
    """A build step ran longer than it may."""

    exit_code = 16


class WorkFolderError(TkbuildError):
    """The folder for temporary files cannot be made, or its disk is full."""

    exit_code = 17


class MissingPackageError(TkbuildError):
    """A Python package that a command needs cannot be imported."""

    exit_code = 20
