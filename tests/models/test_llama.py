"""The model against an independent one that is written in the plainest way: complex rotations, loops over heads."""

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardtorch.models import DEFAULT_RULES, Constant, Llama, LlamaConfig, Normal, RopeScaling, preset

CONFIG = LlamaConfig(
    vocab_size=40,
    num_layers=3,
    embed_dim=24,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=56,
    max_seq_len=32,
    rope_theta=10_000.0,
    rope_scaling=RopeScaling(factor=4.0, original_max_seq_len=16),
)


def make_model(config=CONFIG, seed=0):
    torch.manual_seed(seed)
    model = Llama(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, or a norm's weight could be left out unnoticed
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return model


def make_tokens(batch=2, seq=16, vocab=CONFIG.vocab_size):
    return torch.randint(vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(1))


def matching(pattern, names):
    """Names that a pattern matches, where `*` is one dotted segment."""
    regex = re.escape(pattern).replace(r"\*", r"[^.]+")
    return [name for name in names if re.fullmatch(regex, name)]


def plain_frequencies(config):
    scaling = config.rope_scaling
    for i in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * i / config.head_dim)
        if scaling is not None:
            wavelen = 2 * math.pi / frequency
            smooth = (scaling.original_max_seq_len / wavelen - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            smooth = min(max(smooth, 0.0), 1.0)
            frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        yield frequency


def plain_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_llama(weights, tokens, config):
    """Logits in float64, one sequence and one head at a time."""
    heads_per_kv_head, half = config.num_heads // config.num_kv_heads, config.head_dim // 2
    seq = tokens.shape[1]
    angles = torch.outer(torch.arange(seq).double(), torch.tensor(list(plain_frequencies(config)), dtype=torch.float64))
    rotation = torch.polar(torch.ones_like(angles), angles)
    mask = torch.full((seq, seq), -math.inf, dtype=torch.float64).triu(1)

    def rotate(x):
        turned = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous()) * rotation
        return torch.cat((turned.real, turned.imag), -1)

    def head(x, weight, index):
        return x @ weight[index * config.head_dim : (index + 1) * config.head_dim].T

    def one_sequence(row):
        x = weights["embed.weight"][row]
        for n in range(config.num_layers):
            w = {name.removeprefix(f"layers.{n}."): value for name, value in weights.items() if f"layers.{n}." in name}
            h = plain_norm(x, w["attention_norm.weight"], config.norm_eps)
            outputs = []
            for i in range(config.num_heads):
                q = rotate(head(h, w["attention.wq.weight"], i))
                k = rotate(head(h, w["attention.wk.weight"], i // heads_per_kv_head))
                v = head(h, w["attention.wv.weight"], i // heads_per_kv_head)
                outputs.append(torch.softmax(q @ k.T / math.sqrt(config.head_dim) + mask, -1) @ v)
            x = x + torch.cat(outputs, -1) @ w["attention.wo.weight"].T
            h = plain_norm(x, w["mlp_norm.weight"], config.norm_eps)
            gate, up = h @ w["mlp.w_gate.weight"].T, h @ w["mlp.w_up.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.w_down.weight"].T
        out = weights["embed.weight" if config.tie_embeddings else "head.weight"]
        return plain_norm(x, weights["norm.weight"], config.norm_eps) @ out.T

    return torch.stack([one_sequence(row) for row in tokens])


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("rope_scaling", [None, CONFIG.rope_scaling])
def test_logits_loss_and_gradients_equal_the_plain_model(tie_embeddings, rope_scaling):
    config = dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings, rope_scaling=rope_scaling)
    model, tokens = make_model(config), make_tokens()
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = -100
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected_logits = plain_llama(weights, inputs, config)
    torch.testing.assert_close(model(inputs).double(), expected_logits, rtol=1e-4, atol=1e-4)

    expected = F.cross_entropy(expected_logits.flatten(0, 1), targets.flatten())
    expected.backward()
    for num_chunks in (1, 4):
        model.zero_grad()
        loss = model(inputs, targets, loss_chunks=num_chunks)
        loss.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
        for name, parameter in model.named_parameters():
            error = (parameter.grad.double() - weights[name].grad).norm() / weights[name].grad.norm()
            assert error < 1e-4, f"{name}: relative error {error}"


def test_loss_sum_is_the_mean_times_the_targets():
    model, tokens = make_model(), make_tokens()
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[1, 3:] = -100
    total = model(inputs, targets, reduction="sum")
    torch.testing.assert_close(total, model(inputs, targets) * (16 + 3))


def test_a_token_does_not_change_earlier_logits():
    model, tokens = make_model(), make_tokens()
    before = model(tokens)
    for position in (0, 7, 16):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % CONFIG.vocab_size
        after = model(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position])
        assert not torch.isclose(after[:, position:], before[:, position:]).all(-1).any()


def test_grouped_query_equals_multi_head_with_repeated_key_heads():
    grouped = make_model()
    full = Llama(dataclasses.replace(CONFIG, num_kv_heads=CONFIG.num_heads))
    repeats = CONFIG.num_heads // CONFIG.num_kv_heads
    state = {
        name: value.unflatten(0, (-1, CONFIG.head_dim)).repeat_interleave(repeats, dim=0).flatten(0, 1)
        if name.endswith(("wk.weight", "wv.weight"))
        else value
        for name, value in grouped.state_dict().items()
    }
    full.load_state_dict(state)
    tokens = make_tokens()
    torch.testing.assert_close(full(tokens), grouped(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_activations_stay_bfloat16_beside_any_norm(norm_dtype):
    model = make_model().to(torch.bfloat16)
    for name, module in model.named_modules():
        if "norm" in name:
            module.to(norm_dtype)
    dtypes = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, args, out, name=name: dtypes.update({name: out.dtype}))
    tokens = make_tokens()
    model(tokens)
    assert set(dtypes.values()) == {torch.bfloat16}
    assert model(tokens[:, :-1], tokens[:, 1:]).dtype == torch.float32


def test_norm_is_computed_in_float32():
    norm = make_model().norm.to(torch.bfloat16)
    x = torch.randn(4, 24).to(torch.bfloat16) * 30
    exact = plain_norm(x.double(), norm.weight.double(), CONFIG.norm_eps)
    torch.testing.assert_close(norm(x), exact.to(torch.bfloat16), rtol=2**-8, atol=0)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_parameters_have_the_documented_names_axes_and_initializers(tie_embeddings):
    config = dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings)
    with torch.device("meta"):
        model = Llama(config)
    parameters = dict(model.named_parameters())
    assert config.num_parameters == sum(p.numel() for p in parameters.values())
    assert ("head.weight" in parameters) is not tie_embeddings
    assert (model.head.weight is model.embed.weight) is tie_embeddings
    axis_sizes = {"vocab": 40, "embed": 24, "norm": 24, "heads": 48, "kv_heads": 16, "mlp": 56}
    for table in (model.parameter_axes(), model.initializers()):
        matches = [name for pattern in table for name in matching(pattern, parameters)]
        assert sorted(matches) == sorted(parameters)  # each exactly once
        assert all(matching(pattern, parameters) for pattern in table)
    for pattern, axes in model.parameter_axes().items():
        for name in matching(pattern, parameters):
            assert parameters[name].shape == tuple(axis_sizes[axis] for axis in axes), name


def test_activation_axes_name_every_dim_of_every_output():
    model, tokens = make_model(), make_tokens(batch=3, seq=10)
    sizes = {"batch": 3, "seq": 10, "act_embed": 24, "heads": (48, 6), "kv_heads": (16, 2), "mlp": 56, "vocab": 40}
    shapes = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, args, out, name=name: shapes.update({name: tuple(out.shape)}))
    model(tokens[:, :-1])
    for pattern, axes in model.activation_axes().items():
        names = matching(pattern, shapes)
        assert names, pattern
        for name in names:
            assert len(axes) == len(shapes[name]), name
            for axis, size in zip(axes, shapes[name], strict=True):
                expected = CONFIG.head_dim if axis is None else sizes[axis]
                assert size in (expected if isinstance(expected, tuple) else (expected,)), (name, axis)


def test_default_rules_name_every_logical_axis():
    model = make_model()
    tables = (model.parameter_axes(), model.activation_axes())
    used = {axis for table in tables for axes in table.values() for axis in axes if axis is not None}
    assert used == {logical for logical, _ in DEFAULT_RULES}


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_initial_values_start_near_the_uniform_guess(tie_embeddings):
    config = dataclasses.replace(preset("llama-tiny"), tie_embeddings=tie_embeddings)
    torch.manual_seed(0)
    model = Llama(config)
    initializers = model.initializers()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            (initializer,) = (i for pattern, i in initializers.items() if matching(pattern, [name]))
            match initializer:
                case Constant(value):
                    parameter.fill_(value)
                case Normal(std):
                    parameter.normal_(0.0, std)
    tokens = make_tokens(batch=2, seq=64, vocab=config.vocab_size)
    residual = []
    model.norm.register_forward_hook(lambda _, args, out: residual.append(args[0].detach()))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    # Logits of variance 1 cost half a nat over a uniform guess.
    assert abs(loss.item() - math.log(config.vocab_size) - 0.5) < 0.2
    assert residual[0].std() < 2 * max(1.0, initializers["embed.weight"].std)


def test_initializers_do_not_depend_on_the_layer():
    initializers = make_model().initializers()
    assert initializers["layers.*.attention.wo.weight"] == Normal((2 * 3 * 48) ** -0.5)
    assert initializers["layers.*.mlp.w_down.weight"] == Normal((2 * 3 * 56) ** -0.5)
    assert not any(re.search(r"\d", pattern) for pattern in initializers)


def test_one_module_may_stand_for_all_layers():
    model, tokens = make_model(), make_tokens()
    expected = model(tokens)

    class AllLayers(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.stacked, self.template = torch.func.stack_module_state(list(layers))[0], layers[0]

        def forward(self, x, cos, sin):
            for n in range(CONFIG.num_layers):
                weights = {name: stacked[n] for name, stacked in self.stacked.items()}
                x = torch.func.functional_call(self.template, weights, (x, cos, sin))
            return x

    model.layers = torch.nn.ModuleList([AllLayers(model.layers)])
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_flops_equal_an_independent_count(tie_embeddings):
    config = dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings)
    model, tokens = make_model(config), make_tokens()
    counter = FlopCounterMode(display=False)
    # The counter knows matrix products; the causal half that attention may skip it counts in full.
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert counter.get_total_flops() == config.flops_per_token(16, causal=False) * 2 * 16
    attention = config.flops_per_token(16, causal=False) - config.flops_per_token(0)
    assert config.flops_per_token(16) == config.flops_per_token(0) + attention / 2


def test_flops_of_llama3_8b_by_hand():
    matmul_parameters = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert preset("llama3-8b").flops_per_token(8192) == 6 * matmul_parameters + 6 * 32 * 4096 * 8192


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size must be positive\.\n  got: vocab_size=0\n  fix: "),
        ({"num_layers": -1}, "num_layers must be positive"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
        ({"num_kv_heads": 4}, r"divide num_heads(.|\n)*num_heads=6, num_kv_heads=4\n  fix: use one of 1, 2, 3, 6 "),
        ({"head_dim": 7}, r"head_dim must be even(.|\n)*fix: use 8"),
    ],
)
def test_config_errors_teach(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changed)


def test_too_long_a_sequence_is_an_error():
    with pytest.raises(ValueError, match=r"max_seq_len=32 tokens\.\n  got: tokens of shape \(1, 33\)\n  fix: "):
        make_model()(torch.zeros(1, 33, dtype=torch.long))


def test_configs_are_values():
    assert preset("llama3-8b") == dataclasses.replace(preset("llama3-8b"))
    assert len({preset("llama3-8b"), dataclasses.replace(preset("llama3-8b")), CONFIG}) == 2
