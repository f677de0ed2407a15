"""The forms in which people keep questions and answers, found by their columns: a record in, a chat out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from data_prep.sources.choices import with_choices
from data_prep.sources.file_records import first_value, parse_json, structure
from data_prep.sources.placeholders import ImagePlaces, is_marked
from data_prep.sources.row_source import SHORT, BadRecord, stated_answer, text_of, worked
from trainer.data.schema import LEARNED

ROLES = {
    "question": ("question", "problem", "query", "prompt", "instruction", "input"),
    "answer": (
        *("answer", "gt_answer", "ground_truth", "final_answer", "expected_answer", "correct_answer"),
        *("gold", "label", "target", "response", "output"),
    ),
    "images": ("images", "image", "decoded_image", "image_path", "image_paths", "img", "imgs", "image_file"),
    "choices": ("choices", "options"),
    "solution": ("solution", "rationale", "explanation", "reasoning", "cot"),
    "system": ("system", "system_prompt"),
    "source": ("source", "data_source", "dataset"),
    "split": ("split",),
}
"""Role -> names that its column may have; the first that exists wins. `--map ROLE=COLUMN` names another."""
CHATS = {
    "message": "MathV60K",
    "conversations": "LLaVA / ShareGPT",
    "messages": "messages",
    "prompt": "prompt messages",
}
"""Columns that hold whole conversations."""
SPEAKERS = {"human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant"}
PASS_RATE = re.compile(r"pass_?rate", re.IGNORECASE)
_MARK = re.compile(r"####|\\(?:boxed|fbox)")
_IMAGE_COLUMN = re.compile(r"(?:image|img|picture)[ _]?(\d{1,3})", re.IGNORECASE)
TERSE = 20
"""Characters by which a worked solution is longer than its answer, at least."""
_NOT_FINITE = frozenset(("nan", "NaN", "inf", "-inf"))
"""A float that is no number, as text."""


@dataclass
class Parsed:
    messages: list[dict[str, Any]]
    images: list[Any]
    """Paths, bytes, data URLs or structures of these, in the order of the placeholders."""
    answer: str
    solution: str = ""
    source: str = ""
    split: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """One way to read records: its name, and the column of each role (dotted for a field inside)."""

    name: str
    columns: dict[str, str]
    keep: bool = False
    """Whether columns without a role go into `extra` (an evaluation set's scorers want them); pass
    rates always do."""
    marked: bool = False
    """Whether an answer counts only after `####` or in a box."""
    sft: bool = False
    """Whether the reply is learned from as it stands, and no reference answer is needed."""
    only: tuple[str, Sequence[str]] = ("", ())
    """A column, and the values of it with which a row is taken; the others ask for graders that are not
    here."""

    @property
    def is_mathv60k(self) -> bool:
        """Whether lines hold `question`, `answer` (`$\\boxed{B}$`) and `message`, a JSON list inside a
        string, whose images are paths of the machine that wrote it: absolute, `file://`, relative or bare,
        with slashes possibly escaped."""
        return self.columns.get("chat") == "message"

    def parse(self, record: dict[str, Any]) -> Parsed:
        """Reads one record. Raises BadRecord."""
        column, accepted = self.only
        if column and (value := text_of(_inside(record, column))) not in accepted:
            raise BadRecord(
                "other_reward", f"{column} is {value!r}, and the grader knows {', '.join(accepted)}"
            )
        places = self._places(record)
        learned: list[int] = []
        if "chat" in self.columns:
            turns = _turns(self.value(record, "chat"))
            if self.sft:
                turns, learned = flagged(turns)
            messages, reply = _chat(turns, places)
            answer = self._answer(record)
        else:
            messages, answer = self._question(record, places)
            reply = ""
        images = places.finish()
        if self.sft:
            answer, solution = self._learned(record, answer, reply)
        else:
            answer, solution = self._graded(record, answer, reply)
        return Parsed(
            messages=messages,
            images=images,
            answer=answer,
            solution=solution,
            source=text_of(self.value(record, "source")),
            split=text_of(self.value(record, "split")),
            extra=self._extra(record) | ({LEARNED: learned} if learned else {}),
        )

    def _places(self, record: dict[str, Any]) -> ImagePlaces:
        """The images beside the record's texts; those of columns `image_1`, `image_2`... by their numbers."""
        images: list[Any] = []
        numbered: dict[int, Any] = {}
        for column in self.columns.get("images", "").split(","):
            number = _IMAGE_COLUMN.fullmatch(column)
            for image in flattened(_inside(record, column)):
                images.append(image)
                numbered[int(number[1]) if number else len(images)] = image
        return ImagePlaces(images, numbered)

    def _question(self, record: dict[str, Any], places: ImagePlaces) -> tuple[list[dict[str, Any]], str]:
        """Messages and answer of a record that has a question."""
        question = text_of(self.value(record, "question"))
        if self.columns.get("question") == "instruction":
            more = text_of(record.get("input"))
            question = f"{question}\n\n{more}" if more else question
        answer = self._answer(record)
        choices = listed(self.value(record, "choices"))
        if choices:
            question, answer = with_choices(question, choices, self.value(record, "answer"), self.keep)

        messages: list[dict[str, Any]] = []
        system = text_of(self.value(record, "system"))
        if system:
            messages.append({"role": "system", "content": system})
        if places.beside and not is_marked(question):
            content: str | list[dict[str, str]] = places.first(question)
        else:
            content = places.content(question.strip())
        messages.append({"role": "user", "content": content})
        return messages, answer

    def _graded(self, record: dict[str, Any], answer: str, reply: str) -> tuple[str, str]:
        """Reference answer, and worked answer (empty if there is none). Raises BadRecord."""
        solution = text_of(self.value(record, "solution"))
        if not solution and len(reply) > len(answer) + TERSE:
            solution = reply
        if not answer and not solution:
            answer = reply
        if not answer and not solution:
            raise BadRecord(
                "no_answer_field", f"nothing under {self.columns.get('answer') or 'any known column'}"
            )
        given = answer
        answer = stated_answer(given or solution)
        unstated = not answer and (not given or len(given) > SHORT)
        if unstated or (self.marked and not _MARK.search(given or solution)):
            raise BadRecord("no_answer_field", "the text states no answer: no box, no ####, no `answer is`")
        if "####" in given:
            solution = re.sub(r"<<[^>]*>>", "", given.rpartition("####")[0])
        if solution and "<answer>" not in solution:
            solution = "" if solution.strip() == answer else worked(solution.strip(), answer)
        return answer, solution

    def _learned(self, record: dict[str, Any], answer: str, reply: str) -> tuple[str, str]:
        """Reference answer and solution for supervised training, which learns all of the reply."""
        solution = text_of(self.value(record, "solution")) or reply
        if not (solution or answer).strip():
            raise BadRecord("no_reply", "there is no solution, no answer and no last reply to learn from")
        if not solution:
            return "", answer
        return stated_answer(answer), solution

    def _answer(self, record: dict[str, Any]) -> str:
        value = self.value(record, "answer")
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, (list, dict)):
            raise BadRecord("no_answer_field", f"the answer is a {type(value).__name__}, not one value")
        answer = text_of(value)
        if answer in _NOT_FINITE:
            raise BadRecord("bad_answer", f"the answer is {answer}, no number")
        return answer

    def value(self, record: dict[str, Any], role: str) -> Any:
        """The value of a role; None where it has no column or the record lacks it."""
        return _inside(record, self.columns[role]) if role in self.columns else None

    def _extra(self, record: dict[str, Any]) -> dict[str, Any]:
        used = {column for role, column in self.columns.items() if role not in ("choices", "source")}
        kept = {}
        for name, value in record.items():
            if PASS_RATE.search(name):
                kept[name] = float(value) if value not in (None, "") else None
            elif self.keep and name not in used and value not in (None, "") and _plain(value):
                kept[name] = value
        return kept


def _inside(record: dict[str, Any], column: str) -> Any:
    """The value of a column, or of a field inside one (`metadata.source`), which may be JSON text."""
    value: Any = record
    for name in column.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = structure(value)
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _plain(value: Any) -> bool:
    """Whether it is small and JSON: no image, no long text."""
    return not isinstance(value, bytes) and "bytes" not in str(value)[:100] and len(str(value)) < 4000


def detect(
    records: Sequence[dict[str, Any]], mapping: dict[str, str], keep: bool = False, sft: bool = False
) -> Form:
    """The form of a file by its first records; `mapping` (role -> column) comes before what is found.

    Raises ValueError saying what was looked for.
    """
    names = list(dict.fromkeys(chain.from_iterable(records)))
    unknown = [c for c in mapping.values() if c.partition(".")[0] not in names]
    if unknown:
        raise ValueError(f"no column {', '.join(unknown)}: there are {', '.join(names)}")
    columns = dict(mapping)
    chat = "" if "question" in mapping else _chat_column(records)
    if chat:
        columns["chat"] = chat
    rewards = any(_inside(record, "reward_model.ground_truth") is not None for record in records)
    if chat and rewards and "answer" not in columns:
        columns["answer"] = "reward_model.ground_truth"
    for role, known in ROLES.items():
        if role in columns or (role == "question" and chat):
            continue
        free = [c for c in known if c in names and c not in columns.values()]
        if free:
            columns[role] = free[0]
        elif role == "images":
            numbered = sorted(filter(None, map(_IMAGE_COLUMN.fullmatch, names)), key=lambda m: int(m[1]))
            if numbered:
                columns[role] = ",".join(match[0] for match in numbered)
    has_question = "question" in columns
    has_answer = "answer" in columns or "solution" in columns
    if not chat and not (has_question and has_answer):
        raise ValueError(
            f"columns {', '.join(names)}; looked for a question ({', '.join(ROLES['question'])}) "
            f"with an answer ({', '.join(ROLES['answer'])}) or a solution, "
            f"or for a conversation ({', '.join(CHATS)}). "
            "Name them: --map question=COLUMN,answer=COLUMN,images=COLUMN"
        )
    name = "verl" if chat and rewards else CHATS.get(chat, "question and answer")
    return Form(name, columns, keep, sft=sft)


def _chat_column(records: Sequence[dict[str, Any]]) -> str:
    """The first known column that holds conversations; empty if there is none."""
    for column in CHATS:
        value = next((record[column] for record in records if record.get(column)), None)
        if isinstance(value, str) and value.lstrip().startswith("[{"):
            return column
        if isinstance(value, list) and isinstance(value[0], dict):
            return column
    return ""


def listed(value: Any) -> list[Any]:
    """A value that may be one, a list, a list written as JSON or as Python writes it, or missing."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = value if (read := structure(value)) is None else read
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        return [value]
    return [item for item in value if item not in (None, "")]


def flattened(value: Any) -> list[Any]:
    """Images of a column, in lists of any depth."""
    images = []
    for item in listed(value):
        images += flattened(item) if isinstance(item, list) else [item]
    return images


def _chat(turns: list[Any], places: ImagePlaces) -> tuple[list[dict[str, Any]], str]:
    """Messages with image placeholders, and the last reply (which is not in the messages).

    Images beside the conversation go where it names them, or before the first question if it nowhere does.
    """
    spoken = [_turn(turn) for turn in turns]
    if spoken[-1][0] == "system":
        raise BadRecord("bad_message", "the last turn is the system's")
    reply = ""
    if spoken[-1][0] == "assistant":
        last = spoken.pop()[1]
        reply = last if isinstance(last, str) else "\n".join(part.get("text") or "" for part in last)
    marked = any(_names_images(content) for _, content in spoken)
    messages: list[dict[str, Any]] = []
    roles = set()
    for role, content in spoken:
        first_question = role == "user" and "user" not in roles
        roles.add(role)
        if not isinstance(content, str):
            content = _parts(content, places)
        elif first_question and places.beside and not marked:
            content = places.first(content)
        else:
            content = places.content(content)
        messages.append({"role": role, "content": content})
    if "user" not in roles:
        raise BadRecord("bad_message", "there is no user turn")
    return messages, reply


def _parts(content: list[Any], places: ImagePlaces) -> list[dict[str, str]]:
    """The parts of a turn, each a text or an image's place. An image's part names it, or the next one beside
    the conversation."""
    parts: list[dict[str, str]] = []
    read = [_part(part) for part in content]
    places_itself = any(kind == "image" for kind, _ in read)
    for kind, value in read:
        if kind == "image":
            parts += places.part(value)
        elif places_itself and is_marked(value):
            raise BadRecord("image_count", "a turn has parts that are images, and a text that names others")
        else:
            placed = places.content(value)
            parts += [{"type": "text", "text": placed}] if isinstance(placed, str) else placed
    return parts


def _names_images(content: Any) -> bool:
    """Whether a turn's text or parts say where an image stands."""
    if isinstance(content, str):
        return is_marked(content)
    return any(kind == "image" or is_marked(value) for kind, value in map(_part, content))


def flagged(turns: list[Any]) -> tuple[list[Any], list[int]]:
    """(turns up to the last reply that is learned, numbers of the earlier ones that are), by flags on
    assistant turns.

    `loss: true` or false, or `weight: 1` or 0 as in OpenAI's files. Without a flag the last reply is
    learned, and no other. Raises BadRecord where none is.
    """
    flags = {}
    for n, turn in enumerate(turns):
        if isinstance(turn, dict) and _turn(turn)[0] == "assistant":
            flags[n] = turn.get("loss", turn.get("weight"))
    if all(flag is None for flag in flags.values()):
        return turns, []
    last = max(flags)
    learned = [n for n, flag in flags.items() if flag or (flag is None and n == last)]
    if not learned:
        raise BadRecord("no_reply", "every assistant turn says that it is not to be learned")
    return turns[: learned[-1] + 1], learned[:-1]


def _turns(chat: Any) -> list[Any]:
    """The turns of a conversation, which may be written as JSON. Raises BadRecord."""
    try:
        turns = parse_json(chat) if isinstance(chat, str) else chat
    except ValueError as error:
        raise BadRecord("bad_message", f"the conversation is not JSON: {error}") from None
    if not isinstance(turns, list) or not turns:
        raise BadRecord("bad_message", "the conversation is no list of turns")
    return turns


def _turn(turn: Any) -> tuple[str, Any]:
    if not isinstance(turn, dict):
        raise BadRecord("bad_message", "a turn is no object")
    role = turn.get("role") or turn.get("from")
    content = turn.get("content") if "content" in turn else turn.get("value")
    role = SPEAKERS.get(role, role) if isinstance(role, str) else None
    if role not in ("system", "user", "assistant"):
        raise BadRecord("bad_message", f"a turn's role is {role!r}")
    if not isinstance(content, (str, list)):
        raise BadRecord("bad_message", f"the {role} turn has no content")
    return role, content


def _part(part: Any) -> tuple[str, Any]:
    """("text", text) or ("image", where it is; None where it stands beside the conversation)."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return "text", part["text"]
    if kind in ("image", "image_url", "input_image"):
        return "image", first_value(part, ("image", "image_url", "url", "path"))
    raise BadRecord("bad_message", f"content of an unknown kind {kind!r}")
