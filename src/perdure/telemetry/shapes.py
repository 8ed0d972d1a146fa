"""The shape of a pipelined elastic world: into what stages it is cut, and who holds which."""

from dataclasses import dataclass, field

from perdure.model.events import Event, WorldReformed
from perdure.model.report import StageRow, WorldShape


@dataclass(slots=True)
class ShapeFold:
    """What the members of the newest epoch have said of it."""

    generation: int = -1
    epoch: int = -1
    shape: str = ""
    micro_batches: int = 0
    sections: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Rank -> the runs of blocks that it holds."""

    def add(self, event: Event) -> None:
        """Take the next event of the journal."""
        if not isinstance(event, WorldReformed) or not event.shape:
            return
        number, newest = (event.generation, event.epoch), (self.generation, self.epoch)
        if number < newest:
            return
        if number > newest:
            self.generation, self.epoch, self.sections = event.generation, event.epoch, {}
        self.shape, self.micro_batches = event.shape, event.micro_batches
        self.sections[event.rank] = (event.section, *event.more_sections)

    def find(self, generation: int) -> WorldShape | None:
        """Return the shape of `generation`'s world; None where it has no stages."""
        if generation != self.generation or not self.sections:
            return None
        stages = tuple(
            StageRow(blocks, tuple(sorted(r for r, b in self.sections.items() if blocks in b)))
            for blocks in sorted({one for runs in self.sections.values() for one in runs})
        )
        return WorldShape(self.epoch, self.shape, self.micro_batches, stages)
