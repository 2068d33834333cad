"""DSpark draft stages (architecture section 7): their weights. They do not run yet."""

from flax import nnx

from dsv4jax.config import ModelConfig
from dsv4jax.model.block import Block
from dsv4jax.model.norm import RMSNorm
from dsv4jax.weights import declare_dense, declare_fp8


class DraftStage(Block):
    """`mtp.N`: a window-only layer; the first stage owns the feature projection, the last the heads."""

    def __init__(self, cfg: ModelConfig, stage: int, packed: bool):
        layer = cfg.num_hidden_layers + stage
        super().__init__(cfg, layer, cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok, packed)
        hidden, rank = cfg.hidden_size, cfg.dspark_markov_rank
        if stage == 0:
            features = len(cfg.dspark_target_layer_ids) * hidden
            self.main_proj = declare_fp8(cfg, hidden, features, ("embed", None))
            self.main_norm = RMSNorm(hidden, cfg.rms_norm_eps, "embed")
        if stage == cfg.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(hidden, cfg.rms_norm_eps, "embed")
            self.markov_head = nnx.Dict(
                embed=declare_dense(cfg.vocab_size, rank, ("vocab", None)),
                head=declare_dense(cfg.vocab_size, rank, ("vocab", None)),
            )
            self.confidence_head = nnx.Dict(proj=declare_dense(1, hidden + rank, (None, None), memory="F32"))
