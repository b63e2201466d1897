"""Load a published checkpoint into a runnable, sharded, quantized model, and let no wrong weight through in silence.

The public names below are imported when they are first used: ``import steelyard`` itself imports nothing, not
torch, not pydantic and no plugin.
"""

TYPE_CHECKING = False  # not typing's: importing it would be the first thing that `import steelyard` costs
if TYPE_CHECKING:
    from typing import Any

    from steelyard.checkpoint import Checkpoint
    from steelyard.config import LoadConfig
    from steelyard.errors import (
        AmbiguousPlugin,
        BadConfig,
        BadHeader,
        BrokenPlugin,
        CapabilityError,
        CheckpointError,
        ConfigError,
        CutError,
        DistributedLoadError,
        LoadError,
        MissingShard,
        NoWeights,
        PlanError,
        PluginError,
        SteelyardError,
        UnknownPlugin,
    )
    from steelyard.into import LoadedInto, load_into
    from steelyard.loader import LoadedModel, load
    from steelyard.loadplan import LoadPlan
    from steelyard.planning import plan
    from steelyard.ranks import Ranks
    from steelyard.report import LoadReport

    __version__: str

__all__ = [
    "AmbiguousPlugin",
    "BadConfig",
    "BadHeader",
    "BrokenPlugin",
    "CapabilityError",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "CutError",
    "DistributedLoadError",
    "LoadConfig",
    "LoadError",
    "LoadPlan",
    "LoadReport",
    "LoadedInto",
    "LoadedModel",
    "MissingShard",
    "NoWeights",
    "PlanError",
    "PluginError",
    "Ranks",
    "SteelyardError",
    "UnknownPlugin",
    "__version__",
    "load",
    "load_into",
    "plan",
]

_HOMES = {
    "load": "loader",
    "LoadedModel": "loader",
    "load_into": "into",
    "LoadedInto": "into",
    "plan": "planning",
    "LoadPlan": "loadplan",
    "LoadReport": "report",
    "LoadConfig": "config",
    "Checkpoint": "checkpoint",
    "Ranks": "ranks",
}
"""Public name to the module that defines it; every other public name is an error class of `steelyard.errors`."""


def __getattr__(name: str) -> "Any":
    """Import the module of a public name, once, and return the name's value."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "__version__":
        value = import_module("steelyard.discovery").core_version()
    else:
        value = getattr(import_module(f"steelyard.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names also before they are imported."""
    return sorted({*globals(), *__all__})
