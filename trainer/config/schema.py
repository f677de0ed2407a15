"""The typed configuration of one run: frozen dataclasses, one per concern, every field documented under
itself.

`RunConfig` is what runs: a recipe resolves to it, it is saved as `config.yaml` with the run, and every rank
reads the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.config.algorithm import Algorithm
from trainer.config.expected import Expected
from trainer.config.lora import LoRA
from trainer.config.ranges import ranged_field
from trainer.config.rewards import Rewards
from trainer.config.turns import Turns
from trainer.config.watching import Guards, Watch

WORKER_GPU_SHARE = 0.9
"""Share of a GPU's memory for an engine that has the card to itself."""
SHARED_BY = "SPOTRL_PROCESSES_ON_NODE"
"""Variable for a rollout worker: the processes with a GPU that share its node's cores, its own among them."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Rollout workers outside the trainer's cluster, fed through the bucket alone (docs/fleet.md)."""

    workers: Literal["off", "only"] = "off"
    """off: the trainer's GPUs sample. only: workers sample everything, and the trainer builds no engine."""
    gpus_per_node: int = ranged_field(0, least=0)
    """GPUs of each of the run's own nodes that sample for it while the others learn (processes, on CPU). 0:
    none; workers are on other machines alone."""
    run: str = ""
    """Id of the run that a rollout worker samples for, in the bucket `checkpoint.remote`; for workers
    only."""
    unit_prompts: int = ranged_field(0, least=0)
    """Prompts that a worker is given at a time, with all their completions; 0: as many as a step has. On a
    GPU the engine's batch is a part of what a sample depends on, so a run keeps this number."""
    lost_s: float = ranged_field(30.0, above=5)
    """A worker that was silent for this long is lost: others get what it had not sent."""
    wait_s: float = ranged_field(600.0, above=0)
    """The trainer ends, to be started again, when it has waited this long without any worker."""
    idle_s: float = ranged_field(900.0, above=0)
    """A worker ends itself when the trainer, or its launcher while it starts, was silent for this long, so
    that no machine outlives its run."""


@dataclass(frozen=True)
class Split:
    """One split of a prepared dataset, or its first rows. Row indices everywhere count within the split."""

    path: str
    """Folder or object-store URL of the prepared dataset."""
    name: str
    """Name of the split, such as `train`."""
    max_rows: int = 0
    """Only this many first rows are used; 0 means all."""

    def __str__(self) -> str:
        return f"split {self.name} of {self.path}"


SYNC_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Mean |log-probability difference| of engine and policy, by dtype, above which the engine does not hold the
policy's weights."""
LEAST_SEQUENCES = 64
"""An evaluation has more prompts than a small step: an engine takes at least so many at once."""


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str = "run"
    """Human-readable name; shown in W&B, reports and job names."""
    id: str = ""
    """Our own RUN_ID: keys bucket prefix, resume and logs, since engines' ids change on recovery. Default:
    name."""
    seed: int = ranged_field(0, least=0)
    """Every other seed is a hash of this one and of what is seeded."""
    dir: str = "runs/run"
    """Local directory of the run: config, metrics, samples, checkpoints, report."""
    max_steps: int = ranged_field(0, least=0)
    """Stop after this many steps; 0 means `data.episodes` passes over the data."""
    deterministic: Literal["", "cuda"] = ""
    """cuda: torch's and vLLM's repeatable kernels, where they have them (docs/reproducibility.md); slower, by
    how much was not measured. On a CPU every run is repeatable to the bit."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The policy and its memory."""

    path: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    """Local directory or hub id of the pretrained model (the original's --pretrain)."""
    revision: str = ""
    """Pinned hub revision (commit hash); empty for a local directory."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute type of policy and engine; master weights and Adam are always fp32."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass."""
    kernels: Literal["plain", "compiled"] = "plain"
    """compiled: norms, rotary positions and SwiGLU become one kernel each (torch.compile), which saves memory
    traffic; the first pass compiles for some seconds. Its gain on a GPU is not measured yet."""
    recurrence: Literal["kernel", "torch"] = "kernel"
    """What computes the recurrence of Qwen3.5's gated delta-net layers on a GPU: flash-linear-attention's
    kernel, compared with PyTorch before the run trains, or PyTorch, more than ten times slower. On a CPU it
    is PyTorch."""
    freeze_vision: bool = False
    """Train the language model only."""
    min_pixels: int = ranged_field(4 * 28 * 28, least=1)
    """Smallest image area after resizing, in pixels (one image token is 28x28, of Qwen3-VL 32x32)."""
    max_pixels: int = ranged_field(1280 * 28 * 28, least=1)
    """Largest image area after resizing, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training data: a directory or URL written by `launch.py data prepare`."""

    path: str = ""
    """Prepared dataset (Parquet shards and manifest): local directory or object-store URL."""
    source: str = ""
    """Rows that are not prepared yet, with the options of `data prepare`: `mine.jsonl --map answer=gold`, a
    name, or OWNER/NAME of the hub. A recipe prepares them before the run, and `data.path` follows unless it
    is set too."""
    split: str = "train"
    """Split of it that is trained on."""
    system_prompt: str = "rows"
    """System message of every row: `rows` (their own), `none`, `ours` (asks for `rewards.answer`),
    `published` (a benchmark's own words), or the text itself; `@FILE` is a file's."""
    max_samples: int = ranged_field(0, least=0)
    """Use only the first this many rows (in the dataset's own order); 0 means all."""
    episodes: int = ranged_field(1, least=1)
    """Passes over the data (the original's --num_episodes)."""
    prompt_max_tokens: int = ranged_field(4096, least=1)
    """Longest prompt, image tokens included. Longer rows are left out and counted."""
    image_cache_gib: float = ranged_field(0.5, least=0)
    """Decoded and encoded images that one rank keeps, GiB; as much again may be in the engine's open
    requests."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Generation with vLLM inside the ranks."""

    prompts_per_step: int = ranged_field(64, least=1)
    """Prompts sampled per step over all engines (the original's --rollout_batch_size)."""
    samples_per_prompt: int = ranged_field(4, least=1)
    """Group size (the original's --n_samples_per_prompt)."""
    temperature: float = ranged_field(1.0, least=0.01, most=2)
    """Sampling temperature (vLLM's least is 0.01); top_p is 1, top_k off: engine and policy use one
    distribution."""
    max_tokens: int = ranged_field(1024, least=1)
    """Longest completion, in tokens (the original's --generate_max_len); with `turns`, all replies and
    observations of an episode."""
    staleness: int = ranged_field(0, least=0, most=8)
    """Steps that sampling is ahead of learning by: step s is sampled with the weights of step s - 1 - this.
    0: with the newest."""
    tokens_per_step: int = ranged_field(0, least=0)
    """Most tokens by which a completion grows in a step's rollout phase; an unfinished one goes on in the
    next, under its weights, and step s is sampled to its end before it is trained. Needs `staleness`. 0: all
    at once."""
    tensor_parallel: int = ranged_field(1, least=1)
    """GPUs per engine; the number of engines is world size / this (the original's --vllm_num_engines
    follows)."""
    expert_parallel: bool = False
    """Each GPU of an engine holds some of a layer's experts whole instead of a part of every expert; for
    mixtures of experts, with tensor_parallel above 1."""
    gpu_memory_utilization: float = ranged_field(0.4, above=0, below=1)
    """Share of GPU memory that the engine may take while awake."""
    kv_cache_gib: float = ranged_field(1.0, above=0)
    """KV cache on CPU, in GiB per rank."""
    sleep_level: Literal[0, 1, 2] = 2
    """0: stay awake. 1: weights to host RAM. 2: discard weights, re-sent by the weight sync. CUDA only."""
    prefix_caching: bool = True
    """Share the prompt's KV cache among the samples of a group."""
    eager: bool = False
    """No CUDA graphs (always so on CPU)."""
    sync_tolerance: float = ranged_field(0.0, least=0)
    """Largest mean |log-prob difference| of engine and policy, at the first sync and in every step; 0: 1e-3
    for fp32, 5e-2 for bf16."""
    sync_bucket_bytes: int = ranged_field(1 << 30, least=1)
    """Layer groups are streamed in buckets of about this size (a single larger parameter goes alone)."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    learning_rate: float = ranged_field(5e-7, least=0)
    """Peak learning rate."""
    warmup_steps: int = ranged_field(0, least=0)
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float = ranged_field(0.0, least=0, below=1)
    """The same as a share of all optimizer steps, rounded up; in place of warmup_steps."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Decay over the run after the warm-up (or none)."""
    floor: float = ranged_field(0.0, least=0, most=1)
    """Share of learning_rate that cosine and linear end on."""
    betas: tuple[float, float] = ranged_field((0.9, 0.95), least=0, below=1)
    """Adam's betas."""
    eps: float = ranged_field(1e-8, above=0)
    """Adam's epsilon."""
    weight_decay: float = ranged_field(0.0, least=0)
    """Decoupled weight decay; not applied to one-dimensional parameters."""
    max_grad_norm: float = ranged_field(1.0, above=0)
    """Global gradient norm clip."""
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients add up over micro-batches. bf16 saves 2 bytes per trained parameter of the
    shard, and loses addends small against the sum: 0.3% of the norm after 64 equal parts. A model in fp32
    always adds in fp32."""
    zero_stage: Literal[1, 2, 3] = 3
    """What is sharded over all ranks. 1: Adam's states and fp32 weights. 2: gradients too. 3: weights too
    (method grpo needs it). Stage 0 is left out: it sends what stage 1 sends, and keeps all states on every
    GPU."""
    live_parameters: int = ranged_field(1_000_000_000, least=0)
    """Elements of gathered weights that may stay whole on a GPU from the forward to the backward pass; 0: all
    are freed at once. At the model's size or more, a micro-batch gathers it once instead of twice."""
    hpz_ranks: int = ranged_field(1, least=1)
    """Ranks of a node that together keep a second copy of the weights, so that the backward pass gathers
    within it (ZeRO++'s hpZ); its memory is weights / this per GPU. 1: none."""
    max_skipped_updates: int = ranged_field(3, least=0)
    """Optimizer steps in a row that may be skipped because their gradient is not finite; one more ends the
    run."""
    offload_optimizer: bool = False
    """Keep optimizer states in host memory always (not only while the engine is awake)."""
    offload_reference: bool = False
    """Keep the reference model's shards in host memory between its passes."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out accuracy while training; with method sft the loss on the solutions of a held-out split."""

    every_steps: int = ranged_field(0, least=0)
    """Steps between evaluations; 0: none. One is also made before the first step and after the last."""
    path: str = ""
    """Prepared dataset; default: `data.path`."""
    split: str = "test"
    """Split evaluated."""
    max_samples: int = ranged_field(0, least=0)
    """First this many rows; 0 means all."""
    temperature: float = ranged_field(0.0, least=0, most=2)
    """0 is greedy."""
    top_p: float = ranged_field(1.0, above=0, most=1)
    """Probability that is sampled from, the likeliest tokens first; 1: all of it."""
    samples_per_prompt: int = ranged_field(1, least=1)
    """Completions per prompt; accuracy is their mean."""
    pass_rate_samples: int = ranged_field(0, least=0)
    """Train nothing: ask every training row this often at rollout.temperature, into pass_rates.jsonl. 0:
    train."""
    benchmarks: bool = False
    """These rows are of benchmarks: ask at evaluation.temperature, count what is too long as wrong, and
    score."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When and where checkpoints are saved."""

    every_steps: int = ranged_field(50, least=0)
    """Steps between checkpoints (--save_steps); 0: chosen by Young and Daly's formula from the measured save
    time."""
    mean_time_between_preemptions_s: float = ranged_field(4 * 3600.0, above=0)
    """Stated MTBF of the nodes, seconds; used when every_steps is 0."""
    remote: str = ""
    """Object-store URL (s3://, gs://, r2://, file://) that checkpoints are pushed to, under the run id."""
    shared_files: bool = False
    """All nodes see `run.dir` (a shared file system): several nodes may then do without `remote`."""
    keep_last: int = ranged_field(2, least=1)
    """Newest checkpoints kept locally (--max_ckpt_num)."""
    keep_best: int = ranged_field(0, least=0)
    """Best checkpoints by held-out score kept besides."""
    keep_good: int = ranged_field(2, least=0)
    """Checkpoints from before a guard's first alarm that stay while the alarm lasts, newest first, here (as
    far as the disk has room) and in the object store."""
    before: int = ranged_field(0, least=0)
    """Go back: resume from the newest checkpoint before this step, and leave out what was made from there on;
    0: the newest of all. `launch.py resume RUN --before STEP` sets it."""
    keep_last_remote: int = ranged_field(2, least=1)
    """Newest checkpoints kept in the object store."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume from the newest committed checkpoint if there is one. must: refuse to start without
    one."""
    export_hf: Literal["never", "end"] = "end"
    """Write the final weights in Hugging Face format (--save_hf_ckpt); any checkpoint can be exported
    afterwards."""
    max_disk_gib: float = ranged_field(0.0, least=0)
    """Budget for local checkpoints; 0: what the disk has, less 5%."""
    max_restarts: int = ranged_field(3, least=0)
    """Restarts after failures of the job itself that bring no new checkpoint; then the run ends for good."""
    max_losses: int = ranged_field(10, least=0)
    """The same for attempts that lost their machines (preempted, a node gone) before a new checkpoint."""
    max_hours: float = ranged_field(24.0, above=0)
    """Hours of all attempts of a launch together: then the run saves and ends for good."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The ranks: one per GPU, or per CPU slot."""

    nodes: int = ranged_field(1, least=1)
    """Nodes of the cluster."""
    workers_per_node: int = ranged_field(1, least=1)
    """Ranks per node: GPUs used, or CPU processes."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where policy and engine live. ROCm counts as cuda."""
    threads_per_worker: int = ranged_field(1, least=1)
    """Compute threads per rank (CPU)."""
    start_timeout_s: float = ranged_field(600.0, above=0)
    """Deadline for all ranks to be placed and to meet."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers_per_node


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What is written and shown."""

    tensorboard: bool = True
    """Write event files under the run directory."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode; offline needs no account."""
    wandb_project: str = "spotrl"
    """W&B project."""
    samples_per_step: int = ranged_field(4, least=0)
    """Sample generations written per step, with their grades."""
    samples_every_steps: int = ranged_field(5, least=1)
    """Steps between written samples."""
    push_every_s: float = ranged_field(20.0, least=0)
    """Seconds between two pushes of metrics, samples, log and node samples to `checkpoint.remote`; 0:
    never."""
    profile_step: int = ranged_field(0, least=0)
    """Step whose phases are profiled on every rank (docs/failures.md); 0: none but on request."""
    profile_s: float = ranged_field(20.0, above=0)
    """Seconds of each call of a rank that are recorded: a rollout of thousands of tokens would fill the
    disk."""
    keep_rollouts: bool = False
    """Keep every step's graded completions, here and in the bucket (else: those that a restart may need)."""


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Supervised fine-tuning (method: sft)."""

    batch_size: int = ranged_field(64, least=1)
    """Rows per optimizer step over all ranks."""
    epochs: int = ranged_field(1, least=1)
    """Passes over the data; `run.max_steps` cuts it short."""
    max_tokens: int = ranged_field(4096, least=1)
    """Longest row, prompt and solution."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run depends on."""

    method: Literal["grpo", "sft"] = "grpo"
    """Which loop runs."""
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    lora: LoRA = field(default_factory=LoRA)
    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=Rollout)
    turns: Turns = field(default_factory=Turns)
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    rewards: Rewards = field(default_factory=Rewards)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    placement: Placement = field(default_factory=Placement)
    logging: Logging = field(default_factory=Logging)
    watch: Watch = field(default_factory=Watch)
    guards: Guards = field(default_factory=Guards)
    sft: SFT = field(default_factory=SFT)
    fleet: Fleet = field(default_factory=Fleet)
    expected: Expected = field(default_factory=Expected)

    @property
    def run_id(self) -> str:
        """The id that keys the bucket prefix, the resume and the logs."""
        return self.run.id or self.run.name

    @property
    def tower_trained(self) -> bool:
        """Whether anything of the vision tower is trained."""
        return self.lora.vision if self.lora.rank else not self.model.freeze_vision

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split that one step takes."""
        return self.sft.batch_size if self.method == "sft" else self.rollout.prompts_per_step

    @property
    def evaluation_path(self) -> str:
        """The dataset that is evaluated on."""
        return self.evaluation.path or self.data.path

    @property
    def engine_tolerance(self) -> float:
        """Largest mean |log-prob difference| of engine and policy, nats per token."""
        return self.rollout.sync_tolerance or SYNC_TOLERANCE[self.model.dtype]

    @property
    def loads_policy(self) -> bool:
        """Whether the ranks load a policy. Pass rates that rollout workers sample need none."""
        return not (self.evaluation.pass_rate_samples and self.fleet.workers == "only")

    @property
    def train_split(self) -> Split:
        """The rows that are trained on."""
        return Split(self.data.path, self.data.split, self.data.max_samples)

    @property
    def evaluation_split(self) -> Split:
        """The rows that are evaluated on."""
        return Split(self.evaluation_path, self.evaluation.split, self.evaluation.max_samples)

    @property
    def processes_per_node(self) -> int:
        """GPUs of a node that the run uses, or CPU processes: its ranks, and the workers beside them."""
        return self.placement.workers_per_node + self.fleet.gpus_per_node

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and completion together that the rollout engine takes."""
        return self.data.prompt_max_tokens + self.rollout.max_tokens

    @property
    def engine_sequences(self) -> int:
        """Completions that an engine samples at once: its share of a step, as a power of two. With
        completions that are carried over those of all steps: a run's first phase begins them all."""
        engines = self.placement.world_size // self.rollout.tensor_parallel
        steps = 1 + self.rollout.staleness if self.carries_over else 1
        share = -(-self.samples_per_step * steps // max(engines, 1))
        return max(LEAST_SEQUENCES, 1 << (share - 1).bit_length())

    @property
    def carries_over(self) -> bool:
        """Whether a completion may be sampled in the rollout phases of several steps."""
        return self.rollout.tokens_per_step > 0

    @property
    def samples_per_step(self) -> int:
        """Completions that a step trains on."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        """Completions per optimizer step."""
        return self.algorithm.samples_per_update or self.samples_per_step

    @property
    def old_logprobs(self) -> bool:
        """Whether the policy's own log-probabilities are computed before a step's first update."""
        several = self.algorithm.epochs > 1 or self.samples_per_update < self.samples_per_step
        return several or self.kl_in_reward or self.teaches

    @property
    def teaches(self) -> bool:
        """Whether a teacher is asked for the log-probabilities of completions."""
        return self.method == "grpo" and bool(self.algorithm.teacher)

    @property
    def kl_in_reward(self) -> bool:
        """Whether rewards are known only with the log-probabilities of policy and reference."""
        return bool(self.algorithm.kl_coef) and self.algorithm.kl_in == "reward"
