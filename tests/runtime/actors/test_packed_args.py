"""Who gets the keys of the API."""

import pickle
from argparse import Namespace
from hashlib import sha256

from sterna.cli.serve.priority_options import settle_classes
from sterna.runtime.actors.packed_args import PackedArgs

KEY = "sk-not-for-the-wires"


def test_instances_which_may_be_on_other_nodes_get_no_key_of_the_api() -> None:
    args = Namespace(model="terns", policy="sterna", scheduling_policy=None, api_key=[KEY])
    settle_classes(args)
    packed = PackedArgs.of(args)
    assert KEY.encode() not in packed.for_instances
    assert sha256(KEY.encode()).digest() not in packed.for_instances
    assert pickle.loads(packed.for_instances).model == "terns"
    frontends = pickle.loads(packed.for_frontends)
    assert [each.digest for each in frontends.api_key_table] == [sha256(KEY.encode()).digest()]
