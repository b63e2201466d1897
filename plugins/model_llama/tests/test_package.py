import subprocess
import sys

from steelyard.testing import PluginPackageSuite
from support.planned import hollow_d


class TestPackage(PluginPackageSuite):
    """M-02, M-15: every key resolves through metadata, and nothing heavy is imported for it."""

    distribution = "steelyard-model-llama"


def test_a_plan_through_the_installed_plugin_imports_no_torch(tmp_path):
    """M-02, L-30: family, names of further publishers and drops, where torch is absent."""
    folder = hollow_d(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import steelyard\n"
        f"plan = steelyard.plan({str(folder)!r}, tp=2, target='cpu')\n"
        "assert not plan.errors, plan.errors\n"
        "print(plan.family_key, *sorted(offer for _, offer in plan.offers))\n"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "LlamaForCausalLM"
    assert "llama.meta" in done.stdout.split()
