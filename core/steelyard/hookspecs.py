"""The hooks through which a plugin introduces its classes: one a kind of `steelyard.kinds`.

A hook is called once for one plugin, returns classes and takes no arguments; the objects do the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steelyard.protocols import (
        KernelBackend,
        LoadFormat,
        ModelFamily,
        QuantDialect,
        QuantMethod,
        TuningProvider,
        WeightMapping,
    )

PROJECT: Final = "steelyard"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def steelyard_models() -> Iterable[type[ModelFamily]]:  # type: ignore[empty-body]  # pluggy takes the signature alone
    """Offer model families.

    Called:
        Once for one plugin, when a key that it declares under ``steelyard.models`` is first resolved. Not at
        start-up, and not for each tensor.

    Returns:
        Classes. Each key that the distribution declares must be in ``keys`` of exactly one of them.

    Raises:
        Anything; the user gets `BrokenPlugin` with the distribution's name, version and the cause.

    Imports:
        torch belongs into the methods that build modules. The module that holds this hook must import
        where torch is absent.

    Proved by:
        steelyard.testing.PluginPackageSuite
    """


@hookspec
def steelyard_weight_mappings() -> Iterable[type[WeightMapping]]:  # type: ignore[empty-body]  # pluggy takes the signature alone
    """Offer weight mappings for publishers that name tensors in their own way.

    Called:
        Once for one plugin, when a key that it declares under ``steelyard.weight_mappings`` is first resolved. Not at
        start-up, and not for each tensor.

    Returns:
        Classes. Each key that the distribution declares must be in ``keys`` of exactly one of them.

    Raises:
        Anything; the user gets `BrokenPlugin` with the distribution's name, version and the cause.

    Imports:
        Nothing beyond the standard library and ``steelyard.plugin``; names are mapped without torch.

    Proved by:
        steelyard.testing.PluginPackageSuite
    """


@hookspec
def steelyard_quant_methods() -> Iterable[type[QuantMethod]]:  # type: ignore[empty-body]  # pluggy takes the signature alone
    """Offer quantization methods.

    Called:
        Once for one plugin, when a key that it declares under ``steelyard.quant_methods`` is first resolved. Not at
        start-up, and not for each tensor.

    Returns:
        Classes. Each key that the distribution declares must be in ``keys`` of exactly one of them.

    Raises:
        Anything; the user gets `BrokenPlugin` with the distribution's name, version and the cause.

    Imports:
        torch belongs into the methods that touch tensors. The module that holds this hook must import
        where torch is absent.

    Proved by:
        steelyard.testing.PluginPackageSuite
    """


@hookspec
def steelyard_kernel_backends() -> Iterable[type[KernelBackend]]:  # type: ignore[empty-body]  # pluggy takes the signature alone
    """Offer kernel backends.

    Called:
        Once for one plugin, when a key that it declares under ``steelyard.kernel_backends`` is first resolved. Not at
        start-up, and not for each tensor.

    Returns:
        Classes. Each key that the distribution declares must be in ``keys`` of exactly one of them.

    Raises:
        Anything; the user gets `BrokenPlugin` with the distribution's name, version and the cause.

    Imports:
        torch, compilers and kernel libraries belong into the methods that build kernels. The module that
        holds this hook must import where none of them is installed.

    Proved by:
        steelyard.testing.PluginPackageSuite
    """


@hookspec
def steelyard_tuning_providers() -> Iterable[type[TuningProvider]]:  # type: ignore[empty-body]  # pluggy takes the signature alone
    """Offer providers of tuned kernel tables.

    Called:
        Once for one plugin, when a key that it declares under ``steelyard.tuning_providers`` is first resolved. Not at
        start-up, and not for each tensor.

    Returns:
        Classes. Each key that the distribution declares must be in ``keys`` of exactly one of them.

    Raises:
        Anything; the user gets `BrokenPlugin` with the distribution's name, version and the cause.

    Imports:
        Kernel libraries belong into the methods that apply a table. The module that holds this hook must
        import where none of them is installed.

    Proved by:
        steelyard.testing.PluginPackageSuite
    """


@hookspec
def steelyard_quant_dialects() -> Iterable[type[QuantDialect]]:  # type: ignore[empty-body]  # pluggy takes the signature alone
    """Offer readers of quantization configs.

    Called:
        Once for one plugin, when a key that it declares under ``steelyard.quant_dialects`` is first resolved. Not at
        start-up, and not for each tensor.

    Returns:
        Classes. Each key that the distribution declares must be in ``keys`` of exactly one of them.

    Raises:
        Anything; the user gets `BrokenPlugin` with the distribution's name, version and the cause.

    Imports:
        Nothing beyond the standard library and ``steelyard.plugin``; configs are read without torch.

    Proved by:
        steelyard.testing.PluginPackageSuite
    """


@hookspec
def steelyard_load_formats() -> Iterable[type[LoadFormat]]:  # type: ignore[empty-body]  # pluggy takes the signature alone
    """Offer load formats.

    Called:
        Once for one plugin, when a key that it declares under ``steelyard.load_formats`` is first resolved. Not at
        start-up, and not for each tensor.

    Returns:
        Classes. Each key that the distribution declares must be in ``keys`` of exactly one of them.

    Raises:
        Anything; the user gets `BrokenPlugin` with the distribution's name, version and the cause.

    Imports:
        torch and reader libraries belong into ``open``. The module that holds this hook must import where
        they are absent.

    Proved by:
        steelyard.testing.PluginPackageSuite
    """
