//! The shape of a decoder, whichever family it is of.

/// The shape of a decoder of equal blocks; where it has experts, of two kinds of blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// What people call it.
    pub name: String,
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside a dense feed-forward part.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// How the feed-forward part is made.
    pub feed_forward: FeedForward,
    /// How rows are normed.
    pub norm: Norm,
    /// Where positions come from.
    pub positions: Positions,
    /// Whether matrices have biases.
    pub has_biases: bool,
    /// Whether the head uses the embedding's table.
    pub tie_word_embeddings: bool,
    /// Longest sequence the model accepts.
    pub max_position_embeddings: usize,
    /// The experts, in a mixture of them.
    pub experts: Option<Experts>,
}

/// How a feed-forward part is made.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum FeedForward {
    /// Three matrices: gate and up, multiplied, then down.
    Gated,
    /// Two matrices with an activation between them.
    Plain,
}

/// How rows are normed.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Norm {
    /// By their root mean square, with a scale.
    RootMeanSquare,
    /// By mean and deviation, with a scale and a bias.
    Layer,
}

/// Where positions come from.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Positions {
    /// Queries and keys are rotated.
    Rotary,
    /// A learnt table is added to the embedding.
    Learnt,
}

/// The experts of a mixture.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// How many a layer has.
    pub num_experts: usize,
    /// How many each token goes to.
    pub num_experts_per_tok: usize,
    /// Width inside an expert.
    pub moe_intermediate_size: usize,
    /// Experts that every token goes to.
    pub num_shared_experts: usize,
    /// Width inside a shared expert.
    pub shared_intermediate_size: usize,
    /// Blocks at the beginning that have no experts.
    pub num_dense_layers: usize,
}
