"""Files that change between the plan and the load, or during it: an error that names them, never other weights."""

import os
import shutil
import threading

import numpy as np
import pytest

from steelyard.checkpoint import Checkpoint
from steelyard.errors import LoadError
from steelyard.placement import Slice
from steelyard.reader import WAYS, open_reader
from support.stored import read_of, write_checkpoint

both = pytest.mark.parametrize("way", WAYS)
STORED = np.arange(4096, dtype=np.float32)


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint.open(write_checkpoint(tmp_path / "c", {"first": STORED, "second": STORED + 1}))


def the_file(checkpoint):
    return checkpoint.files[0].path


def read(reader, checkpoint, name):
    return reader.read(read_of(checkpoint, name, (Slice(0, len(STORED)),)))


def refusal(checkpoint, way, name="first"):
    """Return what is said when the first tensor is read; nothing may stay open."""
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(LoadError) as caught, open_reader(checkpoint, way) as reader:
        read(reader, checkpoint, name)
    assert sorted(os.listdir("/proc/self/fd")) == before
    return str(caught.value)


def later(path):
    """Move a file's time on, as a write at a later moment does."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


# --- between plan and load ---------------------------------------------------------------------------------------


@both
def test_a_file_that_grew_is_refused(checkpoint, way):
    size = the_file(checkpoint).stat().st_size
    with the_file(checkpoint).open("ab") as out:
        out.write(b"more")
    assert refusal(checkpoint, way) == (
        f"model.safetensors: changed (size {size} -> {size + 4}) after it was planned, found at tensor first; plan again"
    )


@both
def test_a_file_that_was_cut_is_refused(checkpoint, way):
    size = the_file(checkpoint).stat().st_size
    os.truncate(the_file(checkpoint), size - 8)
    assert refusal(checkpoint, way, "second") == (
        f"model.safetensors: changed (size {size} -> {size - 8}) after it was planned, found at tensor second; plan again"
    )


@both
def test_a_file_that_was_written_to_is_refused(checkpoint, way):
    """The size alone would not tell."""
    with the_file(checkpoint).open("r+b") as out:
        out.seek(-4, os.SEEK_END)
        out.write(b"\0\0\0\0")
    later(the_file(checkpoint))
    assert refusal(checkpoint, way) == (
        "model.safetensors: was written to after it was planned, found at tensor first; plan again"
    )


@both
def test_another_file_under_the_same_name_is_refused(checkpoint, way, tmp_path):
    """Same size, same time, other weights: only the inode tells."""
    path = the_file(checkpoint)
    status = path.stat()
    write_checkpoint(tmp_path / "other", {"first": STORED + 7, "second": STORED})
    os.utime(tmp_path / "other" / path.name, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(tmp_path / "other" / path.name, path)
    assert path.stat().st_size == status.st_size
    assert refusal(checkpoint, way) == (
        "model.safetensors: was replaced by another file after it was planned, found at tensor first; plan again"
    )


@both
def test_a_link_that_was_turned_elsewhere_is_refused(tmp_path, way):
    """R145: links are followed, and the file behind them is the one that was planned."""
    for name, more in (("one", 0), ("two", 7)):
        write_checkpoint(tmp_path / name, {"first": STORED + more})
    folder = tmp_path / "c"
    folder.mkdir()
    shutil.copy(tmp_path / "one" / "config.json", folder)
    (folder / "model.safetensors").symlink_to("../one/model.safetensors")
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../two/model.safetensors")
    assert refusal(checkpoint, way) == (
        "model.safetensors: was replaced by another file after it was planned, found at tensor first; plan again"
    )
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../three")
    target = os.path.realpath(folder / "model.safetensors")
    assert refusal(checkpoint, way) == (
        "model.safetensors: cannot be opened any more to read tensor first: "
        f"link target missing: {target}; fetch the file again"
    )


@both
def test_a_file_that_is_gone_is_refused(checkpoint, way):
    the_file(checkpoint).unlink()
    assert refusal(checkpoint, way) == (
        "model.safetensors: cannot be opened any more to read tensor first: No such file or directory"
    )


@both
def test_a_pipe_in_place_of_the_file_does_not_hang(checkpoint, way, tmp_path):
    the_file(checkpoint).rename(tmp_path / "aside")  # its inode stays taken
    os.mkfifo(the_file(checkpoint))
    said = []
    thread = threading.Thread(target=lambda: said.append(refusal(checkpoint, way)), daemon=True)
    thread.start()
    thread.join(20)
    assert said == [
        "model.safetensors: was replaced by another file after it was planned, found at tensor first; plan again"
    ]


@both
def test_a_folder_in_place_of_the_file_is_refused(checkpoint, way, tmp_path):
    the_file(checkpoint).rename(tmp_path / "aside")
    the_file(checkpoint).mkdir()
    assert "was replaced by another file after it was planned" in refusal(checkpoint, way)


# --- during the load ---------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_while_it_is_read_names_the_tensor(checkpoint):
    """A plain read cannot be killed by a shorter file, and says where it ends."""
    entry = checkpoint.entries["second"]
    end = entry.start + 100

    def interfered():
        with open_reader(checkpoint, "pread") as reader:
            assert read(reader, checkpoint, "first").tolist() == STORED.tolist()
            os.truncate(the_file(checkpoint), end)
            read(reader, checkpoint, "second")

    with pytest.raises(LoadError) as caught:
        interfered()
    assert str(caught.value) == (
        f"model.safetensors: ends at byte {end}, inside tensor second; the file was cut after it was planned"
    )


@both
def test_a_file_that_is_written_to_while_it_is_read_is_an_error_at_the_end(checkpoint, way):
    """Bytes of two versions in one model are found even if every read succeeded."""

    def interfered():
        with open_reader(checkpoint, way) as reader:
            read(reader, checkpoint, "first")
            with the_file(checkpoint).open("r+b") as out:
                out.seek(-4, os.SEEK_END)
                out.write(b"\0\0\0\0")
            later(the_file(checkpoint))
            read(reader, checkpoint, "second")

    with pytest.raises(LoadError) as caught:
        interfered()
    assert str(caught.value) == "model.safetensors: was written to while it was read; plan again"


@both
@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "removed"])
def test_a_file_that_is_replaced_or_removed_while_it_is_read_was_read_whole(checkpoint, way, is_replaced, tmp_path):
    """The open file is still the one that was planned: the load is right, so it is no error."""
    with open_reader(checkpoint, way) as reader:
        assert read(reader, checkpoint, "first").tolist() == STORED.tolist()
        the_file(checkpoint).unlink()
        if is_replaced:
            write_checkpoint(tmp_path / "c", {"first": STORED + 7, "second": STORED + 8})
        assert read(reader, checkpoint, "second").tolist() == (STORED + 1).tolist()


@both
def test_the_error_of_the_load_is_not_hidden_by_a_changed_file(checkpoint, way):
    """X-14: what went wrong first is what is told."""

    def interfered():
        with open_reader(checkpoint, way) as reader:
            read(reader, checkpoint, "first")
            later(the_file(checkpoint))
            raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="^first$"):
        interfered()
