"""Ops that act element by element, with broadcasting.

Cut any output dim; an operand that has the dim at full size is cut too, one that is broadcast stays whole.
What a Partial(sum) may pass is a fact of each op:

| word    | fact                                                             | ops                    |
|---------|------------------------------------------------------------------|------------------------|
| none    | not linear                                                       | exp, relu, ...         |
| first   | linear in the first operand alone                                | neg, div, mul by number|
| each    | linear in each operand, the others whole                         | mul                    |
| all     | linear in all operands together                                  | add, sub               |
| choice  | the first operand (the condition) whole, the others together     | where                  |
| copy    | moves values only: lets every Partial through                    | clone                  |
"""

from __future__ import annotations

from collections.abc import Iterable

from distpar.graph import NumberType, OpSpec, TensorType
from distpar.layout import Replicate, Shard
from distpar.rules.rule import Rule, linear, moved, position_of, shape
from distpar.rules.spec import Row

_FLOATS = {"f64", "f32", "bf16", "f16", "c64", "c128"}


def pointwise(word: str = "none") -> Rule:
    """The rule of an elementwise op that is linear as the word says."""

    def rows(spec: OpSpec) -> Iterable[Row]:
        yield from cuts(spec)
        yield from _linear(spec, word)

    return Rule(rows)


def cuts(spec: OpSpec) -> Iterable[Row]:
    """One row for each output dim of more than one element."""
    out = shape(spec.outputs[0])
    for dim, size in enumerate(out):
        if size == 1:
            continue
        operands = []
        for type_ in spec.operands:
            local = shape(type_)
            own = dim - (len(out) - len(local))
            operands.append(Shard(own) if own >= 0 and local[own] == size else Replicate())
        yield Row(tuple(operands), (Shard(dim),) * len(spec.outputs))


def _linear(spec: OpSpec, word: str) -> Iterable[Row]:
    tensors = [i for i, type_ in enumerate(spec.operands) if isinstance(type_, TensorType)]
    out = spec.outputs[0]
    if not tensors or isinstance(out, NumberType) or out.dtype not in _FLOATS:
        return
    floating = all(type_.dtype in _FLOATS for i in tensors if isinstance(type_ := spec.operands[i], TensorType))
    match word:
        case "first" if position_of(spec, 0) == 0 and floating:
            yield linear(spec, 0)
        case "each":
            for position in tensors:
                type_ = spec.operands[position]
                if isinstance(type_, TensorType) and type_.dtype in _FLOATS:
                    yield linear(spec, position)
        case "all" if floating and _only_tensors(spec, len(tensors)):
            yield linear(spec, *tensors)
        case "choice" if tensors == [0, 1, 2] and floating_after(spec):
            yield linear(spec, 1, 2)
        case "copy":
            same = spec.operands[0] == out
            yield from moved(spec) if same else ([linear(spec, 0)] if floating else [])


def _only_tensors(spec: OpSpec, count: int) -> bool:
    """add(x, y): both are tensors (x + 1 is not linear); a number as alpha does not matter."""
    return count == 2 and position_of(spec, 0) is not None and position_of(spec, 1) is not None


def floating_after(spec: OpSpec) -> bool:
    return all(isinstance(t, TensorType) and t.dtype in _FLOATS for t in spec.operands[1:])


_NONE = """abs acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor
bitwise_left_shift bitwise_right_shift ceil clamp clamp_max clamp_min copysign cos cosh elu elu_backward eq erf erfc
erfinv exp exp2 expm1 floor fmod frac ge gelu gelu_backward gt hardsigmoid hardsigmoid_backward hardswish
hardswish_backward heaviside hypot isinf isnan isfinite le leaky_relu lgamma log log10 log1p log2 logaddexp
logical_and logical_not logical_or logical_xor logit lt maximum minimum mish mish_backward ne nextafter pow
reciprocal relu remainder round rsqrt sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh
softplus softplus_backward special_erfcx sqrt square tan tanh tanh_backward threshold threshold_backward trunc
xlogy floor_divide fmax fmin digamma nan_to_num log_sigmoid_backward sgn bitwise_xor"""
_WORDS = {
    "neg": "first", "div": "first", "mul": "each", "add": "all", "sub": "all", "where": "choice",
    "clone": "copy", "_to_copy": "copy", "alias": "copy", "positive": "copy", "copy": "none", "rsub": "none",
    "lerp": "all",
}  # fmt: skip
_OVERLOADS = (
    "default", "Tensor", "Scalar", "Tensor_Scalar", "Tensor_Tensor", "Scalar_Tensor", "self", "ScalarSelf",
    "ScalarOther",
    "Tensor_mode", "Scalar_mode", "Tensor_out", "int", "decimals",
)  # fmt: skip

RULES = {
    f"aten.{name}.{overload}": pointwise(word)
    for name, word in [*((n, "none") for n in _NONE.split()), *_WORDS.items()]
    for overload in _OVERLOADS
}
# A rounding division is not linear.
RULES |= {f"aten.div.{mode}": pointwise() for mode in ("Tensor_mode", "Scalar_mode")}


def like() -> Rule:
    """A constant with another tensor's shape: the tensor's values do not matter."""
    return Rule(cuts)


RULES |= {f"aten.{name}.default": like() for name in ("zeros_like", "ones_like", "full_like", "empty_like")}
