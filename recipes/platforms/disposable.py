"""What SkyPilot, dstack and Kubernetes have in common: machines or containers that are thrown away."""

from __future__ import annotations

from dataclasses import replace

from recipes.platforms import script
from recipes.platforms.answers import PlatformAnswer, PlatformAnswers, merge_answers
from recipes.platforms.base import Platform
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord


class Disposable(Platform):
    disposable = True
    copies_tree = True

    OBEYS = frozenset(
        {"cluster.cpus", "cluster.memory_gib", "cluster.disk_gib", "cluster.image", "storage.volume"}
    )

    def ask(self, record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
        if record.jobs == 1:
            return self.ask_job(record, answers)
        jobs = []
        for name in record.names():
            answer = self.ask_job(replace(record, run_id=name, jobs=1), answers)
            if answer is None:
                return None
            jobs.append(answer)
        return merge_answers(jobs)

    def ask_job(self, record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
        """What it says of one job; None where it does not answer."""
        raise NotImplementedError

    def is_open(self, record: RunRecord) -> bool:
        return not record.ended_s

    def begin_shell(self, recipe: Recipe, work: str = "/workspace") -> str:
        """What the shell of its tasks begins with. work: where data and runs go, as a shell expression."""
        return script.preamble(
            recipe,
            work,
            asks_bucket=recipe.uses_bucket,
            data=script.data_directory(recipe),
            kept_folder=self.kept_folder(recipe),
        )
