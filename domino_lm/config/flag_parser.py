"""argparse with a short overview, one flag's whole text, and all wrong values in one go. Nothing here imports torch."""

import argparse
import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from domino_lm.config import megatron_flags
from domino_lm.config.neighbours import hint_of_neighbours
from domino_lm.config.settings import ConfigError, refuse

DEFAULT = " Default: "
"""Between a setting's text and its default."""


class OverviewFormatter(argparse.HelpFormatter):
    """The first sentence of each flag, in at most two lines, with its default in brackets."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=shutil.get_terminal_size().columns)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = text.rstrip().split("\n\n")  # indented ones are commands
        return "\n\n".join(block if block.startswith(" ") else textwrap.fill(block, width, break_on_hyphens=False) for block in blocks)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = list(action.option_strings)
        if isinstance(action, argparse.BooleanOptionalAction):
            names = [f"--[no-]{name[2:]}" for name in names if not name.startswith("--no-")]
        while len(", ".join(names)) > self._width - 4 and len(names) > 1:
            names.pop()  # the oldest spelling
        if isinstance(action, argparse.BooleanOptionalAction):
            return ", ".join(names)
        value = self._format_args(action, self._get_default_metavar_for_optional(action)) if action.nargs != 0 else ""
        return f"{', '.join(names)} {value}".strip()

    def _split_lines(self, text: str, width: int) -> list[str]:
        text, _, default = text.partition(DEFAULT)
        first, shown = re.split(r"(?<=\.) ", text)[0], f" [{default.removesuffix('.')}]" if default else ""
        lines = textwrap.wrap(first + shown, width, break_on_hyphens=False)
        while len(lines) > 2:
            first = first.removesuffix(" ...").rpartition(" ")[0] + " ..."
            lines = textwrap.wrap(first + shown, width, break_on_hyphens=False)
        return lines


class FlagParser(argparse.ArgumentParser):
    """Knows what is asked by ``--help``, ``--help FLAG`` and ``--help-megatron``; wrong values are ConfigErrors, collected in `faults`."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage="%(prog)s [--preset NAME] [--config FILE] [FLAG [VALUE]] ...",
            description=description,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=OverviewFormatter,
        )
        self.faults: list[str] = []
        self.wrong: set[str] = set()
        """Names of settings whose value is at fault."""
        self.add_argument("-h", "--help", nargs="?", metavar="FLAG", help="Print this overview, or all that is known of one flag.")
        self.add_argument(
            "--help-megatron", action="store_true", help="Print Megatron's other flags: which are accepted, which refused, and why."
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but for help, which is printed wherever it is asked for, and for wrong values, which are collected."""
        words = list(sys.argv[1:] if args is None else args)
        for position, word in enumerate(words):
            name, _, value = word.partition("=")
            if name in ("-h", "--help"):
                asked = value or next(iter(words[position + 1 :]), "")
                self._print_and_exit(self.describe(asked) if asked else self.format_help())
            if word == "--help-megatron":
                self._print_and_exit(megatron_flags.help_text(shutil.get_terminal_size().columns))
        return super().parse_known_args(words, namespace)

    def _print_and_exit(self, text: str) -> NoReturn:
        if int(os.environ.get("RANK", "0")) == 0:
            print(text, end="")
        raise SystemExit(0)

    def describe(self, name: str) -> str:
        """The whole text of one flag, of ours or Megatron's, given with or without dashes. Raises ConfigError if there is none."""
        flag = "--" + name.lstrip("-").replace("_", "-")
        width = shutil.get_terminal_size().columns
        action = next((item for item in self._actions if flag in {text.replace("_", "-") for text in item.option_strings}), None)
        entry = megatron_flags.find(flag)
        if action is not None:
            formatter = OverviewFormatter(self.prog)
            title, text = formatter._format_action_invocation(action), formatter._expand_help(action)
        elif entry is not None:
            outcome = {"accepted": "It is accepted without effect", "refused": "It is refused"}[entry.outcome]
            but = f" Only {' or '.join(entry.neutral)} is accepted." if entry.neutral else ""
            title, text = flag, f"A flag of Megatron's. {outcome}: {entry.why}.{but}"
        else:
            raise ConfigError(self.unknown(flag))
        return f"{title}\n{textwrap.fill(text, width, initial_indent='    ', subsequent_indent='    ', break_on_hyphens=False)}\n"

    def unknown(self, flag: str) -> str:
        """The fault of a flag that nobody knows, with the nearest that is known."""
        known = [option for action in self._actions for option in action.option_strings]
        known += [entry.flag for entry in megatron_flags.megatron_flags() if not entry.is_family]
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
        neighbour = hint_of_neighbours(flag.removeprefix("--")) or ""
        hint = re.sub(r"^nearest: (\w+)$", lambda found: f"nearest: --{found[1].replace('_', '-')}", neighbour)
        hint = hint or (f"nearest: {near[0]}" if near else "")
        return f"{flag} is not a flag of this program" + (f" ({hint})" if hint else "") + "; --help lists all flags."

    def unknown_faults(self, words: Sequence[str]) -> Iterable[str]:
        """What is said of words that are no flags and no values of any."""
        flags = [word.split("=")[0] for word in words if word.startswith("-")]
        if words and not flags:
            return [f"{' '.join(words)}: a value without a flag; every setting is given as --name value."]
        return map(self.unknown, flags)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the faults found before, too."""
        refuse([*self.faults, _sentence(message)])
        raise AssertionError

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        try:
            return argparse.SUPPRESS if action.dest in self.wrong else super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            return self._collect(action, error)

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._collect(action, error)
            return 0

    def _collect(self, action: argparse.Action, error: argparse.ArgumentError) -> str:
        """Keep a fault for later; argparse leaves a suppressed value out."""
        self.faults.append(_sentence(str(error)))
        self.wrong.add(action.dest)
        return argparse.SUPPRESS


def _sentence(message: str) -> str:
    return message.removeprefix("argument ") + "."
