"""The options of `vllm serve`, pickled for instances and front ends."""

import pickle
from argparse import Namespace
from dataclasses import dataclass
from typing import Self

WITHOUT_KEYS = {"api_key": None, "api_key_table": (), "api_key_file": None}
"""Replaces the keys of the API in the options of instances: these may be on any node, and the way
there is not encrypted."""


@dataclass(frozen=True, slots=True)
class PackedArgs:
    """The pickled options. Unpickling them imports vLLM, so the environment must be set before.

    Attributes:
        for_frontends: all options.
        for_instances: the options without the keys of the API.
    """

    for_frontends: bytes
    for_instances: bytes

    @classmethod
    def of(cls, args: Namespace) -> Self:
        """Pack the options."""
        public = Namespace(**{**vars(args), **WITHOUT_KEYS})
        return cls(pickle.dumps(args), pickle.dumps(public))
