"""The page of settings is made from `Config`, and says what `Config` says."""

from config_table import PAGE, render

from farandole.config import Config


def test_the_page_is_up_to_date() -> None:
    assert render() == PAGE.read_text(encoding="utf-8"), "run python tools/config_table.py"


def test_every_setting_has_a_row_with_its_variables() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    for setting in Config.settings():
        (row,) = [each for each in rows if each.startswith(f"| `{setting.name}` |")]
        assert all(f"`{variable}`" in row for variable in setting.variables)
