"""The same model on an XLA device, in a process of its own: how torch_xla starts is fixed once per process."""

import pytest
from processes import run_python

PROGRAM = """
import copy, torch, torch_xla
from shardtorch.models import Llama, LlamaConfig, RopeScaling

torch.manual_seed(0)
model = Llama(LlamaConfig(
    vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48, max_seq_len=64,
    rope_scaling=RopeScaling(original_max_seq_len=32),
))
model_on_xla = copy.deepcopy(model).to("xla")
tokens = torch.randint(0, 64, (2, 33))
inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
targets[0, :5] = -100

def run(model, inputs, targets):
    loss = model(inputs, targets, loss_chunks=4)
    loss.backward()
    with torch.no_grad():
        logits = model(inputs)
    grads = {name: p.grad.cpu() for name, p in model.named_parameters()}
    return loss.detach().cpu(), logits.cpu(), grads

expected = run(model, inputs, targets)
actual = run(model_on_xla, inputs.to("xla"), targets.to("xla"))
torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
assert all(grad.abs().max() > 1e-3 for grad in expected[2].values())
print("equal")
"""


@pytest.mark.slow
def test_loss_logits_and_gradients_equal_plain_torch():
    result = run_python(PROGRAM, CPU_NUM_DEVICES="1", XLA_FLAGS="--xla_backend_optimization_level=0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("equal")
