"""A GGUF file becomes a Hugging Face folder with the same weights and tokenizer."""

import json

import pytest

pytest.importorskip("gguf")

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sterna.demo_model.gguf_llama import convert_llama_gguf, hugging_face_name
from tests.models import write_tiny_gguf


def ignore(line):
    pass


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    weights = write_tiny_gguf(folder / "tiny.gguf")
    lines = []
    convert_llama_gguf(folder / "tiny.gguf", folder / "model", lines.append)
    return folder / "model", weights, lines


def test_every_weight_arrives_in_bfloat16_under_its_hugging_face_name(converted):
    folder, expected, _ = converted
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(weights[name], torch.from_numpy(values).to(torch.bfloat16)), name


def test_the_configuration_says_what_the_file_says(converted):
    folder, _, _ = converted
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 261,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize(
    "text", ["hello", "  two  spaces \n", "1234", "é 漢字 🙂", "a<|im_end|>b", "it's\ttabbed"]
)
def test_the_tokenizer_gives_any_text_back(converted, text):
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_tokenizer_merges_words_splits_digits_and_keeps_special_tokens_whole(converted):
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    tokens = tokenizer.encode("hello12<|im_end|>").tokens
    assert tokens == ["hel", "l", "o", "1", "2", "<|im_end|>"]
    assert tokenizer.token_to_id("<|im_end|>") == 2


def test_the_chat_template_and_special_tokens_are_kept(converted):
    config = json.loads((converted[0] / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert config["model_max_length"] == 256
    special = [config[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]


def test_progress_ends_with_all_tensors(converted):
    assert converted[2][-1] == "converting the weights: 11 of 11 tensors"


def test_another_architecture_is_refused(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture="falcon")
    with pytest.raises(ValueError, match="not a Llama model"):
        convert_llama_gguf(tmp_path / "tiny.gguf", tmp_path / "model", ignore)


def test_a_file_without_one_of_its_tensors_is_refused(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", without="blk.0.attn_k.weight")
    with pytest.raises(ValueError, match="10 tensors where 11 are expected"):
        convert_llama_gguf(tmp_path / "tiny.gguf", tmp_path / "model", ignore)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_qkv.weight", "blk.0.attn_q"])
def test_a_tensor_that_a_llama_does_not_have_is_refused(name):
    with pytest.raises(ValueError, match="no tensor"):
        hugging_face_name(name)


def test_the_output_layer_of_an_untied_model_has_its_name():
    assert hugging_face_name("output.weight") == "lm_head.weight"
