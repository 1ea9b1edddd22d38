"""Tests that docs/settings.md lists all settings of the services and of `baton serve`."""

from pathlib import Path
from typing import Final

from baton.launch.serve_settings import SERVICES, ServeSettings
from baton.runtime.settings import settings_of
from tests.cli.settings_page import settings_page

PAGE: Final = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_list_of_settings_is_the_one_that_the_code_makes(rewrite: bool) -> None:
    text = settings_page()
    if rewrite:
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text, "run pytest tests/cli/test_settings_page.py --rewrite"


def test_every_setting_of_every_command_has_its_line() -> None:
    lines = [line for line in settings_page().splitlines() if "| `BATON_" in line]
    told = {line.split("| ")[2].strip(" `") for line in lines}
    assert told == {each.variable for cls in (*SERVICES, ServeSettings) for each in settings_of(cls)}
    assert all(line.count("|") == 6 for line in lines)


def test_nobodys_key_is_shown_as_a_default_or_a_flag() -> None:
    [line] = [line for line in settings_page().splitlines() if "`BATON_API_KEYS`" in line and "|  |" in line]
    assert "--api-keys" not in line
