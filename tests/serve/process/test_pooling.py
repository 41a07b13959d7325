"""Models that only embed, and have no KV cache: several instances serve them, without moves."""

import json
from pathlib import Path

import pytest

from bench.kinds.tiny_models import VOCAB_SIZE, write_tokenizer
from tests.serve.nodes import states
from tests.serve.server import MODEL_NAME, start_sterna

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

OPTIONS = ("--dtype", "float32", "--max-model-len", "512")


def tiny_encoder(folder: Path) -> Path:
    """A random encoder, whose layers attend in both directions."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        pad_token_id=0,
    )
    BertModel(config).save_pretrained(folder)
    write_tokenizer(folder, {})
    return folder


def tiny_late_interaction(folder: Path) -> Path:
    """The encoder as a ColBERT: it scores a document by the embeddings of its tokens."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny_encoder(folder) / "model.safetensors")
    weights = {f"bert.{name}": weight for name, weight in weights.items()}
    weights["linear.weight"] = torch.randn(32, 64)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["HF_ColBERT"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_documents_of_one_query_are_scored_by_several_instances(tmp_path: Path) -> None:
    server = start_sterna(*OPTIONS, model=tiny_late_interaction(tmp_path / "model"))
    try:
        texts = [f"terns of {number} islands" for number in range(16)]
        body = {"model": MODEL_NAME, "text_1": texts[3], "text_2": texts}
        for _ in range(2):
            answer = server.http().post("/score", json=body)
            assert answer.status_code == 200, answer.text
            scores = [each["score"] for each in answer.json()["data"]]
            assert len(scores) == len(texts)
            assert max(scores) == scores[3]
        decisions = server.http().get("/admin/recent?last_s=600").json()["decisions"]
        used = {each["instance"] for each in decisions if each["event"] == "dispatched"}
        assert used == {"i0", "i1"}
        assert set(states(server).values()) == {"running"}
    finally:
        server.end()


def test_a_model_without_a_kv_cache_answers(tmp_path: Path) -> None:
    server = start_sterna(*OPTIONS, model=tiny_encoder(tmp_path / "model"))
    try:
        texts = [f"terns of {number} islands" for number in range(8)] * 2
        answer = server.client().embeddings.create(model=MODEL_NAME, input=texts)
        vectors = [each.embedding for each in answer.data]
        assert vectors[:8] == [pytest.approx(each, rel=1e-4, abs=1e-5) for each in vectors[8:]]
        assert len({tuple(each) for each in vectors[:8]}) == 8
        assert set(states(server).values()) == {"running"}
        assert all(each["total_tokens"] == 0 for each in server.instances())
    finally:
        server.end()
