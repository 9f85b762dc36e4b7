"""Rules of the house that no single module can show: imports go down, names are plain."""

import ast
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dspark_jax", "pallas_kernels", "train")

# What each part may import, beside itself. Parts that are missing here may import nothing.
BELOW_DECODE = {
    "verify", "schedule", "drafter", "models", "calibration", "checkpoints", "text", "pretrained",
    "pallas_kernels",
}  # fmt: skip
ALLOWED = {
    "pallas_kernels": set(),
    "models": {"pallas_kernels"},
    "calibration": {"pallas_kernels"},
    "text": {"models"},
    "pretrained": set(),
    "drafter": {"models", "calibration", "pallas_kernels"},
    "checkpoints": {"drafter", "models", "text", "pretrained"},
    "verify": {"drafter", "models", "calibration", "pallas_kernels"},
    "schedule": {"drafter", "models", "calibration", "pallas_kernels"},
    "decode": BELOW_DECODE,
    "engine": BELOW_DECODE | {"decode"},
    "bench": BELOW_DECODE | {"decode", "engine"},
    "testing": BELOW_DECODE | {"decode"},
    "train": BELOW_DECODE | {"decode"},
    "cli": BELOW_DECODE | {"decode", "engine", "bench", "train"},
}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def part_of(module: str) -> str | None:
    """The part of the house a dotted module name belongs to; None outside and for the face."""
    words = module.split(".")
    if words[0] in ("pallas_kernels", "train"):
        return words[0]
    if words[0] == "dspark_jax" and len(words) > 1:
        return words[1]
    return None


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import, write the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_only_go_down():
    wrong = []
    for path in sources():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        part = part_of(module)
        if part not in ALLOWED:
            continue
        for name in imports(path):
            other = part_of(name)
            if other in ALLOWED and other != part and other not in ALLOWED[part]:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))


def test_a_family_of_deepseeks_decoders_takes_nothing_from_the_other():
    wrong = []
    for one, other in (("deepseek_v4", "deepseek_v32"), ("deepseek_v32", "deepseek_v4")):
        for path in sources():
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if one in module:
                wrong += [f"{module} imports {name}" for name in imports(path) if other in name]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_module_is_a_drawer_for_everything():
    drawers = {"utils", "util", "common", "helpers", "misc"}
    assert not [path for path in sources() if path.stem in drawers]


def test_every_source_file_says_in_one_sentence_what_it_is():
    files = sources() + sorted((ROOT / "tests").rglob("*.py"))
    silent = [path for path in files if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def test_every_test_file_has_a_name_that_is_collected():
    uncollected = []
    for path in (ROOT / "tests").rglob("*.py"):
        defines_tests = any(
            isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            for node in ast.walk(ast.parse(path.read_text()))
        )
        if defines_tests and not path.name.startswith("test_"):
            uncollected.append(path)
    assert not uncollected


def test_tracked_text_holds_no_path_of_one_machine():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    machine = re.compile(r"(?<![\w.~$}>])/(?:work|root|home)/")
    suffixes = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".json", ".svg", ""}
    found = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.suffix not in suffixes or not path.is_file() or path == Path(__file__):
            continue
        if machine.search(path.read_text(errors="replace")):
            found.append(name)
    assert not found


def test_the_wheel_holds_all_three_packages():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    for package in PACKAGES:
        assert f"{package}*" in include
        folders = {path.parent for path in (ROOT / package).rglob("*.py")}
        assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
