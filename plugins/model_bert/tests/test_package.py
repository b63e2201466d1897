from steelyard.testing import PluginPackageSuite


class TestPackage(PluginPackageSuite):
    """B-01: every key resolves through metadata, and nothing heavy is imported for it."""

    distribution = "steelyard-model-bert"
