"""Files are whole or not there."""

from __future__ import annotations

import os

import pytest

from halfback.files import write_bytes, write_text


def test_a_file_that_cannot_be_written_stays_what_it_was_and_is_named(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    write_text(path, "before")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    wanted = r"page.html cannot be written \(No space left on device\). What was there stays. Free some room, .* same command again."
    with pytest.raises(OSError, match=wanted):
        write_text(path, "after")
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_text(tmp_path / "link.json", "[]")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").read_text() == "[]"


def test_what_is_no_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(pipe, b"anything")
    assert os.read(reader, 100) == b"anything" and pipe.is_fifo()
    os.close(reader)
