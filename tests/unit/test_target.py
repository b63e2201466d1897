"""What this machine is as a target, found without torch."""

import ctypes

import pytest

import steelyard.target
from steelyard.errors import ConfigError
from steelyard.planning import plan
from steelyard.target import CPU, check_target, gfx_name, this_machine
from support.families import ToyDense
from support.planned import hollow_d, registry_of

MI300 = "cpu_cores_count 0\nsimd_count 1216\ngfx_target_version 90402\nlocation_id 1280\n"
HOST = "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n"


class Driver:
    """A libcuda that answers from numbers; ``error`` is what cuInit returns."""

    def __init__(self, count=1, capability=(9, 0), error=0):
        self.count, self.capability, self.error = count, capability, error

    def cuInit(self, flags):  # noqa: N802 - the driver's names
        return self.error

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        value._obj.value = self.capability[{75: 0, 76: 1}[attribute]]
        return 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that makes this a machine with torch, a driver and a KFD topology, each or none."""

    def become(*, torch=True, driver=None, nodes=()):
        def no_library(name):
            raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr(steelyard.target, "find_spec", lambda name: object() if torch else None)
        monkeypatch.setattr(ctypes, "CDLL", no_library if driver is None else lambda name: driver)
        for index, text in enumerate(nodes):
            (tmp_path / str(index)).mkdir()
            (tmp_path / str(index) / "properties").write_text(text)
        monkeypatch.setattr(steelyard.target, "KFD_NODES", tmp_path)

    return become


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90402, "gfx942"),
        (90500, "gfx950"),
        (90010, "gfx90a"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
        (90012, "gfx90c"),
    ],
)
def test_a_kfd_version_is_a_gfx_name(version, name):
    assert gfx_name(version) == name


def test_a_machine_without_torch_is_a_cpu(machine):
    machine(torch=False, driver=Driver(), nodes=[MI300])
    assert this_machine() == CPU


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_the_cpu_is_taken_where_it_is_asked_for(machine, device):
    machine(driver=Driver())
    assert this_machine(device) == CPU


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "sm_90"), ((10, 0), "sm_100"), ((8, 9), "sm_89")])
def test_a_compute_capability_is_an_sm_name(machine, capability, name):
    machine(driver=Driver(capability=capability), nodes=[MI300])
    assert this_machine("cuda:1") == name


@pytest.mark.parametrize(
    "driver", [Driver(count=0), Driver(error=100), None], ids=["no-device", "no-init", "no-library"]
)
def test_a_driver_without_a_device_leaves_the_question_to_rocm(machine, driver):
    machine(driver=driver, nodes=[HOST, HOST, MI300, MI300])
    assert this_machine() == "gfx942"
    assert this_machine("cuda") == "gfx942"


@pytest.mark.parametrize(
    "nodes",
    [
        (),
        (HOST,),
        ("gfx_target_version\n",),
        ("gfx_target_version many\n",),
        ("",),
    ],
    ids=["none", "host", "no-value", "no-number", "empty"],
)
def test_a_topology_without_a_gpu_is_a_cpu(machine, nodes):
    machine(nodes=nodes)
    assert this_machine() == CPU


def test_a_gpu_that_a_container_may_not_look_at_is_passed_over(machine, tmp_path):
    """KFD answers EPERM for the properties of devices that a container was not given."""
    machine(nodes=[MI300])
    (tmp_path / "0" / "properties").unlink()
    (tmp_path / "0" / "properties").mkdir()  # read_text fails with an OSError
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "properties").write_text(MI300)
    assert this_machine() == "gfx942"


def test_a_plan_without_a_target_is_for_this_machine(machine, tmp_path):
    """D-13: and a device of the CPU is one."""
    machine(driver=Driver())
    hollow_d(tmp_path / "model")
    assert plan(tmp_path / "model", registry=registry_of(ToyDense)).target == "sm_90"
    machine(torch=False)
    assert plan(tmp_path / "model", registry=registry_of(ToyDense)).target == CPU


@pytest.mark.parametrize("target", ["cpu", "sm_90", "sm_100a", "gfx942", "gfx90a"])
def test_a_target_that_a_backend_could_serve_passes(target):
    assert check_target(target) == target


@pytest.mark.parametrize("target", ["zzz", "sm90", "cuda", "gfx", "sm_90 ", ""])
def test_a_target_of_no_known_form_is_refused(target):
    """M-18."""
    with pytest.raises(ConfigError) as caught:
        check_target(target)
    assert str(caught.value) == f"target={target!r} is none; targets are cpu, sm_90, gfx942 and their like"
