"""Where this perfsuite comes from, so that a workflow can use the same one."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perfsuite import errors, revision


@dataclass(frozen=True, slots=True)
class Source:
    """A repository of perfsuite, and the commit or tag of it."""

    host: str
    repository: str
    """OWNER/NAME."""
    ref: str

    @property
    def url(self) -> str:
        """Address to clone."""
        return f"https://{self.host}/{self.repository}"

    @property
    def raw(self) -> str:
        """Address below which its files are served as they are."""
        if self.host == "github.com":
            return f"https://raw.githubusercontent.com/{self.repository}/{self.ref}"
        return f"{self.url}/-/raw/{self.ref}"


PLACEHOLDER = Source("github.com", "OWNER/perfsuite", "v0.1.0")


def source() -> Source:
    """Return where the installed perfsuite comes from, by pip's record (PEP 610); `PLACEHOLDER` where that names no
    repository on a server."""
    try:
        record = json.loads(importlib.metadata.distribution("perfsuite").read_text("direct_url.json") or "{}")
        if "vcs_info" in record:
            return parse(record["url"], record["vcs_info"]["commit_id"]) or PLACEHOLDER
        clone = Path(unquote(urlsplit(record["url"]).path))
        address = revision.git("remote", "get-url", "origin", cwd=clone)
        return parse(address, revision.git("rev-parse", "HEAD", cwd=clone)) or PLACEHOLDER
    except (importlib.metadata.PackageNotFoundError, errors.PerfsuiteError, ValueError, KeyError, TypeError, OSError):
        return PLACEHOLDER


def parse(address: str, commit: str) -> Source | None:
    """Return the repository that an address such as git@github.com:OWNER/NAME.git names; None for another one."""
    found = re.fullmatch(
        r"(?:(?:https|ssh|git)://(?:[^/@]+@)?|[^/@:]+@)([\w.-]+)(?::\d+)?[:/]([\w.-]+(?:/[\w.-]+)+)",
        address.removesuffix("/").removesuffix(".git"),
        re.ASCII,
    )
    return Source(found[1], found[2], commit) if found and re.fullmatch("[0-9a-f]{40}", commit) else None
