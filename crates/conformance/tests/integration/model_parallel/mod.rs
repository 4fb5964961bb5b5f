//! Tensor, sequence, context and pipeline parallelism on real ranks, compared with one rank.

mod bytes;
mod chunked_loss;
mod context;
mod documents;
mod dropout;
mod equality;
mod families;
mod gpt2;
mod memory;
mod mixed;
mod optimizers;
mod pipeline;
mod pipeline_overlap;
mod presets;
mod tensor;

use trainyard_conformance::{Case, Suite};

const TENSOR: &[Case] = &[
    Case {
        name: "fp64_equals_one_rank",
        run: tensor::fp64,
    },
    Case {
        name: "fp32_equals_one_rank",
        run: tensor::fp32,
    },
    Case {
        name: "bf16_is_close_to_one_rank",
        run: tensor::bf16,
    },
    Case {
        name: "tied_embeddings_equal_one_rank",
        run: tensor::tied,
    },
    Case {
        name: "recomputation_is_bit_identical",
        run: tensor::recomputation,
    },
    Case {
        name: "dropout_equals_one_rank",
        run: dropout::equal,
    },
    Case {
        name: "recomputed_dropout_is_identical",
        run: dropout::recomputation,
    },
    Case {
        name: "weights_from_a_file_equal_one_rank",
        run: tensor::from_file,
    },
    Case {
        name: "evaluation_equals_one_rank",
        run: tensor::evaluation,
    },
    Case {
        name: "a_block_sends_four_all_reduces",
        run: bytes::tensor,
    },
    Case {
        name: "activation_memory_equals_the_closed_form",
        run: memory::activations,
    },
];

const CONTEXT: &[Case] = &[
    Case {
        name: "fp64_equals_one_rank",
        run: context::fp64,
    },
    Case {
        name: "fp32_equals_one_rank",
        run: context::fp32,
    },
    Case {
        name: "bf16_is_close_to_one_rank",
        run: context::bf16,
    },
    Case {
        name: "recomputation_is_bit_identical",
        run: context::recomputation,
    },
    Case {
        name: "bytes_equal_the_closed_form",
        run: bytes::context,
    },
];

const MIXED: &[Case] = &[
    Case {
        name: "tensor_and_data_parallel_equal_one_rank",
        run: mixed::replicated,
    },
    Case {
        name: "tensor_parallel_and_sharded_states_equal_one_rank",
        run: mixed::sharded,
    },
    Case {
        name: "tensor_parallel_and_hybrid_sharding_equal_one_rank",
        run: mixed::hybrid,
    },
    Case {
        name: "tensor_context_and_sharded_states_equal_one_rank",
        run: mixed::context,
    },
    Case {
        name: "bytes_equal_the_closed_form",
        run: mixed::bytes,
    },
];

const GPT2: &[Case] = &[
    Case {
        name: "fp64_equals_one_rank",
        run: gpt2::fp64,
    },
    Case {
        name: "bf16_is_close_to_one_rank",
        run: gpt2::bf16,
    },
    Case {
        name: "pipelines_equal_one_rank",
        run: gpt2::pipelines,
    },
    Case {
        name: "recomputation_is_bit_identical",
        run: gpt2::recomputation,
    },
    Case {
        name: "bytes_equal_the_closed_form",
        run: gpt2::bytes,
    },
];

const PRESETS: &[Case] = &[
    Case {
        name: "the_cnn_in_fp64_equals_one_rank",
        run: presets::cnn,
    },
    Case {
        name: "the_encoder_in_fp64_equals_one_rank",
        run: presets::encoder,
    },
    Case {
        name: "the_vision_transformer_in_fp64_equals_one_rank",
        run: presets::vit,
    },
    Case {
        name: "bf16_is_close_to_one_rank",
        run: presets::bf16,
    },
    Case {
        name: "fp16_is_close_to_one_rank",
        run: presets::fp16,
    },
];

const OPTIMIZERS: &[Case] = &[
    Case {
        name: "adamw_equals_one_rank",
        run: optimizers::adamw,
    },
    Case {
        name: "sgd_with_nesterov_momentum_equals_one_rank",
        run: optimizers::sgd,
    },
    Case {
        name: "lamb_equals_one_rank",
        run: optimizers::lamb,
    },
    Case {
        name: "lars_equals_one_rank",
        run: optimizers::lars,
    },
    Case {
        name: "lion_equals_one_rank",
        run: optimizers::lion,
    },
    Case {
        name: "muon_equals_one_rank",
        run: optimizers::muon,
    },
    Case {
        name: "optimizers_of_experts_equal_one_rank",
        run: optimizers::experts,
    },
];

const FAMILIES: &[Case] = &[
    Case {
        name: "gemma_3_equals_one_rank",
        run: families::gemma3,
    },
    Case {
        name: "olmo_2_equals_one_rank",
        run: families::olmo2,
    },
    Case {
        name: "latent_attention_equals_one_rank",
        run: families::latent,
    },
    Case {
        name: "groups_of_experts_equal_one_rank",
        run: families::experts,
    },
    Case {
        name: "bytes_equal_the_closed_form",
        run: families::bytes,
    },
];

const CHUNKED_LOSS: &[Case] = &[
    Case {
        name: "fp64_equals_one_rank_with_all_logits",
        run: chunked_loss::fp64,
    },
    Case {
        name: "bf16_is_close_to_one_rank",
        run: chunked_loss::bf16,
    },
    Case {
        name: "recomputation_is_bit_identical",
        run: chunked_loss::recomputation,
    },
    Case {
        name: "bytes_equal_the_closed_form",
        run: chunked_loss::sent_bytes,
    },
];

const DOCUMENTS: &[Case] = &[
    Case {
        name: "document_masks_equal_one_rank",
        run: documents::equal,
    },
    Case {
        name: "document_masks_change_the_result",
        run: documents::make_a_difference,
    },
    Case {
        name: "recomputation_is_bit_identical",
        run: documents::recomputation,
    },
];

const PIPELINE: &[Case] = &[
    Case {
        name: "every_schedule_equals_one_rank",
        run: pipeline::fp64,
    },
    Case {
        name: "fp32_equals_one_rank",
        run: pipeline::fp32,
    },
    Case {
        name: "tied_embeddings_equal_one_rank",
        run: pipeline::tied,
    },
    Case {
        name: "bytes_equal_the_closed_form",
        run: pipeline::bytes,
    },
];

const PIPELINE_OF_TWO: &[Case] = &[Case {
    name: "micro_batches_in_flight_equal_the_schedule",
    run: memory::in_flight,
}];

const PIPELINE_WITH_ONE_AXIS: &[Case] = &[
    Case {
        name: "pipelines_with_another_axis_equal_one_rank",
        run: pipeline::with_one_axis,
    },
    Case {
        name: "pipelines_of_sharded_stages_equal_one_rank",
        run: pipeline::with_sharding,
    },
    Case {
        name: "bytes_of_sharded_stages_equal_the_closed_form",
        run: pipeline::bytes_with_sharding,
    },
    Case {
        name: "gradients_are_reduced_during_the_cooldown",
        run: pipeline_overlap::reduction_during_cooldown,
    },
    Case {
        name: "a_forward_backward_pair_overlaps_communication",
        run: pipeline_overlap::pairs_communicate_in_turn,
    },
];

const PIPELINE_WITH_TWO_AXES: &[Case] = &[Case {
    name: "pipelines_with_two_axes_equal_one_rank",
    run: pipeline::with_two_axes,
}];

/// The suites of this module.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "model_parallel::tensor",
        sizes: &[2],
        full_sizes: &[4],
        cases: TENSOR,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::context",
        sizes: &[2],
        full_sizes: &[4],
        cases: CONTEXT,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::gpt2",
        sizes: &[2],
        full_sizes: &[4],
        cases: GPT2,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::presets",
        sizes: &[2],
        full_sizes: &[4],
        cases: PRESETS,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::families",
        sizes: &[2],
        full_sizes: &[],
        cases: FAMILIES,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::optimizers",
        sizes: &[2],
        full_sizes: &[4],
        cases: OPTIMIZERS,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::chunked_loss",
        sizes: &[2],
        full_sizes: &[4],
        cases: CHUNKED_LOSS,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::documents",
        sizes: &[2],
        full_sizes: &[],
        cases: DOCUMENTS,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::pipeline",
        sizes: &[2],
        full_sizes: &[4],
        cases: PIPELINE,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::pipeline_of_two",
        sizes: &[2],
        full_sizes: &[],
        cases: PIPELINE_OF_TWO,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::pipeline_with_one_axis",
        sizes: &[4],
        full_sizes: &[],
        cases: PIPELINE_WITH_ONE_AXIS,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::pipeline_with_two_axes",
        sizes: &[8],
        full_sizes: &[],
        cases: PIPELINE_WITH_TWO_AXES,
        also_over_network: false,
    },
    Suite {
        name: "model_parallel::mixed",
        sizes: &[8],
        full_sizes: &[],
        cases: MIXED,
        also_over_network: false,
    },
];
