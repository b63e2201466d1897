"""Paths that are not what they seem: links, pipes, devices, folders, files that change, hub ids."""

import os
import subprocess
import sys

import numpy as np
import pytest

from steelyard.checkpoint import Checkpoint
from steelyard.errors import BadConfig, BadHeader, CheckpointError, MissingShard, NoWeights
from steelyard.headers import read_header
from support.checkpoints import toy_b, toy_d, write_config, write_safetensors

COMMIT = "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"


def refused(path, kind=CheckpointError, **options):
    with pytest.raises(kind) as caught:
        Checkpoint.open(path, **options)
    return str(caught.value)


def in_time(path, seconds=20):
    """Open a checkpoint in a process of its own, so that a hang is a failure; return what it says."""
    code = (
        "import sys\nfrom steelyard.checkpoint import Checkpoint\nfrom steelyard.errors import CheckpointError\n"
        "try:\n    Checkpoint.open(sys.argv[1])\nexcept CheckpointError as error:\n    print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=seconds, env=environment
    )
    assert done.stderr == ""
    return done.stdout.strip()


def hub(cache, repository="models--org--name", ref="main"):
    """Make a cache with one checkpoint as the hub's client leaves it: links to blobs; return its snapshot."""
    root = cache / repository
    snapshot = root / "snapshots" / COMMIT
    toy_d(snapshot, shards=2)
    (root / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(root / "blobs" / f"hash{number}")
        path.symlink_to(f"../../blobs/hash{number}")
    (root / "refs" / ref).parent.mkdir(parents=True)
    (root / "refs" / ref).write_text(COMMIT)
    return snapshot


@pytest.fixture(autouse=True)
def _no_hub_environment(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_links_of_the_hub_cache_are_read(tmp_path):
    """R145: links to a neighbour folder."""
    checkpoint = Checkpoint.open(hub(tmp_path))
    assert len(checkpoint.entries) == 21
    assert [file.name for file in checkpoint.files] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def test_a_link_that_leads_nowhere_is_shown_with_its_target(tmp_path):
    """R145: both paths; before any header is read."""
    snapshot = hub(tmp_path)
    for path in snapshot.glob("*.safetensors"):
        path.resolve().unlink()
    links = ", ".join(f"{path} -> {os.path.realpath(path)}" for path in sorted(snapshot.glob("*.safetensors")))
    assert links.count("/blobs/") == 2
    assert refused(snapshot) == f"{snapshot}: link target missing: {links}; fetch the file again"


def test_a_config_that_is_a_link_to_nowhere_is_shown_with_its_target(tmp_path):
    folder = toy_b(tmp_path)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("gone")
    assert refused(folder, BadConfig) == (
        f"{folder / 'config.json'}: link target missing: {(folder / 'gone').resolve()}; fetch the file again"
    )


def test_a_circle_of_links_is_an_error(tmp_path):
    write_config(tmp_path, {})
    (tmp_path / "model.safetensors").symlink_to("b")
    (tmp_path / "b").symlink_to("model.safetensors")
    path = tmp_path / "model.safetensors"
    assert refused(tmp_path, BadHeader) == f"{path}: its links lead in a circle"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_pipe_does_not_hang(name, tmp_path):
    """R146: nobody writes to it."""
    folder = toy_b(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert in_time(folder) == f"{folder / name}: is a pipe, not a regular file"


def test_a_pipe_behind_a_link_does_not_hang(tmp_path):
    folder = toy_b(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "pipe")
    assert in_time(folder) == f"{folder / 'model.safetensors'}: is a pipe, not a regular file"


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null"])
def test_a_device_is_not_read(target, tmp_path):
    folder = toy_b(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target)
    assert in_time(folder) == f"{folder / 'model.safetensors'}: is a device, not a regular file"


def test_a_pipe_and_a_device_are_not_even_opened(tmp_path, monkeypatch):
    """Opening some devices acts on them."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *args: opened.append(path) or real(path, *args))
    for name in ("pipe", "device"):
        with pytest.raises(BadHeader):
            read_header(tmp_path / name)
    assert opened == []


def test_a_folder_named_like_a_file_is_an_error(tmp_path):
    folder = toy_b(tmp_path)
    (folder / "x.safetensors").mkdir()
    assert refused(folder, BadHeader) == f"{folder / 'x.safetensors'}: is a folder, not a regular file"


def test_a_giant_json_is_not_read(tmp_path):
    folder = toy_b(tmp_path)
    os.truncate(folder / "config.json", 1 << 40)
    assert refused(folder, BadConfig) == (
        f"{folder / 'config.json'}: has 1099511627776 bytes, past the limit of 67108864; it is damaged"
    )


def test_a_file_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    """Made by hand, since root may read everything."""
    folder = toy_b(tmp_path)
    real = os.open

    def denied(path, *args):
        if os.fspath(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path, *args)

    monkeypatch.setattr(os, "open", denied)
    assert refused(folder, BadHeader) == f"{folder / 'model.safetensors'}: Permission denied"


def test_a_folder_that_may_not_be_listed_is_an_error(tmp_path, monkeypatch):
    """Made by hand, since root may list everything: the error is the operating system's own."""
    folder = toy_b(tmp_path)

    def listdir(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert str(caught.value) == f"{folder}: cannot be listed: Permission denied"
    assert isinstance(caught.value.__cause__, PermissionError)


def test_a_file_replaced_between_look_and_open_is_looked_at_again(tmp_path, monkeypatch):
    """The look before the open decides nothing; the handle does."""
    path = write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(2, dtype=np.float32)})
    real, swaps = os.stat, []

    def swapped(target, *args, **options):
        status = real(target, *args, **options)
        if target == path and not swaps:
            swaps.append(path)
            path.unlink()
            os.mkfifo(path)
        return status

    monkeypatch.setattr(os, "stat", swapped)
    with pytest.raises(BadHeader) as caught:
        read_header(path)
    assert str(caught.value) == f"{path}: is a pipe, not a regular file"


@pytest.mark.parametrize("change", ["longer", "shorter", "touched"])
def test_a_file_that_changes_while_it_is_read_is_an_error(change, tmp_path, monkeypatch):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(4096, dtype=np.float32)})
    size = path.stat().st_size
    real = os.pread

    def pread(handle, length, offset):
        raw = real(handle, length, offset)
        if offset:
            if change == "touched":
                os.utime(path, ns=(1, 1))
            else:
                os.truncate(path, size + 1 if change == "longer" else size - 1)
        return raw

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(BadHeader) as caught:
        read_header(path)
    assert str(caught.value) == f"{path}: changed while its header was read; wait until it is complete"


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(2, dtype=np.float32)})
    real = os.pread

    def pread(handle, length, offset):
        os.truncate(path, 20 if offset else path.stat().st_size)
        return real(handle, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(BadHeader) as caught:
        read_header(path)
    assert str(caught.value) == f"{path}: was cut to 20 bytes while its header was read; fetch the file again"


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (lambda folder: None, None),
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), MissingShard),
        (lambda folder: (folder / "model-00002-of-00002.safetensors").write_bytes(b"damaged"), BadHeader),
        (lambda folder: os.truncate(folder / "model-00002-of-00002.safetensors", 5000), BadHeader),
        (lambda folder: (folder / "config.json").write_text("{"), BadConfig),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), CheckpointError),
    ],
    ids=["sound", "missing", "damaged", "cut", "config", "index"],
)
def test_no_handle_stays_open(break_it, kind, tmp_path):
    """L-24: on success and on each failure."""
    folder = toy_d(tmp_path, shards=2)
    break_it(folder)
    before = os.listdir("/proc/self/fd")
    if kind is None:
        Checkpoint.open(folder)
    else:
        refused(folder, kind)
    assert os.listdir("/proc/self/fd") == before


def test_no_handle_stays_open_after_an_interrupt(tmp_path, monkeypatch):
    """L-24: Ctrl-C at the third header."""
    folder = toy_d(tmp_path, shards=4)
    real, calls = os.pread, []

    def pread(handle, length, offset):
        calls.append(offset)
        if calls.count(8) == 3:
            raise KeyboardInterrupt
        return real(handle, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt):
        Checkpoint.open(folder)
    assert os.listdir("/proc/self/fd") == before


def test_paths_that_are_no_folders(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert refused(file) == f"{file}: is no folder; give the folder that holds the checkpoint's files"
    absent = tmp_path / "absent"
    assert refused(absent, NoWeights) == f"{absent}: no such folder ({absent})"
    below = file / "x"
    assert refused(below, NoWeights) == f"{below}: no such folder ({below})"
    absent.symlink_to("gone")
    assert refused(absent) == f"{absent}: link target missing: {(tmp_path / 'gone').resolve()}; fetch the file again"
    for path in ("", "a\0b"):
        assert refused(path) == (f"{path!r} is no path; give the folder of a checkpoint, or a hub id such as org/name")


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, "home/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/huggingface/hub"),
        ({"HF_HOME": "hf", "XDG_CACHE_HOME": "xdg"}, "hf/hub"),
        ({"HF_HUB_CACHE": "cache", "HF_HOME": "hf"}, "cache"),
        ({"HF_HUB_CACHE": "", "HF_HOME": ""}, "home/.cache/huggingface/hub"),
    ],
)
def test_a_hub_id_is_found_in_the_cache_that_the_environment_names(variables, place, tmp_path, monkeypatch):
    """Read when it is looked up, not on import."""
    snapshot = hub(tmp_path / place)
    for name, value in variables.items():
        monkeypatch.setenv(name, value and str(tmp_path / value))
    assert Checkpoint.open("org/name").folder == snapshot


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/3"])
def test_a_revision_is_a_ref_or_a_commit(revision, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = hub(tmp_path, ref=revision)
    assert Checkpoint.open("org/name", revision=revision).folder == snapshot
    assert Checkpoint.open("org/name", revision=COMMIT).folder == snapshot
    refused("org/name", NoWeights)
    assert refused(snapshot, revision=revision) == (
        f"{snapshot}: is a folder; revision {revision!r} can only be asked of a hub id"
    )


def test_a_hub_id_that_is_nowhere_says_both_places_and_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "models--org--na.me"
    assert refused("org/na.me", NoWeights) == (
        f"org/na.me: neither a folder ({tmp_path.resolve()}/org/na.me) nor, at revision main, in the Hugging Face cache "
        f"({repository}). Fetch it with: hf download org/na.me"
    )
    assert refused("org/na.me", NoWeights, revision="v1").endswith(
        f"nor, at revision v1, in the Hugging Face cache ({repository}). "
        "Fetch it with: hf download org/na.me --revision v1"
    )


def test_a_folder_of_that_name_comes_before_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    toy_b(tmp_path / "org" / "name")
    assert Checkpoint.open("org/name").config["model_type"] == "bert"


@pytest.mark.parametrize("revision", ["../../evil", "a/../b", "/etc", "", "a\nb"], ids=repr)
def test_a_revision_does_not_leave_the_cache(revision, tmp_path, monkeypatch):
    """X-22."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub(tmp_path)
    assert refused("org/name", revision=revision) == f"org/name: revision {revision!r} is no branch, tag or commit"


@pytest.mark.parametrize("content", ["../../evil", "..", "", "a/b", "x" * 300])
def test_a_ref_does_not_leave_the_snapshots(content, tmp_path, monkeypatch):
    """X-22: a ref file is read like any other file that came from elsewhere."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub(tmp_path)
    toy_b(tmp_path / "evil")
    (tmp_path / "models--org--name" / "refs" / "main").write_text(content)
    assert refused("org/name", NoWeights).startswith("org/name: neither a folder ")


@pytest.mark.parametrize("path", ["../name", "./org/name", "org/name/more", "~/name", "org/", "org/..", "org"])
def test_what_is_no_hub_id_is_not_looked_for_in_the_cache(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(path, NoWeights) == f"{path}: no such folder ({os.path.abspath(path)})"
