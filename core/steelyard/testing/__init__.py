"""Suites that prove a plugin, and helpers for their tests."""

from steelyard.testing.packages import PluginPackageSuite

__all__ = ["PluginPackageSuite"]
