"""Write what a shell needs to complete the flags of all commands: a file per command, in the folder where the shell looks."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from domino_lm.config.arguments import build_parser

FOLDERS = {
    "bash": Path.home() / ".local/share/bash-completion/completions",
    "zsh": Path.home() / ".zfunc",
    "tcsh": Path.home() / ".tcsh/completions",
}
"""Where bash-completion looks by itself; the other two have to be told."""
NAMES = {"bash": "{}", "zsh": "_{}", "tcsh": "{}.csh"}


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description="Write files that complete the flags of all domino-lm commands. Needs the package shtab: pip install 'domino-lm[completion]'. "
        "bash finds them by itself in a new shell if bash-completion is installed; zsh after `fpath+=~/.zfunc` before compinit; tcsh after `source FILE`.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=list(FOLDERS), help="shell to complete in")
    parser.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="folder to write to (default: where the shell's own completions lie)"
    )
    return parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command of this package that is installed, by its name."""
    found: dict[str, argparse.ArgumentParser] = {}
    for command in sorted(entry_points(group="console_scripts"), key=lambda each: each.name):
        if command.name.startswith("domino-lm-"):
            module = importlib.import_module(command.module)
            found[command.name] = build_parser() if command.name == "domino-lm-pretrain" else module.flag_parser()
            found[command.name].prog = command.name
    return found


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script by which ``shell`` completes a command; values that may be paths are completed as such."""
    import shtab

    for action in parser._actions:
        if action.nargs != 0 and action.choices is None and action.type in (None, str, Path):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell=shell))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; the exit code."""
    own = flag_parser().parse_args(argv)
    if importlib.util.find_spec("shtab") is None:
        print("error: completion needs the package shtab: pip install 'domino-lm[completion]'", file=sys.stderr)
        return 1
    folder = own.output_dir or FOLDERS[own.shell]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        commands = parsers()
        for name, parser in commands.items():
            (folder / NAMES[own.shell].format(name)).write_text(completion(parser, own.shell))
    except OSError as error:
        print(f"error: --output-dir {folder}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"wrote completion of {len(commands)} commands to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
