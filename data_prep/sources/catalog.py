"""The datasets by name, as data: repository, license, and the role of each column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from data_prep.ingest.archive import TAR_ENDINGS
from data_prep.ingest.hub import Progress, Repository
from data_prep.sources import mathv60k
from data_prep.sources.forms import Form
from data_prep.sources.own import RecordSource, by_form, no_subsource, split_of, subsource
from data_prep.sources.records import ENDINGS, first_object, read
from data_prep.sources.text_files import TextForm
from trainer.config import ConfigError

QA = {"question": "question", "answer": "answer"}
MMMU_IMAGES = ",".join(f"image_{i}" for i in range(1, 8))


@dataclass(frozen=True)
class Entry:
    """One dataset of the hub."""

    repo: str
    about: str
    files: dict[str, list[str]]
    """Split -> shell patterns of its data files. The rows of split "" are split here."""
    columns: dict[str, str]
    """Role -> column."""
    images: list[str] = field(default_factory=list)
    """Archives with the images, if the rows do not hold them."""
    rows: int = 0
    """Published number of rows over all splits; 0: not stated. The summary names a difference."""
    license: str = ""
    """License that its repository states; empty: it was not read, so look before you use it."""
    revision: str = ""
    """Commit that is taken; empty: `main`, and the manifest says which commit that was."""
    marked: bool = False
    """Whether answers come after `####` or in a box; a row without one is left out."""
    evaluation: bool = False
    """Whether all rows are kept as published, with their own fields."""
    sft: bool = False
    """Whether it is for supervised training, which learns replies as they are."""
    only: tuple[str, tuple[str, ...]] = ("", ())
    """A column, and the values of it for which a row is taken."""
    checked: str = ""
    """What of this entry was tried, and how."""


LOOPBACK = "columns as published, from a loopback hub (tests)"
TRIED = (
    "columns as its documentation or others' code states them, from a loopback hub (tests); "
    "never downloaded here"
)
VERL = {"chat": "prompt", "answer": "reward_model.ground_truth"}
GRADED = ("string_match", "multiple_choice", "numeric", "counting", "search")
"""Rewards of Vero that compare an answer with a reference; the others want boxes on images, actions or
a judge."""
CATALOG = {
    "mathv60k": Entry(
        "VLM-Reasoner/VerMulti",
        "visual math from 24 sets, 2.4 GB",
        {"": ["mathv60k_message.jsonl"]},
        mathv60k.FORM.columns,
        ["mathv60k_img.tar.gz"],
        checked=LOOPBACK,
    ),
    "mathv-geo": Entry(
        "VLM-Reasoner/VerMulti",
        "its geometry part alone, 56 MB",
        {"": ["mathv_geo_message.jsonl"]},
        mathv60k.FORM.columns,
        ["mathv_geo_img.tar.gz"],
        checked=LOOPBACK,
    ),
    "geometry3k": Entry(
        "hiyouga/geometry3k",
        "geometry with diagrams, free-form answers",
        {
            "train": ["data/train-*.parquet"],
            "validation": ["data/validation-*.parquet"],
            "test": ["data/test-*.parquet"],
        },
        {"question": "problem", "answer": "answer", "images": "images"},
        rows=3002,
        checked=LOOPBACK,
    ),
    "geometry3k-test": Entry(
        "hiyouga/geometry3k",
        "its test split alone, for evaluation",
        {"test": ["data/test-*.parquet"]},
        {"question": "problem", "answer": "answer", "images": "images"},
        rows=601,
        evaluation=True,
        checked=TRIED,
    ),
    "virl39k": Entry(
        "TIGER-Lab/ViRL39K",
        "visual reasoning with pass rates",
        {"": ["39Krelease.parquet"]},
        QA | {"images": "image", "source": "category"},
        ["images.zip"],
        rows=38870,
        license="MIT",
        checked=TRIED,
    ),
    "mmk12": Entry(
        "FanqingM/MMK12",
        "school mathematics, physics, chemistry, biology",
        {"train": ["data/train-*.parquet"], "test": ["data/test-*.parquet"]},
        QA | {"images": "image", "source": "subject"},
        license="Apache-2.0",
        checked=TRIED,
    ),
    "clevr": Entry(
        "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        "counts and comparisons in rendered scenes",
        {"": ["data/train-*.parquet"]},
        {"question": "problem", "answer": "solution", "images": "image"},
        checked=TRIED,
    ),
    "deepscaler": Entry(
        "agentica-org/DeepScaleR-Preview-Dataset",
        "competition problems, text only",
        {"": ["deepscaler.json"]},
        {"question": "problem", "answer": "answer", "solution": "solution"},
        license="MIT",
        checked=TRIED,
    ),
    "openmmreasoner": Entry(
        "OpenMMReasoner/OpenMMReasoner-RL-74K",
        "visual reasoning from eight sets, ViRL39K and MMK12 among them",
        {"": ["*.parquet"]},
        VERL | {"images": "images", "source": "data_source"},
        checked=TRIED,
    ),
    "vero": Entry(
        "zlab-princeton/Vero-600k",
        "59 sets in six kinds of task; rows that our grader can judge are taken",
        {"train": ["*train-*.parquet"], "validation": ["*val-*.parquet"]},
        VERL | {"images": "image", "source": "data_source"},
        only=("extra_info.reward_type", GRADED),
        checked=TRIED,
    ),
    "alpaca": Entry(
        "tatsu-lab/alpaca",
        "instructions with replies, text only, for method: sft",
        {"": ["data/train-*.parquet"]},
        {"question": "instruction", "answer": "output"},
        rows=52002,
        license="CC-BY-NC-4.0",
        sft=True,
        checked=TRIED,
    ),
    "gsm8k": Entry(
        "openai/gsm8k",
        "word problems, text only, with worked solutions",
        {"train": ["main/train-*.parquet"], "test": ["main/test-*.parquet"]},
        QA,
        rows=8792,
        license="MIT",
        marked=True,
        checked=LOOPBACK,
    ),
    "gsm8k-test": Entry(
        "openai/gsm8k",
        "its test split alone, for evaluation",
        {"test": ["main/test-*.parquet"]},
        QA,
        rows=1319,
        license="MIT",
        evaluation=True,
        checked=TRIED,
    ),
    "math": Entry(
        "EleutherAI/hendrycks_math",
        "competition problems, text only, with worked solutions",
        {"train": ["*/train-*.parquet"], "test": ["*/test-*.parquet"]},
        {"question": "problem", "solution": "solution", "source": "type"},
        rows=12500,
        marked=True,
        checked=LOOPBACK,
    ),
    "mathvista": Entry(
        "AI4Math/MathVista",
        "testmini: the answers of its test set are not public",
        {"test": ["data/testmini-*.parquet"]},
        {
            "question": "query",
            "answer": "answer",
            "choices": "choices",
            "images": "decoded_image",
            "source": "metadata.source",
        },
        rows=1000,
        evaluation=True,
        checked=LOOPBACK,
    ),
    "mathverse": Entry(
        "AI4Math/MathVerse",
        "testmini: 788 problems in five versions",
        {"test": ["testmini.parquet"]},
        {"question": "query_cot", "answer": "answer", "images": "image", "source": "problem_version"},
        rows=3940,
        evaluation=True,
        checked=TRIED,
    ),
    "mathvision": Entry(
        "MathLLMs/MathVision",
        "competition problems with diagrams",
        {"test": ["data/test-*.parquet"]},
        QA | {"choices": "options", "images": "decoded_image", "source": "subject"},
        rows=3040,
        evaluation=True,
        checked=TRIED,
    ),
    "mmmu-pro": Entry(
        "MMMU/MMMU_Pro",
        "college subjects, ten options",
        {"test": ["standard (10 options)/test-*.parquet"]},
        QA | {"choices": "options", "images": MMMU_IMAGES, "source": "subject"},
        evaluation=True,
        checked=TRIED,
    ),
    "math-500": Entry(
        "HuggingFaceH4/MATH-500",
        "500 problems of MATH's test split, text only",
        {"test": ["test.jsonl"]},
        {"question": "problem", "answer": "answer", "solution": "solution", "source": "subject"},
        rows=500,
        evaluation=True,
        checked=TRIED,
    ),
}


def sources(name: str, repository: Repository, on_progress: Progress) -> Sequence[RecordSource]:
    """Downloads a dataset of the catalog.

    Raises ConfigError if it lacks the columns that the entry names.
    """
    entry = CATALOG[name]
    tables: list[tuple[Path, str]] = []
    records = []
    for split, patterns in entry.files.items():
        for pattern in patterns:
            for fetched in repository.fetch(repository.matching(pattern), on_progress):
                tables.append((fetched.local, split))
                records.append(fetched.record)
    archive_paths = []
    for pattern in entry.images:
        archive_paths += repository.matching(pattern)
    archives = repository.fetch(archive_paths, on_progress)
    form = Form(
        name, entry.columns, keep=entry.evaluation, marked=entry.marked, sft=entry.sft, only=entry.only
    )
    _check_columns(name, tables[0][0], form)
    vermulti = entry.columns is mathv60k.FORM.columns
    return [
        RecordSource(
            name,
            tables,
            form,
            [one.local for one in archives],
            revision=repository.revision,
            record=cache(lambda: records + [one.record for one in archives]),
            subsource=subsource if vermulti else no_subsource,
        )
    ]


def _check_columns(name: str, path: Path, form: Form) -> None:
    first = first_object(read(path))
    wanted = set()
    for role, columns in form.columns.items():
        if role in ("question", "answer", "chat", "images"):
            wanted |= {column.partition(".")[0] for column in columns.split(",")}
    missing = sorted(wanted - first.keys())
    if missing:
        raise ConfigError(
            f"{name}: {path.name} has no column {', '.join(missing)} (it has {', '.join(first)}): "
            "its repository changed; give --revision a commit from before, or its hub id and --map"
        )


def any_repository(
    repository: Repository,
    mapping: dict[str, str],
    on_progress: Progress,
    split: str = "",
    keep: bool = False,
    sft: bool = False,
    text: TextForm = TextForm(),  # noqa: B008 - frozen
) -> list[RecordSource]:
    """Any dataset repository: its Parquet files, or else its other data files, and its archives."""
    data = _ending_in(repository.files, ".parquet") or _ending_in(repository.files, ENDINGS)
    if not data:
        raise ConfigError(f"{repository.repo} has no data file ({', '.join(ENDINGS)})")
    archives = _ending_in(repository.files, (".zip", *TAR_ENDINGS))
    fetched = repository.fetch([*data, *archives], on_progress)
    splits = [split or split_of(path) for path in data]
    if set(splits) == {"train"} and not split:
        splits = [""] * len(data)
    local = [one.local for one in fetched]
    tables = list(zip(local, splits, strict=False))
    roots = local[len(data) :]
    name = repository.repo.partition("/")[2].lower()
    sources = by_form(tables, name, roots, None, mapping, keep, sft, text)
    for source in sources:
        source.revision = repository.revision
        source.record = lambda: [one.record for one in fetched]
    return sources


def _ending_in(paths: Iterable[str], endings: str | tuple[str, ...]) -> list[str]:
    return [path for path in paths if path.endswith(endings)]
