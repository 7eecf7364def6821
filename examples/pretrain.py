"""Pretrain a Llama over a mesh of 8 devices, in the library's terms: python examples/pretrain.py [STEPS [FOLDER]]"""

import sys
from pathlib import Path

import torch

import shardtorch as st
from shardtorch import train
from shardtorch.models import DEFAULT_RULES, Llama, preset

BATCH, SEQ = 8, 256
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
engine = st.start(num_devices=8)  # virtual CPU devices; on a TPU slice: st.start()
mesh = st.Mesh(fsdp=4, tensor=2)

# The model has no data yet. Its plan follows from the names of its dims and the rules.
config = preset("llama-tiny")
with torch.device("meta"):
    model = Llama(config)
rules = st.AxisRules(DEFAULT_RULES)
plan = st.ShardingPlan.from_logical(model.parameter_axes(), model.activation_axes(), rules, mesh)
st.fully_shard(model, mesh, plan=plan, init=model.initializers(), stack="layers")
state = train.TrainState(step=0, model=model, optimizer=train.adamw(model))

corpus = train.prepare("topics", config.vocab_size, Path("~/.cache/shardtorch").expanduser())
loader = train.train_loader(corpus, BATCH, SEQ, seed=0)
batch_sharding = st.NamedSharding(mesh, rules.spec(("batch", "seq"), mesh))
replicated = st.NamedSharding(mesh, st.P())


def put(batch):
    tokens, targets = (torch.from_numpy(batch[name]) for name in ("tokens", "targets"))
    return engine.put(tokens, batch_sharding, tokens.shape), engine.put(targets, batch_sharding, targets.shape)


train_step = engine.compile(train.make_step(model, state.optimizer, clip_norm=1.0, loss_chunks=1))
schedule = train.Schedule(peak=3e-3, warmup_steps=20, decay_steps=max(steps, 21))
while state.step < steps:
    lr = engine.put(torch.tensor(schedule(state.step + 1)), replicated, ())
    metrics = train_step(*put(loader[state.step]), lr)
    state.step += 1
    if state.step % 10 == 0 or state.step == steps:
        loss, grad_norm = metrics.cpu().tolist()
        print(f"step {state.step}: loss {loss:.4f}, gradient norm {grad_norm:.3f}", flush=True)

if len(sys.argv) > 2:
    state.save(Path(sys.argv[2]), extra={})  # state.restore(train.latest_checkpoint(...)) goes on from there

eval_step = engine.compile(train.make_eval_step(model, loss_chunks=1))
nll = sum(eval_step(*put(batch)).cpu().item() for batch in train.heldout_batches(corpus, BATCH, SEQ))
bits = train.bits_per_byte(nll, corpus.num_heldout_bytes)
print(f"held-out text: {bits:.3f} bits per byte (zlib -9 needs {train.zlib_bits_per_byte(corpus.heldout_text()):.3f})")
