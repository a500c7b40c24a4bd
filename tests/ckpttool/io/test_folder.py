"""Files are moved by plain names in open directories, never over one another, never through links."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import FormatError
from ckpttool.io.folder import Folder, plain_name, same_file


@pytest.fixture
def home(tmp_path: Path) -> Folder:
    (tmp_path / "a").write_bytes(b"content of a")
    (tmp_path / "b").write_bytes(b"content of b")
    (tmp_path / "inner").mkdir()
    return Folder(tmp_path)


@pytest.mark.parametrize("name", ["a", ".a", "..a", "a b", "\x1b", "é", "a\\b", "-rf"])
def test_plain_names(name: str) -> None:
    assert plain_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/", "../a", "a/b", "a\0", "x" * 2000, 4])
def test_names_that_lead_elsewhere(home: Folder, name: Any) -> None:
    with pytest.raises(FormatError):
        plain_name(name)
    for method in ("status", "enter", "make", "remove", "remove_tree"):
        with pytest.raises(FormatError):
            getattr(home, method)(name)
    with pytest.raises(FormatError):
        home.rename("a", home, name)


def test_a_link_is_not_entered(home: Folder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("inner")
    with pytest.raises(NotADirectoryError):
        home.enter("link")
    with pytest.raises(NotADirectoryError):
        home.enter("a")
    with home.enter("inner") as inner:
        assert inner.names() == []


def test_a_move_keeps_the_file(home: Folder, tmp_path: Path) -> None:
    inode = (tmp_path / "a").stat().st_ino
    with home.enter("inner") as inner:
        home.move("a", inner, "c")
        assert inner.names() == ["c"]
        assert home.names() == ["b", "inner"]
        assert (tmp_path / "inner" / "c").stat().st_ino == inode
        inner.move("c", home, "a")
    assert (tmp_path / "a").stat().st_ino == inode


@pytest.mark.parametrize("links", [True, False])
def test_a_move_never_replaces(
    home: Folder, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:

        def link(*_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", link)
    (tmp_path / "broken").symlink_to("nowhere")
    for target in ("b", "inner", "broken"):
        with pytest.raises(FileExistsError):
            home.move("a", home, target)
    with pytest.raises(FileNotFoundError):
        home.move("missing", home, "c")
    assert (tmp_path / "b").read_bytes() == b"content of b"
    home.move("inner", home, "moved")
    home.move("broken", home, "still-broken")
    assert home.names() == ["a", "b", "moved", "still-broken"]


def test_a_move_that_was_killed_half_way_goes_on(home: Folder, tmp_path: Path) -> None:
    os.link(tmp_path / "a", tmp_path / "c")
    assert same_file(home.status("a"), home.status("c"))
    home.move("a", home, "c")
    assert home.names() == ["b", "c", "inner"]


def test_reading_takes_only_regular_files_of_a_sane_size(home: Folder, tmp_path: Path) -> None:
    assert home.read("a", 12) == b"content of a"
    assert home.read("missing", 12) is None
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("a")
    for name, code in (("a", errno.EFBIG), ("pipe", errno.EINVAL), ("link", errno.ELOOP)):
        with pytest.raises(OSError) as caught:
            home.read(name, 11)
        assert caught.value.errno == code


def test_writing_a_file_anew(home: Folder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("b")
    home.write_new("link", b"new", 0o604)
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "link").stat().st_mode) == 0o604
    assert (tmp_path / "b").read_bytes() == b"content of b"


def test_a_mode_is_that_of_a_regular_file(home: Folder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    before = (tmp_path / "a").stat().st_mode
    for name in ("link", "inner"):
        with pytest.raises(OSError):
            home.change_mode(name, 0o600)
    assert (tmp_path / "a").stat().st_mode == before
    home.change_mode("a", 0)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0


def test_removing_a_tree_follows_nothing(home: Folder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    deep = tmp_path / "inner" / "deep" / "deeper"
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"x")
    (deep / "link").symlink_to(outside)
    home.remove_tree("inner")
    home.remove_tree("a")
    home.remove_tree("missing")
    assert home.names() == ["b", "outside"]
    assert (outside / "precious").exists()


def test_a_tree_that_is_too_deep_is_an_error(home: Folder, tmp_path: Path) -> None:
    (tmp_path / "inner" / Path(*["d"] * 150)).mkdir(parents=True)
    with pytest.raises(OSError, match="nested too deep"):
        home.remove_tree("inner")
