"""An ordinary PyTorch loop on one XLA device, CPU or TPU: python examples/single_device.py

Three things change: the model moves, the work of a step is wrapped, and results are read after a sync.
"""

import torch
from torch import nn

import shardtorch as st

engine = st.start(num_devices=1)  # before anything else touches an XLA device

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
model.to(engine.device)  # 1. move the model
# capturable: the count of updates is part of the graph. As a Python number it would make every step a new graph.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True, foreach=False)


@engine.compile  # 2. wrap the work of a step: it is traced, and runs as one graph when it returns
def step(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


generator = torch.Generator().manual_seed(1)
for number in range(1, 101):
    x = torch.randn(64, 16, generator=generator)
    y = x[:, :4].sum(dim=1, keepdim=True)
    loss = step(x.to(engine.device), y.to(engine.device))
    if number % 20 == 0:
        print(f"step {number}: loss {loss.cpu().item():.4f}")
engine.sync()  # 3. wait for what is still running
print(f"graphs compiled: {engine.num_compiles()}")
