"""Which member of an archive is the image that a row names by a path of another machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def _endings(path: str) -> Iterator[str]:
    """The path, then the path without its first folder, and so on, down to the file's name."""
    yield path
    while "/" in path:
        path = path.partition("/")[2]
        yield path


class Wanted:
    """Matches paths with members, where one is an ending of the other on whole components.

    `/foreign/prefix/mathv60k_img/a/1.png` and the bare `1.png` both find the member
    `mathv60k_img/a/1.png`. The member that shares most components wins; if two share equally many, the
    path is ambiguous and finds none.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = frozenset(paths)
        self._by_ending: dict[str, list[str]] = {}
        for path in self.paths:
            for ending in _endings(path):
                if ending != path:
                    self._by_ending.setdefault(ending, []).append(path)
        self._matches: dict[str, tuple[int, str]] = {}
        """Path -> (shared components, member); an empty member stands for a tie."""

    def __len__(self) -> int:
        return len(self.paths)

    def match(self, member: str) -> bool:
        """Notes the paths that this member is the image of. False if there are none."""
        hit = False
        for ending in _endings(member):
            shared = 2 * ending.count("/") + 2
            if ending in self.paths:
                self._note(ending, member, shared + (ending == member))
                hit = True
        for path in self._by_ending.get(member, ()):
            self._note(path, member, 2 * member.count("/") + 2)
            hit = True
        return hit

    def _note(self, path: str, member: str, shared: int) -> None:
        best, former = self._matches.get(path, (0, ""))
        if shared > best:
            self._matches[path] = shared, member
        elif shared == best and member != former:
            self._matches[path] = shared, ""

    def member(self, path: str) -> str | None:
        """The member that is this image; None if no member was, and "" if several could be."""
        return self._matches[path][1] if path in self._matches else None
