"""settings.ini is the single list of requirements; constraints.txt and environment.yml follow it."""
import shutil

from cdr_lib.core.config import project_root
from cdr_lib.reporting.pins import check_pins, read_constraints

FILES = ("settings.ini", "constraints.txt", "environment.yml")


def copy(tmp_path):
    for name in FILES:
        shutil.copy(project_root() / name, tmp_path / name)
    return tmp_path


def test_the_three_files_agree():
    assert check_pins() == []


def test_a_changed_pin_is_found(tmp_path):
    root = copy(tmp_path)
    version = read_constraints(root)["pandas"]
    text = (root / "environment.yml").read_text()
    (root / "environment.yml").write_text(text.replace(f"pandas=={version}", "pandas==0.1"))
    assert check_pins(root) == [f"pandas: environment.yml has 0.1, constraints.txt {version}"]


def test_a_pin_outside_the_requirement_is_found(tmp_path):
    root = copy(tmp_path)
    text = (root / "settings.ini").read_text()
    (root / "settings.ini").write_text(text.replace("pandas>=2.2", "pandas>=99"))
    assert any(line.startswith("pandas: constraints.txt pins") and "pandas>=99" in line for line in check_pins(root))


def test_a_requirement_without_a_pin_is_found(tmp_path):
    root = copy(tmp_path)
    text = (root / "settings.ini").read_text()
    (root / "settings.ini").write_text(text.replace("requirements =\n", "requirements = a-new-package\n", 1))
    assert "a-new-package: in settings.ini, not in constraints.txt" in check_pins(root)
