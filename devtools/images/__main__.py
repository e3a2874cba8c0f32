"""``python -m devtools.images``: build the images within an environment that exists."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console

from devtools.images import ImageError, TerminalProgress, build_images


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def main(as_json: bool) -> None:
    """Build the reference images as archives in the cache folder."""
    try:
        with TerminalProgress(Console(stderr=True)) as progress:
            images = build_images(progress)
    except ImageError as error:
        click.echo(f"images: {error}", err=True)
        sys.exit(1)
    if as_json:
        facts = [
            {"reference": image.reference, "archive": str(image.archive_path), "image_id": image.image_id}
            for image in images.all
        ]
        click.echo(json.dumps({"images": facts}))
        return
    for image in images.all:
        size_mib = image.archive_path.stat().st_size / (1 << 20)
        click.echo(f"{image.reference}  {size_mib:.1f} MiB  {image.archive_path}")


if __name__ == "__main__":
    main()
