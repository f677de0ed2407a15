"""Model folders with Qwen's own chat templates, and its vocabulary where one is given."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.config import Model
from trainer.data.processor import Prompter

TEMPLATES = Path(__file__).parent / "templates"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is split before merges, as tokenizer.json of Qwen2 and Qwen2.5 says."""
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 4096,
}


def tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """A byte-level tokenizer as Qwen's, with its three control tokens behind the vocabulary."""
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ENDS])
    return built


def prompter(folder: Path, template: str, built: Tokenizer | None = None, kind: str = "qwen2") -> Prompter:
    """The prompter of a text model with one of the templates; without a tokenizer every byte is a token."""
    built = built or tokenizer(BYTES, [])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    wrapped.save_pretrained(folder)
    config = {"model_type": kind, "vocab_size": built.get_vocab_size(), **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    return Prompter(Model(path=str(folder)))


_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _LIST = 8, 9


def gguf(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file, llama.cpp's format."""
    with open(path, "rb") as file:

        def number(form: str) -> Any:
            return struct.unpack(form, file.read(struct.calcsize(form)))[0]

        def value(kind: int) -> Any:
            if kind == _TEXT:
                return file.read(number("<Q")).decode()
            if kind == _LIST:
                inner = number("<I")
                return [value(inner) for _ in range(number("<Q"))]
            return number(_NUMBERS[kind])

        assert file.read(4) == b"GGUF" and number("<I") >= 2 and number("<Q") == 0
        found = {}
        for _ in range(number("<Q")):
            name = value(_TEXT)
            found[name] = value(number("<I"))
        return found
