"""The `infini` command: reads the verb, checks the words, composes the configuration, and runs the verb.

It refuses words that it cannot read, and keys that the verb does not read because they would change nothing. Its errors
make a suggestion.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from infini.cli.arguments import bracketed, check_lengths, prepare, refuse_bare_words, refuse_unread, without_dashes
from infini.cli.completion import HELP, script
from infini.cli.messages import interrupted, one_line
from infini.cli.sweep import share, sweep
from infini.commands import Verb, verbs
from infini.config.schema import key_of
from infini.errors import InputError, did_you_mean, lone_surrogate
from infini.system.process import OUTPUT, as_interrupt, headless_matplotlib, robust_streams

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, given without the program name. Returns the exit code; 2: the user can fix the error."""
    # Read when torch is imported, which comes later: its notes on DistributedDataParallel address programmers.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        verb = verbs().get(arguments[0]) if arguments else None
    except InputError as error:
        # A module in infini/commands raised it.
        print(f"infini: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    # Work continues when nobody reads its output any more; a command that only prints stops.
    with robust_streams(patient=verb is not None and not verb.needs_reader) as finish, headless_matplotlib():
        try:
            # Schedulers send this signal before they kill.
            @as_interrupt("SIGTERM")
            def run() -> int:
                code = _dispatch(arguments)
                finish()
                return code

            return run()
        except KeyboardInterrupt as stopped:
            return _interrupted(verb, str(stopped))
        except Exception as error:
            if isinstance(error, BrokenPipeError) and error.filename == OUTPUT:
                return 0
            if (line := one_line(error)) is None:
                if interrupted(error):
                    return _interrupted(verb)
                raise
            print(f"infini: error: {_as_typed(verb, arguments, line)}", file=sys.stderr)
            return USAGE_ERROR


def _as_typed(verb: Verb | None, arguments: Sequence[str], line: str) -> str:
    """An error that begins with a key, with the shorter name of that key where the user typed it."""
    for short, whole in (verb.aliases if verb is not None else {}).items():
        if line.startswith(f"{whole}=") and any(word.startswith(f"{short}=") for word in arguments):
            return short + line.removeprefix(whole)
    return line


def _interrupted(verb: Verb | None, message: str = "") -> int:
    message = message or (verb.if_stopped if verb is not None else "")
    print(f"infini: interrupted{'; ' * bool(message)}{message}", file=sys.stderr)
    return INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    if len(arguments) > 1 and arguments[0] == "help":
        # `infini help train` is `infini train --help`.
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments == ["--version"]:
        from infini import __version__

        print(f"infini {__version__}")
        return 0
    if arguments[0] == "completion":
        print(HELP if {"-h", "--help"} & set(arguments) else script(" ".join(arguments[1:])), end="")
        return 0
    for word in arguments:
        # Records and checkpoints store the command line as UTF-8.
        if lone_surrogate(word):
            raise InputError(f"{word.encode(errors='replace').decode()!r}: is not UTF-8 text")
        if "\0" in word:
            raise InputError(f"{word!r}: holds a zero byte")
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(f"the working folder no longer exists ({error.strerror}); change to another") from error
    name, rest = arguments[0], arguments[1:]
    if name not in verbs():
        known = [*verbs(), "completion", "help"]
        raise InputError(f"{name!r}: no such verb; allowed: {', '.join(known)}{did_you_mean(name, known)}")
    verb = verbs()[name]
    if {"-h", "--help"} & set(rest):
        from infini.cli.help import verb_help

        refuse_bare_words(verb, [word for word in rest if not word.startswith("-")])
        print(verb_help(verb, [*verb.fixed_settings, *(bracketed(word) for word in rest if "=" in word)]))
        return 0
    multirun = bool({"-m", "--multirun"} & set(rest))
    words = [word for word in rest if word not in ("-m", "--multirun")]
    for word in words:
        if word.startswith("-"):
            options = ("-m", "--multirun", "-h", "--help")
            hint = without_dashes(verb, word, words) or did_you_mean(word, options)
            raise InputError(f"{word!r}: no such option; allowed: {', '.join(options)}{hint}")
    refuse_bare_words(verb, words)
    refuse_unread(name, words)
    check_lengths(words)
    if multirun:
        return share(verb, words) if verb.shares_runs else sweep(verb, words)
    return _run(verb, words)


def _run(verb: Verb, words: Sequence[str]) -> int:
    """Run a verb on its words."""
    cfg, overrides, extra = prepare(verb, words)
    for word in overrides:
        if key_of(word).startswith("hydra"):
            raise InputError(f"{word}: Hydra runs sweeps alone; add -m")
        if key_of(word) == "workers":
            raise InputError(f"{word}: several processes need -m and a launcher, for example hydra/launcher=joblib")
    return verb.run(cfg, overrides, **extra) or 0


def _overview() -> str:
    lines = ["infini <verb> [key=value ...] [-m]", ""]
    lines += [f"  {name:<10} {verb.summary}\n  {'':<10}   {verb.example}" for name, verb in verbs().items()]
    lines += ["", "-m runs one job a combination of values: infini train -m model=infini_linear,local seed=1,2,3"]
    lines += ["infini <verb> --help lists the keys; infini completion bash (or zsh) prints a script for the shell."]
    return "\n".join(lines)
