"""Kubernetes without a tool between: `kubectl` creates a JobSet (`job_set`).

The code comes in a ConfigMap: packed it takes nine tenths of the 1 MiB that one may hold, kubectl alone
writes it, and a pod unpacks it before it has an environment or any client of a bucket. (A tarball in the
bucket would need such a client in every image, and a git URL would leave out what is not committed, and
private repositories.)
"""

from __future__ import annotations

import hashlib

from recipes.platforms import clouds, pods, restarts, script
from recipes.platforms.disposable import Disposable
from recipes.platforms.job_set import ARCHIVE, NAME, claim, job_set
from recipes.platforms.task_yaml import to_yaml
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from trainer.config import never_sent

LONGEST_NAME = 40
"""Characters of a JobSet's name: those of its pods have up to 23 more, and 63 is the limit."""
TOKENS = "$HOME/.spotrl/tokens.env"
"""File with tokens that the head of a rendered file names: no place of the repository, which is sent."""
LEFT_OUT = (
    "tests",
    "docs",
    "benchmarks",
    "runs",
    "recipes/commands",
    "recipes/drivers",
    "recipes/generated",
    "recipes/screens",
    "CHANGELOG.md",
    "requirements/launch.txt",
    "requirements/test.txt",
    "__pycache__",
    "code.tar",
    ARCHIVE,
)
"""Files and folders that no node needs, locks of other environments among them, besides hidden ones and those
of `never_sent`."""
CHECKS = ("tests/conftest.py", "tests/families.py", "tests/servers.py", "tests/gpu", "tests/learning")
"""What a check of a card needs of it all the same."""
NOT_CHECKED = "tests/learning/test_*.py"
"""Tests in one of these folders that need no card."""
KIND = "jobsets.jobset.x-k8s.io"
"""JobSets, as kubectl takes the word."""


class Kubernetes(Disposable):
    program = "kubectl"
    title = "`kubectl`"

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """The JobSet and, where the recipe names a volume, its claim."""
        recipe = run.recipe
        files = {f"{recipe.name}.yaml": to_yaml(job_set(self, recipe), _head(recipe))}
        if recipe.storage.volume:
            files[f"{recipe.name}.volume.yaml"] = to_yaml(
                claim(recipe), "The claim at /workspace; once, before the run."
            )
        return files

    def obeys(self, recipe: Recipe) -> frozenset[str]:
        own = {"site.namespace", "site.gpu_label", "site.grace_s"}
        if recipe.cluster.nodes > 1:
            own.add("site.topology")  # pods that stand together
        counted = recipe.cluster.nodes > 1 or recipe.kind == "sample"  # one pod: the run counts
        if counted and restarts.restart_codes(recipe):
            own.add("budget.max_requeues")
        return self.OBEYS | pods.obeyed(recipe) | own


KUBERNETES = Kubernetes(
    name="kubernetes",
    cloud="kubernetes",
    max_nodes=64,
    spot=True,
    gpus=clouds.LABELLED,
    network_gbit_s={"": 400},
    note="your cluster with the JobSet controller; no tool between",
)


def set_name(run_id: str) -> str:
    """The run's id as the name of its JobSet: cut, and still one of a kind, where it is too long."""
    if len(run_id) <= LONGEST_NAME:
        return run_id.rstrip("-")
    return f"{run_id[: LONGEST_NAME - 9]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def of_run(text: str, run_id: str) -> str:
    """A rendered file with the id of a launch, and with its JobSet's name, which may be shorter. Machines
    that sample are launched under an id of their own, so their set needs no other name than that."""
    whole = text.replace(f"value: {NAME}\n", f"value: {run_id}\n")
    return whole.replace(f"{NAME}-sample", NAME).replace(NAME, set_name(run_id))


def kubectl(recipe: Recipe, flags: list[str]) -> list[str]:
    """kubectl with what it takes to find the recipe's cluster and namespace. flags: after `--` at the
    launch."""
    site = recipe.site
    context = ["--context", site.kubernetes_context] if site.kubernetes_context else []
    namespace = ["--namespace", site.namespace] if site.namespace else []
    return ["kubectl", *context, *namespace, *flags]


def _head(recipe: Recipe) -> str:
    path = f"recipes/generated/{KUBERNETES.name}/{recipe.name}"
    program = " ".join(kubectl(recipe, []))
    tokens = script.API_KEY if recipe.kind == "serve" else "HF_TOKEN, AWS_ACCESS_KEY_ID"
    if recipe.uses_bucket and not recipe.storage.bucket:
        tokens += ", BUCKET"
    secrets = f"--exclude-from={never_sent.IN_TREE}"
    tar = f"tar -cf code.tar {secrets} {' '.join(f'--exclude={name}' for name in LEFT_OUT)} *"
    tar += (
        f" && tar -rf code.tar {secrets} --exclude={NOT_CHECKED} {' '.join(CHECKS)}"
        if recipe.kind == "check"
        else ""
    )
    lines = [
        script.written_by(recipe, KUBERNETES.name),
        f"  {tar} && gzip -f code.tar",
        f"  {program} create configmap try-1 --from-file={ARCHIVE}",
        f"  {program} create secret generic try-1 --from-env-file={TOKENS}    # NAME=value: {tokens}, ...",
        *([f"  {program} apply -f {path}.volume.yaml"] if recipe.storage.volume else []),
        f"  sed s/{NAME}/try-1/g {path}.yaml | {program} create -f -",
        f"The cluster needs the JobSet controller. A name has at most {LONGEST_NAME} characters.",
        script.run_id_comment(recipe),
    ]
    return "\n".join(lines)
