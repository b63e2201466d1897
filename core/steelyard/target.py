"""What this machine is, as a kernel target, found without torch.

Source:
    CUDA driver API: ``cuDeviceGetAttribute`` 75 and 76 are the compute capability's major and minor number.
    ROCm: ``gfx_target_version`` of the kernel's KFD topology, such as 90402 for gfx942.
"""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path

from steelyard.errors import ConfigError

CPU = "cpu"
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def check_target(target: str) -> str:
    """Return a target; raise ConfigError if its form is none that a backend could serve.

    >>> check_target("sm_90")
    'sm_90'
    """
    if not re.fullmatch(r"cpu|sm_[0-9]{2,3}[a-z]?|gfx[0-9a-f]{3,}", target):
        raise ConfigError(f"target={target!r} is none; targets are cpu, sm_90, gfx942 and their like")
    return target


def has_torch() -> bool:
    """Return whether torch is installed, so that what is planned could be loaded here; it is not imported."""
    return find_spec("torch") is not None


def this_machine(device: str | None = None) -> str:
    """Return the target of this machine: ``"sm_90"``, ``"gfx942"`` or ``"cpu"``.

    Args:
        device: The device asked for; ``"cpu"`` is answered at once, and so is a machine without torch.
    """
    if device is not None and device.partition(":")[0] == CPU:
        return CPU
    if not has_torch():
        return CPU
    return _cuda() or _rocm(KFD_NODES) or CPU


def _cuda() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return f"sm_{major.value}{minor.value}"


def _rocm(nodes: Path) -> str | None:
    for properties in sorted(nodes.glob("*/properties")):
        try:
            lines = properties.read_text().splitlines()
        except OSError:
            continue  # a container may not look at a GPU that it was not given
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "gfx_target_version" and value.strip().isdecimal() and int(value):
                return gfx_name(int(value))
    return None


def gfx_name(version: int) -> str:
    """Return the name of a KFD target version.

    >>> gfx_name(90402), gfx_name(110000), gfx_name(90010)
    ('gfx942', 'gfx1100', 'gfx90a')
    """
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"
