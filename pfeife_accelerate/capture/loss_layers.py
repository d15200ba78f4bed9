"""Rules for layers applied to every row by itself in a loss: convolutions, pools, norms of features, transforms."""

from __future__ import annotations

from torch import fx

from pfeife_accelerate.capture.loss_builder import (
    LossBuilder,
    Result,
    Rule,
    arguments,
    refusal,
    shape,
    source_of,
    words,
)


def rows_in_front(b: LossBuilder, node: fx.Node) -> Result:
    """Images (or the like) in the first argument, one a row; everything else is the same for all rows."""
    source, state = source_of(b, node)
    if not state.is_split or state.dim != 0 or len(shape(source)) < 3:
        raise refusal(node)
    others = {n: b.same(n, node) for n in node.all_input_nodes if n is not source}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: b.micro[n] if n is source else others[n])
    return b.emit(node.target, *args, **kwargs), state  # type: ignore[arg-type]


def layer_norm(b: LossBuilder, node: fx.Node) -> Result:
    """Normalised over the last dimensions, of which none is the batch."""
    source, state = source_of(b, node)
    given = arguments(node)
    if not state.is_split or state.dim >= len(shape(source)) - len(given["normalized_shape"]):
        raise refusal(node)
    scales = [None if given[key] is None else b.same(given[key], node) for key in ("weight", "bias")]
    return b.emit(node.target, b.micro[source], given["normalized_shape"], *scales, given["eps"]), state  # type: ignore[arg-type]


def transform(b: LossBuilder, node: fx.Node) -> Result:
    """Fourier transforms along dimensions that are not the batch."""
    source, state = source_of(b, node)
    if not state.is_split or any(d % len(shape(source)) == state.dim for d in arguments(node)["dim"]):
        raise refusal(node)
    args = [b.micro[source], *node.args[1:]]
    return b.emit(node.target, *args, **node.kwargs), state  # type: ignore[arg-type]


LAYER_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        words("""convolution.default avg_pool2d.default avg_pool3d.default max_pool2d_with_indices.default
        max_pool3d_with_indices.default _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default
        adaptive_max_pool2d.default upsample_linear1d.default upsample_bilinear2d.default upsample_bicubic2d.default
        upsample_trilinear3d.default upsample_nearest1d.default upsample_nearest2d.default upsample_nearest3d.default
        _upsample_bilinear2d_aa.default reflection_pad1d.default reflection_pad2d.default replication_pad1d.default
        replication_pad2d.default pixel_shuffle.default pixel_unshuffle.default im2col.default"""),
        rows_in_front,
    ),
    "native_layer_norm.default": layer_norm,
    **dict.fromkeys(("_fft_r2c.default", "_fft_c2r.default", "_fft_c2c.default"), transform),
}
