"""Qwen's own vocabulary: the tokens that llama.cpp's files say, special tokens, and lengths of prompts.

The source distribution of llama-cpp-python (76 MB) holds it; QWEN_SDIST names one that is here already.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.data.qwen import ENDS, gguf, prompter, tokenizer
from trainer.data.schema import Row

pytestmark = pytest.mark.long

SDIST = "llama-cpp-python==0.3.36"
FILES = "vendor/llama.cpp/models/ggml-vocab-qwen2.gguf"
BETWEEN = "\n__ggml_vocab_test__\n"
USER = [{"role": "user", "content": "Wie groß ist die Fläche? 12 × 34 = …"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folder with the vocabulary, texts, and the ids that llama.cpp gives them."""
    folder = tmp_path_factory.mktemp("sdist")
    archive = os.environ.get("QWEN_SDIST")
    if not archive:
        pip = shutil.which("pip")
        if pip is None:
            pytest.skip("pip is missing")
        command = [pip, "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", SDIST]
        subprocess.run([*command, "-d", str(folder)], check=True, timeout=600)
        (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            if FILES in member.name:
                member.name = Path(member.name).name
                tar.extract(member, folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def built(files):
    told = gguf(files / "ggml-vocab-qwen2.gguf")
    tokens = told["tokenizer.ggml.tokens"]
    first = tokens.index(ENDS[0])
    vocabulary = {token: number for number, token in enumerate(tokens[:first])}
    merges = [tuple(merge.split(" ")) for merge in told["tokenizer.ggml.merges"]]
    return tokenizer(vocabulary, merges)


def test_texts_have_the_ids_that_llama_cpp_says(files, built):
    texts = (files / "ggml-vocab-qwen2.gguf.inp").read_text().removesuffix(BETWEEN).split(BETWEEN)
    lines = (files / "ggml-vocab-qwen2.gguf.out").read_text().splitlines()
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        assert built.encode(text, add_special_tokens=False).ids == list(map(int, line.split())), text


def test_special_tokens_are_qwen_s(built, tmp_path):
    one = prompter(tmp_path, "qwen2.5", built)
    assert [built.token_to_id(token) for token in ENDS] == [151643, 151644, 151645]
    assert one.eos_token_id == 151645 and one.end_token_ids() == {151645}
    spelled = one.tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    assert spelled == [151645], "written out in a row's text it would end the reply: preparation refuses it"
    assert one.reply_text([16, 10, 16, 151645]) == "1+1"


def test_lengths_of_prompts_are_those_of_the_model(built, tmp_path):
    lengths = {}
    for template, kind in (("qwen2.5", "qwen2"), ("qwen3", "qwen3"), ("qwen3.5", "qwen3")):
        (tmp_path / template).mkdir()
        one = prompter(tmp_path / template, template, built, kind)
        row = Row("r", "s", USER, [], "2", "number")
        ids = one.token_ids(row)
        assert one.tokenizer.decode(ids) == one.texts([USER])[0]
        assert one.lengths([USER], [[]], ["r"]) == [len(ids)]
        lengths[template] = len(ids)
    # Qwen2.5's template adds a system message, Qwen3.5's opens the reasoning.
    assert lengths["qwen2.5"] - lengths["qwen3"] == 21
    assert lengths["qwen3.5"] > lengths["qwen3"]
