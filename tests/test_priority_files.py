"""Files of priority classes and of API keys: what is read, and what is refused."""

import json
import os
from hashlib import sha256
from pathlib import Path

import pytest

from sterna.errors import ConfigurationError
from sterna.priority_classes import DEFAULT_CLASSES, ApiKey, PriorityClasses
from sterna.priority_files import KeyFile, read_api_keys, read_classes

ROOT = Path(__file__).parents[1]

CLASSES = """
- {name: gold, rank: 2, target_load: 900}
- {name: quick, rank: 1, execution_rank: 0}
- {name: normal, rank: 0}
- {name: batch, rank: -1}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "file.yaml"
    path.write_text(text)
    return path


def test_classes_are_read_from_yaml_and_from_json(tmp_path: Path) -> None:
    classes = read_classes(written(tmp_path, CLASSES))
    assert [
        (each.name, each.scheduling_priority, each.execution_priority, each.target_load_tokens)
        for each in classes.classes
    ] == [
        ("gold", 2, 2, 900),
        ("quick", 1, 0, None),
        ("normal", 0, 0, None),
        ("batch", -1, -1, None),
    ]
    rows = [{"name": "normal", "rank": 0}, {"name": "high", "rank": 1, "target_load": None}]
    assert read_classes(written(tmp_path, json.dumps(rows))).highest.name == "high"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: normal, rank: 0}\n- {name: a, rank: 0}", "have the same rank, 0"),
        ("- {name: normal, rank: 0, load: 5}", "unknown field `load`"),
        ("- {name: normal, rank: low}", "Expected `int`, got `str`"),
        ("- {name: normal}", "missing required field `rank`"),
        ("normal: 0", "Expected `array`"),
        ("- {name: normal", "is neither YAML nor JSON (line 1)"),
        ("", "Expected `array`, got `null`"),
    ],
)
def test_a_file_of_classes_that_cannot_work_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as refused:
        read_classes(path)
    assert str(refused.value).startswith(f"--priority-classes {path}")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file or directory"):
        read_classes(tmp_path / "nothing.yaml")


def keys_of(folder: Path, text: str, classes: PriorityClasses = DEFAULT_CLASSES) -> list[ApiKey]:
    return read_api_keys(written(folder, text), classes)


def test_the_keys_of_the_page_need_no_classes_of_ones_own(tmp_path: Path) -> None:
    page = (ROOT / "docs/operations/priorities.md").read_text("utf-8")
    rows = page.partition("--api-keys keys.yaml`:\n\n")[2].partition("\n\n")[0]
    file = written(tmp_path, rows.replace("5e884898da28...", sha256(b"sk-nightly").hexdigest()))
    keys = read_api_keys(file, DEFAULT_CLASSES)
    assert [each.name for each in keys] == ["shop", "nightly", "operators"]


def test_keys_are_read_with_their_highest_classes(tmp_path: Path) -> None:
    digest = sha256(b"tern").digest()
    text = f"""
    - {{name: shop, key: sk-shop, highest_class: normal}}
    - {{name: ops, key_sha256: {digest.hex()}, admin: true}}
    """
    assert keys_of(tmp_path, text) == [
        ApiKey("shop", sha256(b"sk-shop").digest(), DEFAULT_CLASSES.normal),
        ApiKey("ops", digest, None, is_admin=True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "the file has no key, so no client could be admitted"),
        ("- {name: a}", "a: give either key or key_sha256"),
        ("- {name: a, key: ''}", "a: give either key or key_sha256"),
        ("- {name: a, key: s3cret, key_sha256: s3cret}", "a: give either key or key_sha256"),
        ("- {name: a, key_sha256: s3cret}", "a: key_sha256 must be 64 hexadecimal digits"),
        ("- {name: a, key_sha256: abcd}", "a: key_sha256 must be 64 hexadecimal digits"),
        ("- {name: a, key: s3cret, highest_class: gold}", "there is no priority class gold"),
        ("- {name: a, key: s3cret}\n- {name: b, key: s3cret}", "a and b have the same key"),
        ("- {name: a, key: s3cret}\n- {name: a, key: k}", "there are two keys named a"),
        ("- {name: a, key: s3cret, class: high}", "unknown field `class`"),
        ("- {name: a, key: s3cret", "is neither YAML nor JSON (line 1)"),
        ("- {name: a, key: 5}", "Expected `str | null`, got `int`"),
        ("- {name: a, key: !!bool s3cret}", "is neither YAML nor JSON"),
        ("[" * 5_000, "is neither YAML nor JSON"),
    ],
)
def test_a_file_of_keys_that_cannot_work_is_refused_and_no_key_is_shown(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        keys_of(tmp_path, text)
    assert message in str(refused.value)
    assert "s3cret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_key_may_be_any_text_that_yaml_can_spell(tmp_path: Path) -> None:
    assert keys_of(tmp_path, '- {name: a, key: "\\uD800"}')[0].name == "a"


def test_the_keys_of_the_file_come_after_those_that_hold_whatever_is_in_it(tmp_path: Path) -> None:
    own = ApiKey("--api-key", sha256(b"own").digest(), is_admin=True)
    path = written(tmp_path, "- {name: shop, key: sk-shop}")
    shop = ApiKey("shop", sha256(b"sk-shop").digest())
    assert KeyFile(path, DEFAULT_CLASSES, (own,)).read() == (own, shop)


def test_a_file_has_another_state_when_it_has_other_content_or_another_takes_its_place(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "a")
    file = KeyFile(path, DEFAULT_CLASSES)
    first = file.state()
    assert file.state() == first
    os.utime(path, ns=(0, 0))
    changed = file.state()
    # Kubernetes has a link lead to a new file, with the same time for all that one cares.
    other = tmp_path / "other.yaml"
    other.write_text("b")
    os.utime(other, ns=(0, 0))
    path.unlink()
    assert file.state() == ()
    path.symlink_to(other)
    assert len({first, changed, file.state(), ()}) == 4
