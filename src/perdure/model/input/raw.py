"""Arguments, variables, and folders as the system gives them: bytes that need not be UTF-8.

Python shows a byte that is not UTF-8 as half of a surrogate pair, which JSON cannot hold. Such text
travels with a mark and two hexadecimal digits in the place of each such byte. The mark is U+FDD0,
which Unicode leaves to programs for their own use. Where the text itself has one, `00` follows.
"""

import re
from typing import TypeVar

from msgspec import structs

from perdure.model.bus.wire import KeeperSpawn, RankLaunch
from perdure.model.job import JobSpec

Spawn = TypeVar("Spawn", bound=KeeperSpawn)

_MARK = "\ufdd0"
_CARRIED = re.compile(f"[\udc80-\udcff{_MARK}]")
_RESTORED = re.compile(f"{_MARK}(00|[89a-f][0-9a-f])")


def carry_text(text: str) -> str:
    r"""Return `text` as JSON can hold it.

    >>> carry_text("caf\udce9")
    'caf\ufdd0e9'
    """
    return _CARRIED.sub(lambda found: f"{_MARK}{_number(found[0]):02x}", text)


def restore_text(text: str) -> str:
    r"""Return what `carry_text` was given.

    >>> restore_text("caf\ufdd0e9")
    'caf\udce9'
    """
    return _RESTORED.sub(lambda found: _name(int(found[1], 16)), text)


def _number(character: str) -> int:
    return 0 if character == _MARK else ord(character) - 0xDC00


def _name(number: int) -> str:
    return chr(0xDC00 + number) if number else _MARK


def carry_variables(environ: dict[str, str]) -> dict[str, str]:
    """Return an environment as JSON can hold it."""
    return {carry_text(name): carry_text(value) for name, value in environ.items()}


def restore_variables(environ: dict[str, str]) -> dict[str, str]:
    """Return what `carry_variables` was given."""
    return {restore_text(name): restore_text(value) for name, value in environ.items()}


def carry_job(spec: JobSpec) -> JobSpec:
    """Return a job with all that its ranks are given as JSON can hold it."""
    return structs.replace(
        spec,
        script=carry_text(spec.script),
        args=tuple(map(carry_text, spec.args)),
        cwd=carry_text(spec.cwd),
        env=carry_variables(spec.env),
    )


def restore_job(spec: JobSpec) -> JobSpec:
    """Return what `carry_job` was given."""
    return structs.replace(
        spec,
        script=restore_text(spec.script),
        args=tuple(map(restore_text, spec.args)),
        cwd=restore_text(spec.cwd),
        env=restore_variables(spec.env),
    )


def restore_spawn(order: Spawn) -> Spawn:
    """Return an order with all that its ranks are given as the system has it."""
    return structs.replace(
        order,
        script=restore_text(order.script),
        args=tuple(map(restore_text, order.args)),
        cwd=restore_text(order.cwd),
        ranks=tuple(map(_restore_launch, order.ranks)),
    )


def _restore_launch(launch: RankLaunch) -> RankLaunch:
    return structs.replace(launch, env=restore_variables(launch.env))
