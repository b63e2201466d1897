"""Hook implementations of what comes with the core."""

from __future__ import annotations

from steelyard.plugin import KernelBackend, LoadFormat, QuantMethod, hookimpl


@hookimpl
def steelyard_quant_methods() -> list[type[QuantMethod]]:
    """Offer the method for plain floats."""
    from steelyard.builtin.unquantized import Unquantized

    return [Unquantized]


@hookimpl
def steelyard_kernel_backends() -> list[type[KernelBackend]]:
    """Offer the torch reference."""
    from steelyard.builtin.reference import TorchReference

    return [TorchReference]


@hookimpl
def steelyard_load_formats() -> list[type[LoadFormat]]:
    """Offer safetensors."""
    from steelyard.builtin.formats import Safetensors

    return [Safetensors]
