"""Trace files on disk, plain and packed, and the data that come with Sterna."""

import gzip
from functools import partial
from importlib import resources
from pathlib import Path

import pytest

from sterna.errors import ConfigurationError
from sterna.workload.arrivals import DAILY_MODELS
from sterna.workload.files import daily_curve, packaged_rows, read_rows

CSV = "input_tokens,output_tokens\n374,44\n396,109\n"
JSONL = '{"input_tokens": 374, "output_tokens": 44}\n{"input_tokens": 396, "output_tokens": 109}\n'

# The same bytes each time, for names of tests have them.
packed = partial(gzip.compress, mtime=0)
PACKED = packed(CSV.encode())
DATA = resources.files("sterna.workload") / "data"


def refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as error:
        read_rows(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", CSV.encode()),
        ("T.CSV", CSV.encode()),
        ("t.csv", CSV.replace("\n", "\r\n").encode()),
        ("t.csv", CSV.encode("utf-8-sig")),
        ("t.csv", CSV.rstrip().encode()),
        ("t.csv.gz", PACKED),
        ("t.v2.csv.gz", PACKED),
        ("t.jsonl", JSONL.encode()),
        ("t.ndjson", JSONL.encode()),
        ("t.jsonl.gz", packed(JSONL.encode())),
    ],
)
def test_a_file_is_read_by_its_ending(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    rows = read_rows(tmp_path / name)
    assert rows.input_tokens.tolist() == [374, 396]
    assert rows.output_tokens.tolist() == [44, 109]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv.gz", CSV.encode(), "cannot be read: it is not gzip, or damaged"),
        # Cut off; a wrong checksum; a block of a kind that deflate does not have.
        ("t.csv.gz", PACKED[:-9], "cannot be read: it is not gzip, or damaged"),
        ("t.csv.gz", PACKED[:-8] + bytes(8), "cannot be read: it is not gzip, or damaged"),
        ("t.csv.gz", PACKED[:10] + b"\x07" * 20, "cannot be read: it is not gzip, or damaged"),
        ("t.csv", b"input_tokens,output_tokens\n\xff\xfe,1\n", "cannot be read: it is not UTF-8"),
        ("t.csv", b"", "is empty; its first line must name the columns"),
        ("t.csv.gz", packed(b""), "is empty; its first line must name the columns"),
        ("t.txt", CSV.encode(), "a trace file's name must end with .csv, .jsonl or .ndjson"),
        ("t.gz", PACKED, "a trace file's name must end with .csv, .jsonl"),
        ("t.csv.gz", packed(b"input_tokens,output_tokens\n1,x\n"), "line 2: output_tokens"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    text = refusal(tmp_path / name)
    assert text.startswith(str(tmp_path / name))
    assert message in text


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    missing, folder = tmp_path / "none.csv", tmp_path / "folder.csv"
    folder.mkdir()
    assert refusal(missing) == f"{missing} cannot be read: No such file or directory"
    assert refusal(folder) == f"{folder} cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("name", "num_requests", "mean_rate", "has_prefixes"),
    [
        ("azure_llm_2023/conv.csv.gz", 19_366, 5.53, False),
        ("mooncake_fast25/conversation.csv.gz", 12_031, 3.40, True),
        ("mooncake_fast25/arxiv_first1000.csv.gz", 1000, 5.64, True),
        ("sharegpt/sharegpt_gpt4_matched.csv.gz", 10_000, None, False),
        ("sharegpt/sharegpt_8k_filtered_llama2.csv.gz", 30_731, None, False),
        ("burstgpt/burstgpt_gpt4_conv_matched.csv.gz", 10_000, None, False),
    ],
)
def test_the_packaged_traces_are_what_their_readmes_say(
    name: str, num_requests: int, mean_rate: float | None, has_prefixes: bool
) -> None:
    rows = packaged_rows(name)
    assert len(rows) == num_requests
    assert rows.mean_rate == (None if mean_rate is None else pytest.approx(mean_rate, abs=0.01))
    assert (rows.prefix_blocks is not None) == has_prefixes


def test_mooncakes_prefixes_are_whole() -> None:
    """The README of its source: 182,790 distinct blocks of 512 tokens, ideal hits 37.4 %."""
    rows = packaged_rows("mooncake_fast25/conversation.csv.gz")
    blocks = rows.prefix_blocks
    assert blocks is not None
    assert len(set(blocks.ids.tolist())) == 182_790
    num_blocks = [len(blocks.of(row)) for row in range(len(rows))]
    assert num_blocks == (-(-rows.input_tokens // 512)).tolist()
    assert 1 - 182_790 / len(blocks.ids) == pytest.approx(0.374, abs=0.02)


@pytest.mark.parametrize(
    ("model", "num_days", "mean_rate"),
    [
        ("language/m-large", 14, 195.8),
        ("language/m-mid", 14, 1790.1),
        ("language/m-small", 14, 1174.4),
        ("multimodal/mm-image", 1, 9.47),
        ("reason/deepseek-r1", 1, 16.01),
    ],
)
def test_the_daily_curves_are_what_their_readme_says(
    model: str, num_days: int, mean_rate: float
) -> None:
    assert model in DAILY_MODELS
    curve = daily_curve(model)
    assert curve.duration_s.sum() == num_days * 86_400
    assert curve.mean_rate == pytest.approx(mean_rate, rel=0.001)


def test_every_daily_model_has_its_days() -> None:
    for model in DAILY_MODELS:
        assert len(daily_curve(model).rate) % 144 == 0


def test_the_packaged_data_stay_small_and_say_where_they_come_from() -> None:
    folders = [folder for folder in DATA.iterdir() if folder.is_dir()]
    files = [file for folder in folders for file in folder.iterdir()]
    assert sum(len(file.read_bytes()) for file in files) < 2_000_000
    for folder in folders:
        readme = (folder / "README.md").read_text("utf-8")
        for file in folder.iterdir():
            assert file.name == "README.md" or file.name in readme
        assert "icence" in readme
