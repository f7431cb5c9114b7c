"""A release is one tag: the commands of the workflows exist, the version is the same
everywhere, and one command fills in the owner.
"""

import os
import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from places import ROOT

import hf_rmsnorm

WORKFLOWS = {}
for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
    WORKFLOWS[path.stem] = yaml.safe_load(path.read_text(encoding="utf-8"))
STEPS = []
for document in WORKFLOWS.values():
    for job in document["jobs"].values():
        STEPS += job["steps"]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLACEHOLDER = "OWN" + "ER"  # so that this file does not hold it

TEXTS = (".md", ".py", ".toml", ".yml", ".ipynb", ".cff", ".txt", ".svg")
INSTALLED = ("pip", "mkdocs")  # on the machine of a workflow, or by its step before


def test_what_a_step_runs_exists():
    commands = [shlex.split(step["run"]) for step in STEPS if "run" in step]
    for words in commands:
        found = words[0] in INSTALLED or shutil.which(words[0])
        assert found or os.access(ROOT / words[0], os.X_OK), words
        if words[0] == "pip":
            assert (ROOT / words[words.index("--constraint") + 1]).is_file()
    for step in STEPS:
        # a tag of an action, or one of its branches that move with its releases
        assert "run" in step or re.fullmatch(
            r"[\w-]+/[\w-]+@(v\d+|release/v1)", step["uses"]
        )


def test_only_the_publication_may_act_for_the_project():
    jobs = WORKFLOWS["release"]["jobs"]
    assert "permissions" not in jobs["build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}


@pytest.mark.parametrize("tag, code", [(hf_rmsnorm.__version__, 0), ("9.9.9", 1)])
def test_a_tag_of_another_version_is_refused(tag, code):
    (check,) = [step["run"] for step in STEPS if step.get("name", "").startswith("The")]
    environment = {**os.environ, "GITHUB_REF_NAME": f"v{tag}"}
    done = subprocess.run(
        ["bash", "-c", check], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    )
    assert done.returncode == code


def places_of(word: str) -> set[str]:
    """The committed files that hold a word; what a command wrote does not count."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    places = set()
    for name in listed.stdout.decode().splitlines():
        file = ROOT / name
        if file.suffix in TEXTS and word in file.read_text(encoding="utf-8"):
            places.add(name)
    return places


def test_one_command_fills_in_the_owner_everywhere(tmp_path):
    (command,) = re.findall(r"^sed -i .*$", GUIDE, re.MULTILINE)
    named = set()
    for glob in shlex.split(command)[3:]:
        files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(glob)}
        assert files, glob
        named |= files
    holding = places_of(PLACEHOLDER) - {"CONTRIBUTING.md"}  # the command itself
    assert holding <= named
    for place in holding:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
    there = " ".join(sorted(holding))
    start = shlex.join(shlex.split(command)[:3])
    subprocess.run(["bash", "-c", f"{start} {there}"], cwd=tmp_path, check=True)
    for place in holding:
        text = (tmp_path / place).read_text(encoding="utf-8")
        assert PLACEHOLDER not in text, place
        assert "/NAME/hf-rmsnorm" in text, place
