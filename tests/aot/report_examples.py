"""Reports as compiling would give them, without compiling."""

import dataclasses
import math

from hypothesis import strategies as st

from shardtorch.aot._report import (
    Buffer,
    Collective,
    CompileReport,
    Event,
    Memory,
    Operation,
    Origin,
    StepTime,
)
from shardtorch.mesh import Mesh, NamedSharding, P

LAYERS, EMBED, KV, MLP, VOCAB, SEQ = 32, 4096, 1024, 14336, 128256, 8192
WEIGHTS = {
    "embed.weight": (VOCAB, EMBED),
    "layers.*.attention_norm.weight": (LAYERS, EMBED),
    "layers.*.attention.wq.weight": (LAYERS, EMBED, EMBED),
    "layers.*.attention.wk.weight": (LAYERS, KV, EMBED),
    "layers.*.attention.wv.weight": (LAYERS, KV, EMBED),
    "layers.*.attention.wo.weight": (LAYERS, EMBED, EMBED),
    "layers.*.mlp_norm.weight": (LAYERS, EMBED),
    "layers.*.mlp.w_gate.weight": (LAYERS, MLP, EMBED),
    "layers.*.mlp.w_up.weight": (LAYERS, MLP, EMBED),
    "layers.*.mlp.w_down.weight": (LAYERS, EMBED, MLP),
    "norm.weight": (EMBED,),
    "head.weight": (VOCAB, EMBED),
}
"""Global shapes of an 8B Llama's stacked parameters."""


def llama_shardings(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], NamedSharding]]:
    """The parameters of an 8B Llama, split as its plan has it over the axes `fsdp` and `tensor` that the mesh has."""
    fsdp = "fsdp" if "fsdp" in mesh.axis_names else None
    tensor = "tensor" if "tensor" in mesh.axis_names else None
    shardings = {}
    for name, shape in WEIGHTS.items():
        tail = (fsdp,) if "norm" in name else (fsdp, tensor) if "wo" in name or "w_down" in name else (tensor, fsdp)
        spec = P(*[None] * (len(shape) - len(tail)), *tail)
        shardings[name] = (shape, NamedSharding(mesh, spec))
    return shardings


def llama_8b_fits() -> CompileReport:
    """llama3-8b on v5p:4x4x4, fsdp=64: it fits, and two collectives should not be there."""
    buffers = _largest_first(_state_buffers(64) + _activations())
    memory = _memory(buffers, limit=95 * 2**30 - 300 * 2**20)
    operations, collectives = _operations(), _collectives()
    compute = sum(operation.seconds for operation in operations if operation.bound == "compute")
    step_time = StepTime(
        compute=compute,
        memory=sum(operation.seconds for operation in operations if operation.bound == "memory"),
        communication=sum(collective.exposed_seconds for collective in collectives),
        hidden_communication=sum(c.seconds - c.exposed_seconds for c in collectives),
        efficiency=0.93,
    )
    return CompileReport(
        title="llama3-8b",
        topology="v5p:4x4x4",
        mesh="fsdp=64",
        num_chips=64,
        libtpu_version="0.0.40",
        fits=True,
        memory=memory,
        peak_flops=459e12,
        hbm_bandwidth=2.765e12,
        trace_s=0.71,
        compile_s=25.4,
        step_time=step_time,
        tokens_per_step=64 * SEQ,
        model_flops=2.858e16,
        model_flops_full_attention=3.19e16,
        collectives=collectives,
        operations=operations,
        buffers=buffers,
        events=_events(operations, collectives),
        advice=(
            "77.9 GiB of HBM are free: remat='dots' would save the recomputed matrix products, about 25 % of compute.",
            "constrain the residual stream after `embed` to P('fsdp'): it is gathered whole, 31.2 ms of each step.",
        ),
        assumptions=(
            "kernels run at 55 % of peak, fitted on published splash attention times",
            "each ICI link carries 90 GB/s in each direction; a ring uses both",
            "no time passes between operations, and the host never makes the chip wait",
        ),
    )


def llama_70b_out_of_memory() -> CompileReport:
    """llama3-70b on v5e:4x8, data=2,fsdp=4,tensor=4: the compiler gave up, so it has no times."""
    buffers = _largest_first(_state_buffers(3.6) + _activations())
    return CompileReport(
        title="llama3-70b",
        topology="v5e:4x8",
        mesh="data=2,fsdp=4,tensor=4",
        num_chips=32,
        libtpu_version="0.0.40",
        fits=False,
        memory=_memory(buffers, limit=16_909_625_344),
        peak_flops=197e12,
        hbm_bandwidth=819e9,
        trace_s=1.9,
        compile_s=18.3,
        tokens_per_step=32 * SEQ,
        buffers=buffers,
        advice=("use at least 128 chips: the optimizer's state alone is more than one chip has.",),
        assumptions=("sizes are those of the compiler's failed attempt",),
    )


def huge() -> CompileReport:
    """As many events, buffers, operations and collectives as a report may have, each with a long name."""
    small = llama_8b_fits()

    def many(items, number):
        return tuple(
            dataclasses.replace(
                items[i % len(items)],
                name=f"{items[i % len(items)].name}.{i}",
                origin=Origin(
                    f"decoder.layers.*.block_{i % 17}.mixture_of_experts.expert_{i % 9}.projection",
                    f"/home/someone/projects/llm/modeling/decoder/mixture_of_experts.py:{i}",
                    "backward",
                ),
            )
            for i in range(number)
        )

    buffers = _largest_first(many(small.buffers, 500))
    return dataclasses.replace(
        small,
        memory=_memory(buffers, limit=small.memory.limit),
        fits=False,
        buffers=buffers,
        operations=many(small.operations, 800),
        collectives=many(small.collectives, 400),
        events=many(small.events, 2000),
    )


def _state_buffers(num_shards: float) -> tuple[Buffer, ...]:
    buffers = []
    for name, shape in WEIGHTS.items():
        share = math.ceil(math.prod(shape) / num_shards)
        module = name.removesuffix(".weight")
        local = ",".join(map(str, (*shape[:-1], max(1, int(shape[-1] / num_shards)))))
        origin = Origin(module, f"models/llama.py:{100 + len(buffers)}")
        buffers.append(Buffer(name, "parameter", 2 * share, f"bf16[{local}]", origin))
        buffers.append(Buffer(name, "gradient", 2 * share, f"bf16[{local}]", origin))
        for moment in ("exp_avg", "exp_avg_sq"):
            buffers.append(Buffer(f"{name}.{moment}", "optimizer", 4 * share, f"f32[{local}]", origin))
    return tuple(buffers)


def _largest_first(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    return tuple(sorted(buffers, key=lambda buffer: -buffer.bytes))


def _activations() -> tuple[Buffer, ...]:
    def activation(name, num_bytes, shape, module, line, phase="forward"):
        return Buffer(name, "activation", num_bytes, shape, Origin(module, f"models/llama.py:{line}", phase))

    return (
        activation("while.12", 2 * LAYERS * SEQ * EMBED, "bf16[32,1,8192,4096]", "layers.*", 248),
        activation("custom-call.7", 2 * LAYERS * SEQ * EMBED, "bf16[32,1,32,8192,128]", "layers.*.attention", 171),
        activation("fusion.881", 4 * VOCAB * EMBED, "f32[128256,4096]", "head", 296, "backward"),
        activation("all-gather.31", 2 * VOCAB * EMBED, "bf16[128256,4096]", "head", 296),
        activation("fusion.413", 4 * 2048 * VOCAB, "f32[1,2048,128256]", "loss", 215),
        activation("fusion.77", 2 * SEQ * MLP, "bf16[1,8192,14336]", "layers.*.mlp.w_gate", 189, "backward"),
        activation("fusion.78", 2 * SEQ * MLP, "bf16[1,8192,14336]", "layers.*.mlp.w_up", 189, "backward"),
        activation("all-gather.12", 2 * MLP * EMBED, "bf16[14336,4096]", "layers.*.mlp.w_up", 189),
        activation("all-gather.13", 2 * MLP * EMBED, "bf16[14336,4096]", "layers.*.mlp.w_gate", 189),
        activation("copy.5", 4 * SEQ * EMBED, "f32[1,8192,4096]", "", 0),
    )


def _memory(buffers: tuple[Buffer, ...], *, limit: int) -> Memory:
    """The parts of which the buffers are the largest pieces: a little more than these."""
    sums = dict.fromkeys(("parameter", "gradient", "optimizer", "batch", "activation", "code"), 0)
    for buffer in buffers:
        sums[buffer.kind] += buffer.bytes
    return Memory(
        limit=limit,
        parameters=sums["parameter"],
        gradients=sums["gradient"],
        optimizer_state=sums["optimizer"] + 8,
        batch=sums["batch"] + 2 * 4 * SEQ + 1024,
        activations=sums["activation"] + 310 * 2**20,
        code=sums["code"] + 21 * 2**20,
    )


def _operations() -> tuple[Operation, ...]:
    tokens = SEQ  # of one chip
    rows = []
    for phase, times in (("forward", 1), ("backward", 3)):  # of which one is recomputed
        for module, width in (("mlp.w_gate", MLP), ("mlp.w_up", MLP), ("mlp.w_down", MLP), ("attention.wq", EMBED),
                              ("attention.wo", EMBED), ("attention.wk", KV), ("attention.wv", KV)):  # fmt: skip
            flops = 2.0 * tokens * EMBED * width * LAYERS * times
            efficiency = 0.74 if width > KV else 0.48
            moved = 2 * (tokens * EMBED + tokens * width + EMBED * width) * LAYERS * times
            seconds = flops / (459e12 * efficiency)
            rows.append(("matmul", f"layers.*.{module}", phase, seconds, flops, moved, "compute"))
        flops = 4.0 * SEQ * SEQ * EMBED / 2 * LAYERS * times
        rows.append(("kernel", "layers.*.attention", phase, flops / (459e12 * 0.55), flops,
                     int(2 * 4 * SEQ * EMBED * 1.6) * LAYERS * times, "compute"))  # fmt: skip
        flops = 2.0 * tokens * EMBED * VOCAB * (times - 0.5)
        rows.append(("matmul", "loss", phase, flops / (459e12 * 0.7), flops, int(flops / 900), "compute"))
        for module in ("attention_norm", "mlp_norm"):
            moved = 3 * 2 * tokens * EMBED * LAYERS * times
            rows.append(("elementwise", f"layers.*.{module}", phase, moved / 2.2e12, 0.0, moved, "memory"))
        moved = 4 * tokens * EMBED * LAYERS
        rows.append(("copy", "layers.*", phase, moved / 2.5e12, 0.0, moved, "memory"))
    rows.append(("elementwise", "", "update", 0.0021, 0.0, 5_200_000_000, "memory"))
    rows.append(("matmul", "loss", "update", 0.0009, 2.1e9, 1_500_000_000, "memory"))
    operations = [
        Operation(f"{'custom-call' if row[0] == 'kernel' else 'fusion'}.{20 + 7 * i}", row[0],
                  LAYERS if row[1].startswith("layers") else 1, row[3], row[4], row[5], row[6],
                  Origin(row[1], f"models/llama.py:{160 + i}" if row[1] else "train/optim.py:88", row[2]))
        for i, row in enumerate(rows)
    ]  # fmt: skip
    return tuple(sorted(operations, key=lambda operation: -operation.seconds))


def _collectives() -> tuple[Collective, ...]:
    rows = (
        ("all-gather", "all-gather.12", 64, MLP * EMBED * 2, 0.061, 0.004, "layers.*.mlp.w_up", 189, ""),
        ("all-gather", "all-gather.13", 64, MLP * EMBED * 2, 0.061, 0.004, "layers.*.mlp.w_gate", 189, ""),
        ("all-gather", "all-gather.14", 64, MLP * EMBED * 2, 0.061, 0.002, "layers.*.mlp.w_down", 190, ""),
        ("all-gather", "all-gather.15", 64, EMBED * EMBED * 2, 0.018, 0.0, "layers.*.attention.wq", 168, ""),
        ("reduce-scatter", "reduce-scatter.3", 32, MLP * EMBED * 2, 0.034, 0.0021, "layers.*.mlp.w_up", 189, ""),
        ("reduce-scatter", "reduce-scatter.4", 32, MLP * EMBED * 2, 0.034, 0.0021, "layers.*.mlp.w_gate", 189, ""),
        ("all-gather", "all-gather.31", 2, VOCAB * EMBED * 2, 0.0151, 0.0151, "head", 296, ""),
        ("all-reduce", "all-reduce.9", 1, 4, 0.00001, 0.00001, "", "", ""),
        ("all-gather", "all-gather.90", 1, 64 * SEQ * EMBED * 2, 0.0312, 0.0312, "embed", 244,
         "the partitioner gathers the whole batch after `embed`: annotate its output with P('fsdp')."),
        ("all-to-all", "all-to-all.2", 32, SEQ * EMBED * 2, 0.0042, 0.0011, "layers.*.attention", 171,
         "the heads are resharded from seq to heads: constrain q, k and v to P('fsdp', None, None, None)."),
    )  # fmt: skip
    return tuple(
        Collective(kind, name, ("fsdp",), "ICI", 64, count, size, seconds, exposed,
                   Origin(module, line and f"models/llama.py:{line}", "backward" if "scatter" in kind else "forward"),
                   warning)
        for kind, name, count, size, seconds, exposed, module, line, warning in rows
    )  # fmt: skip


def _events(operations: tuple[Operation, ...], collectives: tuple[Collective, ...]) -> tuple[Event, ...]:
    events, now = [], 0.0
    for operation in operations:
        events.append(
            Event(
                operation.name,
                "core",
                operation.category,
                now,
                operation.seconds / operation.count,
                ((operation.count, operation.seconds / operation.count),),
                operation.origin,
            )
        )
        now += operation.seconds
    start = 0.0
    for collective in collectives:  # each begins while the one before is under way
        events.append(
            Event(
                collective.name,
                "network",
                collective.kind,
                start,
                collective.seconds,
                (),
                collective.origin,
            )
        )
        start += collective.seconds * 0.75
    return tuple(events)


@st.composite
def meshes(draw: st.DrawFn, max_devices: int) -> Mesh:
    """Meshes of up to four axes, the first of which may span two slices."""
    sizes: dict[str, int] = {}
    for axis in ("data", "fsdp", "context", "tensor")[draw(st.integers(0, 3)) :]:
        sizes[axis] = draw(st.integers(1, min(600, max_devices // math.prod(sizes.values()))))
    first = next(iter(sizes))
    return Mesh(sizes, dcn={first: 2} if sizes[first] % 2 == 0 and draw(st.booleans()) else None)


def _repeats() -> st.SearchStrategy[tuple[tuple[int, float], ...]]:
    return st.lists(st.tuples(st.integers(1, 4), st.floats(0, 10)), max_size=2).map(tuple)


def _times() -> st.SearchStrategy[float]:
    return st.just(0.0) | st.floats(1e-12, 1e4)


@st.composite
def reports(draw: st.DrawFn) -> CompileReport:
    """Any report whose buffers are pieces of its memory, with names of any characters."""
    count, size, text = st.integers(0, 1000), st.integers(0, 2**45), st.text(max_size=12)
    module = st.lists(st.sampled_from(["layers", "*", "mlp", "w_up", "<b>", "&"]), max_size=5).map(".".join)
    origin = st.builds(Origin, module, text, st.sampled_from(["forward", "backward", "update", ""]))
    buffers = draw(st.lists(st.builds(Buffer, st.one_of(text, module), origin=origin, bytes=size), max_size=12))
    rest = draw(st.lists(size, min_size=6, max_size=6))
    parts = dict(zip(("parameter", "gradient", "optimizer", "batch", "activation", "code"), rest, strict=True))
    for buffer in buffers:
        parts[buffer.kind] += buffer.bytes
    return draw(
        st.builds(
            CompileReport,
            title=text,
            topology=text,
            mesh=text,
            num_chips=st.integers(1, 10_000),
            libtpu_version=text,
            memory=st.builds(lambda limit: Memory(limit, *parts.values()), st.integers(1, 2**45)),
            peak_flops=st.floats(1e12, 1e16),
            hbm_bandwidth=st.floats(1e9, 1e13),
            trace_s=_times(),
            compile_s=_times(),
            step_time=st.none()
            | st.builds(StepTime, st.floats(1e-9, 1e4), _times(), _times(), _times(), st.floats(0.1, 2)),
            tokens_per_step=st.none() | st.integers(1, 2**40),
            model_flops=st.none() | st.floats(1, 1e22),
            model_flops_full_attention=st.none() | st.floats(1, 1e22),
            collectives=_tuples(
                st.builds(
                    Collective,
                    axes=st.lists(text, max_size=3).map(tuple),
                    name=text,
                    count=count,
                    bytes=size,
                    seconds=_times(),
                    exposed_seconds=_times(),
                    origin=origin,
                    warning=text,
                )
            ),
            operations=_tuples(
                st.builds(
                    Operation,
                    name=text,
                    count=count,
                    seconds=_times(),
                    flops=st.just(0.0) | st.floats(1, 1e20),
                    bytes=size,
                    origin=origin,
                )
            ),
            buffers=st.just(_largest_first(tuple(buffers))),
            events=_tuples(
                st.builds(Event, name=text, start=_times(), duration=_times(), repeats=_repeats(), origin=origin)
            ),
            advice=_tuples(text),
            layout=_tuples(text),
            assumptions=_tuples(text),
        )
    )


def _tuples(items: st.SearchStrategy) -> st.SearchStrategy[tuple]:
    return st.lists(items, max_size=5).map(tuple)
