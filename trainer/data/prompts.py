r"""What a run asks with: the rows' own words, or others in their place (`data.system_prompt`).

rows        the messages as the dataset has them; of a benchmark, as the rows that the model was trained on
none        without a system message
ours        a system message that asks for answers in the run's form (`rewards.answer`)
published   no system message; what a benchmark's own evaluation asks with stands at the question
any text    this system message; `launch.py ... --set data.system_prompt=@FILE` takes a file's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config import RunConfig
from trainer.data.prompt_form import PromptForm
from trainer.data.schema import SYSTEM_PROMPT, TEXT_SYSTEM_PROMPT, count_placeholders

STEPS_AND_BOX = "Please reason step by step, and put your final answer within \\boxed{}."
"""As the model cards of Qwen2.5-Math and DeepSeek-R1 say."""

OURS = {
    "block": SYSTEM_PROMPT,
    "boxed": STEPS_AND_BOX,
    "final": "Reason step by step. End with a line of #### and the answer alone, for example: #### 12",
    "whole": "Reply with the answer alone.",
    "any": STEPS_AND_BOX,
}
"""System message by form of answer (trainer/rewards/grading/stated_answers.py)."""

BEFORE = {
    "mathvision": 'Please solve the problem step by step and put your answer in one "\\boxed{}". If it is a '
    'multiple choice question, only one letter is allowed in the "\\boxed{}".\n',
}
"""What stands before a benchmark's question, by its name: MathVision's evaluation scripts."""

AFTER = {
    "mmmu-pro": "\nAnswer the preceding multiple choice question. The last line of your response should be"
    " of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of options. Think step"
    " by step before answering.",
    "geometry3k-test": f"\n{STEPS_AND_BOX}",
    "gsm8k-test": f"\n{STEPS_AND_BOX}",
    "math-500": f"\n{STEPS_AND_BOX}",
}
"""What follows it: MMMU-Pro's prompt with reasoning as OpenCompass has it, and for the others what Qwen's
evaluation asks. MathVista and MathVerse have their own words in their questions."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptWording:
    """How a run asks."""

    system_prompt: str = "rows"
    answer: str = "block"
    """Form of the answers, for `ours`."""
    trained: PromptForm | None = None
    """How a model that is evaluated was asked while it was trained; its rows are then asked so."""

    @classmethod
    def of(cls, config: RunConfig) -> PromptWording:
        """The prompting of a run."""
        trained = PromptForm.read(config.model.path) if config.evaluation.benchmarks else None
        return cls(config.data.system_prompt, config.rewards.answer, trained)

    def asked(self, messages: Messages, source: str) -> Messages:
        """A row's chat as the model is asked. source: the row's, `benchmark/category`."""
        if self.system_prompt == "rows":
            return self.trained.ask(messages) if self.trained else messages
        turns = messages[messages[0]["role"] == "system" :]
        if self.system_prompt == "none":
            return turns
        if self.system_prompt == "published":
            name = source.partition("/")[0]
            return [*turns[:-1], _around(turns[-1], BEFORE.get(name, ""), AFTER.get(name, ""))]
        text = self.system_prompt
        if text == "ours":
            text = OURS[self.answer]
            if text == SYSTEM_PROMPT and not count_placeholders(messages):
                text = TEXT_SYSTEM_PROMPT
        return [{"role": "system", "content": text}, *turns]


def _around(message: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    """A message with text before and after its own; images stay where they are."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": before + content + after}
    parts = list(content)
    if before:
        parts.insert(0, {"type": "text", "text": before})
    if after:
        parts.append({"type": "text", "text": after})
    return message | {"content": parts}
