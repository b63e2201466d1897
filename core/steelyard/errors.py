"""The exception tree, and the wording of every message.

Attributes first, text second. A text answers, in this order: what was asked, what was found, where it
came from, what to do. Low code raises the short cause, the public function adds context once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from steelyard.findings import Finding, summarize


class SteelyardError(Exception):
    """The base of every error that steelyard raises on purpose."""


# --- plugins ----------------------------------------------------------------------------------------


class PluginError(SteelyardError):
    """Something about an installed, or missing, plugin."""


class UnknownPlugin(PluginError, KeyError, ValueError):
    """Nothing installed offers the requested key.

    It is a `KeyError`, so that ``registry.get`` and ``in`` keep the mapping contract, and a `ValueError`.
    """

    def __init__(
        self,
        noun: str,
        key: str,
        installed: Sequence[str],
        hint: str | None = None,
        *,
        broken: Sequence[str] = (),
        blocked: Sequence[str] = (),
    ) -> None:
        self.noun, self.key, self.installed = noun, key, tuple(installed)
        self.hint, self.broken, self.blocked = hint, tuple(broken), tuple(blocked)
        known = ", ".join(sorted(installed)) or "none"
        if blocked:
            advice = f"{' and '.join(blocked)} would offer it, but is blocked by STEELYARD_BLOCK; unblock it."
        elif hint:
            advice = f"Install it with: pip install {hint}"
        else:
            advice = "No known package offers it."
        failed = f"\nInstalled, but failed to import: {'; '.join(broken)}." if broken else ""
        self.message = f"no {noun} named {key!r}; installed: {known}. {advice}{failed}"
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


class AmbiguousPlugin(PluginError, ValueError):
    """Two distributions offer the same key and the user prefers neither."""

    def __init__(self, noun: str, key: str, distributions: Sequence[str]) -> None:
        self.noun, self.key, self.distributions = noun, key, tuple(distributions)
        offered = " and ".join(distributions)
        super().__init__(
            f"{noun} {key!r} is offered by {offered}. Uninstall one, block one with STEELYARD_BLOCK, "
            f"or name the one you want: prefer={{{noun!r}: {{{key!r}: {distributions[0]!r}}}}}"
        )


class BrokenPlugin(PluginError, ImportError):
    """An installed plugin could not be used; the cause is chained."""

    def __init__(self, distribution: str, version: str, module: str, why: str) -> None:
        self.distribution, self.version, self.module, self.why = distribution, version, module, why
        super().__init__(f"plugin {distribution} {version} is installed, but {module} failed: {why}")


# --- configuration ----------------------------------------------------------------------------------


class ConfigError(SteelyardError, ValueError):
    """A value that the user or the model's config gave cannot be met."""


class HeadsError(ConfigError):
    """Attention heads do not go out over the ranks."""


# --- checkpoints ------------------------------------------------------------------------------------


class CheckpointError(SteelyardError, ValueError):
    """The checkpoint folder is not one that can be read."""


class MissingShard(CheckpointError, FileNotFoundError):
    """Files that the checkpoint must have are absent."""

    def __init__(self, folder: str, missing: Sequence[str], source: str) -> None:
        self.folder, self.missing, self.source = folder, tuple(missing), source
        super().__init__(f"{folder}: {source} names files that are absent: {', '.join(missing)}")

    def __str__(self) -> str:
        return str(self.args[0])


class NoWeights(CheckpointError, FileNotFoundError):
    """There is no checkpoint at a path, or no weights in a folder.

    Attributes:
        path: What was given.
        tried: The places or names that were looked for.
    """

    def __init__(self, path: str, why: str, tried: Sequence[str]) -> None:
        self.path, self.tried = path, tuple(tried)
        super().__init__(f"{path}: {why}")

    def __str__(self) -> str:
        return str(self.args[0])


class BadHeader(CheckpointError):
    """A file's header contradicts itself or the file."""

    def __init__(self, file: str, why: str) -> None:
        self.file, self.why = file, why
        super().__init__(f"{file}: {why}")


class BadConfig(CheckpointError, ConfigError):
    """A JSON file of the checkpoint is absent, unreadable or says something impossible."""

    def __init__(self, file: str, why: str) -> None:
        self.file, self.why = file, why
        super().__init__(f"{file}: {why}")


# --- plans ------------------------------------------------------------------------------------------


class CutError(SteelyardError, ValueError):
    """A rank's piece does not fall on the edges of what is stored.

    Attributes:
        axis: The logical axis, such as ``"out"``.
        range: The logical range asked for, ``(start, stop)``.
        step: Logical elements between two edges; 0 if no edge helps.
        fits: Sizes of the parallel group that do fit, if they are known.
    """

    def __init__(self, axis: str, range: tuple[int, int], step: int, why: str, *, fits: Sequence[int] = ()) -> None:
        self.axis, self.range, self.step, self.why, self.fits = axis, range, step, why, tuple(fits)
        sizes = f"; sizes that fit: {', '.join(map(str, fits))}" if fits else ""
        super().__init__(f"cannot cut {axis}[{range[0]}:{range[1]}]: {why}{sizes}")


class PlanError(SteelyardError, ValueError):
    """A checkpoint cannot be loaded as asked; carries every finding, raised once."""

    def __init__(self, checkpoint: str, findings: Iterable[Finding], *, asked: str = "") -> None:
        self.checkpoint, self.findings, self.asked = checkpoint, tuple(findings), asked
        count = len(self.findings)
        noun = "problem" if count == 1 else "problems"
        lines = "".join(f"\n  - {line}" for line in summarize(self.findings))
        under = f" ({asked})" if asked else ""
        super().__init__(f"{checkpoint} cannot be loaded as asked{under}, {count} {noun}:{lines}")


class CapabilityError(SteelyardError, RuntimeError):
    """Nothing here can do what was asked; every candidate's reason is kept."""

    def __init__(self, asked: str, reasons: Mapping[str, str]) -> None:
        self.asked, self.reasons = asked, dict(reasons)
        listed = "; ".join(f"{name}: {why}" for name, why in reasons.items()) or "no candidate is installed"
        super().__init__(f"{asked}: {listed}")


# --- loads ------------------------------------------------------------------------------------------


class LoadError(SteelyardError, RuntimeError):
    """Bytes could not be read, or what was read contradicts the plan."""


class DistributedLoadError(SteelyardError, RuntimeError):
    """A rank failed, died or disagreed; raised alike on every surviving rank.

    Attributes:
        rank: The rank that the error names; -1 if several disagree.
    """

    def __init__(self, rank: int, why: str) -> None:
        self.rank, self.why = rank, why
        super().__init__(f"rank {rank}: {why}" if rank >= 0 else why)
