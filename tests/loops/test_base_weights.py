"""A resume whose checkpoint holds every weight downloads none: a real run of a model of a hub on loopback."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from transformers import AutoConfig

from tests.data_prep import hub_server
from tests.families import FAMILIES, loader
from tests.loops.jobs import REWARD, Job
from trainer import config as c


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_resume_asks_the_hub_for_no_weights(tiny_model, mixed_dataset, tmp_path):
    """Two steps, then two more on a machine without the model: as four at once, and only the first start
    asks."""
    (tmp_path / "reward.py").write_text(REWARD)
    config = c.RunConfig(
        run=c.Run(name="small", dir=str(tmp_path / "run"), max_steps=2),
        model=c.Model(path="owner/tiny", dtype="fp32", gradient_checkpointing=False, min_pixels=784),
        data=c.Data(path=str(mixed_dataset), prompt_max_tokens=300),
        rollout=c.Rollout(
            prompts_per_step=4, samples_per_prompt=4, max_tokens=12, kv_cache_gib=0.25, sleep_level=0
        ),
        algorithm=c.Algorithm(micro_batch_tokens=400, kl_coef=0.0),
        optimizer=c.Optimizer(learning_rate=1e-3),
        rewards=c.Rewards(function=f"{tmp_path}/reward.py:reward", workers=1),
        checkpoint=c.Checkpoint(every_steps=1, export_hf="end"),
        placement=c.Placement(device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
    )
    assert c.checkpoint_suffices(config)
    four = replace(config.run, max_steps=4)
    with hub_server.serve() as hub:
        hub.add("owner/tiny", {path.name: path.read_bytes() for path in tiny_model.iterdir()})
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}

        def weights() -> list:
            """Downloads of the weights. vLLM asks for a file's header, to learn its type."""
            asked = [
                given
                for method, path, given in hub.requests
                if method == "GET" and path.endswith(".safetensors")
            ]
            return [given for given in asked if given != "bytes=0-100000"]

        first = Job(config, tmp_path, env).start()
        assert first.wait(300) == 0, first.tail()
        assert weights(), "the first start has them from the hub"
        hub.requests.clear()
        shutil.rmtree(tmp_path / "cache")
        job = Job(replace(config, run=four), tmp_path, env).start()
        assert job.wait(300) == 0, job.tail()
        assert "resumed from step 2" in job.log.read_text()
        assert hub.requests and not weights()
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
    whole = replace(
        config,
        run=replace(four, dir=str(tmp_path / "whole/run")),
        model=replace(config.model, path=str(tiny_model)),
    )
    undisturbed = Job(whole, tmp_path / "whole").start()
    assert undisturbed.wait(300) == 0, undisturbed.tail()
    assert job.metrics() == undisturbed.metrics()
    ours, theirs = (one.run_dir / "hf/model.safetensors" for one in (job, undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_holds_nothing_that_no_checkpoint_holds(family_model, family):
    """Neither does a checkpoint hold buffers, nor does a sync bring them."""
    folder = family_model(family)
    model = loader(family).from_config(AutoConfig.from_pretrained(folder))
    assert model.state_dict().keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
