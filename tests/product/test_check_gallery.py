"""The gallery of docs/check_scripts.md and the picture of the README show what the command prints."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
QUICK = ("divided_twice", "forward_past_wrapper")


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gallery

    return gallery


def test_the_gallery_shows_scripts_that_are_there(gallery: ModuleType) -> None:
    shown = gallery.written(gallery.PAGE.read_text())
    assert set(shown) <= set(gallery.names())
    assert len(shown) >= 10
    assert all(f"**{gallery.title(name)}**" in text for name, text in shown.items())


def test_the_page_lists_what_can_be_accepted(gallery: ModuleType) -> None:
    assert gallery.accepted() in gallery.PAGE.read_text(), "run benchmarks/gallery.py"


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize("name", QUICK)
def test_the_gallery_shows_what_is_printed(gallery: ModuleType, name: str) -> None:
    assert gallery.written(gallery.PAGE.read_text())[name] == gallery.entry(name)


@pytest.mark.processes
@pytest.mark.thorough
def test_the_picture_in_the_readme_shows_what_is_printed(gallery: ModuleType) -> None:
    status, text = gallery.printed(gallery.EXAMPLE)
    assert status == 1
    assert gallery.PICTURE.read_text() == gallery.picture(text)
    assert str(gallery.PICTURE.relative_to(ROOT)) in (ROOT / "README.md").read_text()
    assert sys.modules["terminal_picture"].words(gallery.PICTURE.read_text())[0] == f"$ {gallery.COMMAND}"
