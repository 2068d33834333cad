"""One step of training: losses, optimiser, and the biases that keep experts in use."""

import dataclasses
import functools
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32

from dsv4jax.config import ModelConfig
from dsv4jax.linear import linear_fp32
from dsv4jax.model.transformer import merge
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.training.draft import BLOCK_STRIDE, draft_losses
from dsv4jax.training.forward import INDEX_STRIDE, training_forward
from dsv4jax.training.parameters import Masters, abstract_masters, init_masters, rounded_params

Phase = Literal["dense", "sparse", "draft"]


@dataclasses.dataclass(frozen=True)
class Optimisation:
    """What the optimiser and the losses are tuned with."""

    learning_rate: float = 2e-3
    """At its peak; `train_step` takes the factor of the moment."""
    weight_decay: float = 0.05
    """Of matrices; vectors have none."""
    clip: float = 1.0
    """Largest global norm of the gradients."""
    index_weight: float = 0.3
    head_regularisation: float = 1e-4
    """Weight of the squared logarithm of the head's normaliser, which keeps logits small."""
    bias_rate: float = 2e-4
    """How far an expert's routing bias moves in a step towards an equal load. Small: loads stay uneven."""


@flax.struct.dataclass
class TrainState:
    """Everything a run needs to go on; with the data's seed it determines the rest of the run."""

    masters: Masters
    moments: Any
    step: Int32[Array, ""]


def init_state(cfg: ModelConfig, seed: int, settings: Optimisation) -> TrainState:
    """The state before the first step."""
    return resumed_state(init_masters(cfg, seed), settings)


def abstract_state(cfg: ModelConfig, settings: Optimisation) -> TrainState:
    """Shapes and types of a state."""
    return jax.eval_shape(lambda masters: resumed_state(masters, settings), abstract_masters(cfg))


def resumed_state(masters: Masters, settings: Optimisation, step: int = 0) -> TrainState:
    """A state that goes on from masters alone, with new moments."""
    return TrainState(masters, jax.jit(_optimiser(settings).init)(masters), jnp.int32(step))


def _optimiser(settings: Optimisation) -> optax.GradientTransformation:
    """Everything but the learning rate, which is an argument of the step."""

    def decayed(masters):
        return jax.tree_util.tree_map_with_path(lambda path, a: a.ndim > 1 and "embed" not in str(path), masters)

    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(settings.weight_decay, decayed),
        optax.scale(-settings.learning_rate),
    )


@functools.partial(jax.jit, static_argnames=("cfg", "settings", "phase", "numerics"), donate_argnames="state")
def train_step(
    state: TrainState,
    tokens: Int32[Array, "batch length"],
    weights: Float[Array, "batch length"],
    rate: Float[Array, ""],
    token_map: Int32[Array, " vocab"],
    *,
    cfg: ModelConfig,
    settings: Optimisation,
    phase: Phase,
    numerics: Numerics = REFERENCE,
) -> tuple[TrainState, dict[str, Array]]:
    """One step. The state is donated.

    Args:
      tokens: rows of one token more than is run; the last is a target only.
      weights: of each token as a target; 0 teaches nothing.
      rate: factor on the learning rate.
      token_map: `compressed_ids` of the tokenizer.
      phase: "dense" trains the model with attention to every visible entry and the indexer towards it, "sparse" the
        same with attention to the selected entries, "draft" the draft stages on the model as it stands.
      numerics: where to round; others than `REFERENCE` are for tests.

    Returns:
      The new state and scalars to log, per source and layer where the name says so.
    """

    def loss_of(masters):
        model = merge(cfg, rounded_params(masters, cfg, token_map))
        target = weights[:, 1:]
        offset = (state.step * 5) % INDEX_STRIDE
        out = training_forward(model, tokens[:, :-1], numerics=numerics, select=phase != "dense", offset=offset)
        logits = linear_fp32(out.hidden, model.head)
        report, loads = {}, (out.loads, None)
        log_normaliser = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        total = jnp.maximum(jnp.sum(target), 1.0)
        report["loss"] = jnp.sum(target * (log_normaliser - picked)) / total
        right = (jnp.argmax(logits, -1) == tokens[:, 1:]) & (target > 0)
        report["accuracy"] = jnp.sum(right) / jnp.maximum(jnp.sum(target > 0), 1)
        report["index_loss"] = out.index_loss
        if phase == "draft":
            offset = (state.step * 5) % BLOCK_STRIDE
            losses, draft_loads = draft_losses(
                model, tokens[:, :-1], target, jax.lax.stop_gradient(out.features), logits, offset, numerics
            )
            loss = losses["draft"] + 0.1 * losses["confidence"]
            return loss, (report | losses, (out.loads, draft_loads))
        loss = report["loss"] + settings.index_weight * jnp.sum(out.index_loss)
        loss += settings.head_regularisation * jnp.sum(target * log_normaliser**2) / total
        return loss, (report, loads)

    gradients, (report, (loads, draft_loads)) = jax.grad(loss_of, has_aux=True)(state.masters)
    gradients = only_trained(gradients, phase)
    report["gradient_norm"] = optax.global_norm(gradients)
    updates, moments = _optimiser(settings).update(gradients, state.moments, state.masters)
    # A part that is not trained has neither gradients nor decay.
    updates = only_trained(updates, phase)
    masters = jax.tree.map(lambda a, u: a + rate * u, state.masters, updates)
    trained, loads = ("mtp", draft_loads) if phase == "draft" else ("layers", loads)
    for block, load in zip(masters[trained].values(), loads, strict=True):
        gate = block["ffn"]["gate"]
        gate["bias"] += rate * settings.bias_rate * jnp.sign(jnp.mean(load) - load)
        gate["bias_vl"] = gate["bias"]
    report["largest_load"] = jnp.max(loads, -1) / jnp.mean(loads, -1)
    return TrainState(masters, moments, state.step + 1), report


def only_trained(tree: Masters, phase: Phase) -> Masters:
    """Zeros outside the part that a phase trains."""
    mine = {"mtp"} if phase == "draft" else set(tree) - {"mtp", "vision", "aligner"}
    return {name: part if name in mine else jax.tree.map(jnp.zeros_like, part) for name, part in tree.items()}
