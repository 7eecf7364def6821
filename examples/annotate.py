"""`mark_sharding` in a model and a loop of your own, on 8 devices: python examples/annotate.py"""

import torch
from torch import nn

import shardtorch as st

engine = st.start(num_devices=8)
mesh = st.Mesh(data=4, model=2)  # the names are yours


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 256)
        self.down = nn.Linear(256, 32)

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        # A value inside the graph: this fixes its sharding and its gradient's. Use what it returns.
        hidden = st.mark_sharding(hidden, mesh, st.P("data", "model"))
        return self.down(hidden)


torch.manual_seed(0)
model = MLP().to(engine.device)
# Leaf data: cut up before it was ever copied to all devices.
st.mark_sharding(model.up.weight, mesh, ("model", None), name="up.weight")
st.mark_sharding(model.up.bias, mesh, ("model",), name="up.bias")
st.mark_sharding(model.down.weight, mesh, [None, "model"], name="down.weight")
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)


@engine.compile
def step(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


generator = torch.Generator().manual_seed(1)
for number in range(1, 51):
    x = torch.randn(128, 32, generator=generator)
    x, y = x.to(engine.device), x.flip(-1).to(engine.device)
    for batch in (x, y):
        st.mark_sharding(batch, mesh, ("data",))
    loss = step(x, y)
    if number % 10 == 0:
        print(f"step {number}: loss {loss.cpu().item():.4f}")
print("up.weight lies as", engine.sharding_of(model.up.weight))
print(f"graphs compiled: {engine.num_compiles()}")
