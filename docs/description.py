"""What an index shows of the package: README.md, with addresses in the place of relative links and pictures."""

import re

from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


def described(text, repository, version):
    """Return a text in Markdown whose links lead to the files of a version in a repository."""

    def address(match):
        folder = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({repository}/{folder}/{version}/{match['file']})"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?![a-z]+:|#)(?P<file>[^)\s]+)\)", address, text)


class Description(MetadataHookInterface):
    """Gives the description to whatever builds the package."""

    def update(self, metadata):
        """Add the field `readme`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = described(text, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
