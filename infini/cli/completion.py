"""Shell completion: `infini completion bash` prints a script that knows verbs, keys and the choices of groups."""

from __future__ import annotations

from infini.commands import Verb, verbs
from infini.config.schema import groups, settings_in
from infini.errors import InputError, did_you_mean

SHELLS = ("bash", "zsh")
HELP = 'infini completion bash (or zsh): a script for the shell; eval "$(infini completion bash)" in ~/.bashrc\n'

_SCRIPT = """\
# Completion of infini in {shell}; made by `infini completion {shell}`.
{prepare}_infini() {{
  local line="${{COMP_LINE:0:$COMP_POINT}}" keys="" choices=""
  local token="${{line##*[[:space:]]}}" verb="${{COMP_WORDS[1]}}"
  if [ "$COMP_CWORD" -le 1 ]; then
    COMPREPLY=($(compgen -W "{verbs} completion help" -- "$token"))
    return
  fi
  case "$token" in
    *=*)
      local key="${{token%%=*}}" value="${{token#*=}}"
      case "$key" in
{choices}
      esac
      COMPREPLY=($(compgen {prefix}-W "$choices" -- "$value"))
      ;;
    *)
      case "$verb" in
{keys}
      esac
      compopt -o nospace 2>/dev/null
      COMPREPLY=($(compgen -S = -W "$keys" -- "$token"))
      ;;
  esac
}}
complete {options}-F _infini infini
"""


def script(shell: str) -> str:
    """The script for a shell. Raises InputError for a shell that has none."""
    if shell not in SHELLS:
        raise InputError(f"completion {shell!r}: must be one of {', '.join(SHELLS)}{did_you_mean(shell, SHELLS)}")
    return _SCRIPT.format(
        shell=shell,
        prepare="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        verbs=" ".join(verbs()),
        # Bash replaces what stands behind the =, zsh the whole word.
        prefix='-P "$key=" ' if shell == "zsh" else "",
        # zsh has no compopt, so no word gets a space: a key must not have one.
        options="-o nospace " if shell == "zsh" else "",
        choices=_cases({group: " ".join(options) for group, options in groups().items()}, "choices"),
        keys=_cases({name: " ".join(keys_of_verb(verb)) for name, verb in verbs().items()}, "keys"),
    )


def _cases(values: dict[str, str], variable: str) -> str:
    return "\n".join(f'        {name}) {variable}="{text}" ;;' for name, text in values.items())


def keys_of_verb(verb: Verb) -> list[str]:
    """Groups and keys that bear on a verb, with the keys of every choice of a group."""
    found = dict.fromkeys([*verb.groups, *verb.choices, *verb.keys, *verb.aliases])
    for group in verb.groups:
        for choice in groups()[group]:
            settings = settings_in(group, choice)
            # A choice that sets another group's keys too, "# @package _global_", has its own below the group's name.
            own = settings.get(group, settings)
            found |= dict.fromkeys(f"{group}.{key}" for key in own if key not in ("name", "kind", "defaults"))
    return [key for key in found if key not in verb.excludes]
