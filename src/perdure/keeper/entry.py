"""The beginning of a warm image: logs all imports from perdure's own on.

What is there when this begins, a fresh Python has as well.
"""

from perdure.keeper.modules import ModuleLog

_log = ModuleLog()
with _log:
    from perdure.keeper import zygote


def main(job: str, node: int, fd: int) -> None:
    """Be an image of `node` of `job`; `fd` is its end of the keeper's socket."""
    zygote.main(job, node, fd, _log)
