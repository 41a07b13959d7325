"""How long KV blocks take from one emulated engine to another. Pure."""

from dataclasses import dataclass

from sterna.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class CopyTime:
    """The constants, in seconds.

    A stage of n blocks takes `stage_s + n * block_s` when no other copy shares a link with it.

    Attributes:
        block_s: a block.
        stage_s: a stage, whatever it holds: gathering, the first bytes' way, scattering.
    """

    block_s: float
    stage_s: float

    def __post_init__(self) -> None:
        for option in ("block_s", "stage_s"):
            value = getattr(self, option)
            if value <= 0:
                raise ConfigurationError(f"{option} must be positive, not {value!r}")

    def stage_duration_s(self, num_blocks: int) -> float:
        """A stage of so many blocks, alone on its links."""
        return self.stage_s + num_blocks * self.block_s
