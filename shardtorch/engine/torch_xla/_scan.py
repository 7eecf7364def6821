"""One layer, looped over stacked weights: an XLA While loop with gradients.

torch_xla's own `scan` traces its body anew each step, copies every constant once per layer, needs jax for its backward
pass, and keeps transposed copies of the weights as activations; this one lowers each body once per shape.

Private symbols of torch_xla 2.9.0: `_XLAC.lowering.LoweringContext`, `_xla_user_computation`, `_xla_get_tensor_id`.
Of torch 2.9.0: `functorch.compile`, `make_boxed_func`.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.autograd.function import once_differentiable

from shardtorch.engine._contract import LayerBody, check_layer_output, check_scan
from shardtorch.engine.torch_xla._provenance import in_backward
from shardtorch.engine.torch_xla._trace import check_layer, flush_autograd, tracing
from shardtorch.errors import ShardtorchError

_XLAC = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class _Aval:
    """What a traced tensor is, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, x: Tensor) -> "_Aval":
        return cls(tuple(x.shape), x.dtype, x.requires_grad)

    def placeholder(self) -> Tensor:
        return xb.create_placeholder_tensor(self.shape, self.dtype).requires_grad_(self.requires_grad)

    def of_layer(self) -> "_Aval":
        return _Aval(self.shape[1:], self.dtype, self.requires_grad)


@dataclass(frozen=True)
class _Lowered:
    """A function as an XLA computation."""

    computation: object
    arguments: tuple[int, ...]
    """For each parameter of the computation, the argument it is; from the number of arguments on, a hoisted tensor."""
    hoisted: tuple[Tensor, ...]
    """Constants that the function makes, which torch_xla holds as data."""
    outputs: tuple[_Aval, ...]


def _lower(name: str, fn: Callable[..., Sequence[Tensor]], avals: Sequence[_Aval]) -> _Lowered:
    """Traces `fn` over placeholders."""
    arguments = [aval.placeholder() for aval in avals]
    ids = {_XLAC._xla_get_tensor_id(argument) for argument in arguments}  # equal for aliases
    with tracing():
        # An argument handed through is no value of the graph that could be built: a copy of it is.
        outputs = [out.clone() if _XLAC._xla_get_tensor_id(out) in ids else out for out in fn(*arguments)]
    context = _XLAC.lowering.LoweringContext(name)
    context.set_name_string(name)
    context.build(outputs)
    others: dict[int, Tensor] = dict(context.device_parameter_id_tensor_mapping())
    argument_of: dict[int, int] = {}
    for i, argument in enumerate(arguments):
        parameter = context.tensor_parameter_id(argument)
        if parameter != -1:  # -1: not used
            argument_of[parameter] = i
            others.pop(parameter, None)
    if 'opcode: "rng' in context.hlo_text():
        raise _draws("a random operation, such as dropout, inside the layer")
    for n, parameter in enumerate(sorted(others)):
        argument_of[parameter] = len(arguments) + n
    return _Lowered(
        xb.computation_from_module_proto(name, context.hlo()),
        tuple(argument_of[parameter] for parameter in range(len(argument_of))),
        tuple(others[parameter].detach() for parameter in sorted(others)),
        tuple(_Aval(tuple(out.shape), out.dtype) for out in outputs),
    )


def _draws(got: str) -> ShardtorchError:
    return ShardtorchError(
        "a scanned layer must not draw random numbers: every layer would draw the same ones.",
        got=got,
        fix="remove it, set its probability to 0, or do not stack the layers (stack=None).",
    )


class _Loop:
    """`carry, *ys = fn(carry, *xs[i], *constants)` for every index i of the layer dim, as one XLA While."""

    def __init__(
        self,
        name: str,
        fn: Callable[..., Sequence[Tensor]],
        carry: _Aval,
        xs: Sequence[_Aval],
        constants: Sequence[_Aval],
        *,
        reverse: bool = False,
    ):
        self.name, self.reverse = name, reverse
        self.num_layers, self.num_xs = xs[0].shape[0], len(xs)
        self.body = _lower(f"{name}_body", fn, [carry, *(aval.of_layer() for aval in xs), *constants])
        self.computation = None

    def __call__(self, carry: Tensor, xs: Sequence[Tensor], constants: Sequence[Tensor]) -> list[Tensor]:
        ys = [
            torch.zeros((self.num_layers, *out.shape), dtype=out.dtype, device="xla") for out in self.body.outputs[1:]
        ]
        counter = torch.zeros((), dtype=torch.int32, device="xla")
        operands = [counter, carry, *xs, *constants, *self.body.hoisted, *ys]
        if self.computation is None:
            self.computation = self._build(operands, num_ys=len(ys))
        results = _XLAC._xla_user_computation(f"shardtorch::{self.name}", operands, self.computation)
        return [results[1], *results[len(operands) - len(ys) :]]

    def _build(self, operands: Sequence[Tensor], num_ys: int):
        builder = xb.create_builder(self.name)
        parameters = [xb.mkparam(builder, i, xb.tensor_shape(x)) for i, x in enumerate(operands)]
        first_y = len(operands) - num_ys

        def condition(counter: xb.Op, *_: xb.Op) -> xb.Op:
            return counter < xb.Op.scalar(counter.builder(), self.num_layers, dtype=xb.Type.S32)

        def body(counter: xb.Op, *rest: xb.Op) -> tuple[xb.Op, ...]:
            def scalar(value: int) -> xb.Op:
                return xb.Op.scalar(counter.builder(), value, dtype=xb.Type.S32)

            layer = scalar(self.num_layers - 1) - counter if self.reverse else counter

            def at_layer(stack: xb.Op) -> list[xb.Op]:
                return [layer, *[scalar(0)] * (stack.shape().rank - 1)]

            carry, *stacks = rest
            arguments = [carry]
            for stack in stacks[: self.num_xs]:
                sizes = list(stack.shape().sizes)
                arguments.append(stack.dynamic_slice(at_layer(stack), [1, *sizes[1:]]).reshape(sizes[1:]))
            arguments += stacks[self.num_xs : first_y - 2]
            used = [arguments[i] for i in self.body.arguments]
            result = xb.Op.call(self.body.computation, used, builder=counter.builder())
            ys = [
                stack.dynamic_update_slice(result.get_tuple_element(i + 1).broadcast([1]), at_layer(stack))
                for i, stack in enumerate(stacks[first_y - 2 :])
            ]
            return (counter + scalar(1), result.get_tuple_element(0), *stacks[: first_y - 2], *ys)

        return xb.Op.mkwhile(parameters, condition, body).build(self.name)


def _dependents(graph: torch.fx.Graph, source: torch.fx.Node) -> set[torch.fx.Node]:
    """`source` and every node that is computed from it."""
    found = {source}
    for node in graph.nodes:  # in topological order
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


class _Plan:
    """The loops of one body at one set of shapes."""

    def __init__(
        self, body: LayerBody, names: Sequence[str], x: _Aval, weights: list[_Aval], constants: list[_Aval], mode: str
    ):
        def flat_body(x: Tensor, *rest: Tensor) -> Tensor:
            layer_weights = dict(zip(names, rest[: len(names)], strict=True))
            y = check_layer_output(x, body(x, layer_weights, *rest[len(names) :]))
            # AOTAutograd leaves out of its graph what is an alias of an input.
            return y.clone() if y is x or y._is_view() else y

        self.num_weights = len(weights)
        self.grad_of = [i for i, aval in enumerate(weights) if aval.requires_grad]
        layer = [x, *(weight.of_layer() for weight in weights), *constants]
        check_layer(flat_body, lambda: [torch.empty(aval.shape, dtype=aval.dtype, device="xla") for aval in layer])
        getattr(self, f"_plan_{mode}")(flat_body, x, weights, constants)

    def _loop(self, fn, carry: _Aval, xs: Sequence[_Aval], constants: Sequence[_Aval]) -> _Loop:
        with torch.no_grad():
            return _Loop("scan", fn, carry, xs, constants)

    def _loop_backward(self, fn, carry: _Aval, xs: Sequence[_Aval], constants: Sequence[_Aval]) -> _Loop:
        with torch.no_grad(), in_backward():
            return _Loop("scan_backward", fn, carry, xs, constants, reverse=True)

    def _plan_inference(self, body, x, weights, constants):
        self.forward = self._loop(lambda *args: (body(*args),), x, weights, constants)

    def _plan_remat(self, body, x, weights, constants):
        """Saves each layer's input; the backward body computes the layer again."""

        def forward(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            return body(x, *rest), x

        def backward(grad: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                y = body(x, *rest)
            inputs = [x, *(rest[i] for i in self.grad_of)]
            return torch.autograd.grad(y, inputs, grad, materialize_grads=True)

        x = _Aval(x.shape, x.dtype, requires_grad=True)
        saved = [_Aval((weights[0].shape[0], *x.shape), x.dtype, requires_grad=True)]
        self.forward = self._loop(forward, x, weights, constants)
        self.backward = self._loop_backward(backward, _Aval(x.shape, x.dtype), saved + weights, constants)

    def _plan_save(self, body, x, weights, constants):
        """Saves what a min-cut of the layer's joint graph chooses: no matmul is computed twice."""
        graphs: dict[str, torch.fx.GraphModule] = {}

        def keep(which: str):
            def compiler(graph: torch.fx.GraphModule, _):
                graphs[which] = graph
                return make_boxed_func(graph)

            return compiler

        traced = aot_function(
            body,
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        x = _Aval(x.shape, x.dtype, requires_grad=True)
        examples = [
            aval.placeholder().requires_grad_(aval.requires_grad)
            for aval in [x, *(weight.of_layer() for weight in weights), *constants]
        ]
        with tracing(), torch.enable_grad():
            y = traced(*examples)
            y.backward(torch.empty_like(y))
        forward_graph, backward_graph = graphs["forward"], graphs["backward"]
        placeholders = [node for node in forward_graph.graph.nodes if node.op == "placeholder"]
        (returned,) = forward_graph.graph.output_node().args
        assert isinstance(returned, tuple | list)
        # What follows from weights and constants alone (a transposed weight, say) is made again in the backward body,
        # where they are at hand, rather than kept once per layer.
        varying = _dependents(forward_graph.graph, placeholders[0])
        kept = [n for n, node in enumerate(returned[1:]) if node in varying]

        def forward(x: Tensor, *rest: Tensor) -> list[Tensor]:
            y, *saved = forward_graph(x, *rest)
            return [y, *(saved[n] for n in kept)]

        def backward(grad: Tensor, *rest: Tensor) -> list[Tensor]:
            # Values are lazy: of this forward pass only what does not vary is used, and so computed.
            arguments = [x.placeholder(), *rest[len(kept) :]]
            _, *residuals = forward_graph(*arguments)
            for n, value in zip(kept, rest[: len(kept)], strict=True):
                residuals[n] = value
            grads = backward_graph(*residuals, grad)
            wanted = [0, *(1 + i for i in self.grad_of)]
            return [torch.zeros_like(arguments[i]) if grads[i] is None else grads[i] for i in wanted]

        self.forward = self._loop(forward, x, weights, constants)
        saved = [_Aval((weights[0].shape[0], *out.shape), out.dtype) for out in self.forward.body.outputs[1:]]
        self.backward = self._loop_backward(backward, _Aval(x.shape, x.dtype), saved + weights, constants)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: _Plan, x: Tensor, *rest: Tensor) -> Tensor:
        weights, constants = rest[: plan.num_weights], rest[plan.num_weights :]
        y, *saved = plan.forward(x, weights, constants)
        ctx.plan, ctx.num_saved = plan, len(saved)
        ctx.save_for_backward(*saved, *weights, *constants)
        return y

    @staticmethod
    @once_differentiable  # the backward loop is no graph that autograd could go through
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, split = ctx.plan, ctx.num_saved + ctx.plan.num_weights
        saved = ctx.saved_tensors
        grad_x, *rest = plan.backward(grads[0], saved[:split], saved[split:])
        weight_grads: list[Tensor | None] = [None] * plan.num_weights
        for i, weight_grad in zip(plan.grad_of, rest, strict=True):
            weight_grads[i] = weight_grad
        return None, grad_x, *weight_grads, *[None] * (len(saved) - split)


# A sync runs every live tensor, and is a segmentation fault if one of them depends on a placeholder, which has no data.
# So nothing of a trace may outlive it: neither in the frames of an error that someone keeps, nor in autograd's thread.


def clear_frames(error: BaseException | None) -> None:
    """Drops the local variables of the frames that an error came through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_plans: WeakKeyDictionary[LayerBody, dict[object, _Plan]] = WeakKeyDictionary()


def scan(
    body: LayerBody, x: Tensor, weights: Mapping[str, Tensor], constants: Sequence[Tensor], *, remat: bool
) -> Tensor:
    """See `Engine.scan`. Lowered once per body, shapes and mode; `body` is the key, so keep it."""
    check_scan(weights, constants)
    if torch.is_inference_mode_enabled():
        raise ShardtorchError(
            "stacked layers are traced as autograd sees them, and it does not see inference tensors.",
            got="torch.inference_mode()",
            fix="use torch.no_grad() in its place.",
        )
    aval, avals, constant_avals = _Aval.of(x), [_Aval.of(w) for w in weights.values()], [_Aval.of(c) for c in constants]
    differentiable = torch.is_grad_enabled() and any(aval.requires_grad for aval in [aval, *avals])
    mode = ("remat" if remat else "save") if differentiable else "inference"
    key = (mode, aval.shape, aval.dtype, tuple(weights), tuple(avals), tuple(constant_avals))
    plans = _plans.setdefault(body, {})
    if key not in plans:
        host_state = torch.get_rng_state()
        try:
            plans[key] = _Plan(body, list(weights), _Aval(aval.shape, aval.dtype), avals, constant_avals, mode)
            if not torch.equal(torch.get_rng_state(), host_state):
                del plans[key]
                raise _draws("random numbers drawn on the host, inside the layer")
        except BaseException as error:
            clear_frames(error)
            raise
        finally:
            flush_autograd()
    plan = plans[key]
    if not differentiable:
        return plan.forward(x, list(weights.values()), constants)[0]
    y = _Scan.apply(plan, x, *weights.values(), *constants)
    assert isinstance(y, Tensor)
    return y
