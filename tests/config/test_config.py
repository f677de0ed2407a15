"""The configuration: strict reading, overriding, validation, and what a resume compares."""

import dataclasses
import typing
from dataclasses import replace

import pytest
import yaml

from trainer import config as c
from trainer.config.budget import CHECKPOINT_BYTES_PER_PARAMETER, checkpoints_bytes
from trainer.config.overrides import read_yaml


def test_round_trip(tmp_path):
    config = c.override(
        c.RunConfig(), ["optimizer.learning_rate=5e-7", "run.name=x", "optimizer.betas=[0.9, 0.99]"]
    )
    path = tmp_path / "run.yaml"
    path.write_text(c.dump(config))
    assert c.load(path) == config
    assert config.optimizer.learning_rate == 5e-7 and config.optimizer.betas == (0.9, 0.99)


@pytest.mark.parametrize("text", ["NO", "2026", "1e3", "2026-11-22", "on"])
def test_a_text_stays_the_text_that_was_written(text):
    assert c.override(c.RunConfig(), [f"run.id={text}"]).run.id == text
    assert c.override(c.RunConfig(), ["run.id='quoted'"]).run.id == "quoted"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("rollout.temprature=1", "did you mean rollout.temperature?"),
        ("rolout.temperature=1", "did you mean rollout?"),
        ("rollout.max_tokens=many", "expected int"),
        ("model.dtype=fp16", "not one of bf16, fp32"),
        ("rollout.eager=1", "expected bool"),
        ("run.seed=true", "expected int"),
        ("rollout.temperature.x=1", "has no keys of its own"),
        ("rollout.temperature", "write it as section.key=value"),
    ],
)
def test_a_wrong_override_says_what_is_right(assignment, message):
    with pytest.raises(c.ConfigError, match=message.replace("?", r"\?")):
        c.override(c.RunConfig(), [assignment])


TEACHER = ["algorithm.teacher=some/teacher", "algorithm.kl_coef=0"]
TWO_RANKS = ["placement.workers_per_node=2"]


def choices() -> list[tuple[str, str]]:
    """Every choice of every option that is a word, as it is written: `watch.on_hang`, `off`."""
    found = []
    for section in dataclasses.fields(c.RunConfig):
        value = getattr(c.RunConfig(), section.name)
        if not dataclasses.is_dataclass(value):
            continue
        for key, hint in typing.get_type_hints(type(value)).items():
            words = [x for x in typing.get_args(hint) if isinstance(x, str) and x]
            found += [(f"{section.name}.{key}", word) for word in words]
    return found


def test_every_choice_is_taken_as_it_is_written_in_overrides_and_files(tmp_path):
    """YAML 1.1 reads `off` as false."""
    path = tmp_path / "run.yaml"
    assert ("watch.on_hang", "off") in choices() and ("algorithm.rollout_correction", "off") in choices()
    for name, word in choices():
        section, key = name.split(".")
        given = c.override(c.RunConfig(), [f"{name}={word}"])
        assert getattr(getattr(given, section), key) == word, name
        path.write_text(f"{section}: {{{key}: {word}}}\n")
        read = c.from_dict(c.RunConfig, read_yaml(path.read_text()))
        assert read == given, name
    path.write_text("watch: {on_hang: off}\nmodel: {freeze_vision: yes}\n")
    assert c.load(path).watch.on_hang == "off" and c.load(path).model.freeze_vision is True


@pytest.mark.parametrize(("word", "value"), [("off", False), ("No", False), ("on", True), ("yes", True)])
def test_options_that_are_true_or_false_take_the_words_of_yaml_1_1(word, value):
    assert c.override(c.RunConfig(), [f"rollout.eager={word}"]).rollout.eager is value


def test_an_unknown_key_in_a_file_names_the_nearest(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {kl_coeff: 0.1}\n")
    with pytest.raises(
        c.ConfigError, match=r"unknown key algorithm.kl_coeff: did you mean algorithm.kl_coef\?"
    ):
        c.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["lora.rank=8", "lora.qlora=true"], "lora.qlora is for method sft: the engine holds all weights"),
        (["lora.rank=8", "lora.dropout=0.1"], "lora.dropout is 0.1 with method grpo"),
        (["lora.vision=true"], "lora.rank is 0, so lora.vision, lora.dropout and lora.qlora have no adapter"),
        (["lora.rank=8", "lora.vision=true", "model.freeze_vision=true"], "model.freeze_vision"),
        (["optimizer.zero_stage=2"], "zero_stage is 2 with method grpo"),
        (
            ["method=sft", "optimizer.zero_stage=1", "optimizer.hpz_ranks=2", *TWO_RANKS],
            "hpz_ranks is 2 at optimizer.zero_stage 1",
        ),
        (["optimizer.warmup_steps=1", "optimizer.warmup_ratio=0.1"], "set one to 0"),
        (["method=sft", "sft.batch_size=1", *TWO_RANKS], "use at least 2"),
        ([*TEACHER, "algorithm.kl_coef=0.01"], "set algorithm.kl_coef to 0"),
        ([*TEACHER, "method=sft"], "set method to grpo"),
        ([*TEACHER, "algorithm.teacher=", "algorithm.teacher_revision=abc"], "name the teacher too"),
        ([*TEACHER, "algorithm=gmpo", "algorithm.kl_coef=0"], "use ppo, gspo or cispo"),
        (
            [*TEACHER, "algorithm.refill_rounds=2", "rewards.accuracy_weight=0", "rewards.format_weight=0"],
            "set algorithm.refill_rounds to 0",
        ),
        ([*TEACHER, "evaluation.pass_rate_samples=4"], "has no use for algorithm.teacher"),
        ([*TEACHER, "algorithm.teacher_coef=0"], "teacher_coef"),
        (["rollout.prompts_per_step=0"], "at least 1"),
        (["rollout.samples_per_prompt=1"], "at least 2"),
        (["algorithm.samples_per_update=7"], "use a divisor of 256"),
        (["algorithm.micro_batch_tokens=-1"], "algorithm.micro_batch_tokens is -1: it must be at least 0"),
        (["placement.workers_per_node=4", "optimizer.hpz_ranks=3"], "use a divisor of 4"),
        (["placement.workers_per_node=3", "rollout.tensor_parallel=2"], "use a divisor of 3"),
        (["placement.workers_per_node=3"], "3 engines: use a multiple of 3"),
        (["rollout.gpu_memory_utilization=1.5"], "above 0 and below 1"),
        (["rollout.temperature=0"], "at least 0.01"),
        (["evaluation.temperature=0.005"], "none between 0 .greedy. and 0.01"),
        (["rollout.temperature=3"], "at most 2"),
        (["model.min_pixels=10000000"], "swap them"),
        (["optimizer.learning_rate=-1"], r"learning_rate is -1.0: it must be at least 0"),
        (["optimizer.learning_rate=.nan"], "learning_rate is nan"),
        (
            ["optimizer.betas=[0.9, 1.0]"],
            r"optimizer.betas is \(0.9, 1.0\): it must be at least 0 and below 1",
        ),
        (["evaluation.samples_per_prompt=0"], "evaluation.samples_per_prompt is 0: it must be at least 1"),
        (["data.max_samples=-5"], "data.max_samples is -5: it must be at least 0"),
        (["algorithm.samples_per_update=-64"], "at least 0"),
        (["sft.epochs=0"], "sft.epochs is 0"),
        (["evaluation.samples_per_prompt=4"], "greedy completions"),
        (["data.max_samples=63"], "less than the 64 rows of one step"),
        (["algorithm.surrogate=gspo"], "loss_denominator is tokens: use sequences"),
        (["rollout.staleness=9"], "rollout.staleness is 9: it must be at least 0 and at most 8"),
        (["rollout.staleness=1", "algorithm.rollout_correction=off"], "set it to truncate"),
        (["rollout.staleness=2", "algorithm.refill_rounds=3"], "rewards that are not known yet"),
        (["rollout.staleness=2", "evaluation.pass_rate_samples=8"], "set rollout.staleness to 0"),
        (["rollout.tokens_per_step=8"], "has no later phase to go on in"),
        (
            [
                *("rollout.tokens_per_step=8", "rollout.staleness=1", "fleet.workers=only"),
                "checkpoint.remote=s3://b",
            ],
            "what they send is of one version",
        ),
        (["rollout.expert_parallel=true"], "tensor_parallel is 1: set it to the GPUs of an engine"),
        (["algorithm.kl_estimator=k1"], "use k2 or k3, or set algorithm.kl_in to reward"),
        (["algorithm.kl_in=reward", "algorithm.kl_estimator=k3"], "not the KL's .*: use k1, or leave it"),
        (["algorithm.kl_in=reward", "algorithm.kl_estimator=k2"], "not the KL's .*: use k1, or leave it"),
        (["algorithm=rloo", "algorithm.kl_estimator=k3"], "use k1, or leave it empty"),
        (["algorithm=gspo", "algorithm.correction_level=token"], "geometric or sequence"),
        (["algorithm=gmpo", "algorithm.correction_level=token"], "geometric or sequence"),
        (["algorithm.rollout_correction=off", "algorithm.correction_level=token"], "do nothing"),
        (["algorithm.rollout_correction=off", "algorithm.correction_high=3"], "do nothing"),
        (["algorithm=dapo", "algorithm.overlong_penalty=0"], "nothing is lost"),
        (["algorithm.overlong_penalty=0.5"], "nothing is too long"),
        (["algorithm.teacher_coef=0.5"], "name the teacher"),
        (["rewards.accuracy_weight=0", "rewards.format_weight=0"], "all completions earn the same"),
        (["evaluation.benchmarks=true"], "set evaluation.pass_rate_samples to 1 or more"),
        (["rewards.remote_url=http://h:1/get_reward?token=t0ps3cret"], "parameter 'token', .*REWARD_TOKEN"),
        (["rewards.remote_url=http://u:t0ps3cret@h:1/get_reward"], "a password, .*SPOTRL_REWARD_TOKEN"),
        (["rewards.remote_url=h:5000"], "write http://HOST:PORT"),
        (["rewards.judge_url=https://h/v1?key=t0ps3cret", "rewards.judge_model=m"], "SPOTRL_JUDGE_KEY"),
        (["rewards.judge_url=https://h/v1"], "name the model it serves"),
        (["rewards.judge_model=m"], "no judge is asked"),
        (["rewards.judge_types=text,letters"], "'letters' is none of"),
        (["rewards.function=a.py:f", "rewards.functions=[{path: b.py:g}]"], "are both set: unset one"),
        (["rewards.remote_url=http://h/r", "rewards.functions=[{path: b.py:g}]"], "are both set: unset one"),
        (
            ["rewards.functions=[{path: b.py:g}, {path: a.py:g}]"],
            "two of rewards.functions .* give one a name",
        ),
        (["rewards.functions=[{path: b.py}]"], "write path/to/file.py:function"),
        (["rewards.functions=[{path: 'b.py:g', weight: .inf}]"], "use a finite number"),
        (["algorithm.kl_coef=0", "algorithm.kl_target=0.1"], "there is no reference"),
        (["algorithm.surrogate=cispo", "algorithm.dual_clip=3"], "does nothing to algorithm.surrogate cispo"),
        (["algorithm.dual_clip=0.5"], "above 1"),
        (["algorithm=gmpo", "algorithm.gamma=0.9"], "one advantage per sequence"),
        (["algorithm=gdpo", "algorithm.normalize_reward=true"], "normalizes each reward by itself"),
        (["method=sft", "sft.batch_size=8", "data.max_samples=7"], "lower sft.batch_size"),
    ],
)
def test_validation_says_what_to_change(changes, message):
    with pytest.raises(c.ConfigError, match=message) as error:
        c.validate(c.override(c.RunConfig(), changes))
    assert "\n" not in str(error.value) and "t0ps3cret" not in str(error.value)


def test_the_default_of_an_option_follows_the_one_that_decides_it():
    for changes, estimator, level in (
        ([], "k3", "token"),
        (["algorithm.kl_in=reward"], "k1", "token"),
        (["algorithm=rloo"], "k1", "token"),
        (["algorithm=gspo"], "k3", "geometric"),
        (["algorithm=gspo", "algorithm.correction_level=sequence"], "k3", "sequence"),
        (["rewards.judge_url=https://h/v1?api-version=2024-10-21", "rewards.judge_model=m"], "k3", "token"),
    ):
        config = c.override(c.RunConfig(), changes)
        c.validate(config)
        assert (config.algorithm.kl_estimated_by, config.algorithm.corrected_at) == (estimator, level)


def test_a_checkpoint_from_before_these_defaults_is_resumed():
    """Older code wrote the options out, and allowed k3 in the reward and a token's correction in gspo."""
    for now, recorded in (
        ([], {"algorithm.kl_estimator": "k3", "algorithm.correction_level": "token"}),
        (["algorithm=rloo"], {"algorithm.kl_estimator": "k1"}),
        (["algorithm.kl_in=reward"], {"algorithm.kl_in": "reward", "algorithm.kl_estimator": "k3"}),
        (["algorithm=gspo"], {"algorithm.surrogate": "gspo", "algorithm.correction_level": "token"}),
    ):
        config = c.override(c.RunConfig(), now)
        view = c.resume_view(config) | recorded
        del view["rewards.functions"], view["rewards.answer"]
        assert c.difference(config, view) == "", now
    config = c.override(c.RunConfig(), ["algorithm.kl_estimator=k2"])
    assert "algorithm.kl_estimator is 'k2'" in c.difference(config, {"algorithm.kl_estimator": "k3"})


@pytest.mark.parametrize("name", c.Algorithm.PRESETS)
def test_a_preset_sets_the_objective_and_nothing_else(name):
    config = c.override(c.RunConfig(), ["algorithm.samples_per_update=64", f"algorithm={name}"])
    c.validate(config)
    assert config.algorithm.samples_per_update == 64 and config.algorithm.rollout_correction == "truncate"
    assert c.override(config, ["algorithm=dapo", f"algorithm={name}"]) == config, "what one sets, all set"
    assert c.from_dict(c.RunConfig, {"algorithm": name}).algorithm == c.Algorithm(**c.Algorithm.PRESETS[name])


def test_an_unknown_preset_is_refused_by_name():
    with pytest.raises(c.ConfigError, match="algorithm: 'grop' must be one of grpo, dr_grpo, dapo"):
        c.override(c.RunConfig(), ["algorithm=grop"])
    with pytest.raises(c.ConfigError, match="it has no named sets"):
        c.override(c.RunConfig(), ["rollout=dapo"])


def test_every_number_has_a_range():
    config = c.RunConfig()
    for section in (f.name for f in dataclasses.fields(config) if f.name != "method"):
        part = getattr(config, section)
        for f in dataclasses.fields(part):
            value = getattr(part, f.name)
            number = isinstance(value, (int, float, tuple)) and not isinstance(value, bool)
            if number and not any(kind in str(f.type) for kind in ("Literal", "Band", "RewardF")):
                assert "range" in f.metadata, f"{section}.{f.name}"


def test_defaults_are_valid():
    c.validate(c.RunConfig())


def test_workers_may_have_larger_engines_than_the_trainer_has_ranks():
    ranks = ["placement.workers_per_node=2", "rollout.tensor_parallel=8"]
    fleet = ["fleet.workers=only", "checkpoint.remote=s3://b/p"]
    c.validate(c.override(c.RunConfig(), [*ranks, *fleet]))
    with pytest.raises(c.ConfigError, match="use a divisor of 2"):
        c.validate(c.override(c.RunConfig(), ranks))


def test_a_run_that_samples_on_both_sides_is_refused_with_the_choices_that_are_left():
    with pytest.raises(c.ConfigError, match="fleet.workers.*off.*only"):
        c.override(c.RunConfig(), ["fleet.workers=beside"])


def test_resume_compares_what_is_computed_and_nothing_else():
    base = c.RunConfig()
    for change in (
        "placement.workers_per_node=4",
        "run.dir=/elsewhere",
        "checkpoint.every_steps=7",
        "algorithm.micro_batch_tokens=200",
    ):
        assert c.fingerprint(c.override(base, [change])) == c.fingerprint(base), change
    for change in ("optimizer.learning_rate=1", "run.seed=3", "rollout.max_tokens=9", "model.path=other"):
        assert c.fingerprint(c.override(base, [change])) != c.fingerprint(base), change


def test_the_length_of_the_run_matters_where_the_learning_rate_decays_over_it():
    base = c.RunConfig()
    for schedule, same in (("constant", True), ("cosine", False), ("linear", False)):
        run = c.override(base, [f"optimizer.schedule={schedule}", "run.max_steps=10"])
        assert (c.fingerprint(c.override(run, ["run.max_steps=20"])) == c.fingerprint(run)) == same, schedule


def test_several_nodes_need_a_store_or_shared_files():
    base = c.override(c.RunConfig(), ["placement.nodes=2"])
    with pytest.raises(c.ConfigError, match=r"checkpoint\.remote is empty.*set it to a bucket.*shared_files"):
        c.validate_saving(base)
    for change in ("checkpoint.remote=s3://mine", "checkpoint.shared_files=true", "placement.nodes=1"):
        c.validate_saving(c.override(base, [change]))


def test_every_ignored_key_exists():
    flat = {f"{s}.{k}" for s, v in c.to_dict(c.RunConfig()).items() if isinstance(v, dict) for k in v}
    for name in c.RESUME_IGNORES:
        assert name in flat or any(key.startswith(name + ".") for key in flat), name


def test_configurations_are_frozen():
    with pytest.raises(AttributeError):
        c.RunConfig().run.seed = 1  # type: ignore[misc]
    assert replace(c.Run(), seed=1).seed == 1


def test_an_engine_has_room_for_all_that_a_first_phase_begins():
    """512 samples on four engines of a GPU each; with completions that are carried over, of four steps."""
    options = ["rollout.prompts_per_step=64", "rollout.samples_per_prompt=8", "placement.workers_per_node=4"]
    config = c.override(c.RunConfig(), options)
    assert config.engine_sequences == 128
    assert c.override(config, ["rollout.staleness=3"]).engine_sequences == 128
    carrying = c.override(config, ["rollout.staleness=3", "rollout.tokens_per_step=512"])
    assert carrying.engine_sequences == 512


def test_aliases_that_stand_for_billions_of_values_are_refused():
    lines = ["a0: &a0 [x, x, x, x]"]
    lines += [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 26)]
    for text in ("\n".join(lines), "a: &a [*a]", "a: &a {b: *a}"):
        with pytest.raises(yaml.YAMLError, match="its aliases make more than"):
            read_yaml(text)
    assert read_yaml("a: &a [1, 2]\nb: *a\n") == {"a": [1, 2], "b": [1, 2]}


ONE = 1000 * CHECKPOINT_BYTES_PER_PARAMETER


def asked(steps: int, every: int, held: int = 0) -> float:
    """Checkpoints of a run of a thousand parameters that the disk must have room for."""
    assignments = [f"run.max_steps={steps}", f"checkpoint.every_steps={every}", "checkpoint.keep_last=2"]
    config = c.override(c.RunConfig(), [*assignments, "checkpoint.keep_best=1", "placement.nodes=1"])
    return checkpoints_bytes(config, 1000, held * ONE) / ONE


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [(4, 100, 1), (4, 4, 1), (5, 4, 2), (8, 3, 3), (100, 5, 4), (0, 100, 4), (2, 0, 2), (100, 0, 4)],
)
def test_a_run_of_few_steps_writes_few(steps, every, expected):
    """Its last step is always saved; without a number of steps all are asked for that are kept."""
    assert asked(steps, every) == expected


def test_what_a_notice_left_lies_beside_them():
    assert asked(4, 100, held=1) == 2
    assert asked(100, 5, held=3) == 4
