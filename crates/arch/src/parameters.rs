//! The parameters of a decoder: names, shapes, and how they are sharded.
//!
//! Everything that counts parameters adds up this list, and the model crate is tested against it.

use crate::{DecoderConfig, FeedForward, Norm, NormPlacement, Positions, QkNorm};

/// How tensor and expert parallelism shard a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// Tensor-parallel ranks have some outputs each.
    Colwise,
    /// Tensor-parallel ranks have some inputs each.
    Rowwise,
    /// Every tensor-parallel rank has it: norms, the router, latent projections.
    Replicated,
    /// Expert-parallel ranks have some experts each.
    Experts,
}

/// A parameter of a block, or of what is outside of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterSpec {
    /// The name, below that of the block.
    pub name: &'static str,
    /// The full shape.
    pub shape: Vec<usize>,
    /// How it is sharded.
    pub sharding: Sharding,
}

impl ParameterSpec {
    fn new(name: &'static str, shape: &[usize], sharding: Sharding) -> ParameterSpec {
        ParameterSpec {
            name,
            shape: shape.to_vec(),
            sharding,
        }
    }

    /// The number of elements.
    pub fn num_elements(&self) -> u64 {
        num_elements(&self.shape)
    }
}

fn num_elements(shape: &[usize]) -> u64 {
    shape.iter().map(|&length| length as u64).product()
}

/// A block with or without experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// A block with a dense feed-forward layer.
    Dense,
    /// A block with experts; a dense one if the model has none.
    Experts,
}

/// The number of parameters of a block, by how they are sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockParameters {
    /// Matrices (and their biases) that tensor parallelism shards.
    pub sharded: u64,
    /// Parameters that every tensor-parallel rank has.
    pub replicated: u64,
    /// All routed experts of the block.
    pub experts: u64,
}

impl BlockParameters {
    /// The sum of all.
    pub const fn total(&self) -> u64 {
        self.sharded + self.replicated + self.experts
    }
}

impl DecoderConfig {
    /// The parameters of a block, in the order in which the model has them.
    pub fn block_parameters(&self, kind: BlockKind) -> Vec<ParameterSpec> {
        let mut parameters = Vec::new();
        self.visit_block(kind, &mut |name, shape, sharding| {
            parameters.push(ParameterSpec::new(name, shape, sharding));
        });
        parameters
    }

    /// The number of parameters of a block, by how they are sharded.
    pub fn block(&self, kind: BlockKind) -> BlockParameters {
        let mut sums = BlockParameters::default();
        // The planner counts parameters for every strategy, so this does not build the list.
        self.visit_block(kind, &mut |_, shape, sharding| {
            let sum = match sharding {
                Sharding::Colwise | Sharding::Rowwise => &mut sums.sharded,
                Sharding::Replicated => &mut sums.replicated,
                Sharding::Experts => &mut sums.experts,
            };
            *sum += num_elements(shape);
        });
        sums
    }

    fn visit_block(&self, kind: BlockKind, visit: Visit<'_>) {
        let list = &mut ParameterList(visit);
        if self.is_gpt2() {
            self.add_gpt2_block(list);
        } else {
            self.add_named_block(kind, list);
        }
    }

    /// The total number of parameters.
    pub fn num_parameters(&self) -> u64 {
        let of = |kind| self.block(kind).total();
        let dense = self.num_dense_layers() as u64 * of(BlockKind::Dense);
        let sparse = self.num_expert_layers() as u64 * of(BlockKind::Experts);
        dense + sparse + self.outside_blocks()
    }

    /// The number of parameters that a token uses.
    pub fn num_active_parameters(&self) -> u64 {
        let Some(moe) = &self.moe else {
            return self.num_parameters();
        };
        let idle = (moe.num_experts - moe.num_experts_per_tok) as u64;
        let each = self.feed_forward_weights(moe.moe_intermediate_size);
        self.num_parameters() - self.num_expert_layers() as u64 * idle * each
    }

    /// Parameters outside of blocks: embedding, positions, final norm and output head.
    pub fn outside_blocks(&self) -> u64 {
        let num_tables = if self.tie_word_embeddings { 1 } else { 2 };
        num_tables * self.embedding() + self.position_table() + self.norm_parameters()
    }

    /// Parameters of the token embedding; the output head has as many.
    pub fn embedding(&self) -> u64 {
        (self.vocab_size * self.hidden_size) as u64
    }

    /// Parameters of the learned position table, if there is one.
    pub fn position_table(&self) -> u64 {
        match self.positions {
            Positions::Learned => (self.max_position_embeddings * self.hidden_size) as u64,
            Positions::Rotary => 0,
        }
    }

    /// Parameters of one norm of the residual stream.
    pub fn norm_parameters(&self) -> u64 {
        match self.norm {
            Norm::RootMeanSquare | Norm::RootMeanSquarePlusOne => self.hidden_size as u64,
            Norm::Layer => 2 * self.hidden_size as u64,
        }
    }

    /// Weights of a feed-forward layer of the given width.
    pub fn feed_forward_weights(&self, width: usize) -> u64 {
        let num_matrices = match self.feed_forward {
            FeedForward::Gated => 3,
            FeedForward::Plain => 2,
        };
        num_matrices * (self.hidden_size * width) as u64
    }

    /// The names of Llama and its relatives.
    fn add_named_block(&self, kind: BlockKind, list: &mut ParameterList<'_>) {
        let hidden = self.hidden_size;
        if self.norm_placement != NormPlacement::After {
            list.norm(["input_layernorm.weight", "input_layernorm.bias"], self);
        }
        match &self.latent {
            Some(_) => self.add_latent_attention(list),
            None => self.add_attention(list),
        }
        list.norm(
            [
                "post_attention_layernorm.weight",
                "post_attention_layernorm.bias",
            ],
            self,
        );
        if self.norm_placement == NormPlacement::BeforeAndAfter {
            list.norm(
                [
                    "pre_feedforward_layernorm.weight",
                    "pre_feedforward_layernorm.bias",
                ],
                self,
            );
        }
        match &self.moe {
            Some(_) if kind == BlockKind::Experts => self.add_experts(list),
            _ => {
                let inner = self.intermediate_size;
                if self.feed_forward == FeedForward::Gated {
                    list.colwise(
                        ["mlp.gate_proj.weight", "mlp.gate_proj.bias"],
                        hidden,
                        inner,
                        self.has_biases,
                    );
                }
                list.colwise(
                    ["mlp.up_proj.weight", "mlp.up_proj.bias"],
                    hidden,
                    inner,
                    self.has_biases,
                );
                list.rowwise(
                    ["mlp.down_proj.weight", "mlp.down_proj.bias"],
                    inner,
                    hidden,
                    self.has_biases,
                );
            }
        }
        if self.norm_placement != NormPlacement::Before {
            list.norm(
                [
                    "post_feedforward_layernorm.weight",
                    "post_feedforward_layernorm.bias",
                ],
                self,
            );
        }
    }

    fn add_attention(&self, list: &mut ParameterList<'_>) {
        let (hidden, query, key_value) =
            (self.hidden_size, self.query_width(), self.key_value_width());
        let has_bias = self.has_biases || self.attention_bias;
        list.colwise(
            ["self_attn.q_proj.weight", "self_attn.q_proj.bias"],
            hidden,
            query,
            has_bias,
        );
        list.colwise(
            ["self_attn.k_proj.weight", "self_attn.k_proj.bias"],
            hidden,
            key_value,
            has_bias,
        );
        list.colwise(
            ["self_attn.v_proj.weight", "self_attn.v_proj.bias"],
            hidden,
            key_value,
            has_bias,
        );
        list.rowwise(
            ["self_attn.o_proj.weight", "self_attn.o_proj.bias"],
            query,
            hidden,
            self.has_biases,
        );
        let norms = self.qk_norm.map(|norm| match norm {
            QkNorm::Head => ([self.head_dim; 2], Sharding::Replicated),
            // A rank has the scales of its heads.
            QkNorm::AllHeads => ([query, key_value], Sharding::Colwise),
        });
        if let Some(([of_query, of_key], sharding)) = norms {
            list.add("self_attn.q_norm.weight", &[of_query], sharding);
            list.add("self_attn.k_norm.weight", &[of_key], sharding);
        }
    }

    fn add_latent_attention(&self, list: &mut ParameterList<'_>) {
        let Some(latent) = &self.latent else {
            return;
        };
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        let query = heads * latent.qk_head_dim();
        match latent.q_lora_rank {
            Some(rank) => {
                list.replicated("self_attn.q_a_proj.weight", &[rank, hidden]);
                list.replicated("self_attn.q_a_layernorm.weight", &[rank]);
                list.colwise(["self_attn.q_b_proj.weight", ""], rank, query, false);
            }
            None => list.colwise(["self_attn.q_proj.weight", ""], hidden, query, false),
        }
        let (rank, rope) = (latent.kv_lora_rank, latent.qk_rope_head_dim);
        list.replicated(
            "self_attn.kv_a_proj_with_mqa.weight",
            &[rank + rope, hidden],
        );
        list.replicated("self_attn.kv_a_layernorm.weight", &[rank]);
        let key_value = heads * (latent.qk_nope_head_dim + latent.v_head_dim);
        list.colwise(["self_attn.kv_b_proj.weight", ""], rank, key_value, false);
        let values = heads * latent.v_head_dim;
        list.rowwise(["self_attn.o_proj.weight", ""], values, hidden, false);
    }

    fn add_experts(&self, list: &mut ParameterList<'_>) {
        let Some(moe) = &self.moe else {
            return;
        };
        let (hidden, experts, inner) =
            (self.hidden_size, moe.num_experts, moe.moe_intermediate_size);
        list.replicated("mlp.gate.weight", &[experts, hidden]);
        // The router's bias is a buffer: no gradient changes it.
        list.add(
            "mlp.experts.gate_up_proj",
            &[experts, 2 * inner, hidden],
            Sharding::Experts,
        );
        list.add(
            "mlp.experts.down_proj",
            &[experts, hidden, inner],
            Sharding::Experts,
        );
        let shared = moe.shared_width();
        if shared > 0 {
            list.colwise(
                ["mlp.shared_experts.gate_proj.weight", ""],
                hidden,
                shared,
                false,
            );
            list.colwise(
                ["mlp.shared_experts.up_proj.weight", ""],
                hidden,
                shared,
                false,
            );
            list.rowwise(
                ["mlp.shared_experts.down_proj.weight", ""],
                shared,
                hidden,
                false,
            );
        }
        if moe.has_shared_gate {
            list.replicated("mlp.shared_expert_gate.weight", &[1, hidden]);
        }
    }

    /// GPT-2's names and transposed matrices.
    fn add_gpt2_block(&self, list: &mut ParameterList<'_>) {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        list.norm(["ln_1.weight", "ln_1.bias"], self);
        list.add(
            "attn.c_attn.weight",
            &[hidden, 3, hidden],
            Sharding::Colwise,
        );
        list.add("attn.c_attn.bias", &[3, hidden], Sharding::Colwise);
        list.add("attn.c_proj.weight", &[hidden, hidden], Sharding::Rowwise);
        list.replicated("attn.c_proj.bias", &[hidden]);
        list.norm(["ln_2.weight", "ln_2.bias"], self);
        list.add("mlp.c_fc.weight", &[hidden, inner], Sharding::Colwise);
        list.add("mlp.c_fc.bias", &[inner], Sharding::Colwise);
        list.add("mlp.c_proj.weight", &[inner, hidden], Sharding::Rowwise);
        list.replicated("mlp.c_proj.bias", &[hidden]);
    }
}

/// What happens to a parameter: its name, shape and sharding.
type Visit<'a> = &'a mut dyn FnMut(&'static str, &[usize], Sharding);

/// A list of parameters that grows by layers.
struct ParameterList<'a>(Visit<'a>);

impl ParameterList<'_> {
    fn add(&mut self, name: &'static str, shape: &[usize], sharding: Sharding) {
        (self.0)(name, shape, sharding);
    }

    fn replicated(&mut self, name: &'static str, shape: &[usize]) {
        self.add(name, shape, Sharding::Replicated);
    }

    /// A linear layer whose outputs are sharded, and its bias with them.
    fn colwise(
        &mut self,
        [weight, bias]: [&'static str; 2],
        inputs: usize,
        outputs: usize,
        has_bias: bool,
    ) {
        self.add(weight, &[outputs, inputs], Sharding::Colwise);
        if has_bias {
            self.add(bias, &[outputs], Sharding::Colwise);
        }
    }

    /// A linear layer whose inputs are sharded; every rank has the bias.
    fn rowwise(
        &mut self,
        [weight, bias]: [&'static str; 2],
        inputs: usize,
        outputs: usize,
        has_bias: bool,
    ) {
        self.add(weight, &[outputs, inputs], Sharding::Rowwise);
        if has_bias {
            self.replicated(bias, &[outputs]);
        }
    }

    fn norm(&mut self, [weight, bias]: [&'static str; 2], decoder: &DecoderConfig) {
        self.replicated(weight, &[decoder.hidden_size]);
        if decoder.norm == Norm::Layer {
            self.replicated(bias, &[decoder.hidden_size]);
        }
    }
}
