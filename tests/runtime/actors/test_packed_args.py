"""Who gets the keys of the API."""

import pickle
from argparse import Namespace
from hashlib import sha256
from pathlib import Path

from sterna.cli.serve.priority_options import settle_classes
from sterna.runtime.actors.packed_args import PackedArgs

KEY, CLIENTS_KEY = "sk-not-for-the-wires", "sk-neither"


def test_instances_which_may_be_on_other_nodes_get_no_key_of_the_api(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {{name: client, key: {CLIENTS_KEY}}}")
    args = Namespace(
        model="terns", policy="sterna", scheduling_policy=None, api_key=[KEY], api_keys=str(path)
    )
    settle_classes(args)
    packed = PackedArgs.of(args)
    digests = [sha256(each.encode()).digest() for each in (KEY, CLIENTS_KEY)]
    for secret in (KEY.encode(), CLIENTS_KEY.encode(), *digests):
        assert secret not in packed.for_instances
    assert pickle.loads(packed.for_instances).model == "terns"
    frontends = pickle.loads(packed.for_frontends)
    assert [each.digest for each in frontends.api_key_table] == digests
    assert frontends.api_key_file == args.api_key_file
