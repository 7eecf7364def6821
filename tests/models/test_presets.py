import pytest
import torch

from shardtorch.models import PRESETS, Llama, RopeScaling, preset


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-7b", "6.74"),
        ("llama2-13b", "13.02"),
        ("llama2-70b", "68.98"),
        ("llama3-8b", "8.03"),
        ("llama3-70b", "70.6"),
        ("llama3-405b", "405.9"),
    ],
)
def test_number_of_parameters_is_the_published_one(name, billions):
    assert f"{preset(name).num_parameters / 1e9:.{len(billions.split('.')[1])}f}" == billions


@pytest.mark.parametrize("name", PRESETS)
def test_module_on_meta_has_the_number_of_parameters(name):
    with torch.device("meta"):
        model = Llama(preset(name))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not list(model.buffers())
    assert sum(p.numel() for p in model.parameters()) == preset(name).num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_fields_are_the_published_ones(name):
    config = preset(name)
    assert not config.tie_embeddings
    if name == "llama-tiny":
        assert (config.max_seq_len, config.rope_theta, config.rope_scaling) == (256, 10_000.0, None)
    elif name.startswith("llama2"):
        assert (config.vocab_size, config.max_seq_len, config.rope_theta) == (32_000, 4096, 10_000.0)
        assert config.rope_scaling is None
        assert config.num_heads * config.head_dim == config.embed_dim
    else:
        assert (config.vocab_size, config.max_seq_len, config.rope_theta) == (128_256, 131_072, 500_000.0)
        assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
        assert config.num_heads * config.head_dim == config.embed_dim


def test_every_dim_of_llama_tiny_that_a_mesh_may_split_divides_by_8():
    config = preset("llama-tiny")
    with torch.device("meta"):
        model = Llama(config)
    assert all(size % 8 == 0 for p in model.parameters() for size in p.shape)
    assert config.num_heads % 8 == config.num_kv_heads % 8 == config.max_seq_len % 8 == 0


def test_unknown_preset_names_the_presets_and_a_close_one():
    with pytest.raises(
        ValueError, match=r"one of llama-tiny, llama2-7b(.|\n)*got: 'llama3-80b'\n  fix: did you mean 'llama3-8"
    ):
        preset("llama3-80b")
    with pytest.raises(ValueError, match="fix: use one of these names"):
        preset("gpt")
