"""The options of `vllm serve`, packed for those who unpack them."""

import pickle
from argparse import Namespace
from dataclasses import dataclass
from typing import Self

WITHOUT_KEYS = {"api_key": None, "api_key_table": ()}
"""What instances have in place of who may use the API: they are on any node, and what goes there is
not encrypted."""


@dataclass(frozen=True, slots=True)
class PackedArgs:
    """The pickled options. To unpickle them imports vLLM: only those do that need it, and only when
    their environment is set.

    Attributes:
        for_frontends: all of them.
        for_instances: those without the keys of the API.
    """

    for_frontends: bytes
    for_instances: bytes

    @classmethod
    def of(cls, args: Namespace) -> Self:
        """Pack the options."""
        public = Namespace(**{**vars(args), **WITHOUT_KEYS})
        return cls(pickle.dumps(args), pickle.dumps(public))
