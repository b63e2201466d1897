from steelyard.testing import PluginPackageSuite


class TestPackage(PluginPackageSuite):
    """M-02: every key resolves through metadata, and nothing heavy is imported for it."""

    distribution = "steelyard-model-qwen3-moe"
