"""The address of a bucket: `s3://NAME/PREFIX`, also `gs://` and `r2://`, or `file:///FOLDER`. Standard
library only.

Desk, nodes and rendered shell (`trainer/shell/bucket.sh`) accept the very same addresses: a test holds them
equal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.system.errors import ConfigError

STORES = ("s3", "gs", "r2")
FORMS = "s3://NAME/PREFIX, gs://NAME/PREFIX, r2://NAME/PREFIX or file:///FOLDER"

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]"
"""A bucket's name. Each store has stricter rules of its own; what this refuses, all of them refuse."""
KEY_PART = r"[A-Za-z0-9._=@+:,~-]+"
"""What stands between two slashes of a prefix: safe in a key, a shell word and a YAML string."""
FOLDER_PART = r"""[^]/\x00-\x20\x7f"'`\\$*?{}<>|[]+"""
"""The same for a folder of this machine, where other alphabets are usual."""


@dataclass(frozen=True)
class BucketAddress:
    scheme: str
    """s3, gs, r2 or file."""
    bucket: str
    """Name of the bucket; "" for a folder."""
    path: str
    """Prefix in the bucket without slashes at its ends, or the absolute path of the folder."""

    @classmethod
    def parse(cls, text: str, what: str = "bucket") -> BucketAddress:
        """Reads an address. Raises ConfigError, which begins with `what` and says what to write instead."""
        shown = f"{what} {text!r}"
        _refuse(
            f"{shown} is empty: write {FORMS}; if it was given as $NAME, that variable is not set",
            not text.strip(),
        )
        _refuse(
            f"{shown} holds a variable that was not filled in: write {FORMS}, or set the variable",
            "$" in text,
        )
        _refuse(f"{shown} has white space in it: remove that", re.search(r"\s", text, re.ASCII))
        scheme, separator, rest = text.partition("://")
        _refuse(
            f"{shown}: unknown form of address: write it as {FORMS}",
            not separator or scheme not in (*STORES, "file"),
        )
        path = rest.removesuffix("/")
        if scheme == "file":
            as_in = "as in file:///data/checkpoints"
            _refuse(f"{shown}: write an absolute path, {as_in}", not rest.startswith("/"))
            _refuse(f"{shown} names no folder: write file:///FOLDER, {as_in}", not path)
            _check_parts(path[1:], FOLDER_PART, shown)
            return cls("file", "", path)

        bucket, slash, prefix = rest.partition("/")
        _refuse(
            f"{shown} names no bucket: write {scheme}://NAME/PREFIX; was NAME a variable, it is not set",
            not bucket,
        )
        _refuse(
            f"{shown}: {bucket!r} is no bucket name: it takes 3 or more letters, digits, dots and hyphens,"
            " and begins and ends with a letter or digit",
            not re.fullmatch(NAME, bucket),
        )
        prefix = prefix.removesuffix("/")
        if prefix or (slash and rest.endswith("//")):
            _check_parts(prefix, KEY_PART, shown)
        return cls(scheme, bucket, prefix)

    @property
    def is_store(self) -> bool:
        """Whether this is an object store, which all machines reach, and no folder of one machine."""
        return self.scheme != "file"

    @property
    def url(self) -> str:
        """The address without a slash at its end."""
        if not self.is_store:
            return f"file://{self.path}"
        return f"{self.scheme}://{self.bucket}/{self.path}".removesuffix("/")

    def under(self, key: str) -> str:
        """URL of `key` below this address."""
        return f"{self.url}/{key}"


def is_address(text: str) -> bool:
    """Whether `text` is meant as an address, right or wrong, and not as a path of this machine. `s3:` and
    `s3:/run` count: that is what is left of `s3://$UNSET` where slashes are cut off or joined."""
    return "://" in text or bool(re.match(rf"({'|'.join(STORES)}|file):", text))


def _check_parts(path: str, part: str, shown: str) -> None:
    """Raises ConfigError unless all that stands between slashes is a name."""
    for name in path.split("/"):
        _refuse(
            f"{shown} has nothing between two slashes: write one slash, or set what stands there", not name
        )
        _refuse(f"{shown}: {name!r} is no folder of a bucket: write the path without it", name in (".", ".."))
        _refuse(
            f"{shown}: {name!r} has characters that a path cannot have here: use letters, digits, - . _",
            not re.fullmatch(part, name),
        )


def _refuse(change: str, wrong: object) -> None:
    if wrong:
        raise ConfigError(change)
