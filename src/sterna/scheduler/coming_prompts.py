"""Prompts that instances have still to compute, found by their beginnings. Pure.

Many prompts begin alike, with a system prompt or the turns of a session before. They stand in a
tree whose branches are what prompts share, so that a search takes as many steps as a prompt shares
pieces with others, however many these are.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from sterna.types import InstanceId

Hashes = Sequence[int]
"""The hashes of a prompt's blocks. A hash says what is before its block, too."""


@dataclass(slots=True)
class _Piece:
    """Blocks that all prompts below have behind their earlier pieces: `hashes[begin:end]`.

    Attributes:
        numbers: of the prompts that have it, by instance.
        next: the pieces behind it, by their first hash. A prompt ends at the end of a piece.
    """

    hashes: Hashes
    begin: int
    end: int
    numbers: dict[InstanceId, int]
    next: "dict[int, _Piece]" = field(default_factory=dict)

    def shared_until(self, hashes: Hashes) -> int:
        """The place at which this piece or the hashes end, or differ; they begin alike."""
        mine = self.hashes
        places = range(min(self.end, len(hashes)))
        return bisect_left(
            places, True, self.begin + 1, key=lambda place: hashes[place] != mine[place]
        )


class ComingPrompts:
    """The prompts that are on their way to instances, or wait there to be computed."""

    def __init__(self) -> None:
        self._first: dict[int, _Piece] = {}

    def add(self, hashes: Hashes, instance_id: InstanceId) -> None:
        """A prompt goes to this instance; the same may go there several times."""
        pieces, place = self._first, 0
        while place < len(hashes):
            piece = pieces.get(hashes[place])
            if piece is None:
                pieces[hashes[place]] = _Piece(hashes, place, len(hashes), {instance_id: 1})
                return
            place = piece.shared_until(hashes)
            if place < piece.end:
                rest = _Piece(piece.hashes, place, piece.end, dict(piece.numbers), piece.next)
                piece.end, piece.next = place, {rest.hashes[place]: rest}
            piece.numbers[instance_id] = piece.numbers.get(instance_id, 0) + 1
            pieces = piece.next

    def remove(self, hashes: Hashes, instance_id: InstanceId) -> None:
        """A prompt that was added is computed there, or will not be."""
        pieces, place = self._first, 0
        while place < len(hashes):
            piece = pieces[hashes[place]]
            piece.numbers[instance_id] -= 1
            if not piece.numbers[instance_id]:
                del piece.numbers[instance_id]
                if not piece.numbers:
                    del pieces[hashes[place]]
                    return
            pieces, place = piece.next, piece.end

    def longest(self, hashes: Hashes) -> dict[InstanceId, int]:
        """The number of hashes with which this prompt and one that goes to the instance begin
        alike, the most of each instance that shares any."""
        found: dict[InstanceId, int] = {}
        pieces, place = self._first, 0
        while place < len(hashes) and (piece := pieces.get(hashes[place])) is not None:
            place = piece.shared_until(hashes)
            found.update(dict.fromkeys(piece.numbers, place))
            if place < piece.end:
                break
            pieces = piece.next
        return found
