"""Values that the partitioner replicates on its own are named."""

import subprocess
import sys

import pytest
from processes import environment

from shardtorch.aot._replication import involuntary_replications
from shardtorch.engine import Origin

LOG = (
    "W1201 01:44:56.417276   14505 spmd_partitioner.cc:667] [SPMD] Involuntary full rematerialization. The compiler "
    "cannot go from sharding {devices=[1,4,2]<=[8] last_tile_dim_replicate} to {devices=[2,1,4]<=[4,2]T(1,0) "
    "last_tile_dim_replicate} efficiently for HLO operation %copy.1 = f32[64,16]{1,0} copy(%cos.1), "
    'sharding={devices=[1,4,2]<=[8] last_tile_dim_replicate}, metadata={op_name="call.3/~1~.7/aten__cos" '
    "stack_frame_id=4}. As the last resort, SPMD will replicate the tensor\n"
)


def test_the_log_in_the_users_names():
    origins = (Origin(), Origin("layers.*.mlp", "model.py:12", "forward"))
    (text,) = involuntary_replications(f"other lines\n{LOG}{LOG}", origins)
    assert text.startswith(
        "f32[64,16] in layers.*.mlp at model.py:12 is made whole on every device, to go from {devices"
    )
    assert involuntary_replications("nothing of the kind", origins) == ()
    assert "in the step is made whole" in involuntary_replications(LOG, ())[0]


PROGRAM = """
import torch, shardtorch as st
from shardtorch.aot import compile_report
engine = st.start("libtpu", topology="v5e:2x4")
mesh = st.Mesh(a=2, b=2, c=2)

class Turn(torch.nn.Module):
    def forward(self, x):
        x = st.mark_sharding(torch.cos(x), mesh, (None, ("a", "b")))
        return st.mark_sharding(torch.sin(x), mesh, ("c",))

model = Turn()
x = engine.zeros((64, 64), torch.float32, st.NamedSharding(mesh, st.P(None, ("a", "b"))))
report = compile_report(lambda x: model(x).sum(), model, [x], "v5e:2x4")
print(*report.advice, sep="\\n")
"""


@pytest.mark.slow
def test_the_compiler_says_so():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is made whole on every device" in done.stdout
