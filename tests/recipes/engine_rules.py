"""What SkyPilot and dstack decide after exit codes, by their own code: `.venvs/launch/bin/python THIS <
question.json`.

{"sky": {name: task}, "dstack": {name: [task, questions]}, "codes": questions} -> for each name, how often in
a row the engine starts the job again after each question; a question is the exit codes of all nodes. Nothing
is launched: SkyPilot's recovery strategy is made from the task as its jobs controller makes it; dstack's run
and jobs are rows in a database in memory, whose state its own worker analyzes.
"""

import asyncio
import json
import sys
from datetime import timedelta

import yaml

STARTS = 12
"""Where counting ends: an engine that starts a job again so often does it for ever."""


def sky_restarts(text: str, codes: list[int]) -> int:
    """How often in a row SkyPilot starts the job again whose nodes leave with `codes`; at most STARTS."""
    import sky
    from sky import backends
    from sky.jobs import recovery_strategy

    given = [("RUN_ID", "r"), ("BUCKET", "s3://mine")]
    task = sky.Task.from_yaml_config(yaml.safe_load(text), env_overrides=given)
    executor = recovery_strategy.StrategyExecutor.make(
        "cluster", backends.CloudVmRayBackend(), task, 1, 0, None, set(), asyncio.Lock(), asyncio.Condition()
    )
    count = 0
    while any(codes) and count < STARTS and executor.should_restart_on_failure(exit_codes=codes):
        count += 1
    return count


async def dstack_restarts(text: str, questions: list[list[int]]) -> list[int]:
    """The same of dstack: one job per node, each machine in use for a minute before its job ends."""
    from dstack._internal.core.models.configurations import parse_apply_configuration
    from dstack._internal.server import db as database
    from dstack._internal.server.models import BaseModel
    from dstack._internal.server.services import encryption  # noqa: F401 - columns are stored through it
    from dstack._internal.server.testing import common as make
    from sqlalchemy import StaticPool
    from sqlalchemy.ext.asyncio import create_async_engine

    url = "sqlite+aiosqlite://"
    engine = create_async_engine(url, connect_args={"check_same_thread": False}, poolclass=StaticPool)
    database.override_db(database.Database(url, engine=engine))
    async with engine.begin() as connection:
        await connection.run_sync(BaseModel.metadata.create_all)
    text = text.replace("\n- RUN_ID\n", "\n- RUN_ID=r\n").replace("\n- BUCKET\n", "\n- BUCKET=s3://mine\n")
    configuration = parse_apply_configuration(yaml.safe_load(text))
    answers = []
    async with database.get_session_ctx() as session:
        user = await make.create_user(session)
        project = await make.create_project(session, owner=user)
        repo = await make.create_repo(session, project_id=project.id)
        for i, codes in enumerate(questions):
            spec = make.get_run_spec(repo_id=repo.name, run_name=f"run-{i}", configuration=configuration)
            run = await make.create_run(session, project, repo, user, run_name=f"run-{i}", run_spec=spec)
            answers.append(await _submissions(session, run, spec, codes))
    return answers


async def _submissions(session, run, spec, codes: list[int]) -> int:
    from dstack._internal.core.models.runs import JobStatus, JobTerminationReason, RunStatus
    from dstack._internal.server.background.pipeline_tasks.runs import active
    from dstack._internal.server.testing import common as make
    from dstack._internal.utils.common import get_current_datetime
    from sqlalchemy.orm.attributes import set_committed_value

    count = 0
    while count < STARTS:
        ended = get_current_datetime() - timedelta(seconds=60)
        jobs = [
            await make.create_job(
                session,
                run,
                job_num=node,
                submission_num=count,
                last_processed_at=ended,
                status=JobStatus.FAILED if code else JobStatus.DONE,
                termination_reason=getattr(JobTerminationReason, _REASON[bool(code)]),
                job_provisioning_data=make.get_job_provisioning_data(),
            )
            for node, code in enumerate(codes)
        ]
        set_committed_value(run, "jobs", jobs)
        analysis = await active._analyze_active_run(run)
        transition = active._get_active_run_transition(spec, run, analysis)
        if transition.new_status != RunStatus.PENDING:
            break
        count += 1
    return count


_REASON = {False: "DONE_BY_RUNNER", True: "CONTAINER_EXITED_WITH_ERROR"}
"""What the runner reports of a job that ended by itself, by whether its code is not 0."""


def main() -> None:
    asked = json.load(sys.stdin)
    out: dict = {
        name: [sky_restarts(text, codes) for codes in asked["codes"]] for name, text in asked["sky"].items()
    }
    for name, (text, questions) in asked["dstack"].items():
        out[name] = asyncio.run(dstack_restarts(text, questions))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
